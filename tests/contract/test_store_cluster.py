"""Several nodes as one store: who keeps what, replicas, nodes that go, come back, hang, or register themselves."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.servers.redis_server import RedisServer
from tests.support.servers.store_process import store_processes
from tests.support.transport.kv_shapes import pool_of, whole_kv
from tests.support.transport.store_rig import (
    BLOCK,
    BS,
    CHAIN,
    KIND,
    WAIT_S,
    Client,
    Rig,
    chain,
    eventually,
    needs_redis,
)

from baton.errors import UnavailableError
from baton.kv_cache.fingerprint import Fingerprint
from baton.kv_cache.layout import KVLayout, LayerShape
from baton.kv_cache.shards import KVGeometry, ShardSpec
from baton.kv_transfer.connector.store.backend import ChainPart, LoadCall, LoadProgress, SaveCall
from baton.kv_transfer.connector.store.cluster import Heat, Placement, StoreCluster, segments_of
from baton.rpc.redis import open_redis, store_node_key
from baton.types import BlockHash, BlockId
from baton_kvstore.server import KVStoreServer


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as made:
        yield made


async def several(kind: str, stack: AsyncExitStack) -> Rig:
    rig = Rig(kind, stack)
    await rig.start(Path())
    return rig


def cluster_of(client: Client) -> StoreCluster:
    assert isinstance(client.backend, StoreCluster)
    return client.backend


def held_by(node: KVStoreServer, hashes: Sequence[BlockHash]) -> list[bool]:
    digest = KIND.digest()
    return [node.store.has(digest, name) for name in hashes]


async def test_every_node_gets_its_part(stack: AsyncExitStack) -> None:
    rig = await several("three", stack)
    client = await rig.client()
    for seed in range(10):
        await client.put(chain(seed))
    assert all(node.store.num_blocks >= 32 for node in rig.nodes)
    assert sum(node.store.num_blocks for node in rig.nodes) == 10 * CHAIN
    for seed in range(10):
        owners = [[held_by(node, [name]) for node in rig.nodes].index([True]) for name in chain(seed)]
        for first in range(0, CHAIN, 32):
            assert len(set(owners[first : first + 32])) == 1
    await rig.check()


async def test_clients_agree_whatever_order_they_know_the_nodes_in(stack: AsyncExitStack) -> None:
    rig = await several("three", stack)
    one = await rig.client()
    other = await rig.client(address=",".join(reversed(rig.address.split(","))))
    await one.put(chain())
    assert await other.put(chain()) == (CHAIN, 0)
    assert (await other.get(chain())).num_blocks == CHAIN


async def test_with_two_replicas_a_missing_node_costs_nothing_and_is_noticed(stack: AsyncExitStack) -> None:
    rig = await several("three-twice", stack)
    client = await rig.client(failures=2, cooldown_s=60.0)
    await client.put(chain())
    lost = rig.holder()
    await lost.stop()
    noticed = []
    for _ in range(8):
        progress = await client.get(chain())
        assert progress.num_blocks == CHAIN
        noticed += progress.failures
    assert len(noticed) <= 2  # then it is left alone
    assert all(lost.address in failure for failure in noticed)
    assert client.use.node_failures == len(noticed)
    assert (client.use.nodes, client.use.nodes_resting) == (3, 1 if len(noticed) == 2 else 0)
    rig.nodes.remove(lost)
    await rig.check()


async def test_with_one_replica_a_missing_node_costs_what_it_held(stack: AsyncExitStack) -> None:
    rig = await several("three", stack)
    client = await rig.client(cooldown_s=60.0)
    hashes = chain()
    await client.put(hashes)
    lost = next(node for node in reversed(rig.nodes) if node.store.num_blocks)
    there = held_by(lost, hashes)
    await lost.stop()
    for _ in range(2):
        assert (await client.get(hashes)).num_blocks == there.index(True)
    assert client.use.nodes_resting == 1
    # What is put now goes to those who are there.
    assert (await client.put(hashes))[0] == CHAIN
    progress = await client.get(hashes)
    assert (progress.num_blocks, progress.failures) == (CHAIN, [])


async def test_a_node_that_comes_back_is_used_again_and_what_moved_meanwhile_is_found(stack: AsyncExitStack) -> None:
    rig = await several("three", stack)
    client = await rig.client()
    hashes = chain()
    await client.put(hashes)
    lost = rig.holder()
    await lost.stop()
    await client.get(hashes)
    await client.put(hashes)
    again = await rig.node(port=int(lost.address.rpartition(":")[2]))
    await eventually(lambda: client.use.nodes_resting == 0)
    # It comes back empty: what it owns lies with who owned it meanwhile, and is copied to it as it is read.
    async with asyncio.timeout(WAIT_S):
        while not held_by(again, hashes)[0]:
            assert (await client.get(hashes)).num_blocks == CHAIN
    await eventually(lambda: client.use.copied_blocks >= 32)
    assert client.use.failovers >= 1
    rig.nodes = [again, *(node for node in rig.nodes if node is not lost)]
    await rig.check()


async def test_what_a_new_node_should_have_is_read_from_before_and_copied(stack: AsyncExitStack) -> None:
    rig = await several("three", stack)
    client = await rig.client()
    chains = [chain(seed) for seed in range(12)]
    for hashes in chains:
        await client.put(hashes)
    new = await rig.node()
    cluster_of(client).nodes.set([*(node.address for node in rig.nodes), new.address])
    for hashes in chains:
        progress = await client.get(hashes)
        assert (progress.num_blocks, progress.failures) == (CHAIN, [])
    placement = Placement([*rig.address.split(","), new.address])
    moved = [
        s for h in chains for s in segments_of(ChainPart(h, 0, CHAIN)) if placement.ranked(s.key, 1)[0] == new.address
    ]
    assert moved
    await eventually(lambda: all(held_by(new, [segment.key])[0] for segment in moved))
    await eventually(lambda: new.store.num_blocks == sum(segment.stop - segment.start for segment in moved))
    # A client that never knew another placement finds all of it.
    fresh = await rig.client(address=f"{rig.address},{new.address}")
    for hashes in chains:
        assert (await fresh.get(hashes)).num_blocks == CHAIN
    assert fresh.use.failovers == 0
    rig.nodes.append(new)
    await rig.check()


async def test_a_node_that_leaves_is_read_no_more(stack: AsyncExitStack) -> None:
    rig = await several("three-twice", stack)
    client = await rig.client()
    await client.put(chain())
    gone = rig.holder()
    cluster_of(client).nodes.set(node.address for node in rig.nodes if node is not gone)
    before = gone.store.stats()
    progress = await client.get(chain())
    assert progress.num_blocks == CHAIN
    assert gone.instance_id not in progress.source
    assert gone.store.stats().hits == before.hits


async def test_a_replica_that_lost_blocks_gets_them_again(stack: AsyncExitStack) -> None:
    rig = await several("three-twice", stack)
    client = await rig.client()
    await client.put(chain())
    placement = Placement(rig.address.split(","))
    first = next(node for node in rig.nodes if node.address == placement.ranked(chain()[0], 1)[0])
    first.store.delete(KIND, chain()[5:20])
    async with asyncio.timeout(WAIT_S):
        while not all(held_by(first, chain()[:32])):  # replicas take turns
            assert (await client.get(chain())).num_blocks == CHAIN
    await rig.check()


async def test_hot_segments_get_more_replicas_and_loads_are_spread(stack: AsyncExitStack) -> None:
    rig = await several("three", stack)
    client = await rig.client(hot_loads_per_s=0.5)
    hashes = chain()[:20]
    await client.put(hashes)

    async def used() -> int:
        assert (await client.get(hashes)).num_blocks == len(hashes)
        return sum(node.store.counters.hits >= 5 * len(hashes) for node in rig.nodes)

    async with asyncio.timeout(WAIT_S):
        while await used() < 3:
            pass
    assert all(all(held_by(node, hashes)) for node in rig.nodes)
    await rig.check()


def test_heat_is_a_rate() -> None:
    now = [0.0]
    heat = Heat(10.0, lambda: now[0])
    for _ in range(400):  # 5 per second
        now[0] += 0.2
        assert heat.hit(b"warm") == 0
    levels = []
    for _ in range(800):  # 25 per second
        now[0] += 0.04
        levels.append(heat.hit(b"hot"))
    assert levels[-1] == 2
    now[0] += 60.0
    assert heat.hit(b"hot") == 0
    assert all(Heat(0.0, lambda: now[0]).hit(b"x") == 0 for _ in range(100))


@pytest.mark.parametrize("replication", [1, 2])
async def test_a_node_killed_in_mid_load_costs_blocks_and_never_wrong_ones(replication: int) -> None:
    """SIGKILL, bytes over TCP, before the first block and in the middle of two segments."""
    flags = ("--pipes", "tcp", "--capacity-bytes", str(8 * CHAIN * BLOCK))
    async with store_processes(3, *flags) as nodes, AsyncExitStack() as stack:
        rig = Rig("three", stack)
        rig.address = ",".join(node.address for node in nodes)
        short = 0
        for turn, moment in enumerate((0, 40, 80)):
            client = await rig.client(replication=replication, blocks_per_call=4, failures=3, call_timeout_s=WAIT_S)
            hashes = chain(turn)
            assert (await client.put(hashes))[0] == CHAIN
            placement = Placement(node.address for node in nodes)
            owner = placement.ranked(hashes[moment // 32 * 32], 1)[0]
            victim = next(node for node in nodes if node.address == owner)
            progress = LoadProgress()
            load = asyncio.ensure_future(client.get(hashes, progress=progress))
            while progress.num_blocks < moment and not load.done():
                await asyncio.sleep(0)
            victim.signal(signal.SIGKILL)
            await load
            assert progress.num_blocks >= moment
            short += progress.num_blocks < CHAIN
            if replication == 2:
                assert progress.num_blocks == CHAIN
            await victim.kill()
            await victim.start()
        assert short == (3 if replication == 1 else 0)


async def test_no_lease_is_held_while_another_node_is_waited_for(stack: AsyncExitStack) -> None:
    """Or two loads could each hold the memory that the other one waits for, until their time is up."""
    rig = await several("three", stack)
    client = await rig.client()
    placement = Placement(node.address for node in rig.nodes)
    owners = {seed: [placement.ranked(name, 1)[0] for name in chain(seed)[::32]] for seed in range(100)}
    hashes, first = next((chain(seed), names[0]) for seed, names in owners.items() if len(set(names)) > 1)
    await client.put(hashes)
    holder = next(node for node in rig.nodes if node.address == first)
    gate = asyncio.Event()
    for node in (node for node in cluster_of(client).nodes if node.name != first):
        lease = node.client.lease

        async def late(*args: Any, lease: Any = lease, **options: Any) -> Any:
            await gate.wait()
            return await lease(*args, **options)

        node.client.lease = late  # type: ignore[method-assign]
    progress = LoadProgress()
    load = asyncio.ensure_future(client.get(hashes, progress=progress))
    await eventually(lambda: progress.num_blocks > 0 and not len(holder.store.leases))
    assert progress.num_blocks < CHAIN
    assert not load.done()
    gate.set()
    await load
    assert progress.num_blocks == CHAIN
    await rig.check()


async def registered(redis: RedisServer, name: str) -> None:
    """Wait for a node's registration, which it makes in the background."""
    client = open_redis(redis.url, timeout_s=WAIT_S)
    try:
        async with asyncio.timeout(WAIT_S):
            while not await client.exists(store_node_key("test", name)):
                await asyncio.sleep(0.005)
    finally:
        await client.aclose()


