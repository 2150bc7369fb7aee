"""The router's small parts: load, leases, traces, merged streams, configuration, pauses."""

from __future__ import annotations

import argparse
import asyncio
import random
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from baton.api.v1 import common_pb2
from baton.config import add_flags, from_flags
from baton.config.router import RouterConfig
from baton.errors import ConfigError
from baton.rpc.channel import Backoff
from baton.types import Role
from baton_router.app import RouterApp, listen
from baton_router.dispatch.attempt import TraceMerge
from baton_router.dispatch.interface import ChunkQueue
from baton_router.dispatch.request import DispatchMetrics
from baton_router.registry.load import REQUEST_OVERHEAD_TOKENS, LoadReservation, LoadTracker
from baton_router.registry.registry import Leases

# --- load ---


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 100)), max_size=60))
def test_holds_always_add_up(steps: list[tuple[int, int]]) -> None:
    book, holds = LoadTracker(Role.DECODE), list[LoadReservation]()
    for kind, value in steps:
        if kind <= 1 or not holds:
            holds.append(LoadReservation(book, value, 1 + kind, expected=value // 3))
        elif kind == 2:
            holds[value % len(holds)].grow(value)
        else:
            holds[value % len(holds)].release()
    live = [h for h in holds if not h.released]
    assert book.tokens == sum(h.tokens + h.expected for h in live)
    assert book.requests == sum(h.requests for h in live)
    for hold in holds:
        hold.release()
    assert (book.tokens, book.requests, book.work) == (0, 0, 0.0)


def test_an_expected_output_counts_from_the_start_and_once() -> None:
    book = LoadTracker(Role.DECODE)
    hold = LoadReservation(book, 100, expected=50)
    assert book.tokens == 150
    hold.grow(20)
    assert book.tokens == 150, "these were counted"
    hold.grow(40)
    assert book.tokens == 160, "10 more than expected"
    hold.release()
    book.now = lambda: book._done_at
    early = LoadReservation(book, 100, expected=50)
    done = book.load
    early.release()
    assert book.load - done < 0, "what was not generated is no work that was done"
    assert book.tokens == 0


def test_only_the_work_of_others_is_taken_from_reports() -> None:
    book = LoadTracker(Role.DECODE)
    hold = LoadReservation(book, 160)
    book.observe(common_pb2.LoadReport(num_running=1, blocks_active=12), 16)
    assert book.foreign == 0, "one request runs there and it is ours, whatever the rounding of blocks says"
    book.observe(common_pb2.LoadReport(num_running=2, num_waiting=1, blocks_active=30), 16)
    assert book.foreign == 30 * 16 - 160 + 2 * REQUEST_OVERHEAD_TOKENS
    hold.release()
    assert book.work == book.foreign
    book.forget_reports()
    assert book.work == 0


def test_prefill_load_is_what_is_not_computed_yet() -> None:
    book = LoadTracker(Role.PREFILL)
    book.observe(common_pb2.LoadReport(num_waiting=1, waiting_prompt_tokens=700, blocks_active=1000), 16)
    assert book.work == 700 + REQUEST_OVERHEAD_TOKENS


# --- leases ---


def test_leases() -> None:
    now = 0.0
    leases = Leases(10.0, lambda: now)
    first = leases.grant("a:1")
    other = leases.grant("b:1")
    second = leases.grant("a:1")
    assert not leases.renew(first.lease_id), "a new registration voids the old lease"
    now = 9.0
    assert leases.renew(second.lease_id)
    now = 11.0
    assert not leases.renew(other.lease_id)
    assert leases.remove_expired() == ["b:1"]
    assert leases.remove_expired() == []
    assert len(leases) == 1
    assert leases.end(second.lease_id) == "a:1"
    assert leases.end(second.lease_id) is None
    assert leases.end("nonsense") is None


# --- traces ---


def test_traces_of_several_attempts() -> None:
    traces = TraceMerge()
    first, second = 1, 2
    traces.update(
        first,
        common_pb2.RequestTrace(
            path=common_pb2.PREFILL_PATH_REMOTE,
            decode_instance="d0",
            prompt_tokens=100,
            cached_tokens=16,
            kv_bytes=10,
            pipe="shm",
            transferred_tokens=84,
            failed_prefills=["p0: gone"],
            ttft_us=5,
        ),
    )
    traces.update(second, common_pb2.RequestTrace(decode_instance="d1", prompt_tokens=100, kv_bytes=0))
    traces.update(
        second,
        common_pb2.RequestTrace(
            path=common_pb2.PREFILL_PATH_LOCAL,
            decode_instance="d1",
            prompt_tokens=100,
            cached_tokens=64,
            kv_bytes=4,
            recomputed_tokens=36,
            failed_prefills=["p1: gone"],
            ttft_us=9,
            num_preemptions=1,
        ),
    )
    traces.num_migrations = 1
    assert traces.merged() == common_pb2.RequestTrace(
        path=common_pb2.PREFILL_PATH_REMOTE, decode_instance="d1", prompt_tokens=100, cached_tokens=16, kv_bytes=14,
        pipe="shm", transferred_tokens=84, recomputed_tokens=36, failed_prefills=["p0: gone", "p1: gone"], ttft_us=5,
        num_preemptions=1, num_migrations=1,
    )  # fmt: skip
    assert TraceMerge().merged() == common_pb2.RequestTrace()


def test_sums_of_traces_have_room() -> None:
    traces = TraceMerge()
    for attempt in range(2):
        traces.update(attempt, common_pb2.RequestTrace(kv_bytes=2**64 - 1, num_preemptions=2**32 - 1))
    assert traces.merged() == common_pb2.RequestTrace(kv_bytes=2**64 - 1, num_preemptions=2**32 - 1)


def test_trace_metrics() -> None:
    registry = CollectorRegistry()
    metrics = DispatchMetrics(registry)
    metrics.observe_trace(
        common_pb2.RequestTrace(path=common_pb2.PREFILL_PATH_STORE, pipe="tcp", kv_bytes=100, transfer_us=2000)
    )
    value = registry.get_sample_value
    assert value("baton_router_prefill_path_total", {"path": "store", "pipe": "tcp", "reason": ""}) == 1
    assert value("baton_router_kv_bytes_total", {"pipe": "tcp"}) == 100
    assert value("baton_router_transfer_seconds_sum", {"pipe": "tcp"}) == pytest.approx(0.002)


# --- callbacks as a stream ---


class Source:
    """Makes numbers when it is told to, and knows what it was told."""

    def __init__(self, queue: ChunkQueue[int]) -> None:
        self.queue, self.cancelled, self.paused, self.made = queue, 0, False, 0

    def make(self, count: int) -> None:
        for _ in range(count):
            self.queue.on_chunk(self.made)
            self.made += 1

    def cancel(self) -> None:
        self.cancelled += 1

    def set_paused(self, paused: bool) -> None:
        self.paused = paused


async def test_a_queue_of_chunks_yields_all_of_them_and_the_end() -> None:
    queue: ChunkQueue[int] = ChunkQueue()
    source = Source(queue)
    source.make(2)
    taken = []
    async with queue.read_chunks(source) as chunks:
        async for chunk in chunks:
            taken.append(chunk)
            if chunk == 1:
                asyncio.get_running_loop().call_soon(source.make, 3)
            if chunk == 4:
                asyncio.get_running_loop().call_soon(queue.on_end, None)
    assert taken == [0, 1, 2, 3, 4]
    assert source.cancelled == 1


async def test_a_queue_of_chunks_holds_a_source_that_is_too_fast() -> None:
    queue: ChunkQueue[int] = ChunkQueue()
    source = Source(queue)
    async with queue.read_chunks(source) as chunks:
        source.make(1000)
        assert source.paused
        for expected in range(1000):
            assert await anext(chunks) == expected
        waiting = asyncio.ensure_future(anext(chunks))
        await asyncio.sleep(0)
        assert not source.paused
        source.make(1)
        assert await waiting == 1000


async def test_a_queue_of_chunks_raises_the_error_behind_what_came_before_it() -> None:
    queue: ChunkQueue[int] = ChunkQueue()
    source = Source(queue)
    source.make(3)
    queue.on_end(ValueError("at 3"))
    async with queue.read_chunks(source) as chunks:
        assert [await anext(chunks) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(ValueError, match="at 3"):
            await anext(chunks)


# --- pauses ---


def test_backoff() -> None:
    backoff = Backoff(1.0, random.Random(0))
    pauses = [backoff.next_s() for _ in range(20)]
    assert 0.025 <= pauses[0] <= 0.05
    assert all(0.5 <= p <= 1.0 for p in pauses[6:])
    assert len({round(p, 6) for p in pauses[6:]}) > 5, "no jitter"
    backoff.reset()
    assert backoff.next_s() <= 0.05


# --- configuration ---


def parse(*flags: str, env: dict[str, str] | None = None) -> RouterConfig:
    parser = argparse.ArgumentParser()
    add_flags(parser, RouterConfig)
    return from_flags(RouterConfig, parser.parse_args(flags), env=env or {})


def test_flags() -> None:
    config = parse(
        *("--prefill", "a:1,b:2", "--decode", "[::1]:3", "--beta", "0.5", "--policy", "round_robin"),
        *("--strict-fields", "--remote-prefill-threshold", "0"),
        env={"BATON_GRPC_PORT": "7", "BATON_BETA": "0.9"},
    )
    assert (config.prefill, config.decode) == (("a:1", "b:2"), ("[::1]:3",))
    assert (config.beta, config.grpc_port, config.remote_prefill_threshold) == (0.5, 7, 0)
    assert config.strict_fields
    assert parse().remote_prefill_threshold is None


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"port": 70000}, "port"),
        ({"grpc_port": -1}, "grpc_port"),
        ({"prefill": ("nohost",)}, "prefill"),
        ({"decode": ("host:0",)}, "decode"),
        ({"decode": ("host:99999",)}, "decode"),
        ({"prefill": ("a:1",), "decode": ("a:1",)}, "decode"),
        ({"policy": "best"}, "policy"),
        ({"beta": -1.0}, "beta"),
        ({"policy_options": ("nokey",)}, "policy_options"),
        ({"tier_weights": ("host=2",)}, "tier_weights"),
        ({"prefill_candidates": 0}, "prefill_candidates"),
        ({"max_request_sequences": 0}, "max_request_sequences"),
        ({"cors_origins": ("https://ui.example/",)}, "cors_origins"),
        ({"cors_origins": ("ui.example",)}, "cors_origins"),
        ({"max_retries": -1}, "max_retries"),
        ({"lease_ttl_s": 0.0}, "lease_ttl_s"),
        ({"drain_timeout_s": float("nan")}, "drain_timeout_s"),
        ({"remote_prefill_threshold": -5}, "remote_prefill_threshold"),
    ],
)
def test_bad_values(values: dict[str, object], name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RouterApp(RouterConfig(**values))  # type: ignore[arg-type]
    assert caught.value.field == name


async def test_nobody_listens_off_loopback_without_authentication(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("secret, of the services\n")
    for values in ({}, {"token_file": str(path)}, {"open_http": True}):
        with pytest.raises(ConfigError) as caught:
            RouterApp(RouterConfig(host="0.0.0.0", **values))  # type: ignore[arg-type]
        assert caught.value.field == "host"


async def test_api_keys_in_the_clear_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("keys", "token"):
        (tmp_path / name).write_text("3b1f8a64c0de99a75b1f8a64c0de99a7\n")
    files = {"api_keys": str(tmp_path / "keys"), "token_file": str(tmp_path / "token")}
    for host in ("127.0.0.1", "0.0.0.0"):
        assert "in the clear" not in caplog.text
        app = RouterApp(RouterConfig(host=host, **files))  # type: ignore[arg-type]
        await app.stop()
    assert "API keys reach 0.0.0.0 in the clear" in caplog.text


def test_listen_on_a_port_in_use() -> None:
    with listen("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        with pytest.raises(ConfigError, match=str(port)) as caught:
            listen("127.0.0.1", port)
        assert caught.value.field == "port"
    with pytest.raises(ConfigError):
        listen("256.1.1.1", 0)
    with listen("::1", 0) as sock:
        assert sock.family == socket.AF_INET6
