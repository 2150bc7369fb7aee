"""Tiers that other nodes share, over real ones: redis-server, alone and as a cluster, and fsspec's file systems."""

from __future__ import annotations

import asyncio
import contextlib
import queue
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import fsspec
import pytest
import redis
from tests.support.servers.redis_server import RedisServer, missing_redis, redis_cluster
from tests.support.transport.named_blocks import buffers, content, name_of, names
from tests.support.transport.remote_tiers import (
    BLOCK,
    KIND,
    OTHER,
    WAIT_S,
    Place,
    delete,
    held,
    needs_redis,
    place_of,
    read,
    told,
    write,
)

from baton.types import BlockHash
from baton_kvstore.tiers.redis_backend import RedisBackend, RedisOptions
from baton_kvstore.tiers.remote import HEADER_BYTES, RemoteError
from baton_kvstore.types import KvFormat

PLACES = [
    pytest.param("redis", marks=needs_redis),
    pytest.param("redis-cluster", marks=needs_redis),
    "file",
    "memory",
    "async",
]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[RedisServer]]]:
    """A Redis and a cluster, for all tests that do not end them."""
    if missing_redis() is not None:
        yield {}
        return
    with asyncio.Runner() as runner:
        stack = contextlib.AsyncExitStack()

        async def start() -> dict[str, list[RedisServer]]:
            alone = await stack.enter_async_context(RedisServer())
            cluster = await stack.enter_async_context(redis_cluster(tmp_path_factory.mktemp("cluster")))
            return {"redis": [alone], "redis-cluster": cluster}

        try:
            yield runner.run(start())
        finally:
            runner.run(stack.aclose())


@pytest.fixture(params=PLACES)
async def place(
    request: pytest.FixtureRequest, tmp_path: Path, running: dict[str, list[RedisServer]]
) -> AsyncIterator[Place]:
    servers = running.get(request.param, [])
    for server in servers:
        with redis.Redis(port=server.port, protocol=2) as client:
            client.flushall()
    async with place_of(request.param, tmp_path, servers) as made:
        yield made


async def test_bytes_come_back_as_they_went_to_this_node_and_to_others(place: Place) -> None:
    await asyncio.to_thread(_go_and_come_back, place)


def _go_and_come_back(place: Place) -> None:
    one, early = place.tier(), place.tier()
    assert write(one, 1, 2, 3) == [True] * 3
    assert write(one, 1, kind=OTHER) == [True]
    assert read(one, 1, "missing", 3) == [True, False, True]
    assert held(one, 1, 2, 3, "missing") == [True, True, True, False]
    assert held(early, 1, 2, 3) == [False] * 3
    early.find(KIND, names(1, 2, "missing", 3))
    assert held(early, 1, 2) == [True] * 2
    assert read(early, 1, 2, 3) == [True] * 3  # whoever asks need not know
    late = place.tier()
    assert held(late, 1, 2, 3, "missing") == [True, True, True, False]
    assert held(late, 1, kind=OTHER) == [True]
    assert read(late, 1, kind=OTHER) == [True]
    assert late.counters.read_bytes == OTHER.block_bytes


async def test_many_blocks_need_several_batches(place: Place) -> None:
    big = KvFormat(b"b" * 32, b"c" * 32, 3 << 20)

    def work() -> None:
        tier = place.tier(queue_bytes=64 << 20)
        assert write(tier, *range(5), kind=big) == [True] * 5
        assert read(tier, *range(5), kind=big) == [True] * 5

    await asyncio.to_thread(work)


async def test_deleted_blocks_are_gone_for_everybody(place: Place) -> None:
    def work() -> None:
        one, two = place.tier(), place.tier()
        write(one, 1, 2, 3)
        write(one, 1, kind=OTHER)
        two.find(KIND, names(1, 2, 3))
        assert delete(one, names(2, "never"))
        assert held(one, 1, 2) == [True, False]
        assert read(two, 1, 2, 3) == [True, False, True]
        assert held(two, 1, 2, 3) == [True, False, True]  # the miss corrected it
        assert delete(two, None)  # of blocks that it does not know, too
        assert read(one, 1, 2, 3) == [False] * 3
        assert read(one, 1, kind=OTHER) == [True]
        assert len(place.keys()) == 1

    await asyncio.to_thread(work)


async def test_a_block_may_be_named_twice(place: Place) -> None:
    def work() -> None:
        one, two = place.tier(), place.tier()
        write(one, 1, 2, 3)
        two.find(KIND, names(1, 2, 3))
        assert delete(one, names(1, 2, 1))
        assert held(one, 1, 2, 3) == [False, False, True]
        assert read(two, 1, 1) == [False, False]
        assert held(two, 1, 2) == [False, True]
        assert two.find(KIND, names(2, 2), again=True) == set()
        assert two.find(KIND, names(3, 3), again=True) == set(names(3))
        assert held(two, 2, 3) == [False, True]
        assert two.index.num_bytes == BLOCK

    await asyncio.to_thread(work)


