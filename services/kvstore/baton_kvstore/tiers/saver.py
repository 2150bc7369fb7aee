"""From memory to the tiers behind it: cold blocks are written ahead, so that eviction never waits and copies nothing.

Blocks stay in their slots, pinned, while a tier's thread reads them; nothing here blocks the event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from baton.errors import DeadlineError
from baton.types import BlockHash
from baton_kvstore.memory.pool import Entry
from baton_kvstore.memory.store import BlockStore
from baton_kvstore.tiers.chain import Chain
from baton_kvstore.types import KvFormat, TierCounters

RETRY_S = 5.0
"""How long blocks that no tier took are left alone."""
_SAVE_BYTES = 16 << 20
_RECHECKED = 32


@dataclass(frozen=True, slots=True)
class Watermarks:
    """Shares of the memory.

    Attributes:
        full: Above it, cold blocks are written ahead.
        spare: What is kept free or evictable then.
    """

    full: float = 0.75
    spare: float = 0.25


class Saver:
    """Writes blocks of a store in memory to the chain behind it. Used in one event loop.

    Attributes:
        next_kick: Set when blocks may have become evictable, and at the end; then another one takes its place.
    """

    def __init__(self, store: BlockStore, chain: Chain, counters: TierCounters, marks: Watermarks) -> None:
        self._store, self._chain, self._counters, self._marks = store, chain, counters, marks
        self._need = self._num_saving = self._saving_bytes = 0
        self._rest_until = 0.0
        self._progress, self.next_kick = asyncio.Event(), asyncio.Event()
        self._closed = False

    async def make_room(self, num_bytes: int, deadline: float) -> None:
        """Wait until so much can be taken, or nothing more can be done for it.

        Raises:
            DeadlineError: The tiers behind were too slow.
        """
        need = min(num_bytes, self._store.capacity_bytes)
        try:
            while self._store.room() < need:
                self._need = max(self._need, need)
                self.kick()
                if not self._num_saving:
                    break
                if not await self._wait_progress(deadline):
                    raise DeadlineError("the tiers behind are too slow to make room in memory")
        finally:
            self._need = 0  # others who wait say theirs again with the next progress

    def kick(self) -> None:
        """Have the next cold blocks written, if it is time; called whenever blocks may have become evictable."""
        chain = self._chain
        kicked, self.next_kick = self.next_kick, asyncio.Event()
        kicked.set()
        if self._closed or not chain.tiers:
            return
        if time.monotonic() >= self._rest_until:
            self._store.recency.recheck(_RECHECKED, self._still_behind)
        while self._wants_save():
            entries = self._store.begin_save(min(_SAVE_BYTES, self._store.capacity_bytes // 8))
            kind = entries[0].pool.kind
            if not chain.takes(kind):
                self._counters.refused += len(entries)
                self._store.end_save(entries)
                continue
            behind = {entry for entry in entries if chain.holds(kind, entry.block_hash)}  # asked once: that may change
            self._store.end_save([entry for entry in entries if entry in behind])
            rest = [entry for entry in entries if entry not in behind]
            if rest and not self._save(kind, rest):
                self._store.end_save(rest, saved=False)
                return

    async def persist(self, kind: KvFormat, hashes: Sequence[BlockHash], deadline: float) -> list[bool]:
        """Write blocks, sync, and return which of them a restart would find.

        Raises:
            DeadlineError: It took too long.
        """
        chain = self._chain
        names = [name for name in hashes if not chain.has_kept(kind, name)] if chain.takes(kind) else []
        step = max(1, _SAVE_BYTES // kind.block_bytes)
        for at in range(0, len(names), step):
            entries = self._store.pin(kind.key, names[at : at + step])
            try:
                while entries and not self._save(kind, entries, durable=True):
                    if not await _set_before(self.next_kick, deadline):  # blocks of other tiers may fill the queue
                        raise DeadlineError("the tiers behind are too slow to take the blocks")
            except BaseException:  # the caller may be gone
                self._store.end_save(entries, saved=False)
                raise
        synced = await chain.sync(deadline)
        return [synced and chain.keeps(kind, name) for name in hashes]

    async def close(self, deadline: float, *, flush: bool) -> None:
        """Take up nothing new; ``flush``: after what is to be written was, if that is before the deadline."""
        if flush:
            self.kick()
            while self._num_saving and await self._wait_progress(deadline):
                pass
        self._closed = True

    def _wants_save(self) -> bool:
        store = self._store
        if not store.recency.unsaved:
            return False
        if next(store.quotas.unsaved(), None) is not None:
            return True
        coming = store.room() + self._saving_bytes
        if self._chain.write_all or coming < self._need:
            return True
        if store.used_bytes <= self._marks.full * store.capacity_bytes:
            return False
        return coming < self._marks.spare * store.capacity_bytes or not (self._saving_bytes or store.recency.in_order)

    def _still_behind(self, entry: Entry) -> bool:
        kind, share = entry.pool.kind, entry.share
        if entry.brief or not self._chain.takes(kind):
            return True  # no tier is to have it
        if share is not None and share.disk_quota and share.disk_bytes + kind.block_bytes > share.disk_quota:
            return True  # written again, it would push out another of its tenant, which would be written again, ...
        return self._chain.holds(kind, entry.block_hash)

    def _save(self, kind: KvFormat, entries: Sequence[Entry], *, durable: bool = False) -> bool:
        """Queue pinned blocks; ``False``: a queue is full."""
        loop = asyncio.get_running_loop()

        def done(results: list[bool]) -> None:
            loop.call_soon_threadsafe(self._saved, entries, results)

        # Who is evicted comes tail first. On disk a chain lies from its head on: then many blocks are read at once.
        ordered = entries if durable else entries[::-1]
        views = [memoryview(entry.pool.arena.blocks[entry.slot]) for entry in ordered]
        if not self._chain.write(kind, [entry.block_hash for entry in ordered], views, done, durable=durable):
            return False
        self._num_saving += 1
        self._saving_bytes += len(entries) * kind.block_bytes
        return True

    def _saved(self, entries: Sequence[Entry], results: Sequence[bool]) -> None:
        self._num_saving -= 1
        self._saving_bytes -= len(entries) * entries[0].pool.block_bytes
        written = sum(results)
        self._counters.demotions += written
        self._counters.refused += len(results) - written
        if written < len(results):
            self._rest_until = time.monotonic() + RETRY_S  # those are given up; try no others over and over
        self._store.end_save(entries)
        progress, self._progress = self._progress, asyncio.Event()
        progress.set()
        self.kick()

    async def _wait_progress(self, deadline: float) -> bool:
        """Wait until a tier has done something; ``False``: not in time."""
        return await _set_before(self._progress, deadline)


async def _set_before(event: asyncio.Event, deadline: float) -> bool:
    try:
        async with asyncio.timeout(deadline - time.monotonic()):
            return await event.wait()
    except TimeoutError:
        return False
