"""From the tiers behind to memory: prefixes that are asked for, read by threads into slots that are reserved.

Each block is brought once, however many ask for it, and goes on being brought when no caller waits any more.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

from baton.errors import BatonError, DeadlineError, QueueFullError
from baton.kv_cache.fingerprint import Fingerprint
from baton.types import BlockHash, Tenant
from baton_kvstore.memory.leases import Lease
from baton_kvstore.memory.pool import Pool
from baton_kvstore.memory.quotas import NO_TENANT
from baton_kvstore.memory.store import BlockStore, Reservation
from baton_kvstore.tiers.chain import Chain
from baton_kvstore.tiers.saver import RETRY_S, Saver
from baton_kvstore.types import KvFormat, TierCounters, kv_format_of

log = logging.getLogger(__name__)

_MAX_PREFETCHES = 2
_PIECE_BYTES = 16 << 20
"""Of blocks that are brought together."""
_MAX_PIECES = 8
"""Brought at once beyond those that callers wait for."""


@dataclass
class Ask:
    """A Get that waits for a promotion: the lease it wants, ``None`` if no caller waits any more; and for whom."""

    ttl_s: float | None
    tenant: Tenant | None = None


class Promoter:
    """Brings blocks of the chain to a store in memory. Used in one event loop."""

    def __init__(self, store: BlockStore, chain: Chain, saver: Saver, counters: TierCounters) -> None:
        self._store, self._chain, self._saver, self._counters = store, chain, saver, counters
        self._promoting: dict[tuple[bytes, BlockHash], asyncio.Future[None]] = {}
        self._jobs: set[asyncio.Task[Lease | None]] = set()
        self._lines: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._closed = False

    def crowded(self, tenant: Tenant | None) -> bool:
        """Whether others wait already for the room that a tenant would have to wait for."""
        return self._line(tenant).locked()

    def _line(self, tenant: Tenant | None) -> asyncio.Lock:
        """Return where to stand: tenants with a quota wait for room in it, by themselves; all others for the memory."""
        share = self._store.quotas.of(tenant)
        line = asyncio.Lock()
        return self._lines.setdefault(share.name if share.quota else NO_TENANT, line)

    def plan(self, kind: KvFormat, hashes: Sequence[BlockHash]) -> tuple[Sequence[BlockHash], list[BlockHash]]:
        """Return the prefix that can be had at once, and what of it is not in memory: at most half the memory then."""
        limit = max(1, self._store.capacity_bytes // 2 // kind.block_bytes)
        missing: list[BlockHash] = []
        for at, name in enumerate(hashes):
            if missing and at >= limit:
                return hashes[:at], missing
            if self._store.has(kind.key, name):
                continue
            if at >= limit or not self._chain.holds(kind, name):
                return hashes[:at], missing
            missing.append(name)
        return hashes, missing

    def brings(self, kind: KvFormat, name: BlockHash) -> bool:
        """Whether a block is on its way to memory."""
        return (kind.key, name) in self._promoting

    async def wait_for(self, kind: KvFormat, name: BlockHash, deadline: float) -> None:
        """Wait until a block that is on its way is there, or does not come."""
        await asyncio.wait([self._promoting[kind.key, name]], timeout=max(0.0, deadline - time.monotonic()))

    def prefetch(self, fingerprint: Fingerprint, hashes: Sequence[BlockHash], tenant: Tenant | None = None) -> None:
        """Begin to bring a prefix that may be asked for soon, if that takes no room from others."""
        kind = kv_format_of(fingerprint)
        prefix, missing = self.plan(kind, hashes)
        room = self._store.room() >= len(missing) * kind.block_bytes
        if missing and room and len(self._jobs) < _MAX_PREFETCHES and not any(self.brings(kind, x) for x in missing):
            self.begin(fingerprint, prefix, Ask(None, tenant), time.monotonic() + RETRY_S)

    async def bring(
        self, fingerprint: Fingerprint, prefix: Sequence[BlockHash], wanted: Ask, deadline: float
    ) -> Lease | None:
        """Bring a prefix to memory and lease (the first piece of) it; ``None``: it did not come.

        Raises:
            DeadlineError: Not in time.
            QueueFullError: Too many leases, or no room.
        """
        own = Ask(wanted.ttl_s, wanted.tenant)
        job = self.begin_pieces(fingerprint, prefix, own, deadline)
        try:
            # Not asyncio.timeout: it may go off in the loop's turn in which the lease comes, which would then never be
            # released.
            await asyncio.wait([job], timeout=max(0.0, deadline - time.monotonic()))
        except asyncio.CancelledError:
            if job.done() and not job.cancelled() and not job.exception() and (lease := job.result()) is not None:
                self._store.release(lease.lease_id)
                self._saver.kick()
            raise
        finally:
            own.ttl_s = None
        if not job.done():
            raise DeadlineError("the tiers behind are too slow")
        return job.result()

    def begin_pieces(
        self, fingerprint: Fingerprint, prefix: Sequence[BlockHash], ask: Ask, deadline: float
    ) -> asyncio.Task[Lease | None]:
        """Start to bring a prefix piece by piece: the caller has the first one while the others are read.

        Returns:
            The first piece's promotion. What of the prefix is being brought already is left out.
        """
        kind = kv_format_of(fingerprint)
        missing = [at for at, name in enumerate(prefix) if not self._store.has(kind.key, name)]
        stop = next((at for at in missing if self.brings(kind, prefix[at])), len(prefix))
        step = max(1, _PIECE_BYTES // kind.block_bytes)
        starts = [0, *(at for at in missing[step::step] if at < stop)]
        pieces = [prefix[start:end] for start, end in itertools.pairwise([*starts, stop])]
        first = self.begin(fingerprint, pieces[0], ask, deadline)
        for piece in pieces[1:]:
            if len(self._jobs) >= _MAX_PIECES:
                break  # many ask: what has no lease yet would be gone again before they come for it
            self.begin(fingerprint, piece, Ask(None, ask.tenant), deadline)
        return first

    def begin(
        self, fingerprint: Fingerprint, prefix: Sequence[BlockHash], ask: Ask, deadline: float
    ) -> asyncio.Task[Lease | None]:
        """Start to bring a prefix to memory; goes on when no caller waits any more."""
        kind = kv_format_of(fingerprint)
        names = [(kind.key, name) for name in prefix if not self._store.has(kind.key, name)]
        done = asyncio.get_running_loop().create_future()
        self._promoting.update(dict.fromkeys(names, done))
        task = asyncio.create_task(self._run(fingerprint, prefix, ask, deadline, len(names)), name="promote")
        self._jobs.add(task)

        def ended(task: asyncio.Task[Lease | None]) -> None:
            self._jobs.discard(task)
            for name in names:
                self._promoting.pop(name, None)
            done.set_result(None)
            error = None if task.cancelled() else task.exception()
            if error is not None and not isinstance(error, BatonError):
                log.error("bringing blocks to memory failed", exc_info=error)

        task.add_done_callback(ended)
        return task

    async def close(self) -> None:
        """Wait for what runs; no more leases are given."""
        self._closed = True
        self._saver.next_kick.set()
        if self._jobs:
            await asyncio.wait(self._jobs)

    async def _run(
        self, fingerprint: Fingerprint, prefix: Sequence[BlockHash], ask: Ask, deadline: float, absent: int
    ) -> Lease | None:
        reservation = await self._reserve(fingerprint, prefix, ask, deadline, absent)
        arrived = [False] * len(reservation.missing)
        try:
            arrived = await self._read(reservation.pool, reservation, prefix)
            self._counters.promotions += sum(arrived)
            self._store.settle(reservation, arrived, promoted=True)
            return None if ask.ttl_s is None or self._closed else self._store.lease(fingerprint, prefix, ask.ttl_s)
        finally:
            self._store.commit(reservation, arrived, promoted=True)
            self._saver.kick()

    async def _reserve(
        self, fingerprint: Fingerprint, prefix: Sequence[BlockHash], ask: Ask, deadline: float, absent: int
    ) -> Reservation:
        """Take slots. While others use everything, what callers wait for stands in line; a part of it is enough."""
        line = self._line(ask.tenant)
        if ask.ttl_s is None and line.locked():
            raise QueueFullError("others wait for room", retry_after_s=RETRY_S)
        try:
            # First come, first served, and only one of them tries at each kick.
            async with asyncio.timeout(deadline - time.monotonic()), line:
                while True:
                    await self._saver.make_room(absent * fingerprint.block_bytes, deadline)
                    kicked = self._saver.next_kick
                    try:
                        reservation = self._store.reserve(fingerprint, prefix, ask.tenant)
                    except QueueFullError:
                        if ask.ttl_s is None or self._closed:
                            raise
                    else:
                        if reservation.entries[0] is not None or ask.ttl_s is None or self._closed:
                            return reservation
                        self._store.commit(reservation, [False] * len(reservation.missing))
                    await kicked.wait()
        except TimeoutError:
            raise DeadlineError("every block of the store was in use") from None

    async def _read(self, pool: Pool, reservation: Reservation, prefix: Sequence[BlockHash]) -> list[bool]:
        if not reservation.missing:
            return []
        names = [prefix[i] for i in reservation.missing]
        views = [memoryview(pool.arena.blocks[slot]) for slot in reservation.slots]
        return await self._chain.read(pool.kind, names, views)
