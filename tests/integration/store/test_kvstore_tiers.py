"""Whole stores with Redis and object stores behind them: several share one, and it may die at any moment."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis as redis_client
from tests.support.servers.kvstore_service import (
    BLOCK,
    KIND,
    WAIT_S,
    Instance,
    connected,
    eventually,
    refused,
    scrape,
    store,
)
from tests.support.servers.redis_server import RedisServer
from tests.support.transport.kvstore_tiers import needs_redis
from tests.support.transport.named_blocks import names
from tests.support.transport.store_check import check_store

from baton.api.v1 import kvstore_pb2
from baton.rpc.convert import fingerprint_to_pb
from baton.rpc.server import free_port
from baton_kvstore.main import main
from baton_kvstore.server import KVStoreServer
from baton_kvstore.tiers.remote import RemoteTier

LOOKUPS: dict[str, Any] = {"lookup_again_s": 0.0, "lookup_timeout_s": WAIT_S, "redis_timeout_s": WAIT_S}
"""A tier that is slow, as all is on a busy machine, is none that has nothing."""


def tier_of(server: KVStoreServer, name: str) -> RemoteTier:
    (tier,) = (tier for tier in server.tiers.chain.tiers if tier.name == name)
    assert isinstance(tier, RemoteTier)
    return tier


async def load(instance: Instance, *labels: object) -> int:
    """Get, fetch and check blocks, and return how many there were."""
    answer = await instance.get(*labels)
    count = len(answer.block_ids)
    if count:
        assert (await instance.fetch(answer)).valid.all()
        assert instance.holds(names(*labels[:count]))
        await instance.stub.Release(kvstore_pb2.ReleaseRequest(lease_id=answer.lease_id), timeout=WAIT_S)
    return count


async def contains(instance: Instance, *labels: object) -> int:
    request = kvstore_pb2.ContainsRequest(fingerprint=fingerprint_to_pb(KIND), block_hashes=names(*labels))
    return int((await instance.stub.Contains(request, timeout=WAIT_S)).num_blocks)


@needs_redis
async def test_stores_that_share_a_redis_find_what_the_others_wrote() -> None:
    async with RedisServer() as redis:
        shared = {"redis_url": redis.url, "redis_write": "all", **LOOKUPS}
        async with store(**shared) as one, store(**shared) as two, connected(one) as a, connected(two) as b:
            assert await load(b, 1, 2, 3) == 0
            await a.put(1, 2, 3)
            await eventually(lambda: len(tier_of(one, "redis").index) == 3)
            assert await contains(b, 1, 2, 3, 4) == 3
            assert await load(b, 1, 2, 3, 4) == 3
            await eventually(lambda: two.store.used_bytes == 3 * BLOCK)
            assert two.tiers.counters.hits["redis"] == 3 or two.tiers.counters.hits["memory"] == 3  # or Contains did it
            request = kvstore_pb2.DeleteRequest(fingerprint=fingerprint_to_pb(KIND), block_hashes=names(2))
            await a.stub.Delete(request, timeout=WAIT_S)
            async with store(**shared) as three, connected(three) as c:
                assert await load(c, 1, 2, 3) == 1


@needs_redis
async def test_a_redis_killed_under_load_costs_misses_and_nothing_else() -> None:
    """Of a store whose memory holds 20 of 240 blocks; Redis is killed and started again, empty, four times."""
    async with RedisServer() as redis:
        shared = {"redis_url": redis.url, **LOOKUPS, "redis_timeout_s": 0.5}
        async with store(capacity_bytes=20 * BLOCK, **shared) as server:
            tier_of(server, "redis").breaker._cooldown_s = 0.02
            stop = asyncio.Event()
            loaded = [0]

            async def client(number: int) -> None:
                rng = np.random.default_rng(number)
                async with connected(server, pipes=("shm",)) as instance:
                    step = 0
                    while not stop.is_set():
                        mine = [f"{number}/{step % 20}/{i}" for i in range(3)]
                        assert await instance.put(*mine) == [True] * 3
                        past = int(rng.integers(20))
                        count = await load(instance, *[f"{number}/{past}/{i}" for i in range(3)])
                        loaded[0] += count
                        step += 1

            clients = [asyncio.create_task(client(number)) for number in range(4)]
            tier = tier_of(server, "redis")
            for _ in range(4):
                before = loaded[0], tier.counters.read_bytes
                await eventually(
                    lambda before=before: (  # type: ignore[misc]
                        any(task.done() for task in clients)
                        or (loaded[0] > before[0] + 30 and tier.counters.read_bytes > before[1])
                    )
                )
                await redis.kill()
                errors = tier.counters.errors
                await eventually(
                    lambda errors=errors: any(task.done() for task in clients) or tier.counters.errors > errors + 3  # type: ignore[misc]
                )
                await redis.start()
            stop.set()
            await asyncio.gather(*clients)
            assert tier.counters.damaged == 0
            check_store(server.store)


@needs_redis
async def test_a_damaged_value_in_redis_is_a_miss_and_is_mended_by_the_next_put() -> None:
    async with RedisServer() as redis:
        shared = {"redis_url": redis.url, "redis_write": "all", **LOOKUPS}
        async with store(**shared) as server, connected(server) as instance:
            await instance.put(1, 2)
            await eventually(lambda: len(tier_of(server, "redis").index) == 2)
        with redis_client.Redis(port=redis.port, protocol=2) as client:
            (key,) = (key for key in client.scan_iter() if names(2)[0].hex() in key.decode())
            client.setrange(key, 200, b"damage")
            async with store(**shared) as server, connected(server) as instance:
                assert await load(instance, 1, 2) == 1
                assert tier_of(server, "redis").counters.damaged == 1
                await eventually(lambda: not client.exists(key))
                assert await instance.put(2) == [True]
                await eventually(lambda: bool(client.exists(key)))
            async with store(**shared) as server, connected(server) as instance:
                assert await load(instance, 1, 2) == 2


@needs_redis
async def test_a_deletion_that_redis_did_not_hear_of_is_an_error() -> None:
    async with (
        RedisServer() as redis,
        store(redis_url=redis.url, redis_write="all", **LOOKUPS) as server,
        connected(server) as instance,
    ):
        await instance.put(1)
        await eventually(lambda: len(tier_of(server, "redis").index) == 1)
        await redis.kill()
        request = kvstore_pb2.DeleteRequest(fingerprint=fingerprint_to_pb(KIND), block_hashes=names(1))
        with refused("internal"):
            await instance.stub.Delete(request, timeout=WAIT_S)
        assert await load(instance, 1) == 0


@needs_redis
async def test_a_put_is_not_told_that_blocks_are_kept_which_redis_has_lost() -> None:
    async with RedisServer() as redis:
        shared = {"redis_url": redis.url, "redis_write": "all", "capacity_bytes": 8 * BLOCK, **LOOKUPS}
        async with store(**shared) as server, connected(server) as instance:
            for first in range(0, 12, 4):
                await instance.put(*range(first, first + 4))
            await eventually(lambda: len(tier_of(server, "redis").index) == 12)
            behind = [i for i in range(12) if not server.store.has(KIND.digest(), names(i)[0])]
            assert behind
            hashes = names(*behind)
            instance.fill(hashes)
            again = await instance.stub.Put(instance.put_request(hashes), timeout=WAIT_S)
            assert (all(again.stored), again.bytes) == (True, 0)
            with redis_client.Redis(port=redis.port, protocol=2) as client:
                client.flushall()
            again = await instance.stub.Put(instance.put_request(hashes), timeout=WAIT_S)
            assert (all(again.stored), again.bytes) == (True, len(hashes) * BLOCK)


@needs_redis
async def test_a_chain_of_all_tiers_keeps_everything_over_a_restart(tmp_path: Path) -> None:
    async with RedisServer() as redis:
        tiers = {
            "capacity_bytes": 8 * BLOCK,
            "disk_path": str(tmp_path / "kv"),
            "disk_bytes": 1 << 20,
            "redis_url": redis.url,
            "object_url": f"file://{tmp_path}/objects",
            "object_write": "all",
            **LOOKUPS,
        }
        port = free_port()
        async with store(metrics_port=port, **tiers) as server, connected(server) as instance:
            for first in range(0, 80, 4):
                assert await instance.put(*range(first, first + 4)) == [True] * 4
            for first in range(0, 80, 4):
                assert await load(instance, *range(first, first + 4)) == 4
            text = await asyncio.to_thread(scrape, port)
            for line in (
                'baton_kvstore_tier_resting{tier="redis"} 0.0',
                'baton_kvstore_tier_errors_total{tier="object"} 0.0',
                f'baton_kvstore_tier_hits_total{{tier="disk"}} {float(server.tiers.counters.hits["disk"])}',
            ):
                assert line in text, line
            assert server.tiers.counters.hits["disk"] > 0
            durable = instance.put_request(names(0), durable=True)
            instance.fill(names(0))
            assert list((await instance.stub.Put(durable, timeout=WAIT_S)).durable) == [True]
        await redis.kill()
        await redis.start()
        for path in (tmp_path / "kv").iterdir():
            path.unlink()  # only the object store is left
        async with store(**tiers) as server, connected(server) as instance:
            for first in range(0, 80, 4):
                assert await load(instance, *range(first, first + 4)) == 4
            assert server.tiers.counters.hits["object"] == 80


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--redis-url", "nonsense"], "--redis-url"),
        (["--object-url", "nosuchstore://x"], "--object-url"),
        (["--memory-full", "1.5"], "memory_full"),
        (["--known-blocks", "0"], "known_blocks"),
        (["--redis-url", "redis://h:1", "--redis-prefix", ""], "redis_prefix"),
    ],
)
def test_a_configuration_that_cannot_work_ends_with_one_line(
    argv: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert complaint in error.splitlines()[-1]
