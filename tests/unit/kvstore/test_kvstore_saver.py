"""Writing ahead to the tiers behind memory: which blocks go there, and whose pins are given back. A tier in a set."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from tests.support.transport.named_blocks import names
from tests.support.transport.store_check import check_store
from tests.unit.kvstore.test_kvstore_store import KIND, Clock

from baton.errors import DeadlineError
from baton.types import BlockHash, Tenant
from baton_kvstore.memory.pool import Entry, Quotas
from baton_kvstore.memory.store import BlockStore
from baton_kvstore.tiers.chain import Chain, Link
from baton_kvstore.tiers.saver import Saver, Watermarks
from baton_kvstore.tiers.tier import LowerTier, TierStats
from baton_kvstore.types import KvFormat, TierCounters, TierListener

BLOCK = KIND.block_bytes
WAIT_S = 240.0


class Tier(LowerTier):
    """Takes blocks at once and keeps their names.

    Attributes:
        answers: Come first when it is asked what it holds.
        full: Takes nothing.
        narrow: Is full after the next write.
    """

    name, exact, durable, shared = "disk", True, True, False

    def __init__(self) -> None:
        super().__init__(1)
        self.blocks: set[BlockHash] = set()
        self.written: list[BlockHash] = []
        self.answers: list[bool] = []
        self.full = self.narrow = False
        self._thread = ThreadPoolExecutor(1)

    def listen(self, listener: TierListener) -> None:
        """Nobody hears of anything."""

    def takes(self, kind: KvFormat) -> bool:
        return True

    def holds(self, kind: KvFormat, block_hash: BlockHash) -> bool:
        return self.answers.pop(0) if self.answers else block_hash in self.blocks

    def read(self, kind: KvFormat, hashes: Sequence[BlockHash], into: Sequence[memoryview]) -> list[bool]:
        return [False] * len(hashes)

    def room(self, num_bytes: int, share: float = 1.0) -> bool:
        return not self.full

    def wait_room(self, num_bytes: int, timeout_s: float, share: float = 1.0) -> bool:
        return not self.full

    def write(
        self,
        kind: KvFormat,
        hashes: Sequence[BlockHash],
        views: Sequence[memoryview],
        done: Callable[[list[bool]], None],
    ) -> bool:
        self.blocks.update(hashes)
        self.written += hashes
        self.full = self.narrow
        self._thread.submit(done, [True] * len(hashes))
        return True

    def delete(
        self, kind: KvFormat, hashes: Sequence[BlockHash] | None, done: Callable[[bool], None]
    ) -> list[BlockHash]:
        return []

    def sync(self, done: Callable[[bool], None]) -> None:
        self._thread.submit(done, True)

    def stats(self) -> TierStats:
        return TierStats()

    def close(self) -> None:
        self._thread.shutdown()


@contextlib.asynccontextmanager
async def saver_of(tier: Tier, *, write_all: bool = True) -> AsyncIterator[tuple[BlockStore, Saver]]:
    store = BlockStore(8 * BLOCK, max_pools=4, max_leases=8, clock=Clock(), behind=True, quotas=Quotas())
    chain = Chain([Link(tier, write_all)], lookup_timeout_s=WAIT_S, raise_after=0)
    try:
        yield store, Saver(store, chain, TierCounters(), Watermarks())
        check_store(store)
    finally:
        await chain.close()
        store.close()


def put(store: BlockStore, *labels: int, tenant: Tenant | None = None, ttl_s: float = 0.0) -> list[Entry]:
    reservation = store.reserve(KIND, names(*labels), tenant)
    store.commit(reservation, [True] * len(reservation.missing), ttl_s=ttl_s)
    return [entry for entry in reservation.entries if entry is not None]


async def settled(tier: Tier, saver: Saver) -> None:
    """Kick, let what was written come back to the loop, which kicks again, and again."""
    for _ in range(3):
        saver.kick()
        answer: Future[bool] = Future()
        tier.sync(answer.set_result)
        await asyncio.wait_for(asyncio.wrap_future(answer), WAIT_S)


async def test_blocks_with_a_time_to_live_never_leave_memory() -> None:
    tier = Tier()
    async with saver_of(tier) as (store, saver):
        put(store, 1, ttl_s=60.0)
        put(store, 2)
        await settled(tier, saver)
        assert tier.written == names(2)


@pytest.mark.parametrize("answers", [[False, True], [True, False]])
async def test_a_tier_that_changes_while_it_is_asked_leaves_no_pin(answers: list[bool]) -> None:
    tier = Tier()
    async with saver_of(tier) as (store, saver):
        (entry,) = put(store, 1)
        tier.answers = answers
        saver.kick()
        tier.answers = []
        await settled(tier, saver)
        assert entry.pins == 0
        assert entry in store.eviction


async def test_a_durable_put_that_is_cancelled_while_it_waits_for_a_queue_leaves_no_pin() -> None:
    tier = Tier()
    async with saver_of(tier, write_all=False) as (store, saver):
        (entry,) = put(store, 1)
        tier.full = True
        waiting = asyncio.ensure_future(saver.persist(entry.pool.kind, names(1), time.monotonic() + WAIT_S))
        await asyncio.sleep(0)
        assert entry.pins == 1
        waiting.cancel()
        await asyncio.wait([waiting])
        assert entry.pins == 0


async def test_a_durable_put_goes_on_when_blocks_of_others_have_left_the_queue() -> None:
    tier = Tier()
    async with saver_of(tier, write_all=False) as (store, saver):
        (entry,) = put(store, 1)
        tier.full = True
        waiting = asyncio.ensure_future(saver.persist(entry.pool.kind, names(1), time.monotonic() + WAIT_S))
        await asyncio.sleep(0)
        tier.full = False
        saver.kick()
        assert await waiting == [True]
        assert entry.pins == 0


async def test_room_that_came_too_late_is_not_made_for_nobody() -> None:
    tier = Tier()
    async with saver_of(tier, write_all=False) as (store, saver):
        put(store, *range(8))
        tier.narrow = True
        with pytest.raises(DeadlineError):
            await saver.make_room(8 * BLOCK, time.monotonic())
        tier.narrow = tier.full = False
        await settled(tier, saver)
        assert len(tier.written) == 2  # the spare quarter


async def test_what_a_tenants_quota_pushed_out_of_the_disk_is_not_written_again_and_again() -> None:
    tier, tenant = Tier(), Tenant("a", kv_disk_bytes=BLOCK)
    async with saver_of(tier) as (store, saver):
        put(store, 1, 2, tenant=tenant)
        await settled(tier, saver)
        tier.blocks.discard(names(1)[0])  # as the quota wants it
        share = store.quotas.find("a")
        assert share is not None
        share.disk_bytes = BLOCK
        await settled(tier, saver)
        assert sorted(tier.written) == sorted(names(1, 2))
        share.disk_bytes = 0  # now there is room, and it is a loss like any other
        await settled(tier, saver)
        assert tier.written.count(names(1)[0]) == 2
