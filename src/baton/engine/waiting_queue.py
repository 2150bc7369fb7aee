"""The queue of sequences that wait for admission."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from baton.engine.sequence import Sequence, SortKey


class WaitingQueue:
    """A priority queue by sort key (priority, arrival, index).

    A preempted sequence keeps its key, so it comes back before everything that arrived after it.
    """

    def __init__(self) -> None:
        self._keys: list[SortKey] = []
        self._live: dict[SortKey, Sequence] = {}

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.key in self._live

    def __iter__(self) -> Iterator[Sequence]:
        # A copy, made in one bytecode: statistics are read from other threads.
        return iter(tuple(self._live.values()))

    def in_order(self) -> Iterator[Sequence]:
        """Walk over the sequences that are there now, first ones first; what is removed meanwhile is left out."""
        for key in self._keys.copy():
            if (sequence := self._live.get(key)) is not None:
                yield sequence

    def push(self, sequence: Sequence) -> None:
        """Add a sequence."""
        self._live[sequence.key] = sequence
        insort(self._keys, sequence.key)

    def discard(self, sequence: Sequence) -> None:
        """Remove a sequence, if it is there."""
        if self._live.pop(sequence.key, None) is not None:
            del self._keys[bisect_left(self._keys, sequence.key)]
