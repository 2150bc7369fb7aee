"""Promotion of requested prefixes from lower tiers to memory: threads read blocks into reserved slots.

Each block is promoted once, however many requests wait for it; the promotion continues when no caller waits any more.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from weakref import WeakValueDictionary

from baton.errors import BatonError, DeadlineError, QueueFullError
from baton.kv_cache.fingerprint import Fingerprint
from baton.types import BlockHash, Tenant
from baton_kvstore.memory.leases import Lease
from baton_kvstore.memory.pool import NO_TENANT
from baton_kvstore.memory.store import BlockStore, Reservation
from baton_kvstore.tiers.chain import Chain
from baton_kvstore.tiers.saver import RETRY_S, Saver
from baton_kvstore.types import KvFormat, TierCounters, kv_format_of

log = logging.getLogger(__name__)

_MAX_PREFETCHES = 2
_PIECE_BYTES = 16 << 20
"""Size of the blocks that are promoted together, in bytes."""
_MAX_PIECES = 8
"""Maximum number of concurrent promotions beyond those that callers wait for."""


@dataclass
class LeaseRequest:
    """The lease that a Get wants.

    Attributes:
        fingerprint: KV format of the blocks.
        deadline: ``time.monotonic()`` seconds.
        ttl_s: Duration of the lease, in seconds; ``None``: no caller waits, so no lease is granted.
        tenant: Tenant of the request.
    """

    fingerprint: Fingerprint
    deadline: float
    ttl_s: float | None = None
    tenant: Tenant | None = None

    @property
    def kind(self) -> KvFormat:
        """KV format of the blocks, as tiers know it."""
        return kv_format_of(self.fingerprint)


class Promoter:
    """Promotes blocks from the lower tiers to the store in memory. Used in one event loop."""

    def __init__(self, store: BlockStore, chain: Chain, saver: Saver, counters: TierCounters) -> None:
        self._store = store
        self._chain = chain
        self._saver = saver
        self._counters = counters
        self._promoting: dict[tuple[bytes, BlockHash], asyncio.Future[None]] = {}
        self._jobs: set[asyncio.Task[Lease | None]] = set()
        self._queues: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._closed = False

    def is_queue_busy(self, tenant: Tenant | None) -> bool:
        """Whether requests already wait for the room that a tenant needs."""
        return self._queue_for(tenant).locked()

    def _queue_for(self, tenant: Tenant | None) -> asyncio.Lock:
        """Return the lock that requests wait on for room: one per tenant with a quota, and one for all others."""
        share = self._store.quotas.share_of(tenant)
        queue = asyncio.Lock()
        return self._queues.setdefault(share.name if share.quota_bytes else NO_TENANT, queue)

    def plan(self, kind: KvFormat, hashes: Sequence[BlockHash]) -> tuple[Sequence[BlockHash], list[BlockHash]]:
        """Return the prefix that can be leased at once, and its blocks that are missing in memory.

        A prefix with missing blocks is at most half as large as the memory.
        """
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

    def is_promoting(self, kind: KvFormat, name: BlockHash) -> bool:
        """Whether a block is being promoted."""
        return (kind.key, name) in self._promoting

    async def wait_for(self, kind: KvFormat, name: BlockHash, deadline: float) -> None:
        """Wait until the running promotion of a block ends."""
        await asyncio.wait([self._promoting[kind.key, name]], timeout=max(0.0, deadline - time.monotonic()))

    def prefetch(self, fingerprint: Fingerprint, hashes: Sequence[BlockHash], tenant: Tenant | None = None) -> None:
        """Start to promote a prefix that may be requested soon, if there is free room."""
        kind = kv_format_of(fingerprint)
        prefix, missing = self.plan(kind, hashes)
        room = self._store.room() >= len(missing) * kind.block_bytes
        free = len(self._jobs) < _MAX_PREFETCHES and not any(self.is_promoting(kind, name) for name in missing)
        if missing and room and free:
            self.start_promotion(prefix, LeaseRequest(fingerprint, time.monotonic() + RETRY_S, tenant=tenant))

    async def promote(self, prefix: Sequence[BlockHash], wanted: LeaseRequest) -> Lease | None:
        """Promote a prefix and lease (the first piece of) it; ``None`` if its first block could not be read.

        Raises:
            DeadlineError: The deadline passed first.
            QueueFullError: Too many leases, or no room.
        """
        request = replace(wanted)
        job = self.start_promotions(prefix, request)
        try:
            # Not asyncio.timeout: it may expire in the same loop iteration in which the lease is granted, which would
            # then never be released.
            await asyncio.wait([job], timeout=max(0.0, wanted.deadline - time.monotonic()))
        except asyncio.CancelledError:
            if job.done() and not job.cancelled() and not job.exception() and (lease := job.result()) is not None:
                self._store.release(lease.lease_id)
                self._saver.kick()
            raise
        finally:
            request.ttl_s = None
        if not job.done():
            raise DeadlineError("the lower tiers are too slow")
        return job.result()

    def start_promotions(self, prefix: Sequence[BlockHash], wanted: LeaseRequest) -> asyncio.Task[Lease | None]:
        """Start to promote a prefix in pieces: the caller can use the first one while the others are read.

        Returns:
            The first piece's promotion. Blocks of the prefix that are already being promoted are left out.
        """
        kind = wanted.kind
        missing = [at for at, name in enumerate(prefix) if not self._store.has(kind.key, name)]
        stop = next((at for at in missing if self.is_promoting(kind, prefix[at])), len(prefix))
        step = max(1, _PIECE_BYTES // kind.block_bytes)
        starts = [0, *(at for at in missing[step::step] if at < stop)]
        pieces = [prefix[start:end] for start, end in itertools.pairwise([*starts, stop])]
        first = self.start_promotion(pieces[0], wanted)
        for piece in pieces[1:]:
            if len(self._jobs) >= _MAX_PIECES:
                break  # under load, blocks without a lease would be evicted again before they are used
            self.start_promotion(piece, replace(wanted, ttl_s=None))
        return first

    def start_promotion(self, prefix: Sequence[BlockHash], wanted: LeaseRequest) -> asyncio.Task[Lease | None]:
        """Start to promote a prefix; continues when no caller waits any more."""
        key = wanted.kind.key
        names = [(key, name) for name in prefix if not self._store.has(key, name)]
        done = asyncio.get_running_loop().create_future()
        self._promoting.update(dict.fromkeys(names, done))
        task = asyncio.create_task(self._run(prefix, wanted, len(names)), name="promote")
        self._jobs.add(task)

        def finish(task: asyncio.Task[Lease | None]) -> None:
            self._jobs.discard(task)
            for name in names:
                self._promoting.pop(name, None)
            done.set_result(None)
            error = None if task.cancelled() else task.exception()
            if error is not None and not isinstance(error, BatonError):
                log.error("promoting blocks to memory failed", exc_info=error)

        task.add_done_callback(finish)
        return task

    async def close(self) -> None:
        """Wait for running promotions; no more leases are granted."""
        self._closed = True
        self._saver.next_kick.set()
        if self._jobs:
            await asyncio.wait(self._jobs)

    async def _run(self, prefix: Sequence[BlockHash], wanted: LeaseRequest, num_missing: int) -> Lease | None:
        reservation = await self._reserve(prefix, wanted, num_missing)
        arrived = [False] * len(reservation.missing)
        try:
            if reservation.missing:
                names = [prefix[i] for i in reservation.missing]
                views = [memoryview(reservation.pool.arena.blocks[slot]) for slot in reservation.slots]
                arrived = await self._chain.read(wanted.kind, names, views)
            self._counters.promotions += sum(arrived)
            self._store.publish(reservation, arrived, promoted=True)
            if wanted.ttl_s is None or self._closed:
                return None
            return self._store.lease(wanted.fingerprint, prefix, wanted.ttl_s)
        finally:
            self._store.commit(reservation, arrived, promoted=True)
            self._saver.kick()

    async def _reserve(self, prefix: Sequence[BlockHash], wanted: LeaseRequest, num_missing: int) -> Reservation:
        """Reserve slots for a part of the prefix at least; only requests that a caller waits for queue for room."""
        queue = self._queue_for(wanted.tenant)
        if wanted.ttl_s is None and queue.locked():
            raise QueueFullError("others wait for room", retry_after_s=RETRY_S)
        try:
            # First come, first served; only the first of the queue tries at each kick.
            async with asyncio.timeout(wanted.deadline - time.monotonic()), queue:
                while True:
                    await self._saver.make_room(num_missing * wanted.kind.block_bytes, wanted.deadline)
                    kicked = self._saver.next_kick
                    try:
                        reservation = self._store.reserve(wanted.fingerprint, prefix, wanted.tenant)
                    except QueueFullError:
                        if wanted.ttl_s is None or self._closed:
                            raise
                    else:
                        if reservation.entries[0] is not None or wanted.ttl_s is None or self._closed:
                            return reservation
                        self._store.commit(reservation, [False] * len(reservation.missing))
                    await kicked.wait()
        except TimeoutError:
            raise DeadlineError("every block of the store was in use") from None
