"""Leases: promises that blocks stay where they are for a while."""

from __future__ import annotations

import heapq
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from baton.errors import QueueFullError
from baton_kvstore.memory.pool import Entry


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
