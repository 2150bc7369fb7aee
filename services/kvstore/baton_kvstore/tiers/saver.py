"""Writing cold blocks from memory to the lower tiers ahead of eviction, so that eviction never waits or copies.

Blocks stay pinned in their slots while a tier's thread reads them; nothing here blocks the event loop.
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
"""Delay before blocks that no tier accepted are tried again, in seconds."""
_SAVE_BYTES = 16 << 20
_RECHECKED = 32


@dataclass(frozen=True, slots=True)
class Watermarks:
    """Shares of the memory, from 0 to 1.

    Attributes:
        full: Used share above which cold blocks are written ahead.
        spare: Share that is kept free or evictable then.
    """

    full: float = 0.75
    spare: float = 0.25


class Saver:
    """Writes blocks from memory to the lower tiers. Used in one event loop.

    Attributes:
        next_kick: Set and replaced by a new event when blocks may have become evictable, and on shutdown.
    """

    def __init__(self, store: BlockStore, chain: Chain, counters: TierCounters, marks: Watermarks) -> None:
        self._store = store
        self._chain = chain
        self._counters = counters
        self._marks = marks
        self._need = self._num_saving = self._saving_bytes = 0
        self._rest_until = 0.0
        self._progress = asyncio.Event()
        self.next_kick = asyncio.Event()
        self._closed = False

    async def make_room(self, num_bytes: int, deadline: float) -> None:
        """Wait until ``num_bytes`` are free or evictable, or nothing more can be saved.

        Raises:
            DeadlineError: The lower tiers were too slow.
        """
        need = min(num_bytes, self._store.capacity_bytes)
        try:
            while self._store.room() < need:
                self._need = max(self._need, need)
                self.kick()
                if not self._num_saving:
                    break
                if not await _set_before(self._progress, deadline):
                    raise DeadlineError("the lower tiers are too slow to make room in memory")
        finally:
            self._need = 0  # other waiting calls set theirs again at the next progress

    def kick(self) -> None:
        """Write the next cold blocks if necessary; call whenever blocks may have become evictable."""
        chain = self._chain
        self.next_kick.set()
        self.next_kick = asyncio.Event()
        if self._closed or not chain.tiers:
            return
        if time.monotonic() >= self._rest_until:
            self._store.eviction.recheck(_RECHECKED, self._still_behind)
        while self._wants_save():
            entries = self._store.begin_save(min(_SAVE_BYTES, self._store.capacity_bytes // 8))
            kind = entries[0].pool.kind
            if not chain.takes(kind):
                self._counters.refused += len(entries)
                self._store.end_save(entries)
                continue
            saved = {entry for entry in entries if chain.holds(kind, entry.block_hash)}  # only once: it may change
            self._store.end_save([entry for entry in entries if entry in saved])
            unsaved = [entry for entry in entries if entry not in saved]
            if unsaved and not self._save(kind, unsaved):
                self._store.end_save(unsaved, saved=False)
                return

    async def persist(self, kind: KvFormat, hashes: Sequence[BlockHash], deadline: float) -> list[bool]:
        """Write blocks to the durable tier, sync it, and return for each block whether it survives a restart.

        Raises:
            DeadlineError: The deadline passed first.
        """
        chain = self._chain
        names = [name for name in hashes if not chain.is_durable(kind, name)] if chain.takes(kind) else []
        step = max(1, _SAVE_BYTES // kind.block_bytes)
        for at in range(0, len(names), step):
            entries = self._store.pin(kind.key, names[at : at + step])
            try:
                while entries and not self._save(kind, entries, durable=True):
                    if not await _set_before(self.next_kick, deadline):  # other blocks may fill the queue
                        raise DeadlineError("the lower tiers are too slow to take the blocks")
            except BaseException:  # the call may be cancelled
                self._store.end_save(entries, saved=False)
                raise
        synced = await chain.sync(deadline)
        return [synced and chain.in_durable_tier(kind, name) for name in hashes]

    async def close(self, deadline: float, *, flush: bool) -> None:
        """Start no more writes; with ``flush``, first write what is waiting, until the deadline."""
        if flush:
            self.kick()
            while self._num_saving and await _set_before(self._progress, deadline):
                pass
        self._closed = True

    def _wants_save(self) -> bool:
        store = self._store
        if not store.eviction.unsaved:
            return False
        if next(store.quotas.unsaved(), None) is not None:
            return True
        expected_room = store.room() + self._saving_bytes
        if self._chain.write_all or expected_room < self._need:
            return True
        if store.used_bytes <= self._marks.full * store.capacity_bytes:
            return False
        if expected_room < self._marks.spare * store.capacity_bytes:
            return True
        return not (self._saving_bytes or store.eviction.in_order)

    def _still_behind(self, entry: Entry) -> bool:
        kind = entry.pool.kind
        if entry.brief or not self._chain.takes(kind):
            return True  # no tier stores it
        if entry.share.disk_excess(kind.block_bytes):
            return True  # writing it again would evict another block of the tenant, which would be written again, ...
        return self._chain.holds(kind, entry.block_hash)

    def _save(self, kind: KvFormat, entries: Sequence[Entry], *, durable: bool = False) -> bool:
        """Queue pinned blocks to be written; ``False`` if a queue is full."""
        loop = asyncio.get_running_loop()

        def done(results: list[bool]) -> None:
            loop.call_soon_threadsafe(self._on_saved, entries, results)

        # Eviction order is tail first. On disk a chain is stored head first, so that many blocks are read at once.
        ordered = entries if durable else entries[::-1]
        views = [memoryview(entry.pool.arena.blocks[entry.slot]) for entry in ordered]
        if not self._chain.write(kind, [entry.block_hash for entry in ordered], views, done, durable=durable):
            return False
        self._num_saving += 1
        self._saving_bytes += len(entries) * kind.block_bytes
        return True

    def _on_saved(self, entries: Sequence[Entry], results: Sequence[bool]) -> None:
        self._num_saving -= 1
        self._saving_bytes -= len(entries) * entries[0].pool.block_bytes
        written = sum(results)
        self._counters.demotions += written
        self._counters.refused += len(results) - written
        if written < len(results):
            self._rest_until = time.monotonic() + RETRY_S  # give these up, and do not retry others at once
        self._store.end_save(entries)
        self._progress.set()
        self._progress = asyncio.Event()
        self.kick()


async def _set_before(event: asyncio.Event, deadline: float) -> bool:
    """Wait until an event is set; ``False``: it was not before the deadline."""
    try:
        async with asyncio.timeout(deadline - time.monotonic()):
            return await event.wait()
    except TimeoutError:
        return False
