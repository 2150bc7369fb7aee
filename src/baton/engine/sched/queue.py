"""The sequences that wait for admission, in order."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from baton.engine.sequence import Sequence, SortKey


class WaitingQueue:
    """A priority queue by sort key (priority, arrival, index).

    A preempted sequence keeps its key, so it comes back before everything that arrived after it. Removal from the
    middle is lazy: the heap keeps a key until it comes up.
    """

    def __init__(self) -> None:
        self._heap: list[SortKey] = []
        self._live: dict[SortKey, Sequence] = {}

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Sequence]:
        # A copy, made in one bytecode: statistics are read from other threads.
        return iter(tuple(self._live.values()))

    def push(self, sequence: Sequence) -> None:
        """Add a sequence."""
        self._live[sequence.key] = sequence
        heapq.heappush(self._heap, sequence.key)

    def peek(self) -> Sequence | None:
        """Return the first sequence, or ``None``."""
        while self._heap:
            found = self._live.get(self._heap[0])
            if found is not None:
                return found
            heapq.heappop(self._heap)
        return None

    def pop(self) -> Sequence:
        """Remove and return the first sequence."""
        found = self.peek()
        if found is None:
            raise IndexError("the queue is empty")
        del self._live[heapq.heappop(self._heap)]
        return found

    def discard(self, sequence: Sequence) -> None:
        """Remove a sequence, if it is there."""
        self._live.pop(sequence.key, None)
