"""Belady's MIN: who is not needed for longest goes first. It knows the future, so it is a bound and no policy."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from baton_kvstore.memory.eviction import Eviction
from baton_kvstore.memory.pool import Entry

Need = tuple[int, int]
"""When a block is needed next, and its place in its chain; a larger one goes first."""


class Clairvoyant(Eviction):
    """Evicts what is needed last; of blocks needed at the same time those at a chain's end. Logarithmic time.

    Args:
        next_need: Tells of a block when it is needed next, as of now.
    """

    def __init__(self, next_need: Callable[[Entry], Need]) -> None:
        self._next_need = next_need
        self._needs: dict[Entry, Need] = {}
        self._heap: list[tuple[int, int, int, Entry]] = []
        self._count = 0
        self.saved_bytes = 0

    def __len__(self) -> int:
        return len(self._needs)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._needs)

    def __contains__(self, entry: Entry) -> bool:
        return entry in self._needs

    @property
    def unsaved(self) -> Iterator[Entry]:
        """All of them: a replay has no tier behind."""
        return iter(self._needs)

    @property
    def num_unsaved(self) -> int:
        """All of them."""
        return len(self._needs)

    @property
    def in_order(self) -> bool:
        """Always."""
        return True

    def pin(self, entry: Entry) -> None:
        """Take an entry out."""
        self.discard(entry)

    def unpin(self, entry: Entry, *, used: bool) -> None:
        """Make an entry evictable."""
        need = self._needs[entry] = self._next_need(entry)
        self._count += 1
        heapq.heappush(self._heap, (-need[0], -need[1], self._count, entry))

    def touch(self, entry: Entry) -> None:
        """What was is of no interest."""

    def recheck(self, count: int, still: Callable[[Entry], bool]) -> None:
        """There is no tier behind."""

    def discard(self, entry: Entry) -> None:
        """Take an entry out, if it is in."""
        self._needs.pop(entry, None)

    def last(self) -> Need | None:
        """Return when the entry that would be evicted next is needed."""
        self._tidy()
        return (-self._heap[0][0], -self._heap[0][1]) if self._heap else None

    def pop(self) -> Entry | None:
        """Take out what is needed last."""
        self._tidy()
        if not self._heap:
            return None
        entry = heapq.heappop(self._heap)[3]
        del self._needs[entry]
        return entry

    def _tidy(self) -> None:
        """Drop what was taken out or unpinned anew since it was pushed."""
        heap, needs = self._heap, self._needs
        while heap and needs.get(heap[0][3]) != (-heap[0][0], -heap[0][1]):
            heapq.heappop(heap)
