"""Matches of a prompt for many instances at once: their parts of the index as rows."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from baton.hashing import HashChain
from baton.native import address_of
from baton_router.indexer.events import EventApplier
from baton_router.indexer.prefix_index import PrefixIndex

_ROW = struct.Struct("4d")
"""Slot, time until which it is usable, format, tokens per block: ``struct index_row`` of ``native/block_table.c``."""


class IndexColumns:
    """Parts of the index as rows; only parts that changed are read again.

    Args:
        appliers: Parts of the index, in the order of the rows.
        formats: Number of each part's block format.
        block_sizes: Tokens per block of each format.

    Attributes:
        changed: Positions of parts that changed since they were read.
        over: Whether later columns watch one of the parts, so that these are outdated.
        lower: Positions of instances that have reported slower tiers.
    """

    def __init__(self, appliers: Sequence[EventApplier], formats: Sequence[int], block_sizes: Sequence[int]) -> None:
        self._appliers = appliers
        self._formats = formats
        self._block_sizes = block_sizes
        self.changed = set(range(len(appliers)))
        self.over = False
        self.lower: set[int] = set()
        self._rows = np.zeros((len(appliers), 4))
        self._memory = self._rows.reshape(-1).view(np.uint8).data
        self._address = address_of(self._rows)
        self._owners = [0] * len(appliers)
        self._place: dict[int, int] = {}
        for at, applier in enumerate(appliers):
            applier.watch(self, at)

    def matched_tokens(self, index: PrefixIndex, chains: Mapping[int, HashChain]) -> npt.NDArray[np.float64]:
        """Return how many leading prompt tokens each instance holds, those that are pending for it included.

        Args:
            index: The index.
            chains: Hash chains of the prompt, by format; instances of other formats hold nothing.

        Returns:
            float64, an entry per row.
        """
        if self.changed:
            self._read()
        out = np.zeros(len(self._appliers))
        if self._appliers:
            now = self._appliers[0].clock()
            where = address_of(out)
            for number, chain in chains.items():
                index.match_rows(chain, (self._address, out.size), (float(number), now), self._place.get, where)
        return out

    def _read(self) -> None:
        while self.changed:
            at = self.changed.pop()
            applier = self._appliers[at]
            number = self._formats[at]
            _ROW.pack_into(
                self._memory,
                at * _ROW.size,
                applier.slot,
                applier.usable_until,
                number,
                self._block_sizes[number],
            )
            (self.lower.add if applier.lower_slots else self.lower.discard)(at)
            owner = applier.owner
            known = self._owners[at]
            if owner != known:
                if self._place.get(known) == at:
                    del self._place[known]
                self._owners[at] = owner
                if owner:
                    self._place[owner] = at
