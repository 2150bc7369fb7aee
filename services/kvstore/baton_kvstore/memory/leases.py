"""What keeps blocks in memory, leases and pins, and what ends them: times to live."""

from __future__ import annotations

import heapq
import itertools
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from baton.errors import QueueFullError
from baton_kvstore.memory.pool import Entry, State

_SHARE = 0.5
"""Of the memory, and of a tenant's quota, that may be pinned."""

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
        """Make a lease.

        Raises:
            QueueFullError: As many leases as allowed are alive; says when the next one ends.
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
        if len(self._ends) > 2 * self._max + 64:  # leases given back early leave their ends behind
            self._ends = [(lease.expires_at, lease.lease_id) for lease in self._leases.values()]
            heapq.heapify(self._ends)
        return lease

    def remove(self, lease_id: int) -> Lease | None:
        """Forget a lease and return it."""
        return self._leases.pop(lease_id, None)

    def pop_expired(self) -> list[Lease]:
        """Forget the leases whose time is up and return them."""
        now = self._clock()
        expired: list[Lease] = []
        while self._ends and self._ends[0][0] <= now:
            _, lease_id = heapq.heappop(self._ends)
            lease = self._leases.pop(lease_id, None)
            if lease is not None:
                expired.append(lease)
        return expired


class Pins:
    """Keeps the books of pins and times to live; the store acts on them.

    Args:
        capacity_bytes: Of the memory.
        clock: Monotonic seconds.

    Attributes:
        held_bytes: That are pinned.
    """

    def __init__(self, capacity_bytes: int, clock: Callable[[], float]) -> None:
        self._limit, self._clock = int(_SHARE * capacity_bytes), clock
        self.held_bytes = 0
        self._ends: list[tuple[float, int, Entry]] = []
        self._numbers = itertools.count()
        self._sweep_at = _LEAST_SWEEP

    def hold(self, entry: Entry) -> bool:
        """Take note that a block is pinned; ``False``: it was already.

        Raises:
            QueueFullError: As much is pinned as may be, by all or by the block's tenant.
        """
        if entry.held:
            return False
        size, share = entry.pool.block_bytes, entry.share
        if self.held_bytes + size > self._limit:
            raise QueueFullError(f"{self.held_bytes} bytes are pinned, of {self._limit} that may be")
        if share is not None and share.quota and share.held_bytes + size > _SHARE * share.quota:
            raise QueueFullError(f"{share.held_bytes} bytes are pinned for this tenant; half its quota may be")
        self._count(entry, size, held=True)
        return True

    def drop(self, entry: Entry) -> None:
        """Take note that a block is pinned no more; harmless if it is not."""
        if entry.held:
            self._count(entry, -entry.pool.block_bytes, held=False)

    def _count(self, entry: Entry, size: int, *, held: bool) -> None:
        entry.held = held
        self.held_bytes += size
        if entry.share is not None:
            entry.share.held_bytes += size

    def expire_at(self, entry: Entry, ttl_s: float) -> None:
        """Take note that a block is to be forgotten after some seconds."""
        if len(self._ends) >= self._sweep_at:  # most were evicted before their time
            self._ends = [end for end in self._ends if end[2].state is not State.GONE]
            heapq.heapify(self._ends)
            self._sweep_at = 2 * len(self._ends) + _LEAST_SWEEP
        heapq.heappush(self._ends, (self._clock() + ttl_s, next(self._numbers), entry))

    def expired(self) -> list[Entry]:
        """Return the blocks whose time is up, once."""
        now, found = self._clock(), []
        while self._ends and self._ends[0][0] <= now:
            entry = heapq.heappop(self._ends)[2]
            if entry.state is not State.GONE and not entry.doomed:
                found.append(entry)
        return found
