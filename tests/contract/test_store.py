"""The store connector against a real store: real gRPC, real pipes, real arenas. The test is the engine's thread."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from tests.support.transport.kvstore_tiers import MAKE_UPS, RedisThread, damage, options_of, redis_thread, write_all

from baton.errors import ConfigError
from baton.hashing import block_hashes, root_hash
from baton.kv_cache.arena import HostArena
from baton.kv_cache.connector import KVConnector, LoadPlan, LoadRequest, LoadUpdate, TransferStats
from baton.kv_cache.fingerprint import Fingerprint
from baton.kv_cache.layout import KVLayout, LayerShape
from baton.kv_transfer.blocks import BlockFetcher, BlockServer
from baton.kv_transfer.connector.breaker import CircuitBreaker
from baton.kv_transfer.connector.multi import MultiConnector
from baton.kv_transfer.connector.store.backend import StoreOptions
from baton.kv_transfer.connector.store.connector import StoreConnector
from baton.rpc.server import free_port
from baton.types import BlockHash, BlockId, InstanceId, PrefillPath, RequestId, SamplingParams, TokenLogprob
from baton_kvstore.config import KVStoreConfig
from baton_kvstore.server import KVStoreServer

T = TypeVar("T")
BS = 16
LAYOUT = KVLayout((LayerShape(1, 16, 16),), BS, "float32")
KIND = Fingerprint.of(model="tiny", model_digest="d1", rope="", layout=LAYOUT)
BLOCK = KIND.block_bytes
WAIT_S = 120.0


class Host:
    """An event loop in a thread, as a service has one beside its engine's thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(WAIT_S)

    def close(self) -> None:
        self.run(self.loop.shutdown_default_executor())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(WAIT_S)
        self.loop.close()


@pytest.fixture
def host() -> Iterator[Host]:
    host = Host()
    yield host
    host.close()


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisThread | None]:
    with redis_thread() as made:
        yield made


@pytest.fixture(params=MAKE_UPS, autouse=True)
def tiers(
    request: pytest.FixtureRequest, tmp_path: Path, redis: RedisThread | None, monkeypatch: pytest.MonkeyPatch
) -> str:
    """Every test runs with a store in memory, and with such of which most lies in tiers behind."""
    monkeypatch.setitem(_STORE_OPTIONS, "more", options_of(request.param, tmp_path, redis, BLOCK))
    return str(request.param)


_STORE_OPTIONS: dict[str, dict[str, Any]] = {"more": {}}


@contextmanager
def store(host: Host, **options: Any) -> Iterator[KVStoreServer]:
    async def start() -> KVStoreServer:
        server = KVStoreServer(KVStoreConfig(**{"capacity_bytes": 64 * BLOCK, **_STORE_OPTIONS["more"], **options}))
        await server.start()
        return server

    server = host.run(start())
    try:
        yield server
    finally:
        host.run(server.stop())


