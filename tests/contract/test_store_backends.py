"""One contract for every store: a node, three of them with one replica or two, Redis alone and as a cluster.

Everything is real: servers, gRPC, pipes, arenas, redis-server.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.support.servers.redis_server import RedisServer, redis_cluster
from tests.support.transport.store_rig import BLOCK, CHAIN, LAYOUT, Rig, chain, needs_mooncake, needs_redis, rig_of

from baton.errors import BatonError
from baton.kv_cache.fingerprint import Fingerprint
from baton.kv_transfer.connector.store.backend import LoadProgress

KINDS = [
    "node",
    "three",
    "three-twice",
    pytest.param("redis", marks=needs_redis),
    pytest.param("redis-cluster", marks=needs_redis),
    pytest.param("mooncake", marks=needs_mooncake),
]


@pytest.fixture(scope="module")
def masters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RedisServer]]:
    """One cluster for all tests that leave it alive: its nodes take seconds to find each other."""
    with asyncio.Runner() as runner:
        running = redis_cluster(tmp_path_factory.mktemp("redis"))
        yield runner.run(running.__aenter__())
        runner.run(running.__aexit__(None, None, None))


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def shared(request: pytest.FixtureRequest, kind: str) -> list[RedisServer]:
    return request.getfixturevalue("masters") if kind == "redis-cluster" else []


@pytest.fixture
async def rig(kind: str, shared: list[RedisServer], tmp_path: Path) -> AsyncIterator[Rig]:
    async with rig_of(kind, tmp_path, shared) as made:
        yield made


@pytest.mark.parametrize("pieces", [1024, 3])
async def test_what_one_client_put_another_gets(rig: Rig, pieces: int) -> None:
    hashes = chain()
    writer, reader = await rig.client(), await rig.client(blocks_per_call=pieces)
    assert await writer.put(hashes) == (CHAIN, CHAIN * BLOCK * rig.replication)
    progress = await reader.get(hashes)
    assert (progress.num_blocks, progress.num_bytes, progress.failures) == (CHAIN, CHAIN * BLOCK, [])
    assert progress.pipe == {"redis-cluster": "redis"}.get(rig.kind, "shm" if rig.nodes else rig.kind)
    expected = {node.instance_id for node in rig.nodes} or {rig.address.partition("?")[0]}
    assert set(progress.source.split(",")) <= expected
    assert progress.seconds > 0
    if rig.kind.startswith("three"):
        assert sum(node.store.num_blocks for node in rig.nodes) == CHAIN * rig.replication


async def test_putting_again_moves_no_bytes(rig: Rig) -> None:
    client = await rig.client()
    await client.put(chain())
    assert await client.put(chain()) == (CHAIN, 0)


async def test_the_middle_of_a_chain_is_found_as_its_beginning_is(rig: Rig) -> None:
    hashes = chain()
    client = await rig.client()
    await client.put(hashes[:45])
    assert (await client.put(hashes, 45))[0] == CHAIN - 45
    for start in (0, 1, 31, 32, 50, 99):
        assert (await client.get(hashes, start)).num_blocks == CHAIN - start


async def test_a_load_ends_where_the_store_knows_no_more(rig: Rig) -> None:
    hashes, other = chain(), chain(1)
    client = await rig.client()
    assert (await client.get(hashes)).num_blocks == 0
    await client.put(hashes[:70])
    for end in (10, 70, 71, CHAIN):
        progress = await client.get(hashes[:end])
        assert (progress.num_blocks, progress.failures) == (min(70, end), [])
    assert (await client.get(other)).num_blocks == 0
    assert (await client.get([*hashes[:40], *other[40:]])).num_blocks == 40


async def test_blocks_that_change_while_they_are_put_are_not_stored(rig: Rig) -> None:
    hashes = chain()
    client = await rig.client()
    assert (await client.put(hashes, stale=(10, 40)))[0] == CHAIN - 2
    assert (await client.get(hashes)).num_blocks == 10
    assert (await client.get(hashes, 11)).num_blocks == 40 - 11
    assert (await client.get(hashes, 41)).num_blocks == CHAIN - 41
    assert (await client.put(hashes))[0] == CHAIN  # what was missing is put by the next who has it
    assert (await client.get(hashes)).num_blocks == CHAIN


async def test_kv_of_another_kind_is_not_found(rig: Rig) -> None:
    other = Fingerprint.of(model="tiny", model_digest="d2", rope="", layout=LAYOUT)
    writer, reader = await rig.client(), await rig.client(other)
    await writer.put(chain())
    assert (await reader.get(chain())).num_blocks == 0


async def test_a_store_that_is_away_is_an_error_in_bounded_time(kind: str, tmp_path: Path) -> None:
    async with rig_of(kind, tmp_path) as rig:
        await (await rig.client()).put(chain())
        client = await rig.client(call_timeout_s=0.5, cooldown_s=60.0)  # a node that was missed stays so
        for redis in rig.redis:
            await redis.kill()
        for node in rig.nodes:
            await node.stop()
        if rig.master is not None:
            await rig.master.kill()
        for attempt in range(9):  # of several nodes each has to be missed before the store counts as away
            progress = LoadProgress()
            try:
                await client.get(chain(), progress=progress, deadline_s=5.0)
            except BatonError:
                break
            assert rig.kind.startswith("three")
            assert progress.failures
            assert attempt < 8
        assert progress.num_blocks == 0
        for call in (client.get, client.put):
            with pytest.raises(BatonError):
                await call(chain())


async def test_a_cancelled_load_writes_no_more(rig: Rig) -> None:
    hashes = chain()
    client = await rig.client(blocks_per_call=1)
    await client.put(hashes)
    progress = LoadProgress()
    load = asyncio.ensure_future(client.get(hashes, progress=progress))
    while progress.num_blocks < 3 and not load.done():
        await asyncio.sleep(0)
    load.cancel()
    with pytest.raises(asyncio.CancelledError):
        await load
    assert 2 < progress.num_blocks < CHAIN
    client.arena.blocks[CHAIN:] = 7
    await client.put(chain(1))  # what it takes until anything late would have come
    assert (client.arena.blocks[CHAIN:] == 7).all()
    assert (await client.get(hashes)).num_blocks == CHAIN


async def test_no_time_is_no_result(rig: Rig) -> None:
    client = await rig.client()
    await client.put(chain())
    progress = LoadProgress()
    with pytest.raises(BatonError):
        await client.get(chain(), progress=progress, deadline_s=-1.0)
    assert (progress.num_blocks, progress.num_bytes) == (0, 0)
    assert (await client.get(chain())).num_blocks == CHAIN


async def test_many_at_once(rig: Rig) -> None:
    clients = [await rig.client(blocks_per_call=7) for _ in range(3)]
    chains = [chain(seed) for seed in range(len(clients))]
    for _ in range(2):
        await asyncio.gather(*(client.put(hashes) for client, hashes in zip(clients, chains, strict=True)))
        found = await asyncio.gather(*(c.get(h) for c, h in zip(clients, chains[1:] + chains[:1], strict=True)))
        assert all(progress.num_blocks in (0, CHAIN) for progress in found)
    assert all(progress.num_blocks == CHAIN for progress in found)
