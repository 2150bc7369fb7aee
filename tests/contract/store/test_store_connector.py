"""The store connector against a real store: real gRPC, real pipes, real arenas. The test is the engine's thread."""

from __future__ import annotations

import time

import numpy as np
import pytest
from tests.support.transport.kvstore_tiers import write_all
from tests.support.transport.store_engine import (
    BLOCK,
    BS,
    LAYOUT,
    WAIT_S,
    Host,
    blocks_of,
    content,
    engine,
    host_gate,
    prompt,
    store,
)

from baton.errors import ConfigError
from baton.kv_cache.connector import LoadPlan
from baton.kv_cache.fingerprint import Fingerprint
from baton.kv_transfer.connector.store.backend import StoreOptions
from baton.types import PrefillPath
from baton_kvstore.server import KVStoreServer


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