@needs_redis
async def test_nodes_that_register_themselves_are_found_and_forgotten(stack: AsyncExitStack) -> None:
    redis = await stack.enter_async_context(RedisServer())
    rig = Rig("three", stack)
    names = {"register_redis": redis.url, "register_prefix": "test"}
    rig.nodes = [await rig.node(instance_id="a", **names)]
    options = {"address": "discover", "discovery": (redis.url, "test")}
    client = await rig.client(**options)
    shift = 0.0
    client.backend._membership._now = lambda: time.monotonic() + shift
    await registered(redis, "a")
    assert (await client.put(chain()))[0] == CHAIN
    # One comes: what it should have is read from where it lay, and moves.
    rig.nodes.append(await rig.node(instance_id="b", **names))
    await eventually(lambda: client.use.nodes == 2)
    assert (await client.get(chain())).num_blocks == CHAIN
    # Redis goes and comes back empty: nobody is forgotten, and new clients find everybody again.
    await redis.kill()
    shift = 60.0  # for longer than a lease
    assert (await client.get(chain())).num_blocks == CHAIN
    stranger = await rig.client(**options)
    with pytest.raises(UnavailableError):
        await stranger.get(chain(), deadline_s=0.2)
    await redis.start()

    def again() -> bool:
        assert client.use.nodes == 2
        return stranger.use.nodes == 2

    await eventually(again)
    # One leaves, and says so.
    await rig.nodes.pop().stop()
    await eventually(lambda: client.use.nodes == 1)
    await rig.check()


