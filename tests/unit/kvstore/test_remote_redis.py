"""Redis as a tier: its bounds, and what its ends, absences and returns cost."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import numpy as np
import pytest
from tests.support.transport.named_blocks import names
from tests.support.transport.remote_tiers import KIND, WAIT_S, Place, delete, held, needs_redis, place_of, read, write

from baton_kvstore.types import KvFormat


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
