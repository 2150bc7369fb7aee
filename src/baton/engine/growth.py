"""How many blocks sequences are going to need: how long outputs get, and when blocks come back.

A sequence that is admitted while the others' outputs still grow may leave too few blocks for them; then one that has
begun to answer has to give its own back, and pauses. So admission looks ahead (as "Past-Future Scheduler", Gong et al.,
ASPLOS 2025): with the number of tokens that each sequence is expected to generate, at no end of one of them may those
that go on need more blocks than there are.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Sized
from typing import Protocol

import numpy as np

KEPT = 256
"""Outputs that are remembered."""
LEAST = 8
"""From so many on they say something."""
QUANTILE = 0.5
"""Of the outputs longer than a sequence's own, which one it is expected to reach."""
UNKNOWN = 64
"""Output tokens expected of a request with a larger ``max_tokens`` before there is anything to go by."""


class OutputLengths:
    """How many tokens the latest outputs had."""

    def __init__(self) -> None:
        self._latest: deque[int] = deque()
        self._sorted: list[int] = []

    def add(self, length: int) -> None:
        """Note the length of an output that has ended."""
        if len(self._latest) == KEPT:
            self._sorted.remove(self._latest.popleft())
        self._latest.append(length)
        insort(self._sorted, length)

    def expected(self, done: int, limit: int) -> int:
        """Return how many tokens an output is expected to have in the end.

        Args:
            done: Tokens that it has.
            limit: Most that it may have.
        """
        known = self._sorted
        first = bisect_right(known, done)
        if len(known) >= LEAST and first < len(known):
            return min(limit, known[first + int(QUANTILE * (len(known) - 1 - first))])
        return min(limit, max(2 * done, UNKNOWN if len(known) < LEAST else 0, done + 1))


class Growing(Protocol):
    """What a forecast has to know of a sequence (:class:`baton.engine.sequence.Sequence` is one)."""

    @property
    def pinned(self) -> bool:
        """It keeps its blocks for others when it ends."""

    @property
    def num_output(self) -> int:
        """Tokens generated."""

    @property
    def max_output(self) -> int:
        """Tokens that it may generate."""

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens."""

    @property
    def block_ids(self) -> Sized:
        """Its blocks."""

    @property
    def all_blocks(self) -> Sized:
        """Its blocks of all layer groups."""


class BlockForecast:
    """The blocks that sequences will need until each of them has ended.

    Args:
        lengths: Of outputs.
        block_size: Tokens per block.
        groups: Layer groups that have blocks of their own. Blocks are counted in blocks of all layers.
    """

    def __init__(self, lengths: OutputLengths, block_size: int, groups: int = 1) -> None:
        self._lengths, self._block_size, self._groups = lengths, block_size, groups
        self._needs: list[tuple[int, int, int]] = []

    def add(self, sequence: Growing) -> None:
        """Count a sequence that has its blocks; those that keep them for others when they end neither grow nor end."""
        if not sequence.pinned:
            held = len(sequence.block_ids)
            given_back = held + -len(sequence.all_blocks) // self._groups if self._groups > 1 else 0
            to_come, tokens, _ = self._need(sequence, held)
            self._needs.append((to_come, tokens - given_back * self._block_size, held - given_back))

    def fits(self, sequence: Growing, held: int, free: int) -> bool:
        """Whether a sequence can begin beside the others without any of them having to give its blocks back.

        What there is alone always fits: that it does was checked when it came.

        Args:
            sequence: It has no blocks yet.
            held: Blocks of its prefix that are there.
            free: Other blocks that may be taken.
        """
        size = self._block_size
        if -(-sequence.num_tokens // size) - held > free:
            return False
        if not self._needs:
            return True
        needs = self._needs if sequence.pinned else [*self._needs, self._need(sequence, held)]
        if sequence.pinned:
            free -= -(-sequence.num_tokens // size) - held
        remaining, tokens, blocks = np.array(sorted(needs, reverse=True)).T
        # When the k-th from the longest on ends, k of them have grown by its remaining tokens, the others have ended.
        count = np.arange(1, len(needs) + 1)
        most = (tokens.cumsum() + count * (remaining + size - 1)) // size
        return bool((most - blocks.sum()).max() <= free)

    def _need(self, sequence: Growing, held: int) -> tuple[int, int, int]:
        """Return the output tokens to come, the tokens that are there, and the blocks held of them."""
        done = sequence.num_output
        to_come = self._lengths.expected(done, sequence.max_output) - done
        return max(1, to_come), sequence.num_tokens, held