@pytest.mark.parametrize("replication", [1, 2])
async def test_a_node_that_hangs_in_mid_load_costs_bounded_time(replication: int) -> None:
    """SIGSTOP: connections stay, nothing answers."""
    flags = ("--pipes", "tcp", "--capacity-bytes", str(8 * CHAIN * BLOCK))
    async with store_processes(2, *flags) as nodes, AsyncExitStack() as stack:
        rig = Rig("three", stack)
        rig.address = ",".join(node.address for node in nodes)
        client = await rig.client(replication=replication, blocks_per_call=4, call_timeout_s=6.0, failures=3)
        hashes = chain()
        await client.put(hashes)
        owner = Placement(node.address for node in nodes).ranked(hashes[32], 1)[0]
        victim = next(node for node in nodes if node.address == owner)
        progress = LoadProgress()
        load = asyncio.ensure_future(client.get(hashes, progress=progress, deadline_s=20.0))
        while progress.num_blocks < 40 and not load.done():
            await asyncio.sleep(0)
        victim.signal(signal.SIGSTOP)
        try:
            async with asyncio.timeout(2 * WAIT_S):
                await load
        finally:
            victim.signal(signal.SIGCONT)
        assert progress.failures or replication == 2  # then the other one may have been asked
        assert progress.num_blocks >= 40
        assert (progress.num_blocks == CHAIN) == (replication == 2)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("kind", ["three-twice", pytest.param("redis", marks=needs_redis)])
