"""The blocks of layer groups with sliding windows: one table per sequence and group, whose beginning is given back.

Group 0 keeps its blocks in the sequence itself, as an engine without groups does; they decide what is in the prefix
cache. A prefix counts as found only if the other groups still have what the tokens after it will see.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from baton.kv_cache.block_pool import BlockPool
from baton.kv_cache.layout import LayerGroup
from baton.types import BlockHash, BlockId


class WindowTable:
    """One sequence's blocks of one group.

    Attributes:
        group: Number of the group.
        window: Tokens that a token sees, itself included; 0: all before it.
        first: Place of the first block that is there, counted in blocks.
        block_ids: The blocks from that place on.
        table: int32, the blocks by their place, and room for more; before ``first`` the null block.
    """

    __slots__ = ("_null", "block_ids", "first", "group", "table", "window")

    def __init__(self, group: int, window: int, null: int) -> None:
        self.group, self.window, self._null = group, window, null
        self.first = 0
        self.block_ids: list[BlockId] = []
        self.table: npt.NDArray[np.int32] = np.full(16, null, np.int32)

    def begin(self, first: int, block_ids: Sequence[BlockId]) -> None:
        """Hold these blocks alone, from a place on."""
        self.first, self.block_ids = first, []
        self.table[:] = self._null
        self.append(block_ids)

    def append(self, block_ids: Sequence[BlockId]) -> None:
        """Add blocks at the end."""
        have, want = self.first + len(self.block_ids), self.first + len(self.block_ids) + len(block_ids)
        if want > len(self.table):
            table = np.full(max(want, 2 * len(self.table)), self._null, np.int32)
            table[: len(self.table)] = self.table
            self.table = table
        self.table[have:want] = block_ids
        self.block_ids.extend(block_ids)

    def first_needed(self, num_computed: int, block_size: int) -> int:
        """Place of the first block that tokens from ``num_computed`` on will see."""
        return max(0, num_computed - self.window + 1) // block_size if self.window else 0

    def give_back(self, place: int) -> list[BlockId]:
        """Remove and return the blocks before a place."""
        count = min(max(0, place - self.first), len(self.block_ids))
        gone, self.block_ids = self.block_ids[:count], self.block_ids[count:]
        self.table[self.first : self.first + count] = self._null
        self.first += count
        return gone

    def cut(self, end: int) -> list[BlockId]:
        """Remove and return the blocks from a place on."""
        keep = max(0, end - self.first)
        gone, self.block_ids = self.block_ids[keep:], self.block_ids[:keep]
        return gone

    def take(self) -> list[BlockId]:
        """Remove and return all blocks."""
        gone = self.block_ids
        self.begin(0, ())
        return gone


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Cached blocks that a sequence can begin with.

    Attributes:
        block_ids: Of group 0, from the first token on.
        windows: Of each other group the blocks at the end that its window reaches.
    """

    block_ids: list[BlockId]
    windows: list[list[BlockId]]

    @property
    def all_blocks(self) -> list[BlockId]:
        """The blocks of all groups."""
        return [*self.block_ids, *(block for blocks in self.windows for block in blocks)]


class WindowGroups:
    """What the scheduler has to know of the groups beyond the first.

    Args:
        groups: All of them, that of full attention first; fewer than two: there are no others.
        null: A block that is never written, for the places of blocks that are gone.
        block_size: Tokens per block.
    """

    def __init__(self, groups: Sequence[LayerGroup], null: int, block_size: int) -> None:
        self._windows = [group.window for group in groups[1:]]
        self._null, self._block_size = null, block_size
        self.count = max(1, len(groups))

    def new_tables(self) -> list[WindowTable]:
        """Return a sequence's tables, empty."""
        return [WindowTable(group, window, self._null) for group, window in enumerate(self._windows, 1)]

    def match(self, pool: BlockPool, hashes: Sequence[BlockHash]) -> PrefixHit:
        """Return the longest cached prefix whose end all groups have."""
        found = pool.match(hashes)
        if not self._windows:
            return PrefixHit(found, [])
        cached = [pool.find(hashes[: len(found)], group) for group in range(1, self.count)]
        length = self._longest(cached, len(found))
        tails = [
            [block for block in blocks[self._reach(length, window) : length] if block is not None]
            for blocks, window in zip(cached, self._windows, strict=True)
        ]
        return PrefixHit(found[:length], tails)

    def _longest(self, cached: list[list[BlockId | None]], count: int) -> int:
        """The longest prefix, in blocks, of which every group has what its window reaches."""
        runs = [0] * len(cached)
        best = 0
        for length in range(1, count + 1):
            whole = True
            for i, blocks in enumerate(cached):
                runs[i] = runs[i] + 1 if blocks[length - 1] is not None else 0
                whole = whole and runs[i] >= length - self._reach(length, self._windows[i])
            best = length if whole else best
        return best

    def _reach(self, length: int, window: int) -> int:
        """Place of the first block that the token after ``length`` blocks sees."""
        return max(0, length * self._block_size - window + 1) // self._block_size if window else 0