@pytest.mark.parametrize("damage", ["flip", "cut", "swap", "empty", "noise"])
async def test_a_damaged_value_is_a_miss_forgotten_and_deleted(place: Place, damage: str) -> None:
    def work() -> None:
        tier = place.tier()
        write(tier, 1, 2)
        keys = place.keys()
        (mine,) = (key for key in keys if name_of(1).hex() in key)
        (other,) = (key for key in keys if name_of(2).hex() in key)
        value = bytearray(keys[mine])
        value[HEADER_BYTES + 77] ^= 1
        place.set(
            mine,
            {
                "flip": bytes(value),
                "cut": keys[mine][:-1],
                "swap": keys[other],
                "empty": b"",
                "noise": b"\xff" * len(value),
            }[damage],
        )
        assert held(tier, 1) == [True]
        assert read(tier, 1, 2) == [False, True]
        assert held(tier, 1, 2) == [False, True]
        assert tier.counters.damaged == 1
        assert told(tier.sync)
        assert set(place.keys()) == {other}
        assert write(tier, 1) == [True]
        assert read(tier, 1) == [True]

    await asyncio.to_thread(work)


async def test_keys_of_others_are_left_alone(place: Place) -> None:
    def work() -> None:
        first = place.tier()
        write(first, 1)
        (key,) = place.keys()
        strange = [key[:-1], key[:-64] + "g" * 64, key.replace(KIND.key.hex(), "notes")]
        for number in strange:
            if not place.servers:
                fs, _ = fsspec.core.url_to_fs(place.root)
                fs.makedirs(fs._parent(number), exist_ok=True)
            place.set(number, b"mine")
        tier = place.tier()
        assert held(tier, 1) == [True]
        assert len(tier.index) == 1
        assert delete(tier, names(1))
        assert set(place.keys()) == set(strange)

    await asyncio.to_thread(work)


async def test_what_a_node_knows_is_bounded(place: Place) -> None:
    def work() -> None:
        tier = place.tier(index_blocks=4)
        for label in range(6):
            write(tier, label)
        assert held(tier, *range(6)) == [False] * 2 + [True] * 4
        tier.find(KIND, names(0))
        assert held(tier, 0) == [True]
        assert len(place.tier(index_blocks=4).index) <= 4

    await asyncio.to_thread(work)


async def test_a_block_deleted_on_its_way_is_not_found(place: Place) -> None:
    def work() -> None:
        tier = place.tier()
        gate: queue.Queue[None] = queue.Queue()
        tier.sync(lambda right: gate.get(timeout=WAIT_S))  # holds the thread
        answers: queue.Queue[Any] = queue.Queue()
        views = buffers(2, KIND)
        for view, name in zip(views, names(1, 2), strict=True):
            view[:] = content(name, KIND)
        assert tier.write(KIND, names(1, 2), views, answers.put)
        tier.delete(KIND, names(1), answers.put)
        gate.put(None)
        assert [answers.get(timeout=WAIT_S) for _ in range(2)] == [[False, True], True]
        assert held(tier, 1, 2) == [False, True]
        assert [name_of(2).hex() in key for key in list(place.keys())] == [True]

    await asyncio.to_thread(work)


async def test_many_deletions_are_several_calls_each_with_its_own_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with place_of("memory", tmp_path) as place:

        def work() -> None:
            tier = place.tier()
            assert write(tier, *range(150)) == [True] * 150
            calls, right = [], tier._backend.delete

            def counted(kind: KvFormat, hashes: Sequence[BlockHash] | None) -> None:
                calls.append(len(hashes or ()))
                right(kind, hashes)

            monkeypatch.setattr(tier._backend, "delete", counted)
            assert delete(tier, names(*range(1000)))
            assert max(calls) <= 256
            assert sum(calls) == 1000
            assert not place.keys()

        await asyncio.to_thread(work)


async def test_a_mistake_of_a_clients_library_is_a_failed_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async with place_of("memory", tmp_path) as place:

        def work() -> None:
            tier = place.tier()
            assert write(tier, 1) == [True]
            with monkeypatch.context() as patch:
                for method in ("get", "delete", "has"):
                    patch.setattr(tier._backend, method, lambda *args: {}["nothing"])
                assert not delete(tier, names(1))
                assert tier.find(KIND, names(2)) == set()
                tier.index.add(KIND, names(1))
            assert tier.counters.errors == 2
            assert write(tier, 2) == [True]  # by the thread that lives
            assert read(tier, 1, 2) == [True, True]

        await asyncio.to_thread(work)


def test_a_cluster_that_is_away_is_a_failed_call() -> None:
    backend = RedisBackend(RedisOptions("redis://127.0.0.1:1", "t", cluster=True))
    with pytest.raises(RemoteError):
        backend.get(KIND, names(1))
    with pytest.raises(RemoteError):
        list(backend.scan())
    backend.close()
