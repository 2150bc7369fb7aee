"""Pinned blocks, and blocks with a time to live."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

from baton.errors import QueueFullError
from baton_kvstore.memory.pool import Entry, State

_SHARE = 0.5
"""Of the memory, and of a tenant's quota, that may be pinned."""

_LEAST_SWEEP = 1024


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
