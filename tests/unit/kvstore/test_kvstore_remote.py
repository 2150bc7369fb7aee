"""Tiers that other nodes share, over real ones: redis-server, alone and as a cluster, and fsspec's file systems."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import mmap
import os
import queue
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import redis
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper
from hypothesis import given
from hypothesis import strategies as st
from tests.support.servers.redis_server import RedisServer, missing_redis, redis_cluster

from baton.errors import ConfigError
from baton.types import BlockHash
from baton_kvstore.tiers.remote.backend import HEADER_BYTES, RemoteError, decode_block, decode_kind, encode_header
from baton_kvstore.tiers.remote.object_backend import ObjectBackend
from baton_kvstore.tiers.remote.redis_backend import RedisBackend, RedisOptions
from baton_kvstore.tiers.remote.tier import RemoteIndex, RemoteOptions, RemoteTier
from baton_kvstore.types import KvFormat

BLOCK = 5000
KIND = KvFormat(b"k" * 32, b"c" * 32, BLOCK)
OTHER = KvFormat(b"o" * 32, b"c" * 32, 300)
WAIT_S = 240.0
needs_redis = pytest.mark.skipif(missing_redis() is not None, reason=str(missing_redis()))
PLACES = [
    pytest.param("redis", marks=needs_redis),
    pytest.param("redis-cluster", marks=needs_redis),
    "file",
    "memory",
    "async",
]


def name_of(label: object) -> BlockHash:
    return BlockHash(hashlib.sha256(str(label).encode()).digest())


def names(*labels: object) -> list[BlockHash]:
    return [name_of(label) for label in labels]


def content(name: BlockHash, kind: KvFormat = KIND) -> bytes:
    return np.random.default_rng(list(name)).bytes(kind.block_bytes)


def buffers(count: int, kind: KvFormat = KIND) -> list[memoryview]:
    step = -(-kind.block_bytes // 4096) * 4096
    view = memoryview(mmap.mmap(-1, count * step))
    return [view[i * step : i * step + kind.block_bytes] for i in range(count)]


def value_of(name: BlockHash, kind: KvFormat = KIND) -> bytes:
    payload = content(name, kind)
    return encode_header(kind, name, memoryview(payload)) + payload


class Place:
    """Somewhere to keep blocks, and what a stranger can do to them there."""

    def __init__(self, kind: str, root: str, servers: Sequence[RedisServer]) -> None:
        self.kind, self.root, self.servers = kind, root, servers
        self.tiers: list[RemoteTier] = []

    def backend(self, **options: Any) -> RedisBackend | ObjectBackend:
        if self.servers:
            cluster = self.kind == "redis-cluster"
            return RedisBackend(RedisOptions(self.servers[0].url, "t*[", cluster=cluster, **options))
        backend = ObjectBackend(self.root, timeout_s=WAIT_S, requests=4)
        if self.kind == "async":  # fsspec's file systems for networks are coroutines in a thread of fsspec's own
            backend._fs = AsyncFileSystemWrapper(backend._fs, asynchronous=False)
        return backend

    def tier(self, backend: dict[str, Any] | None = None, **options: Any) -> RemoteTier:
        """Open a tier whose scan has ended."""
        defaults: dict[str, Any] = {"queue_bytes": 1 << 20, "index_blocks": 1000, "absent_s": 0.0}
        made = RemoteTier(
            self.backend(**(backend or {})), RemoteOptions("redis", durable=False, **{**defaults, **options})
        )
        self.tiers.append(made)
        assert made.scanned.wait(WAIT_S)
        return made

    def keys(self) -> dict[str, bytes]:
        """Return everything that is there."""
        if not self.servers:
            fs, path = fsspec.core.url_to_fs(self.root)
            return {found: fs.cat_file(found) for found in fs.find(path)} if fs.exists(path) else {}
        found = {}
        with self._client() as client:
            for key in client.scan_iter():
                found[key.decode()] = client.get(key)
        return found

    def set(self, key: str, value: bytes) -> None:
        if not self.servers:
            fs, _ = fsspec.core.url_to_fs(self.root)
            fs.pipe_file(key, value)
            return
        with self._client() as client:
            client.set(key, value)

    def _client(self) -> Any:
        made = redis.RedisCluster if self.kind == "redis-cluster" else redis.Redis
        return made.from_url(self.servers[0].url, protocol=2)


@contextlib.asynccontextmanager
async def place_of(kind: str, folder: Path, servers: Sequence[RedisServer] = ()) -> AsyncIterator[Place]:
    async with contextlib.AsyncExitStack() as stack:
        if kind == "redis" and not servers:
            servers = [await stack.enter_async_context(RedisServer())]
        place = Place(
            kind, f"memory://{folder}" if kind in ("memory", "async") else f"file://{folder}/objects", servers
        )
        try:
            yield place
        finally:
            for tier in place.tiers:
                await asyncio.to_thread(tier.close)


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


def write(tier: RemoteTier, *labels: object, kind: KvFormat = KIND) -> list[bool]:
    hashes, views = names(*labels), buffers(len(labels), kind)
    for view, name in zip(views, hashes, strict=True):
        view[:] = content(name, kind)
    return told(lambda done: tier.write(kind, hashes, views, done))


def told(begin: Callable[[Callable[[Any], None]], object]) -> Any:
    answers: queue.Queue[Any] = queue.Queue()
    assert begin(answers.put) is not False, "the queue is full"
    return answers.get(timeout=WAIT_S)


def delete(tier: RemoteTier, hashes: Sequence[BlockHash] | None) -> bool:
    return bool(told(lambda done: tier.delete(KIND, hashes, done)))


def read(tier: RemoteTier, *labels: object, kind: KvFormat = KIND) -> list[bool]:
    hashes, views = names(*labels), buffers(len(labels), kind)
    results = tier.read(kind, hashes, views)
    for view, name, there in zip(views, hashes, results, strict=True):
        assert not there or bytes(view) == content(name, kind)
    return results


def held(tier: RemoteTier, *labels: object, kind: KvFormat = KIND) -> list[bool]:
    return [tier.holds(kind, name) for name in names(*labels)]


# Format


def test_what_was_encoded_is_decoded() -> None:
    name = name_of(1)
    value = value_of(name)
    assert decode_kind(value[:HEADER_BYTES]) == KIND
    payload = decode_block(value, KIND, name)
    assert payload is not None
    assert bytes(payload) == content(name)
    assert decode_block(value, KIND, name_of(2)) is None
    assert decode_block(value, KvFormat(b"z" * 32, b"c" * 32, BLOCK), name) is None
    assert decode_block(value, KvFormat(KIND.key, KIND.content_key, BLOCK + 1), name) is None


@given(data=st.binary(max_size=2 * HEADER_BYTES))
def test_random_bytes_are_no_block(data: bytes) -> None:
    assert decode_kind(data) is None
    assert decode_block(data, KvFormat(b"k" * 32, b"c" * 32, max(1, len(data) - HEADER_BYTES)), name_of(1)) is None


@given(data=st.data())
def test_a_flipped_or_cut_value_is_no_block(data: st.DataObject) -> None:
    value = value_of(name_of(1), OTHER)
    at = data.draw(st.integers(0, len(value) - 1))
    flipped = bytearray(value)
    flipped[at] ^= 1 << data.draw(st.integers(0, 7))
    assert decode_block(bytes(flipped), OTHER, name_of(1)) is None
    assert decode_block(value[:at], OTHER, name_of(1)) is None
    assert decode_block(value + value[:at] + b"x", OTHER, name_of(1)) is None


# Index


@given(steps=st.lists(st.tuples(st.sampled_from("auds"), st.integers(0, 5), st.booleans()), max_size=40))
def test_the_index_is_bounded_and_its_listener_knows_what_it_holds(steps: list[tuple[str, int, bool]]) -> None:
    now = [0.0]
    index = RemoteIndex("redis", 3, absent_s=2.0, clock=lambda: now[0])
    heard: set[tuple[KvFormat, BlockHash]] = set()
    order: list[tuple[KvFormat, BlockHash]] = []

    def listen(kind: KvFormat, hashes: Sequence[BlockHash], tier: str, present: bool) -> None:
        for name in hashes:
            assert ((kind, name) in heard) != present
            (heard.add if present else heard.remove)((kind, name))

    index.listen(listen)
    for step, label, first in steps:
        kind, name = KIND if first else OTHER, name_of(label)
        if step in "au":
            known = (kind, name) in order
            if step == "a" or known:
                order = [entry for entry in order if entry != (kind, name)] + [(kind, name)]
            (index.add if step == "a" else index.use)(kind, [name])
            order = order[-3:]
        elif step == "d":
            assert index.drop(kind, [name]) == ([name] if (kind, name) in order else [])
            order = [entry for entry in order if entry != (kind, name)]
        else:
            assert set(index.drop(kind, None)) == {name for other, name in order if other == kind}
            order = [entry for entry in order if entry[0] != kind]
        assert heard == set(order)
        assert all(index.holds(*entry) for entry in order)
        assert (len(index), index.num_bytes) == (len(order), sum(kind.block_bytes for kind, _ in order))
        coldest = index.coldest(1)
        assert coldest == ((order[0][0], [order[0][1]]) if order else None)


def test_a_block_looked_for_in_vain_is_not_looked_for_again_at_once() -> None:
    now = [0.0]
    index = RemoteIndex("redis", 100, absent_s=2.0, clock=lambda: now[0])
    index.add(KIND, names(1))
    index.missed(KIND, names(2))
    assert index.unknown(KIND, names(1, 2, 3)) == names(3)
    assert index.unknown(OTHER, names(1, 2)) == names(1, 2)
    now[0] = 2.0
    assert index.unknown(KIND, names(1, 2, 3)) == names(2, 3)
    index.missed(KIND, names(2))
    index.add(KIND, names(2))
    index.drop(KIND, names(2))
    assert index.unknown(KIND, names(2)) == names(2)


# Tier


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
        views = buffers(2)
        for view, name in zip(views, names(1, 2), strict=True):
            view[:] = content(name)
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


# Redis


def test_a_cluster_that_is_away_is_a_failed_call() -> None:
    backend = RedisBackend(RedisOptions("redis://127.0.0.1:1", "t", cluster=True))
    with pytest.raises(RemoteError):
        backend.get(KIND, names(1))
    with pytest.raises(RemoteError):
        list(backend.scan())
    backend.close()


@needs_redis
async def test_redis_is_kept_below_a_limit_and_the_coldest_blocks_go_first(tmp_path: Path) -> None:
    big = KvFormat(b"b" * 32, b"c" * 32, 200_000)

    def work(place: Place) -> None:
        with place._client() as client:
            limit = client.info("memory")["used_memory"] + (4 << 20)
        tier = place.tier(max_bytes=limit, queue_bytes=8 << 20)
        for label in range(60):
            assert write(tier, label, kind=big) == [True]
            assert read(tier, 0, kind=big) == [True]
            with place._client() as client:
                assert client.info("memory")["used_memory"] < limit + (1 << 20)
        assert tier.counters.evictions > 30
        assert read(tier, 59, kind=big) == [True]
        assert held(tier, 0, 1, kind=big) == [True, False]
        assert len(place.keys()) == len(tier.index)

    async with place_of("redis", tmp_path) as place:
        await asyncio.to_thread(work, place)


@needs_redis
async def test_a_full_redis_takes_nothing_more_and_is_not_left_alone(tmp_path: Path) -> None:
    big = KvFormat(b"b" * 32, b"c" * 32, 200_000)

    def work(place: Place) -> None:
        tier = place.tier()
        with place._client() as client:
            client.config_set("maxmemory", client.info("memory")["used_memory"] + 1_000_000)
        taken = [write(tier, label, kind=big)[0] for label in range(10)]
        assert taken[0]
        assert not taken[-1]
        assert held(tier, *range(10), kind=big) == taken
        assert not tier.resting
        assert tier.counters.errors == 0

    async with place_of("redis", tmp_path) as place:
        await asyncio.to_thread(work, place)


@needs_redis
async def test_blocks_in_redis_end_with_their_life(tmp_path: Path) -> None:
    def work(place: Place) -> None:
        tier, for_ever = place.tier({"ttl_s": 500.0}), place.tier()
        write(tier, 1)
        write(for_ever, 2)
        with place._client() as client:
            lives = {key: client.pttl(key) for key in client.scan_iter()}
            assert sorted(life > 0 for life in lives.values()) == [False, True]
            (mortal,) = (key for key, life in lives.items() if life > 0)
            assert 0 < lives[mortal] <= 500_000
            client.pexpire(mortal, 0)
        assert read(tier, 1, 2) == [False, True]
        assert held(tier, 1) == [False]

    async with place_of("redis", tmp_path) as place:
        await asyncio.to_thread(work, place)


@needs_redis
async def test_a_redis_that_dies_gives_misses_is_left_alone_and_is_used_again(tmp_path: Path) -> None:
    async with place_of("redis", tmp_path) as place:
        tier = await asyncio.to_thread(place.tier)
        now = [0.0]
        tier.breaker._clock = lambda: now[0]
        assert await asyncio.to_thread(write, tier, 1, 2) == [True] * 2
        await place.servers[0].kill()
        assert await asyncio.to_thread(read, tier, 1) == [False]
        assert await asyncio.to_thread(write, tier, 3) == [False]
        await asyncio.to_thread(tier.find, KIND, names(4))
        assert tier.resting
        assert held(tier, 2) == [False]  # it is as if the tier were not there
        assert await asyncio.to_thread(write, tier, 3) == [False]
        assert tier.counters.errors == 3  # of those while it rested, none asked
        assert not await asyncio.to_thread(delete, tier, names(1))
        now[0] += 60.0
        await place.servers[0].start()
        assert await asyncio.to_thread(read, tier, 2) == [False]
        assert await asyncio.to_thread(write, tier, 5) == [True]
        assert await asyncio.to_thread(read, tier, 5) == [True]
        assert held(tier, 2, 5) == [False, True]


@needs_redis
async def test_a_redis_that_is_away_for_long_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with place_of("redis", tmp_path) as place:
        tier = await asyncio.to_thread(place.tier)
        now = [0.0]
        tier.breaker._clock = lambda: now[0]
        await place.servers[0].kill()
        for _ in range(50):
            now[0] += 60.0
            await asyncio.to_thread(tier.find, KIND, names(4), True)
        assert tier.counters.errors == 50
        lines = [record.getMessage() for record in caplog.records if record.levelno > logging.INFO]
        assert len(lines) == 1, lines
        assert "tier redis is left alone" in lines[0]
        now[0] += 60.0
        await place.servers[0].start()
        for label in range(50):
            assert await asyncio.to_thread(write, tier, label) == [True]
        lines = [record.getMessage() for record in caplog.records if record.levelno > logging.INFO]
        assert [line.split()[-1] for line in lines[1:]] == ["again", "back"], lines  # it was started anew, and answers


@needs_redis
async def test_a_redis_that_was_started_again_costs_no_call(tmp_path: Path) -> None:
    async with place_of("redis", tmp_path) as place:
        tier = await asyncio.to_thread(place.tier)
        assert await asyncio.to_thread(write, tier, 1) == [True]
        await place.servers[0].kill()
        await place.servers[0].start()
        assert await asyncio.to_thread(write, tier, 2) == [True]
        assert held(tier, 1, 2) == [False, True]  # it was seen that this is another server
        assert await asyncio.to_thread(read, tier, 1, 2) == [False, True]
        assert tier.counters.errors == 0
        assert await asyncio.to_thread(tier.scanned.wait, WAIT_S)
        assert held(tier, 1, 2) == [False, True]


@needs_redis
async def test_a_redis_that_is_not_there_yet_is_found_later(tmp_path: Path) -> None:
    async with place_of("redis", tmp_path) as place:
        await place.servers[0].kill()
        tier = await asyncio.to_thread(place.tier)
        await place.servers[0].start()
        assert await asyncio.to_thread(write, tier, 1) == [True]
        assert await asyncio.to_thread(read, tier, 1) == [True]


@needs_redis
async def test_whatever_happens_to_redis_what_is_read_is_right(tmp_path: Path) -> None:
    """Killed and started again while several threads read and write; every answer is the block or a miss."""
    async with place_of("redis", tmp_path) as place:
        tier = await asyncio.to_thread(place.tier)
        tier.breaker._cooldown_s = 0.01
        stop = asyncio.Event()
        hits = [0]

        def load(seed: int) -> None:
            rng = np.random.default_rng(seed)
            while not stop.is_set():
                labels = [int(label) for label in rng.choice(40, 8, replace=False)]
                write(tier, *labels[:4])
                hits[0] += sum(read(tier, *labels))

        loads = [asyncio.create_task(asyncio.to_thread(load, seed)) for seed in range(3)]
        for _ in range(5):
            before = hits[0]
            async with asyncio.timeout(WAIT_S):
                while hits[0] < before + 100:
                    await asyncio.sleep(0.005)
            await place.servers[0].kill()
            errors = tier.counters.errors
            async with asyncio.timeout(WAIT_S):
                while tier.counters.errors < errors + 2:
                    await asyncio.sleep(0.005)
            await place.servers[0].start()
        stop.set()
        await asyncio.gather(*loads)
        assert tier.counters.damaged == 0


# Object stores


async def test_objects_are_whole_or_not_there(tmp_path: Path) -> None:
    def work(place: Place) -> None:
        tier = place.tier()
        write(tier, *range(20))
        assert all(len(value) == HEADER_BYTES + BLOCK for value in place.keys().values())
        assert len(place.keys()) == 20
        folder = Path(place.root.removeprefix("file://"))
        for path in folder.rglob("*"):
            path.chmod(0o700)
        assert {path.name for path in folder.iterdir()} == {KIND.key.hex()}

    async with place_of("file", tmp_path) as place:
        await asyncio.to_thread(work, place)


def test_an_object_in_a_file_survives_a_crash_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = ObjectBackend(f"file://{tmp_path}/objects", timeout_s=WAIT_S, requests=1)
    path = Path(backend._path(KIND, name_of(1)))
    right, synced = os.fsync, []

    def fsync(fd: int) -> None:
        synced.append((Path(os.readlink(f"/proc/self/fd/{fd}")), path.exists()))
        right(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    assert backend.put(KIND, names(1), [value_of(name_of(1))]) == [True]
    (file, was_there), *folders = synced
    assert file.name.startswith(path.name)
    assert not was_there
    assert folders == [(folder, True) for folder in list(path.parents)[:3]]
    backend.close()


async def test_a_lookup_asks_for_no_more_than_one_object_that_is_not_there(tmp_path: Path) -> None:
    async with place_of("file", tmp_path) as place:
        writer = await asyncio.to_thread(place.tier)
        await asyncio.to_thread(write, writer, *range(9))
        backend = place.backend()
        asked: list[str] = []
        exists = backend._fs.exists  # type: ignore[union-attr]

        def counted(path: str) -> bool:
            asked.append(path)
            return bool(exists(path))

        backend._fs.exists = counted  # type: ignore[union-attr]
        found = await asyncio.to_thread(backend.has, KIND, names("new", *range(9)))
        assert (found, len(asked)) == ([False] + [None] * 9, 1)
        found = await asyncio.to_thread(backend.has, KIND, names(*range(9), "new", "newer"))
        assert found == [True] * 9 + [False] * 2
        backend.close()


def test_a_missing_package_or_a_wrong_url_is_named() -> None:
    for url, word in (("nosuch://x", "nosuch"), ("s3-of-nobody://b", "s3-of-nobody")):
        with pytest.raises(ConfigError, match=word) as caught:
            ObjectBackend(url, timeout_s=1.0, requests=1)
        assert caught.value.field == "object_url"
    with pytest.raises(ConfigError, match="redis") as caught:
        RedisBackend(RedisOptions("http://nowhere", "p"))
    assert caught.value.field == "redis_url"
    assert "secret" not in repr(RedisOptions("redis://:secret@h:1/0", "p"))
    script = (
        "import sys; sys.modules['redis'] = sys.modules['fsspec'] = None\n"
        "from baton.errors import ConfigError\n"
        "from baton_kvstore.config import KVStoreConfig\n"
        "from baton_kvstore.tiers.open import open_chain\n"
        "for name, url in (('redis_url', 'redis://h:1'), ('object_url', 'memory://x')):\n"
        "    try:\n        open_chain(KVStoreConfig(**{name: url}))\n"
        "    except ConfigError as error:\n        print(error.field, error.message)\n"
    )
    lines = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert "redis_url --redis-url needs" in lines
    assert "object_url --object-url needs" in lines
