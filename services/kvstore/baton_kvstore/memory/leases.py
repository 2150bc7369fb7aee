"""Leases, client pins and times to live: what keeps blocks in memory, and for how long."""

from __future__ import annotations

import heapq
import itertools
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from baton.errors import QueueFullError
from baton_kvstore.memory.pool import Entry, State

_SHARE = 0.5
"""Share of the memory, and of each tenant's quota, that clients may pin."""

_LEAST_SWEEP = 1024


@dataclass(frozen=True, slots=True, eq=False)
class Lease:
    """Blocks that are neither evicted nor reused before ``expires_at`` (monotonic seconds)."""

    lease_id: int
    entries: tuple[Entry, ...]
    expires_at: float


class LeaseTable:
    """Live leases by id, and the order in which they end.

    Ids are random, so that a client of an earlier process cannot release another client's lease by chance.
    """

    def __init__(self, max_leases: int, clock: Callable[[], float]) -> None:
        self._max = max_leases
        self._clock = clock
        self._leases: dict[int, Lease] = {}
        self._ends: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._leases)

    def grant(self, entries: tuple[Entry, ...], ttl_s: float) -> Lease:
        """Create a lease.

        Raises:
            QueueFullError: ``max_leases`` leases are alive; ``retry_after_s`` is the time until the next one ends.
        """
        now = self._clock()
        if len(self._leases) >= self._max:
            wait = max(0.001, min(lease.expires_at for lease in self._leases.values()) - now)
            raise QueueFullError(f"{len(self._leases)} leases are alive, which is the limit", retry_after_s=wait)
        lease_id = 0
        while lease_id == 0 or lease_id in self._leases:
            lease_id = secrets.randbits(63)
        lease = self._leases[lease_id] = Lease(lease_id, entries, now + ttl_s)
        heapq.heappush(self._ends, (lease.expires_at, lease_id))
        if len(self._ends) > 2 * self._max + 64:  # leases released early leave their ends in the heap
            self._ends = [(lease.expires_at, lease.lease_id) for lease in self._leases.values()]
            heapq.heapify(self._ends)
        return lease

    def remove(self, lease_id: int) -> Lease | None:
        """Remove and return a lease, or return ``None`` if there is none with this id."""
        return self._leases.pop(lease_id, None)

    def pop_expired(self) -> list[Lease]:
        """Remove and return the leases that have expired."""
        now = self._clock()
        expired: list[Lease] = []
        while self._ends and self._ends[0][0] <= now:
            _, lease_id = heapq.heappop(self._ends)
            lease = self._leases.pop(lease_id, None)
            if lease is not None:
                expired.append(lease)
        return expired


class ClientPins:
    """Accounts for blocks pinned by clients (``Pin``) and for times to live; the store acts on them.

    Args:
        capacity_bytes: Memory of the store, in bytes.
        clock: Returns monotonic seconds.

    Attributes:
        pinned_bytes: Total size of the blocks that clients have pinned.
    """

    def __init__(self, capacity_bytes: int, clock: Callable[[], float]) -> None:
        self._limit = int(_SHARE * capacity_bytes)
        self._clock = clock
        self.pinned_bytes = 0
        self._ends: list[tuple[float, int, Entry]] = []
        self._numbers = itertools.count()
        self._sweep_at = _LEAST_SWEEP

    def add(self, entry: Entry) -> bool:
        """Count a block as pinned; ``False`` if it already was.

        Raises:
            QueueFullError: The limit of pinned bytes is reached, for the store or for the block's tenant.
        """
        if entry.client_pinned:
            return False
        size = entry.pool.block_bytes
        share = entry.share
        if self.pinned_bytes + size > self._limit:
            raise QueueFullError(f"{self.pinned_bytes} bytes are pinned, of {self._limit} that may be")
        if share.quota_bytes and share.pinned_bytes + size > _SHARE * share.quota_bytes:
            raise QueueFullError(f"{share.pinned_bytes} bytes are pinned for this tenant; half its quota may be")
        self._count(entry, size, pinned=True)
        return True

    def remove(self, entry: Entry) -> None:
        """Count a block as not pinned; no effect if it is not."""
        if entry.client_pinned:
            self._count(entry, -entry.pool.block_bytes, pinned=False)

    def _count(self, entry: Entry, size: int, *, pinned: bool) -> None:
        entry.client_pinned = pinned
        self.pinned_bytes += size
        entry.share.pinned_bytes += size

    def expire_at(self, entry: Entry, ttl_s: float) -> None:
        """Give a block a time to live in seconds."""
        if len(self._ends) >= self._sweep_at:  # most were evicted before their time
            self._ends = [end for end in self._ends if end[2].state is not State.GONE]
            heapq.heapify(self._ends)
            self._sweep_at = 2 * len(self._ends) + _LEAST_SWEEP
        heapq.heappush(self._ends, (self._clock() + ttl_s, next(self._numbers), entry))

    def expired(self) -> list[Entry]:
        """Return the blocks whose time to live has ended since the last call."""
        now = self._clock()
        expired: list[Entry] = []
        while self._ends and self._ends[0][0] <= now:
            entry = heapq.heappop(self._ends)[2]
            if entry.state is not State.GONE and not entry.doomed:
                expired.append(entry)
        return expired
