"""Stores that are gone, deaf, damaged or killed again and again cost the store connector hits only."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import numpy as np
import pytest
from tests.support.transport.kvstore_tiers import RedisThread, damage, write_all
from tests.support.transport.store_check import check_store
from tests.support.transport.store_engine import (
    BLOCK,
    BS,
    WAIT_S,
    Engine,
    Host,
    blocks_of,
    content,
    deaf_store,
    engine,
    prompt,
    store,
)

from baton.circuit_breaker import CircuitBreaker
from baton.kv_cache.connector import LoadRequest, LoadUpdate
from baton.rpc.server import free_port
from baton_kvstore.server import KVStoreServer


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


def test_a_key_value_service_that_says_nothing_holds_up_one_request(host: Host) -> None:
    """The master of a Mooncake Store was killed, say: what the next requests would wait for does not come either."""
    request = prompt(4 * BS)
    with deaf_store() as address, engine(host, f"redis://{address}/0", stall_s=0.2) as one:
        update = one.load(request)
        assert update.num_valid_tokens == 0
        assert update.error
        assert one.connector.plan_load(request, 0) is None, "it is left alone at once"
        assert one.connector.use.times_left_alone == 1


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
    check_store(server.store)
    return server.store.counters.evictions


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
                hits += load_again(one, prompt(7 * BS + 1, f"r{turn}", seed=4))
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
        assert hits >= 4


def load_again(one: Engine, request: LoadRequest) -> int:
    """Save and load until something is loaded again; return the number of loaded blocks."""
    deadline = time.monotonic() + WAIT_S
    while True:
        one.save(request)
        one.arena.blocks[32:] = 0
        update = one.load(request)
        one.arena.generations[:8] += np.uint64(1)
        assert update.error is None
        if update.num_valid_tokens:
            return update.num_valid_tokens // BS
        assert time.monotonic() < deadline, update


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


def test_a_breakers_cooldown_doubles_while_trials_fail() -> None:
    now = [0.0]
    breaker = CircuitBreaker(3, 5.0, lambda: now[0], longest_s=60.0)
    assert breaker.failed(at_once=True)
    assert not breaker.failed(at_once=True), "it was open already"
    lengths = []
    for _ in range(6):
        began = now[0]
        while breaker.open:
            now[0] += 5.0
        lengths.append(now[0] - began)
        assert breaker.allows()
        breaker.failed()
    assert lengths == [5.0, 10.0, 20.0, 40.0, 60.0, 60.0]
    breaker.succeeded()
    breaker.failed()
    assert breaker.allows(), "three in a row again"
    assert breaker.num_opened == 1
