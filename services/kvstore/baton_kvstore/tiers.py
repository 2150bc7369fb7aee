"""Memory first, disk behind it: what is evicted from memory was written to disk before, and comes back when asked for.

The coldest part of a full memory is always on disk already, so eviction never waits and copies nothing. Blocks stay in
their slots, pinned, while the disk's thread reads them, and while reading threads fill them; nothing here blocks the
event loop. A Put waits until there is room; a Get of blocks in memory never waits for anybody.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from baton.errors import BatonError, DeadlineError, InternalError, QueueFullError
from baton.kv.fingerprint import Fingerprint
from baton.types import BlockHash
from baton_kvstore.counts import TierCounters
from baton_kvstore.disk.format import Kind
from baton_kvstore.leases import Lease
from baton_kvstore.pool import Entry, Pool, kind_of
from baton_kvstore.reservation import Reservation
from baton_kvstore.store import BlockStore
from baton_kvstore.tier import BackTier

log = logging.getLogger(__name__)

_FULL = 0.75
"""Share of the memory above which cold blocks are written ahead."""
_SPARE = 0.25
"""Share of the memory kept free or evictable."""
_SAVE_BYTES = 16 << 20
_RECHECKED = 32
_ROUNDS = 8
_MAX_PREFETCHES = 2
_RETRY_S = 5.0
_FLUSH_S = 30.0
"""Longest time that a clean end waits for blocks that are to be written."""


@dataclass
class _Ask:
    """A Get that waits for a promotion: the lease it wants, ``None`` if nobody waits any more."""

    ttl_s: float | None


class Tiers:
    """A store in memory and, if there is one, a tier behind it. Used in one event loop.

    Args:
        store: In memory; made with ``behind`` if there is a tier.
        back: The tier; closed with this.
        write_all: Write every block, not only those that are about to be evicted.
        readers: Threads that read.
    """

    def __init__(self, store: BlockStore, back: BackTier | None, *, write_all: bool, readers: int) -> None:
        self.store, self.back = store, back
        self.counters = TierCounters()
        self._write_all = write_all
        self._readers = ThreadPoolExecutor(readers, thread_name_prefix="kvstore read") if back else None
        self._num_readers = readers
        self._need = self._num_saving = self._saving_bytes = 0
        self._rest_until = 0.0
        self._progress = asyncio.Event()
        self._promoting: dict[tuple[bytes, BlockHash], asyncio.Future[None]] = {}
        self._jobs: set[asyncio.Task[Lease | None]] = set()
        self._closed = False

    # Put

    def piece(self, fingerprint: Fingerprint, count: int) -> int:
        """Return how many blocks of a Put to take at once, so that there can be room for them."""
        if self.back is None:
            return count
        return max(1, min(count, self.store.capacity_bytes // 4 // max(1, fingerprint.block_bytes)))

    def behind(self, fingerprint: Fingerprint, hashes: Sequence[BlockHash]) -> list[bool]:
        """Return which blocks need not be put because they are on disk, though not in memory."""
        back = self.back
        if back is None:
            return [False] * len(hashes)
        kind = kind_of(fingerprint)
        return [not self.store.has(kind.key, name) and back.holds(kind, name) for name in hashes]

    async def make_room(self, num_bytes: int, deadline: float) -> None:
        """Wait until so much can be taken, or nothing more can be done for it.

        Raises:
            DeadlineError: The disk was too slow.
        """
        need = min(num_bytes, self.store.capacity_bytes)
        while self.back is not None and self.store.room() < need:
            self._need = max(self._need, need)
            self.kick()
            if not self._num_saving:
                break
            if not await self._wait_progress(deadline):
                raise DeadlineError("the disk tier is too slow to make room in memory")
        self._need = 0

    def kick(self) -> None:
        """Have the next cold blocks written, if it is time; called whenever blocks may have become evictable."""
        back = self.back
        if back is None or self._closed:
            return
        if time.monotonic() >= self._rest_until:
            self.store.recency.recheck(_RECHECKED, self._still_behind)
        while self._wants_save():
            entries = self.store.begin_save(min(_SAVE_BYTES, self.store.capacity_bytes // 8))
            kind = entries[0].pool.kind
            if not back.takes(kind):
                self.counters.refused += len(entries)
                self.store.end_save(entries)
                continue
            held = [entry for entry in entries if back.holds(kind, entry.block_hash)]
            self.store.end_save(held)
            rest = [entry for entry in entries if not back.holds(kind, entry.block_hash)]
            if rest and not self._save(kind, rest):
                self.store.end_save(rest, saved=False)
                return

    async def persist(self, fingerprint: Fingerprint, hashes: Sequence[BlockHash], deadline: float) -> list[bool]:
        """Write blocks, sync, and return which of them a restart would find.

        Raises:
            DeadlineError: It took too long.
        """
        back = self.back
        if back is None:
            return [False] * len(hashes)
        kind = kind_of(fingerprint)
        names = [name for name in hashes if not back.holds(kind, name)] if back.takes(kind) else []
        step = max(1, _SAVE_BYTES // kind.block_bytes)
        for at in range(0, len(names), step):
            entries = self.store.pin(kind.key, names[at : at + step])
            while entries and not self._save(kind, entries):
                if not await self._wait_progress(deadline):
                    self.store.end_save(entries, saved=False)
                    raise DeadlineError("the disk tier is too slow to take the blocks")
        synced = await self._ask(back.sync, deadline)
        return [synced and back.holds(kind, name) for name in hashes]

    # Get

    async def get(
        self, fingerprint: Fingerprint, hashes: Sequence[BlockHash], ttl_s: float, deadline: float
    ) -> tuple[Lease | None, bool]:
        """Lease the longest prefix that is in memory or can be brought there.

        Returns:
            The lease, and whether the chain goes on: more could be had once these blocks are released.

        Raises:
            QueueFullError: Too many leases.
        """
        kind = kind_of(fingerprint)
        in_memory = self._num_ready(kind, hashes)
        lease: Lease | None = None
        for _ in range(_ROUNDS if self.back is not None else 0):
            prefix, missing = self._plan(kind, hashes)
            if not missing or time.monotonic() >= deadline:
                break
            if await self._wait_promotion(kind, missing, deadline):
                continue
            ask = _Ask(ttl_s)
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    lease = await asyncio.shield(self._promote(fingerprint, kind, prefix, ask, deadline))
            except (TimeoutError, DeadlineError, QueueFullError):
                break
            finally:
                ask.ttl_s = None
            if lease is not None:
                break
        if lease is None:
            lease = self.store.lease(fingerprint, hashes, ttl_s)
        found = 0 if lease is None else len(lease.entries)
        self._count(in_memory, found, len(hashes))
        return lease, 0 < found < len(hashes) and self._holds(kind, hashes[found])

    def contains(self, fingerprint: Fingerprint, hashes: Sequence[BlockHash]) -> int:
        """Return how many leading blocks are in either tier, and begin to bring them to memory."""
        kind = kind_of(fingerprint)
        found = 0
        while found < len(hashes) and self._holds(kind, hashes[found]):
            found += 1
        prefix, missing = self._plan(kind, hashes[:found])
        room = self.store.room() >= len(missing) * kind.block_bytes
        if missing and room and len(self._jobs) < _MAX_PREFETCHES and not self._others(kind, missing):
            self._promote(fingerprint, kind, prefix, _Ask(None), time.monotonic() + _RETRY_S)
        return found

    async def delete(self, fingerprint: Fingerprint, hashes: Sequence[BlockHash] | None) -> int:
        """Forget blocks (``None``: all of the fingerprint) in both tiers, for good, and return how many.

        Raises:
            InternalError: A restart may find some of them again.
        """
        kind = kind_of(fingerprint)
        there = self.store.hashes(kind.key)
        gone = there if hashes is None else there & set(hashes)
        self.store.delete(fingerprint, hashes)
        back = self.back
        if back is not None:
            found: list[BlockHash] = []

            def begin(done: Callable[[bool], None]) -> None:
                found.extend(back.delete(kind, hashes, done))

            if not await self._ask(begin, None):
                raise InternalError("the deletion did not reach the disk")
            gone = gone | set(found)
        return len(gone)

    async def close(self) -> None:
        """Wait for what runs and close the tier behind; the store in memory is closed after this."""
        if self._write_all:
            deadline = time.monotonic() + _FLUSH_S
            self.kick()
            while self._num_saving and await self._wait_progress(deadline):
                pass
        self._closed = True
        if self._jobs:
            await asyncio.wait(self._jobs)
        if self._readers is not None:
            await asyncio.to_thread(self._readers.shutdown)
        if self.back is not None:
            await asyncio.to_thread(self.back.close)

    # Inside

    def _wants_save(self) -> bool:
        store = self.store
        if not store.recency.num_unsaved:
            return False
        coming = store.room() + self._saving_bytes
        if self._write_all or coming < self._need:
            return True
        if store.used_bytes <= _FULL * store.capacity_bytes:
            return False
        return coming < _SPARE * store.capacity_bytes or not (self._saving_bytes or store.recency.in_order)

    def _still_behind(self, entry: Entry) -> bool:
        if self.back is None:
            return False
        kind = entry.pool.kind
        return not self.back.takes(kind) or self.back.holds(kind, entry.block_hash)

    def _save(self, kind: Kind, entries: Sequence[Entry]) -> bool:
        """Queue pinned blocks; ``False``: the queue is full."""
        loop = asyncio.get_running_loop()

        def done(results: list[bool]) -> None:
            loop.call_soon_threadsafe(self._saved, entries, results)

        views = [memoryview(entry.pool.arena.blocks[entry.slot]) for entry in entries]
        if self.back is None or not self.back.write(kind, [entry.block_hash for entry in entries], views, done):
            return False
        self._num_saving += 1
        self._saving_bytes += len(entries) * kind.block_bytes
        return True

    def _saved(self, entries: Sequence[Entry], results: Sequence[bool]) -> None:
        self._num_saving -= 1
        self._saving_bytes -= len(entries) * entries[0].pool.block_bytes
        written = sum(results)
        self.counters.demotions += written
        self.counters.refused += len(results) - written
        if written < len(results):
            self._rest_until = time.monotonic() + _RETRY_S  # those are given up; try no others over and over
        self.store.end_save(entries)
        progress, self._progress = self._progress, asyncio.Event()
        progress.set()
        self.kick()

    async def _wait_progress(self, deadline: float) -> bool:
        """Wait until the disk's thread has done something; ``False``: not in time."""
        progress = self._progress
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                await progress.wait()
        except TimeoutError:
            return False
        return True

    async def _ask(self, begin: Callable[[Callable[[bool], None]], None], deadline: float | None) -> bool:
        """Await an answer that comes from the disk's thread."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[bool] = loop.create_future()

        def settle(right: bool) -> None:
            if not answer.done():
                answer.set_result(right)

        def done(right: bool) -> None:
            loop.call_soon_threadsafe(settle, right)

        begin(done)
        try:
            async with asyncio.timeout(None if deadline is None else deadline - time.monotonic()):
                return await answer
        except TimeoutError:
            raise DeadlineError("the disk tier is too slow") from None

    def _holds(self, kind: Kind, block_hash: BlockHash) -> bool:
        """Whether a block is in either tier."""
        return self.store.has(kind.key, block_hash) or (self.back is not None and self.back.holds(kind, block_hash))

    def _num_ready(self, kind: Kind, hashes: Sequence[BlockHash]) -> int:
        return next((i for i, name in enumerate(hashes) if not self.store.has(kind.key, name)), len(hashes))

    def _plan(self, kind: Kind, hashes: Sequence[BlockHash]) -> tuple[Sequence[BlockHash], list[BlockHash]]:
        """Return the prefix that can be had at once, and what of it is on disk only: at most half the memory then."""
        if self.back is None:
            return [], []
        limit = max(1, self.store.capacity_bytes // 2 // kind.block_bytes)
        missing: list[BlockHash] = []
        for at, name in enumerate(hashes):
            if missing and at >= limit:
                return hashes[:at], missing
            if self.store.has(kind.key, name):
                continue
            if at >= limit or not self.back.holds(kind, name):
                return hashes[:at], missing
            missing.append(name)
        return hashes, missing

    def _others(self, kind: Kind, names: Sequence[BlockHash]) -> set[asyncio.Future[None]]:
        """Promotions under way of some of these blocks."""
        return {self._promoting[kind.key, name] for name in names if (kind.key, name) in self._promoting}

    async def _wait_promotion(self, kind: Kind, names: Sequence[BlockHash], deadline: float) -> bool:
        """Wait for others that promote some of these blocks; ``False`` if nobody does."""
        others = self._others(kind, names)
        if others:
            await asyncio.wait(others, timeout=max(0.0, deadline - time.monotonic()))
        return bool(others)

    def _promote(
        self, fingerprint: Fingerprint, kind: Kind, prefix: Sequence[BlockHash], ask: _Ask, deadline: float
    ) -> asyncio.Task[Lease | None]:
        """Start to bring a prefix to memory; goes on when nobody waits any more."""
        names = [(kind.key, name) for name in prefix if not self.store.has(kind.key, name)]
        done = asyncio.get_running_loop().create_future()
        self._promoting.update(dict.fromkeys(names, done))
        task = asyncio.create_task(self._run_promotion(fingerprint, prefix, ask, deadline, len(names)), name="promote")
        self._jobs.add(task)

        def ended(task: asyncio.Task[Lease | None]) -> None:
            self._jobs.discard(task)
            for name in names:
                self._promoting.pop(name, None)
            done.set_result(None)
            error = None if task.cancelled() else task.exception()
            if error is not None and not isinstance(error, BatonError):
                log.error("bringing blocks from disk failed", exc_info=error)

        task.add_done_callback(ended)
        return task

    async def _run_promotion(
        self, fingerprint: Fingerprint, prefix: Sequence[BlockHash], ask: _Ask, deadline: float, absent: int
    ) -> Lease | None:
        await self.make_room(absent * fingerprint.block_bytes, deadline)
        reservation = self.store.reserve(fingerprint, prefix)
        arrived = [False] * len(reservation.missing)
        try:
            arrived = await self._read(reservation.pool, reservation, prefix)
            self.counters.promotions += sum(arrived)
            self.store.settle(reservation, arrived, promoted=True)
            return None if ask.ttl_s is None or self._closed else self.store.lease(fingerprint, prefix, ask.ttl_s)
        finally:
            self.store.commit(reservation, arrived, promoted=True)
            self.kick()

    async def _read(self, pool: Pool, reservation: Reservation, prefix: Sequence[BlockHash]) -> list[bool]:
        if self.back is None or self._readers is None:
            raise InternalError("there is no tier to read from")
        if not reservation.missing:
            return []
        kind, loop = pool.kind, asyncio.get_running_loop()
        names = [prefix[i] for i in reservation.missing]
        views = [memoryview(pool.arena.blocks[slot]) for slot in reservation.slots]
        step = max(1, -(-len(names) // self._num_readers))
        parts = [slice(at, at + step) for at in range(0, len(names), step)]
        reads = [loop.run_in_executor(self._readers, self.back.read, kind, names[p], views[p]) for p in parts]
        await asyncio.wait(reads)  # all of them, whatever happens: they write into the slots
        return [ok for read in reads for ok in read.result()]

    def _count(self, in_memory: int, found: int, asked: int) -> None:
        counters = self.counters
        counters.memory_hits += min(in_memory, found)
        counters.memory_misses += asked - min(in_memory, found)
        if self.back is not None:
            counters.disk_hits += max(0, found - in_memory)
            counters.disk_misses += asked - max(in_memory, found)
