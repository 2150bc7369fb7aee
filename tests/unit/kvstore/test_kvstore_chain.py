"""The chain of tiers: who gets a block, who is asked for it, what moves between them. Real files, real Redis."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import redis as redis_client
from tests.support.servers.redis_server import RedisServer
from tests.support.servers.tcp_proxy import TcpProxy
from tests.support.transport.kvstore_tiers import needs_redis
from tests.support.transport.named_blocks import buffers, content, name_of, names

from baton.errors import InternalError
from baton.types import BlockHash
from baton_kvstore.tiers.chain import Chain, Link
from baton_kvstore.tiers.disk.log import DiskLog
from baton_kvstore.tiers.disk.tier import DiskTier
from baton_kvstore.tiers.object_backend import ObjectBackend
from baton_kvstore.tiers.redis_backend import RedisBackend, RedisOptions
from baton_kvstore.tiers.remote import RemoteOptions, RemoteTier
from baton_kvstore.tiers.tier import LowerTier
from baton_kvstore.types import KvFormat

BLOCK = 20_000
KIND = KvFormat(b"k" * 32, b"c" * 32, BLOCK)
HUGE = KvFormat(b"h" * 32, b"c" * 32, 300_000)
DISK_BYTES = 1 << 20
WAIT_S = 240.0


def disk(folder: Path) -> DiskTier:
    log = DiskLog(str(folder / "kv"), max_bytes=DISK_BYTES, segment_bytes=1 << 17)
    return DiskTier(log, queue_bytes=1 << 20, sync_interval_s=0.01, checkpoint_interval_s=60.0)


def objects(folder: Path, name: str = "object") -> RemoteTier:
    backend = ObjectBackend(f"file://{folder}/{name}", timeout_s=WAIT_S, requests=4)
    return RemoteTier(
        backend, RemoteOptions(name, durable=True, queue_bytes=1 << 20, index_blocks=10_000, absent_s=0.0)
    )


def redis_tier(url: str, *, timeout_s: float = WAIT_S, max_bytes: int = 0) -> RemoteTier:
    backend = RedisBackend(RedisOptions(url, "t", timeout_s=timeout_s))
    options = RemoteOptions(
        "redis", durable=False, queue_bytes=1 << 20, index_blocks=10_000, absent_s=0.0, max_bytes=max_bytes
    )
    return RemoteTier(backend, options)


@contextlib.asynccontextmanager
async def chain_of(
    *links: LowerTier | Link, raise_after: int = 2, lookup_timeout_s: float = WAIT_S
) -> AsyncIterator[Chain]:
    made = [link if isinstance(link, Link) else Link(link) for link in links]
    chain = Chain(made, lookup_timeout_s=lookup_timeout_s, raise_after=raise_after)
    try:
        yield chain
    finally:
        await chain.close()


async def told(begin: Callable[[Callable[[Any], None]], object]) -> Any:
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Any] = loop.create_future()
    assert begin(lambda value: loop.call_soon_threadsafe(answer.set_result, value)) is not False, "a queue is full"
    async with asyncio.timeout(WAIT_S):
        return await answer


async def write(chain: Chain, *labels: object, kind: KvFormat = KIND, **options: Any) -> list[bool]:
    hashes, views = names(*labels), buffers(len(labels), kind)
    for view, name in zip(views, hashes, strict=True):
        view[:] = content(name, kind)
    results: list[bool] = await told(lambda done: chain.write(kind, hashes, views, done, **options))
    return results


async def read(chain: Chain, *labels: object, kind: KvFormat = KIND) -> list[bool]:
    hashes, views = names(*labels), buffers(len(labels), kind)
    results = await chain.read(kind, hashes, views)
    for view, name, there in zip(views, hashes, results, strict=True):
        assert not there or bytes(view) == content(name, kind)
    return results


def held(tier: LowerTier, *labels: object, kind: KvFormat = KIND) -> list[bool]:
    return [tier.holds(kind, name) for name in names(*labels)]


async def drained(*tiers: LowerTier) -> None:
    for tier in tiers:
        assert await told(tier.sync)


async def test_a_block_goes_to_the_first_tier_that_takes_it(tmp_path: Path) -> None:
    first, second = disk(tmp_path), objects(tmp_path)
    async with chain_of(first, second) as chain:
        assert await write(chain, 1) == [True]
        assert await write(chain, 1, kind=HUGE) == [True]  # more than the disk takes
        assert (held(first, 1), held(second, 1)) == ([True], [False])
        assert (held(first, 1, kind=HUGE), held(second, 1, kind=HUGE)) == ([False], [True])
        assert await read(chain, 1, "missing") == [True, False]
        assert await read(chain, 1, kind=HUGE) == [True]
        assert [chain.fastest_tier(KIND, name) for name in names(1, "missing")] == [0, 2]
        assert chain.surely_holds(KIND, name_of(1))
        assert not chain.surely_holds(HUGE, name_of(1))


async def test_a_tier_that_wants_everything_gets_it_at_once(tmp_path: Path) -> None:
    first, second, third = disk(tmp_path), objects(tmp_path, "second"), objects(tmp_path, "third")
    async with chain_of(first, second, Link(third, write_all=True)) as chain:
        assert chain.write_all
        assert await write(chain, 1, 2) == [True] * 2
        assert [held(tier, 1, 2) for tier in (first, second, third)] == [[True] * 2, [False] * 2, [True] * 2]


async def test_what_the_disk_drops_goes_to_the_next_tier_and_is_read_from_there(tmp_path: Path) -> None:
    first, second = disk(tmp_path), objects(tmp_path)
    async with chain_of(first, second) as chain:
        for label in range(150):
            assert await write(chain, label) == [True]
        await drained(first, second)
        on_disk, beyond = held(first, *range(150)), held(second, *range(150))
        assert chain.counters.handed_over == sum(beyond) > 50
        assert chain.counters.dropped == 0
        assert all(a or b for a, b in zip(on_disk, beyond, strict=True))
        assert await read(chain, *range(150)) == [True] * 150
    async with chain_of(disk(tmp_path), objects(tmp_path)) as chain:  # after a restart too
        await asyncio.to_thread(chain.shared[0].scanned.wait, WAIT_S)  # type: ignore[attr-defined]
        assert await read(chain, *range(150)) == [True] * 150


async def test_a_block_deleted_while_the_disk_hands_it_over_is_gone(tmp_path: Path) -> None:
    """Deleted between the moment when the disk looks what it drops and that in which the next tier is given it."""
    first, second = disk(tmp_path), objects(tmp_path)
    async with chain_of(first, second) as chain:
        await write(chain, *range(3))
        views = buffers(3, KIND)
        for view, name in zip(views, names(*range(3)), strict=True):
            view[:] = content(name, KIND)

        loop = asyncio.get_running_loop()

        def hand_over(hashes: Sequence[BlockHash] | None) -> None:
            with first.leaving(KIND) as offer:
                assert offer is not None
                assert name_of(1) in offer.wanted(names(*range(3)))
                asyncio.run_coroutine_threadsafe(chain.delete(KIND, hashes), loop).result(WAIT_S)
                offer.take(names(*range(3)), views)

        await asyncio.to_thread(hand_over, names(1))
        await drained(second)
        assert held(second, *range(3)) == [True, False, True]
        await asyncio.to_thread(hand_over, None)
        await drained(second)
        assert held(second, *range(3)) == [False] * 3
        assert await read(chain, *range(3)) == [False] * 3


async def test_what_is_read_again_and_again_goes_back_to_the_first_tier(tmp_path: Path) -> None:
    first, second = disk(tmp_path), objects(tmp_path)
    async with chain_of(first, second) as chain:
        await told(lambda done: second.write(KIND, names(1, 2), _filled(1, 2), done))
        assert await read(chain, 1, 2) == [True] * 2
        await drained(first)
        assert held(first, 1, 2) == [False] * 2
        assert await read(chain, 1) == [True]
        await drained(first)
        assert held(first, 1, 2) == [True, False]
        assert chain.counters.raised == 1
        assert await read(chain, 1, 2) == [True] * 2
    async with chain_of(disk(tmp_path / "b"), other := objects(tmp_path), raise_after=0) as chain:
        await asyncio.to_thread(other.scanned.wait, WAIT_S)
        for _ in range(4):
            assert await read(chain, 1) == [True]
        assert chain.counters.raised == 0


def _filled(*labels: object) -> list[memoryview]:
    views = buffers(len(labels), KIND)
    for view, name in zip(views, names(*labels), strict=True):
        view[:] = content(name, KIND)
    return views


async def test_what_is_damaged_in_one_tier_is_read_from_the_next(tmp_path: Path) -> None:
    first, second = objects(tmp_path, "first"), objects(tmp_path, "second")
    async with chain_of(Link(first), Link(second, write_all=True)) as chain:
        assert await write(chain, 1, 2) == [True] * 2
        (path,) = (tmp_path / "first").rglob(name_of(1).hex())
        path.write_bytes(path.read_bytes()[:-1] + b"?")
        assert await read(chain, 1, 2) == [True] * 2
        await drained(first)
        assert (held(first, 1), held(second, 1)) == ([False], [True])
        assert first.stats().damaged == 1


async def test_durable_is_what_the_disk_or_an_object_store_has(tmp_path: Path) -> None:
    first, second = objects(tmp_path, "first"), disk(tmp_path)
    async with chain_of(first, second) as chain:
        assert await write(chain, 1) == [True]
        assert await chain.sync(time.monotonic() + WAIT_S)
        assert chain.in_durable_tier(KIND, name_of(1))  # an object store comes first here
        assert not chain.is_durable(KIND, name_of(1))  # but another process may have deleted it
    async with chain_of(disk(tmp_path / "b"), objects(tmp_path, "c")) as chain:
        assert await write(chain, 1, durable=True) == [True]
        assert await chain.sync(time.monotonic() + WAIT_S)
        assert chain.is_durable(KIND, name_of(1))


@needs_redis
async def test_what_redis_has_no_room_for_goes_to_the_object_store(tmp_path: Path) -> None:
    async with RedisServer() as server:
        probe = RedisBackend(RedisOptions(server.url, "t"))
        used = await asyncio.to_thread(probe.used_bytes)
        await asyncio.to_thread(probe.close)
        assert used is not None
        first, second = redis_tier(server.url, max_bytes=used + (2 << 20)), objects(tmp_path)
        async with chain_of(first, second) as chain:
            for label in range(120):
                assert await write(chain, label) == [True]
            await drained(first, second)
            assert first.counters.evictions == chain.counters.handed_over > 20
            assert await read(chain, *range(120)) == [True] * 120


@needs_redis
async def test_what_redis_refuses_goes_to_the_object_store_unless_it_was_deleted_meanwhile(tmp_path: Path) -> None:
    async with RedisServer() as server:
        first, second, third = redis_tier(server.url), objects(tmp_path), objects(tmp_path, "all")
        async with chain_of(first, second, Link(third, write_all=True)) as chain:
            assert await write(chain, 1) == [True]
            with redis_client.Redis(port=server.port, protocol=2) as client:
                client.config_set("maxmemory", 1)
            assert await write(chain, 2, 3) == [True] * 2
            assert [held(tier, 1, 2, 3) for tier in (first, second)] == [[True, False, False], [False, True, True]]
            gate = threading.Event()
            first.sync(lambda right: gate.wait(WAIT_S) and None)  # holds the thread
            writing = asyncio.create_task(write(chain, 4, 5))
            await asyncio.to_thread(_until, lambda: first.stats().queued_bytes > 0)
            deleting = asyncio.create_task(chain.delete(KIND, names(4)))
            await asyncio.to_thread(_until, lambda: bool(chain._moves and chain._moves[0].unwanted))
            gate.set()
            assert (await writing)[1]
            await deleting
            await drained(first, second, third)
            assert [held(tier, 4, 5) for tier in (first, second, third)] == [[False] * 2, [False, True], [False, True]]
            assert not chain._moves


@needs_redis
async def test_a_redis_that_is_away_is_passed_by_and_what_others_wrote_is_found(tmp_path: Path) -> None:
    async with RedisServer() as server:
        mine, theirs = redis_tier(server.url), redis_tier(server.url)
        async with chain_of(mine, objects(tmp_path)) as chain, chain_of(theirs) as others:
            assert await write(others, 1, 2) == [True] * 2
            assert await read(chain, 1, 2) == [False] * 2
            assert await chain.find(KIND, names(1, 2, 3), math.inf) == set(names(1, 2))
            assert await read(chain, 1, 2) == [True] * 2
            assert await others.delete(KIND, names(1)) == set(names(1))
            assert await chain.find(KIND, names(1, 2), math.inf, again=True) == set(names(2))
            assert not chain.holds(KIND, name_of(1))
            await server.kill()
            while not mine.resting:
                await chain.find(KIND, names("x"), math.inf)
            assert not chain.holds(KIND, name_of(2))
            assert await write(chain, 4) == [True]  # it went to the object store
            assert await read(chain, 4) == [True]
            with pytest.raises(InternalError):  # who knows what Redis still has
                await chain.delete(KIND, names(4))


@needs_redis
async def test_a_redis_that_hangs_holds_nobody_up(tmp_path: Path) -> None:
    """Frozen: connections stay, nothing is answered. Whoever waits is given a miss, and the event loop goes on."""
    async with RedisServer() as server:
        proxy = TcpProxy(server.port)
        url = f"redis://127.0.0.1:{await proxy.start()}/0"
        tier = redis_tier(url, timeout_s=2.0)
        tier.breaker._cooldown_s = 0.5
        async with chain_of(tier, lookup_timeout_s=0.05) as chain:
            await asyncio.to_thread(tier.scanned.wait, WAIT_S)
            assert await write(chain, 1) == [True]
            proxy.freeze()
            ticks = 0

            async def tick() -> None:
                nonlocal ticks
                while True:
                    await asyncio.sleep(0)
                    ticks += 1

            ticking = asyncio.create_task(tick())
            seen = []
            for work in (chain.find(KIND, names("x"), math.inf), read(chain, 1), write(chain, 2)):
                before = ticks
                seen.append(await work)
                assert ticks > before + 10  # others ran meanwhile
            assert seen == [set(), [False], [False]]
            assert chain.counters.skipped_lookups == 1
            ticking.cancel()
            proxy.thaw()
            await asyncio.to_thread(_until, lambda: not tier.resting)
        await proxy.stop()


def _until(holds: Callable[[], bool]) -> None:
    waited = threading.Event()
    for _ in range(int(WAIT_S / 0.05)):
        if holds():
            return
        waited.wait(0.05)
    raise AssertionError("it never did")


async def test_an_object_store_that_hangs_is_given_up_and_writes_into_nobodys_memory(tmp_path: Path) -> None:
    backend = ObjectBackend(f"file://{tmp_path}/o", timeout_s=WAIT_S, requests=2)
    options = RemoteOptions("object", durable=True, queue_bytes=1 << 20, index_blocks=100, absent_s=0.0)
    tier = RemoteTier(backend, options)
    async with chain_of(tier) as chain:
        assert await write(chain, 1) == [True]
        gate, asked = threading.Event(), threading.Event()
        right = backend._fs.cat_file

        def hangs(path: str, **options: Any) -> bytes:
            asked.set()
            gate.wait(WAIT_S)
            return bytes(right(path, **options))

        backend._fs.cat_file, backend._timeout_s = hangs, 2.0
        views = buffers(1, KIND)
        assert await chain.read(KIND, names(1), views) == [False]
        assert asked.is_set()
        views[0][:] = b"mine" * (BLOCK // 4)
        gate.set()
        backend._fs.cat_file = right
        await asyncio.to_thread(backend._each, lambda item: None, [1, 2, 3])  # the one that hung has ended
        assert bytes(views[0]) == b"mine" * (BLOCK // 4)


async def test_a_hung_object_store_is_found_out_by_look_ups(tmp_path: Path) -> None:
    backend = ObjectBackend(f"file://{tmp_path}/o", timeout_s=WAIT_S, requests=4, find_timeout_s=0.05)
    options = RemoteOptions("object", durable=True, queue_bytes=1 << 20, index_blocks=100, absent_s=0.0)
    tier = RemoteTier(backend, options)
    async with chain_of(tier, lookup_timeout_s=0.01) as chain:
        assert await asyncio.to_thread(tier.scanned.wait, WAIT_S)
        gate = threading.Event()
        backend._fs.exists = lambda path: gate.wait(WAIT_S)
        for label in range(3):
            assert await chain.find(KIND, names(label), math.inf) == set()
        await asyncio.to_thread(_until, lambda: tier.resting)
        assert tier.counters.errors == 3
        gate.set()


async def test_listeners_hear_of_every_tier(tmp_path: Path) -> None:
    heard: dict[str, set[BlockHash]] = {"disk": set(), "object": set()}

    def listen(kind: KvFormat, hashes: Sequence[BlockHash], tier: str, present: bool) -> None:
        for name in hashes:
            assert (name in heard[tier]) != present
            (heard[tier].add if present else heard[tier].remove)(name)

    first, second = disk(tmp_path), objects(tmp_path)
    async with chain_of(first, second) as chain:
        await write(chain, 0)
        chain.listen(listen)
        assert heard == {"disk": set(names(0)), "object": set()}
        for label in range(1, 80):
            await write(chain, label)
        await drained(first, second)
        for tier in (first, second):
            assert heard[tier.name] == {name for name in names(*range(80)) if tier.holds(KIND, name)}
        assert heard["object"]
        await chain.delete(KIND, None)
        assert heard == {"disk": set(), "object": set()}