class Engine:
    """A pool, a connector, and what the engine does with them."""

    def __init__(self, host: Host, address: str, *, kind: Fingerprint = KIND, **options: Any) -> None:
        self.host = host
        self.news = threading.Event()
        self.arena = HostArena(64, kind.block_bytes)
        self.server = BlockServer(self.arena, kind, InstanceId("prefill-0"))
        self.fetcher = BlockFetcher(self.arena, kind)
        defaults: dict[str, Any] = {
            "cooldown_s": 60.0,
            "call_timeout_s": WAIT_S,
            "load_timeout_s": WAIT_S,
            "save_timeout_s": WAIT_S,
        }
        self.connector = StoreConnector(
            StoreOptions(address, **{**defaults, **options}),
            arena=self.arena,
            fingerprint=kind,
            fetcher=self.fetcher,
            loop=host.loop,
            wake=self.news.set,
            source=lambda: self.server.source,
        )

    def wait(self, poll: Callable[[], T]) -> T:
        """Poll as the engine does: whenever it is woken."""
        deadline = time.monotonic() + WAIT_S
        while True:
            found = poll()
            if found:
                return found
            assert self.news.wait(max(0.0, deadline - time.monotonic())), "nobody woke the engine"
            self.news.clear()

    def load(self, request: LoadRequest, local: int = 0, first: int = 32) -> LoadUpdate:
        assert self.connector.plan_load(request, local) is not None
        self.connector.start_load(request, local, blocks_of(request, first))
        (update,) = self.wait(self.connector.poll_loads)
        return update

    def save(self, request: LoadRequest, chunks: Sequence[int] = (10_000,), first: int = 0) -> None:
        """Compute a prompt in chunks, end it, and wait until its blocks may be reused."""
        ids = blocks_of(request, first)
        for i, name in enumerate(request.hashes):
            self.arena.blocks[ids[i]] = content(name)
        for end in chunks:
            tokens = min(end, len(request.token_ids))
            self.connector.blocks_computed(request.request_id, ids, request.hashes[: tokens // BS], tokens)
        if self.connector.request_finished(request.request_id):
            assert self.connector.has_pending()
            assert self.wait(self.connector.poll_releases) == [request.request_id]
        assert not self.connector.poll_releases()

    def close(self) -> None:
        self.host.run(self.connector.aclose())
        self.server.close()
        self.fetcher.close()
        self.arena.close()


@contextmanager
def engine(host: Host, address: str, **options: Any) -> Iterator[Engine]:
    made = Engine(host, address, **options)
    try:
        yield made
    finally:
        made.close()


def prompt(length: int, name: str = "r", *, seed: int = 0, **sampling: Any) -> LoadRequest:
    tokens = np.random.default_rng(seed).integers(0, 1000, 4096)[:length].tolist()
    hashes = block_hashes(tokens, BS, root_hash(KIND.content_key()))
    return LoadRequest(RequestId(name), tokens, 0, SamplingParams(**sampling), hashes)


def blocks_of(request: LoadRequest, first: int) -> list[BlockId]:
    return [BlockId(first + i) for i in range(-(-len(request.token_ids) // BS))]


def content(name: BlockHash) -> np.ndarray:
    return np.resize(np.frombuffer(name, np.uint8), BLOCK)


@contextmanager
def deaf_store() -> Iterator[str]:
    """Takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("length", [BS + 1, 100, 6 * BS, 6 * BS + 1])
@pytest.mark.parametrize("pieces", [1024, 2])
def test_what_one_engine_saved_another_loads(host: Host, length: int, pieces: int) -> None:
    request, full = prompt(length), (length - 1) // BS
    with store(host) as server, engine(host, server.address, blocks_per_call=pieces) as prefill:
        prefill.save(request, chunks=(40, 70, 10_000))
        assert prefill.connector.use.saved_blocks == length // BS
        with engine(host, server.address, blocks_per_call=pieces) as decode:
            assert decode.connector.plan_load(request, 0) == LoadPlan(full * BS)
            update = decode.load(request)
            assert (update.num_valid_tokens, update.error, update.first_token) == (full * BS, None, None)
            stats = update.stats
            assert (stats.path, stats.pipe, stats.kv_bytes) == (PrefillPath.STORE, "shm", full * BLOCK)
            assert (stats.source, stats.transferred_tokens) == (server.instance_id, full * BS)
            for i in range(full):
                assert np.array_equal(decode.arena.blocks[32 + i], content(request.hashes[i]))
            assert not decode.arena.blocks[32 + full].any()
            assert not decode.connector.has_pending()
            use = decode.connector.use
            assert (use.loads, use.load_hits, use.loaded_tokens) == (1, 1, full * BS)


def test_blocks_found_locally_are_not_written(host: Host) -> None:
    request = prompt(6 * BS + 3)
    with store(host) as server, engine(host, server.address) as prefill, engine(host, server.address) as decode:
        prefill.save(request)
        decode.arena.blocks[32:34] = 7
        update = decode.load(request, local=2 * BS)
        assert (update.num_valid_tokens, update.stats.transferred_tokens) == (6 * BS, 4 * BS)
        assert (decode.arena.blocks[32:34] == 7).all()
        assert np.array_equal(decode.arena.blocks[34], content(request.hashes[2]))


def test_the_store_may_hold_only_a_beginning_or_nothing(host: Host) -> None:
    long, short, other = prompt(10 * BS), prompt(4 * BS), prompt(10 * BS, seed=1)
    with store(host) as server, engine(host, server.address) as one:
        one.save(short)
        update = one.load(long)
        assert (update.num_valid_tokens, update.error) == (4 * BS, None)
        update = one.load(other, local=2 * BS)
        assert (update.num_valid_tokens, update.error) == (2 * BS, None)
        assert (update.stats.path, update.stats.local_reason) == (PrefillPath.LOCAL, "store_miss")
        assert update.stats.failures == ()


def test_saving_again_moves_no_bytes(host: Host) -> None:
    with store(host) as server, engine(host, server.address) as one:
        one.save(prompt(5 * BS, "a"))
        one.save(prompt(5 * BS, "b"), first=20)
        assert (one.connector.use.saved_blocks, one.connector.use.saved_bytes) == (10, 5 * BLOCK)


def test_a_block_reused_before_the_store_pulled_it_is_not_stored(host: Host) -> None:
    request = prompt(4 * BS)
    with store(host) as server, engine(host, server.address) as one:
        gate = host_gate(host)
        one.connector.blocks_computed(request.request_id, blocks_of(request, 0), request.hashes, 4 * BS)
        one.arena.generations[1] += np.uint64(1)
        gate.set()
        if one.connector.request_finished(request.request_id):
            one.wait(one.connector.poll_releases)
        assert one.connector.use.saved_blocks == 3
        assert one.load(prompt(10 * BS)).num_valid_tokens == BS


def host_gate(host: Host) -> threading.Event:
    """Hold the host's loop until the event is set."""
    gate = threading.Event()
    host.loop.call_soon_threadsafe(gate.wait, WAIT_S)
    return gate


def test_kv_of_another_model_is_not_found(host: Host) -> None:
    request = prompt(4 * BS)
    other = Fingerprint.of(model="tiny", model_digest="d2", rope="", layout=LAYOUT)
    with store(host) as server, engine(host, server.address) as one, engine(host, server.address, kind=other) as two:
        one.save(request)
        assert two.load(request).num_valid_tokens == 0


def test_requests_that_the_store_cannot_help_are_not_planned(host: Host) -> None:
    with store(host) as server, engine(host, server.address, min_load_tokens=32) as one:
        plan = one.connector.plan_load
        assert plan(prompt(BS), 0) is None  # the last token is always computed
        assert plan(prompt(3 * BS), BS) is None  # one block is less than 32 tokens
        assert plan(prompt(3 * BS + 1), BS) == LoadPlan(3 * BS)
        assert plan(prompt(10 * BS), 5) is None  # not at a block's edge
        assert plan(prompt(10 * BS, prompt_logprobs=1), 0) is None


def test_loads_are_bounded(host: Host) -> None:
    with store(host) as server, engine(host, server.address, max_loads=1) as one:
        gate = host_gate(host)
        first, second = prompt(4 * BS, "a"), prompt(4 * BS, "b")
        one.connector.start_load(first, 0, blocks_of(first, 0))
        assert one.connector.plan_load(second, 0) is None
        gate.set()
        one.wait(one.connector.poll_loads)
        assert one.connector.plan_load(second, 0) is not None


def test_saves_are_bounded(host: Host) -> None:
    with store(host) as server, engine(host, server.address, max_saves=1) as one:
        gate = host_gate(host)
        first, second = prompt(4 * BS, "a"), prompt(4 * BS, "b")
        one.connector.blocks_computed(first.request_id, blocks_of(first, 0), first.hashes, 4 * BS)
        one.connector.blocks_computed(second.request_id, blocks_of(second, 8), second.hashes, 4 * BS)
        assert not one.connector.request_finished(second.request_id)
        assert one.connector.request_finished(first.request_id)
        assert one.connector.use.skipped_saves == 1
        gate.set()
        assert one.wait(one.connector.poll_releases) == [first.request_id]


def test_a_store_that_is_gone_fails_nothing_and_is_left_alone(host: Host) -> None:
    request = prompt(4 * BS)
    with engine(host, "127.0.0.1:1", failures=2) as one:
        update = one.load(request, local=BS)
        assert update.num_valid_tokens == BS
        assert update.error
        assert update.stats.local_reason == "store_failed"
        assert update.stats.failures[0].startswith("store 127.0.0.1:1: ")
        one.save(request)
        assert one.connector.use.save_failures == 1
        assert one.connector.plan_load(request, 0) is None
        assert one.connector.use.times_left_alone == 1
        one.connector.blocks_computed(request.request_id, blocks_of(request, 0), request.hashes, 4 * BS)
        assert not one.connector.request_finished(request.request_id)


def test_a_store_that_comes_back_is_used_again(host: Host) -> None:
    port = free_port()
    request = prompt(4 * BS)
    with engine(host, f"127.0.0.1:{port}", failures=1, cooldown_s=0.01) as one:
        assert one.load(request).error
        with store(host, port=port):
            deadline = time.monotonic() + WAIT_S
            while not one.connector.use.saves:  # every cooldown lets one ask through
                assert time.monotonic() < deadline
                one.save(request)
            while one.load(request).num_valid_tokens < 3 * BS:
                assert time.monotonic() < deadline


def test_of_a_resting_store_only_one_asks(host: Host) -> None:
    now = [0.0]
    with deaf_store() as address, engine(host, address, call_timeout_s=0.2) as one:
        one.connector._breaker = CircuitBreaker(1, 5.0, lambda: now[0])
        assert one.load(prompt(4 * BS)).error
        assert one.connector.plan_load(prompt(4 * BS), 0) is None
        now[0] = 5.0
        requests = [prompt(4 * BS, name) for name in "abc"]
        for request in requests:
            assert one.connector.plan_load(request, 0) is not None  # planning takes no turn
        for request in requests:
            one.connector.start_load(request, 0, blocks_of(request, 0))
        updates: list[LoadUpdate] = []
        while len(updates) < 3:
            updates += one.wait(one.connector.poll_loads)
        reasons = {update.request_id: update.stats.local_reason for update in updates}
        assert reasons == {"a": "store_failed", "b": "store_resting", "c": "store_resting"}


def test_a_deaf_store_costs_no_more_than_its_time_out(host: Host) -> None:
    request = prompt(4 * BS)
    with deaf_store() as address, engine(host, address, call_timeout_s=0.1, save_timeout_s=0.2) as one:
        started = time.monotonic()
        update = one.load(request)
        assert update.num_valid_tokens == 0
        assert update.error
        one.save(request)  # returns when the blocks were given back
        assert time.monotonic() - started < WAIT_S / 2
        assert one.connector.use.save_failures == 1


@pytest.mark.parametrize("wait_for_start", [False, True])
def test_a_cancelled_load_reports_soon(host: Host, wait_for_start: bool) -> None:
    request = prompt(4 * BS)
    with deaf_store() as address, engine(host, address, call_timeout_s=WAIT_S) as one:
        one.connector.start_load(request, 0, blocks_of(request, 0))
        if wait_for_start:
            host.run(asyncio.sleep(0.01))
        one.connector.cancel_load(request.request_id)
        (update,) = one.wait(one.connector.poll_loads)
        assert (update.num_valid_tokens, update.error) == (0, "cancelled")
        one.connector.cancel_load(request.request_id)  # a second time is harmless
        assert one.connector.use.load_failures == 0


def test_closing_ends_loads_and_gives_blocks_back(host: Host) -> None:
    load, save = prompt(4 * BS, "load"), prompt(4 * BS, "save")
    with deaf_store() as address, engine(host, address, call_timeout_s=WAIT_S) as one:
        one.connector.start_load(load, 0, blocks_of(load, 0))
        one.connector.blocks_computed(save.request_id, blocks_of(save, 8), save.hashes, 4 * BS)
        assert one.connector.request_finished(save.request_id)
        host.run(asyncio.sleep(0.01))
        one.connector.close()
        assert one.connector.poll_releases() == [save.request_id]
        (update,) = one.wait(one.connector.poll_loads)
        assert update.error == "cancelled"
        host.run(one.connector.aclose())
        assert not one.connector.has_pending()
        assert one.connector.plan_load(load, 0) is None
        one.connector.blocks_computed(save.request_id, blocks_of(save, 8), save.hashes, 4 * BS)
        assert not one.connector.request_finished(save.request_id)


def test_whatever_happens_what_is_reported_valid_is_right(host: Host) -> None:
    """A store far too small, prompts that share beginnings, loads that are cancelled, blocks that are reused."""
    draw = np.random.default_rng(7)
    hits = 0
    with store(host, capacity_bytes=9 * BLOCK) as server, engine(host, server.address, blocks_per_call=3) as one:
        for turn in range(60):
            requests = [
                prompt(int(draw.integers(1, 8)) * BS + 1, f"{turn}-{i}", seed=int(draw.integers(3))) for i in range(4)
            ]
            started = {}
            for i, request in enumerate(requests[:3]):
                if one.connector.plan_load(request, 0) is not None:
                    one.connector.start_load(request, 0, blocks_of(request, 32 + 8 * i))
                    started[request.request_id] = (request, 32 + 8 * i)
            cancelled = requests[int(draw.integers(3))].request_id if draw.random() < 0.3 else None
            if cancelled is not None:
                one.connector.cancel_load(cancelled)
            one.save(requests[3], chunks=(32, 10_000))
            while started:
                for update in one.wait(one.connector.poll_loads):
                    request, first = started.pop(update.request_id)
                    assert update.error is None or update.request_id == cancelled
                    count = update.num_valid_tokens // BS
                    hits += count
                    for at in range(count):
                        assert np.array_equal(one.arena.blocks[first + at], content(request.hashes[at]))
            one.arena.generations[:8] += np.uint64(1)
            one.arena.blocks[32:] = 0
        assert not one.connector.has_pending()
        assert hits > 50
        assert host.run(evictions(server)) > 10


async def evictions(server: KVStoreServer) -> int:
    server.store.check()
    return server.store.counters.evictions


def test_what_is_behind_memory_survives_a_restart(host: Host, tiers: str) -> None:
    request = prompt(6 * BS + 1)
    with store(host, **write_all(tiers)) as server, engine(host, server.address) as one:
        one.save(request)
    with store(host, **write_all(tiers)) as server, engine(host, server.address) as one:
        update = one.load(request)
        count = 0 if tiers == "memory" else 6
        assert (update.num_valid_tokens, update.error) == (count * BS, None)
        for i in range(count):
            assert np.array_equal(one.arena.blocks[32 + i], content(request.hashes[i]))


def test_what_was_damaged_behind_memory_is_computed_and_saved_again(
    host: Host, tiers: str, tmp_path: Path, redis: RedisThread | None
) -> None:
    request = prompt(6 * BS + 1)
    with store(host, **write_all(tiers)) as server, engine(host, server.address) as one:
        one.save(request)
    shared = redis if tiers in ("redis", "chain") else None
    assert (damage(tmp_path, shared) > 0) == (tiers != "memory")
    with store(host, **write_all(tiers)) as server, engine(host, server.address) as one:
        update = one.load(request)
        assert (update.num_valid_tokens, update.error) == (0, None)
        deadline = time.monotonic() + WAIT_S
        while update.num_valid_tokens < 6 * BS:
            # A round for each damage that shows when those before it are mended, and more while a tier is slow to
            # delete what was found to be damaged.
            assert time.monotonic() < deadline, update
            one.save(request)
            update = one.load(request)
            assert update.error is None
        for i in range(6):
            assert np.array_equal(one.arena.blocks[32 + i], content(request.hashes[i]))


def test_a_redis_killed_again_and_again_costs_hits_only(host: Host, tiers: str, redis: RedisThread | None) -> None:
    """Memory has room for three blocks of up to 28; killed Redis servers come back empty."""
    if tiers not in ("redis", "chain"):
        pytest.skip("no Redis in this make-up")
    assert redis is not None
    draw, hits = np.random.default_rng(3), 0
    with store(host) as server, engine(host, server.address) as one:
        for tier in server.tiers.chain.shared:
            tier.breaker._cooldown_s = 0.01  # type: ignore[attr-defined]
        for turn in range(48):
            if turn % 12 == 5:
                redis.kill()
            if turn % 12 == 11:
                redis.start()
            seed = int(draw.integers(4))
            one.save(prompt(7 * BS, f"s{turn}", seed=seed))
            request = prompt(7 * BS + 1, f"l{turn}", seed=int(draw.integers(4)))
            one.arena.blocks[32:] = 0
            update = one.load(request)
            assert update.error is None
            count = update.num_valid_tokens // BS
            hits += count
            for at in range(count):
                assert np.array_equal(one.arena.blocks[32 + at], content(request.hashes[at]))
            one.arena.generations[:8] += np.uint64(1)
        assert one.connector.use.save_failures == 0
        assert hits > 48


def test_leases_are_given_back(host: Host) -> None:
    with store(host) as server, engine(host, server.address) as one:
        one.save(prompt(4 * BS))
        one.load(prompt(4 * BS))
        deadline = time.monotonic() + WAIT_S
        while host.run(leases(server)):
            assert time.monotonic() < deadline


async def leases(server: KVStoreServer) -> int:
    return len(server.store.leases)


def test_options_are_checked() -> None:
    for options, name in (
        ({"address": "nowhere"}, "kvstore"),
        ({"address": "h:1", "min_load_tokens": 0}, "min_load_tokens"),
    ):
        with pytest.raises(ConfigError) as caught:
            StoreOptions(**options)  # type: ignore[arg-type]
        assert caught.value.field == name
    assert "secret" not in repr(StoreOptions("h:1", "secret"))


def test_breaker() -> None:
    now = [0.0]
    breaker = CircuitBreaker(2, 5.0, lambda: now[0])
    breaker.failed()
    breaker.succeeded()
    breaker.failed()
    assert breaker.allows()
    breaker.failed()
    assert breaker.open
    assert not breaker.allows()
    now[0] = 5.0
    assert not breaker.open
    assert breaker.allows()
    assert not breaker.allows()  # one ask per cooldown
    breaker.succeeded()
    assert breaker.allows()
    assert breaker.num_opened == 1


class LastResort(KVConnector):
    """Answers every load at once with everything and a first token: what a remote prefill looks like from here."""

    def __init__(self) -> None:
        self.started: list[tuple[RequestId, int]] = []
        self.held: list[RequestId] = []
        self._done: list[LoadUpdate] = []

    def plan_load(self, request: LoadRequest, num_local_tokens: int) -> LoadPlan | None:
        return LoadPlan(len(request.token_ids), with_first_token=True)

    def start_load(self, request: LoadRequest, num_local_tokens: int, block_ids: Sequence[BlockId]) -> None:
        self.started.append((request.request_id, num_local_tokens))
        total = len(request.token_ids)
        moved = total - num_local_tokens
        stats = TransferStats(PrefillPath.REMOTE, "p0", pipe="tcp", kv_bytes=5, transfer_us=6, transferred_tokens=moved)
        self._done.append(LoadUpdate(request.request_id, total, TokenLogprob(3, 0.0, 1), stats))

    def cancel_load(self, request_id: RequestId) -> None: ...

    def poll_loads(self) -> list[LoadUpdate]:
        done, self._done = self._done, []
        return done

    def blocks_computed(self, request_id: RequestId, *args: Any) -> None: ...

    def request_finished(self, request_id: RequestId) -> bool:
        self.held.append(request_id)
        return True

    def poll_releases(self) -> list[RequestId]:
        held, self.held = self.held, []
        return held

    def has_pending(self) -> bool:
        return bool(self._done or self.held)

    def close(self) -> None: ...


def test_multi_goes_on_where_the_first_fell_short(host: Host) -> None:
    with store(host) as server, engine(host, server.address) as one:
        one.save(prompt(3 * BS))
        last = LastResort()
        multi = MultiConnector([one.connector, last])
        request = prompt(6 * BS, "x")
        assert multi.plan_load(request, 0) == LoadPlan(6 * BS, with_first_token=True)
        multi.start_load(request, 0, blocks_of(request, 32))
        (update,) = one.wait(multi.poll_loads)
        assert last.started == [("x", 3 * BS)]
        assert update.num_valid_tokens == 6 * BS
        assert update.first_token is not None
        stats = update.stats
        assert (stats.path, stats.source, stats.kv_bytes) == (PrefillPath.REMOTE, "p0", 3 * BLOCK + 5)
        assert stats.transferred_tokens == 6 * BS
        assert not multi.has_pending()


def test_multi_stops_at_the_first_that_is_enough_and_when_cancelled(host: Host) -> None:
    with deaf_store() as address, engine(host, address, call_timeout_s=WAIT_S) as one:
        last = LastResort()
        request = prompt(6 * BS, "x")
        front = MultiConnector([last, one.connector])
        front.start_load(request, 0, blocks_of(request, 32))
        assert front.poll_loads()[0].num_valid_tokens == 6 * BS
        back = MultiConnector([one.connector, last])
        last.started.clear()
        back.start_load(request, 0, blocks_of(request, 32))
        back.cancel_load(request.request_id)
        (update,) = one.wait(back.poll_loads)
        assert (update.num_valid_tokens, update.error, last.started) == (0, "cancelled", [])


def test_multi_keeps_blocks_until_the_last_has_let_go(host: Host) -> None:
    request = prompt(4 * BS, "x")
    with store(host) as server, engine(host, server.address) as one:
        last = LastResort()
        multi = MultiConnector([one.connector, last])
        gate = host_gate(host)
        multi.blocks_computed(request.request_id, blocks_of(request, 0), request.hashes, 4 * BS)
        assert multi.request_finished(request.request_id)
        assert multi.poll_releases() == []  # the other has let go, the store has not pulled yet
        assert multi.has_pending()
        gate.set()
        assert one.wait(multi.poll_releases) == [request.request_id]
        assert not multi.has_pending()
        multi.close()


def test_multi_needs_somebody() -> None:
    with pytest.raises(ConfigError):
        MultiConnector([])
