"""The first phase of a Put."""

from __future__ import annotations

from dataclasses import dataclass

from baton_kvstore.memory.pool import Entry, Pool


@dataclass(eq=False)
class Reservation:
    """The first phase of a Put.

    Attributes:
        entries: Parallel to the hashes: where the block is or will be; ``None``: no room, or another Put brings it.
        missing: Indices into ``entries`` of the blocks to be filled.
    """

    pool: Pool
    entries: list[Entry | None]
    missing: list[int]
    settled: bool = False
    done: bool = False

    @property
    def slots(self) -> list[int]:
        """Slots to fill, parallel to ``missing``."""
        return [entry.slot for i in self.missing if (entry := self.entries[i]) is not None]
