"""Instances that fail requests though they look healthy, and one that is killed under load."""

from __future__ import annotations

import asyncio
import json
import secrets
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.router.world import World, assert_right, make_request, run

from baton.errors import InternalError
from baton.types import Epoch

BENCHMARK = Path(__file__).parents[4] / "benchmarks" / "http.py"


async def test_an_instance_that_fails_everything_gets_a_trial_now_and_then(world: World) -> None:
    bad, good = await world.decodes(2, caches=False)
    router = await world.cluster([], [bad, good], breaker_failures=2, breaker_open_s=5.0, policy="round_robin")
    now = 0.0
    router.dispatcher._context.breakers._now = lambda: now
    bad.state.refuse = InternalError("the engine is wedged")
    for i in range(20):
        answer = await run(router, make_request(f"r{i}"))
        assert_right(answer, make_request(f"r{i}"))
        assert answer.trace.decode_instance == "d1"
    assert router.metric("retries_total", reason="internal") < 20 / 2, "every other request met it"
    assert router.metric("breaker_opened_total", instance="d0") >= 1

    bad.state.refuse = None

    async def served() -> bool:
        return (await run(router, make_request())).trace.decode_instance == "d0"

    for _ in range(4):
        assert not await served(), "its breaker is still open"
    now = 60.0
    while not await served():
        await router.registry.wait_changed(0.02)
    assert router.metric("breaker_state", instance="d0") == 0
    router.assert_nothing_held()


async def test_a_stream_that_breaks_in_the_core_of_grpc_is_a_broken_stream(world: World) -> None:
    decodes = await world.decodes(2, caches=False)
    router = await world.cluster([], decodes)
    for worker in decodes:
        worker.state.break_after = 0  # messages
    requests = [make_request(f"r{i}") for i in range(4)]
    for request, answer in zip(requests, await asyncio.gather(*(run(router, x) for x in requests)), strict=True):
        assert_right(answer, request)
    moves = sum(router.metric(f"{name}_total", reason="unavailable") for name in ("migrations", "retries"))
    assert moves >= 1
    router.assert_nothing_held()


async def test_second_tries_are_bounded_while_everybody_fails(world: World) -> None:
    decodes = await world.decodes(4, caches=False)
    router = await world.cluster([], decodes, breaker_failures=0, retry_budget=0.0)
    for worker in decodes:
        worker.state.abort_all = InternalError("an outage")
    for i in range(60):
        with pytest.raises(InternalError, match="an outage"):
            await run(router, make_request(f"r{i}"))
    calls = sum(len(w.state.requests) for w in decodes)
    # Twenty at first and two per second: without a budget there would be 240.
    assert 60 < calls < 160
    assert router.metric("retries_denied_total", reason="internal") > 0
    router.assert_nothing_held()


async def test_another_process_behind_streams_that_hold_is_found_out_by_a_probe(world: World) -> None:
    """As behind a proxy, which keeps its client's connections while what it leads to restarts."""
    (decode,) = await world.decodes(1)
    router = await world.cluster([], [decode], index_heartbeat_ms=0, probe_interval_s=0.05)
    (instance,) = router.registry.instances()
    decode.epoch = Epoch(secrets.token_bytes(16))
    async with asyncio.timeout(240):
        while instance.info is None or instance.info.epoch != decode.epoch:
            await router.registry.wait_changed(0.02)
    assert_right(await run(router, make_request()), make_request())
    router.assert_nothing_held()


def test_killing_one_of_four_after_the_other_under_load_changes_no_answer() -> None:
    """A router, four workers, 128 connections; SIGKILL for one worker after the other while its streams run."""
    command = [sys.executable, str(BENCHMARK), "--kill", "--kill-requests", "800"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert (result["requests"], result["failed"], result["request_failures"]) == (800, 0, 0)
    assert result["wrong"] == 0
    assert result["migrations"] > 0, "no stream ran on the worker that was killed"