async def test_instances_that_divide_their_kv_otherwise_share_a_store(
    stack: AsyncExitStack, kind: str, dtype: str
) -> None:
    rig = await several(kind, stack)
    geometry = KVGeometry((LayerShape(2, 16, 16), LayerShape(2, 16, 16)), dtype, frozenset())
    layout = KVLayout(geometry.layers, BS, dtype)
    one = Fingerprint.of(model="tiny", model_digest="d3", rope="", layout=layout)
    two = dataclasses.replace(one, tp_size=2)
    whole = whole_kv(geometry, 3 * BS)
    hashes = chain()[:3]
    writer = await rig.client(two)
    for rank, arena in enumerate(writer.shards.arenas):
        arena.blocks[:3] = pool_of(geometry, ShardSpec(tp_size=2, tp_rank=rank), BS, whole)
    ids = [BlockId(i) for i in range(3)]
    deadline = time.monotonic() + WAIT_S
    part = ChainPart(hashes, 0, 3)
    assert await writer.backend.save(SaveCall(writer.server.source, part, ids, [0, 0, 0], deadline)) == (
        3,
        3 * one.block_bytes * rig.replication,
    )
    reader = await rig.client(one)
    await reader.backend.load(LoadCall(part, ids, deadline))
    assert np.array_equal(reader.arena.blocks[:3], pool_of(geometry, ShardSpec(), BS, whole))
