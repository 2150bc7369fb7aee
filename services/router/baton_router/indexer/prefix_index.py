"""Exact prefix index: how many leading blocks of a hash chain does each instance hold?

A table maps a block hash to a set with one bit per *slot*. An instance owns a slot (and one more for each lower tier it
tells of) for as long as what is known of it stays true; when it restarts, sends a snapshot or leaves, its slot is
dropped in O(1) and the dead bits are swept out later, some entries at a time, so that no request waits for it.

A look-up narrows the set of slots that hold *every* block so far, and ends at the first block that nobody holds. So the
answer is exact whatever the order in which blocks were stored and removed, also for an instance that evicted a parent
before its child. Nearly all of its cost would be cache misses of the table; a chain that was stored in one go lies side
by side and is compared in sequence instead (see ``block_table.c``).

Over this lies what is *expected*: a request that was just placed has its chain expected on its instances until it ends,
so that a burst of one prompt goes to one place instead of everywhere; and where an instance tells nothing, the router's
own decisions stand in for its events (see :class:`baton_router.indexer.event_applier.EventFeed`).

Not thread-safe; the router calls it from its event loop only. The block hash names content (model, block size and
tenant salt are in the chain's root), so tenants, models and instances with blocks of another size cannot be mixed up:
a prompt has one chain per block size, and each is looked up among the slots of the instances it is made for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from baton.hashing import HashChain
from baton.types import BlockHash
from baton_router.indexer.block_table import make_table
from baton_router.indexer.pending_blocks import Expectation, ExpectedChains

__all__ = ["Expectation", "PrefixIndex"]


class PrefixIndex:
    """Which slots hold which blocks.

    Args:
        max_blocks: Distinct hashes kept at most (about 40 bytes each; 170 where no compiler is). Beyond that new ones
            are not taken: match rates come out too low, never too high.
        native: Use the table in C if there is a compiler.

    Attributes:
        news: Takes what requests placed here make expected, with the chain; ``None``: nobody wants to know.
    """

    def __init__(self, max_blocks: int = 4_000_000, *, native: bool = True) -> None:
        self.max_blocks = max_blocks
        self.news: deque[tuple[Expectation, Sequence[BlockHash]]] | None = None
        self._table = make_table(max_blocks, native=native)
        self._expected = ExpectedChains()
        self._live = 0
        self._dead = 0
        self._counts: dict[int, int] = {}
        self._owners: dict[int, int] = {}
        self._slots: dict[int, int] = {}
        self._num_owners = 0
        self._sweep_from = 0
        self._sweep_bits = 0

    def __len__(self) -> int:
        """Distinct hashes, those that only dropped slots held included until they are swept."""
        return len(self._table)

    @property
    def method(self) -> str:
        """How the table is kept: ``c`` or ``python``."""
        return self._table.name

    def add(self) -> int:
        """Return a new, empty slot."""
        self._num_owners += 1
        return self._add(self._num_owners)

    def drop(self, slot: int) -> None:
        """Forget a slot, everything it holds and everything that is expected of it."""
        owner = self._drop(slot)
        if owner is not None:
            del self._slots[owner]

    def replace(self, slot: int) -> int:
        """Return an empty slot in the place of another one: what was expected of that is expected of it."""
        owner = self._drop(slot)
        return self.add() if owner is None else self._add(owner)

    def _add(self, owner: int) -> int:
        used = self._live | self._dead
        slot = (~used & (used + 1)).bit_length() - 1
        self._table.widen(slot + 1)
        self._live |= 1 << slot
        self._counts[slot] = 0
        self._owners[slot] = owner
        self._slots[owner] = slot
        return slot

    def _drop(self, slot: int) -> int | None:
        owner = self._owners.pop(slot, None)
        if owner is None:
            return None
        self._live &= ~(1 << slot)
        held = self._counts.pop(slot)
        if not self._live:
            self._table.clear()
            self._dead, self._sweep_from, self._sweep_bits = 0, 0, 0
        elif held:
            self._dead |= 1 << slot
        return owner

    def stored(self, slot: int, hashes: Iterable[BlockHash]) -> int:
        """Record blocks; return how many did not fit into the index."""
        added, refused = self._table.store(slot, HashChain.of(hashes).data)
        self._counts[slot] += added
        return refused

    def removed(self, slot: int, hashes: Iterable[BlockHash]) -> None:
        """Record that blocks are gone; unknown ones are no error."""
        self._counts[slot] -= self._table.remove(slot, HashChain.of(hashes).data)

    def num_blocks(self, slot: int) -> int:
        """Blocks a slot holds."""
        return self._counts.get(slot, 0)

    def match(self, hashes: Sequence[BlockHash], slots: int) -> dict[int, int]:
        """Return, per slot that holds any, the number of leading blocks it holds or is expected to hold.

        Args:
            hashes: A chain.
            slots: Bit mask of the slots in question.
        """
        chain = HashChain.of(hashes)
        depths = self._table.match(chain.data, slots & self._live)
        for owner, depth in self._expected.match(chain).items():
            slot = self._slots.get(owner, -1)
            if slot >= 0 and slots >> slot & 1 and depth > depths.get(slot, 0):
                depths[slot] = depth
        return depths

    def match_any(self, hashes: Sequence[BlockHash], groups: Sequence[int]) -> list[int]:
        """Return how many leading blocks each group of slots holds together, without what is expected.

        Args:
            hashes: A chain.
            groups: Bit masks; e.g. the slots of one instance's tiers, down to the one in question.
        """
        return self._table.match_any(HashChain.of(hashes).data, [group & self._live for group in groups])

    def expect(self, slot: int, hashes: Sequence[BlockHash]) -> Expectation | None:
        """Count a whole chain as held until :meth:`forget`; ``None`` if the slot is gone."""
        owner = self._owners.get(slot)
        return None if owner is None else self._expected.add(owner, HashChain.of(hashes))

    def owner(self, slot: int) -> int:
        """Return whose a slot is: a number that stays over snapshots and is never used twice; 0: nobody's."""
        return self._owners.get(slot, 0)

    def num_expected(self, slot: int) -> int:
        """Distinct blocks that are expected of a slot."""
        return self._expected.num_blocks(self._owners.get(slot, 0))

    @staticmethod
    def forget(expectation: Expectation) -> None:
        """End an expectation; harmless if the slot was dropped meanwhile."""
        expectation.tree.forget(expectation)

    def sweep(self, budget: int | None = None) -> bool:
        """Clear dead bits from about ``budget`` entries; return whether nothing is left to do.

        Args:
            budget: Default: as many as take a millisecond or a few.
        """
        if not self._sweep_bits:
            if not self._dead:
                return True
            self._sweep_from, self._sweep_bits = 0, self._dead
        self._sweep_from = self._table.sweep(
            self._sweep_bits, self._sweep_from, self._table.sweep_budget if budget is None else budget
        )
        if self._sweep_from:
            return False
        # Slots dropped while this pass was under way keep their bits reserved for the next one.
        self._dead &= ~self._sweep_bits
        self._sweep_bits = 0
        return not self._dead
