"""Exact prefix index: how many leading blocks of a hash chain does each instance hold?

One dictionary maps a block hash to an integer with one bit per *slot*. An instance owns a slot for as long as what
is known of it stays true; when it restarts, sends a snapshot or leaves, its slot is dropped in O(1) and the dead bits
are swept out later, a few entries at a time, so that no request waits for it.

A look-up walks the chain and narrows the set of slots that hold *every* block so far; it ends at the first block that
nobody holds. So the answer is exact whatever the order in which blocks were stored and removed, also for an instance
that evicted a parent before its child. The masks are interned: along a run of blocks held by the same slots the walk
compares object identities only.

Over this lies an approximate overlay. A request that was just placed has its blocks expected on its instances until it
ends, so that a burst of one prompt goes to one place instead of everywhere.

Not thread-safe; the router calls it from its event loop only. The block hash names content (model, block size and
tenant salt are in the chain's root), so tenants, models and instances with blocks of another size cannot be mixed up:
a prompt has one chain per block size, and each is looked up among the slots of the instances it is made for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from baton.types import BlockHash

_MAX_INTERNED = 65_536


@dataclass(frozen=True, slots=True)
class Expectation:
    """Blocks that a placed request will leave on a slot; give it back with :meth:`PrefixIndex.forget`."""

    counts: dict[BlockHash, int]
    hashes: Sequence[BlockHash]


class PrefixIndex:
    """Which slots hold which blocks.

    Args:
        max_blocks: Distinct hashes kept at most (about 170 bytes each). Beyond that new ones are not taken: match
            rates come out too low, never too high.
    """

    def __init__(self, max_blocks: int = 4_000_000) -> None:
        self.max_blocks = max_blocks
        self._masks: dict[BlockHash, int] = {}
        self._interned: dict[int, int] = {}
        self._live = 0
        self._dead = 0
        self._counts: dict[int, int] = {}
        self._expected: dict[int, dict[BlockHash, int]] = {}
        self._sweeping: Iterator[BlockHash] | None = None
        self._sweep_bits = 0

    def __len__(self) -> int:
        """Distinct hashes, those that only dropped slots held included until they are swept."""
        return len(self._masks)

    def add(self) -> int:
        """Return a new, empty slot."""
        used = self._live | self._dead
        slot = (~used & (used + 1)).bit_length() - 1
        self._live |= 1 << slot
        self._counts[slot] = 0
        self._expected[slot] = {}
        return slot

    def drop(self, slot: int) -> None:
        """Forget a slot and everything it holds."""
        bit = 1 << slot
        if not self._live & bit:
            return
        self._live &= ~bit
        held = self._counts.pop(slot)
        del self._expected[slot]
        if not self._live:
            self._masks.clear()
            self._interned.clear()
            self._dead, self._sweeping = 0, None
        elif held:
            self._dead |= bit

    def stored(self, slot: int, hashes: Iterable[BlockHash]) -> int:
        """Record blocks; return how many did not fit into the index."""
        masks, bit, added, refused = self._masks, 1 << slot, 0, 0
        room = self.max_blocks - len(masks)
        last_old: int | None = None
        new = bit
        for item in hashes:
            old = masks.get(item, 0)
            if old & bit:
                continue
            if not old:
                if room <= 0:
                    refused += 1
                    continue
                room -= 1
            if old is not last_old:
                last_old, new = old, self._intern(old | bit)
            masks[item] = new
            added += 1
        self._counts[slot] += added
        return refused

    def removed(self, slot: int, hashes: Iterable[BlockHash]) -> None:
        """Record that blocks are gone; unknown ones are no error."""
        masks, bit, gone = self._masks, 1 << slot, 0
        for item in hashes:
            old = masks.get(item, 0)
            if not old & bit:
                continue
            gone += 1
            rest = old & ~bit
            if rest:
                masks[item] = self._intern(rest)
            else:
                del masks[item]
        self._counts[slot] -= gone

    def num_blocks(self, slot: int) -> int:
        """Blocks a slot holds."""
        return self._counts.get(slot, 0)

    def match(self, hashes: Sequence[BlockHash], slots: int) -> dict[int, int]:
        """Return, per slot that holds any, the number of leading blocks it holds or is expected to hold.

        Args:
            hashes: A chain.
            slots: Bit mask of the slots in question.
        """
        depths = self._exact(hashes, slots & self._live)
        for slot, expected in self._expected.items():
            if expected and slots >> slot & 1:
                depth = self._extend(hashes, slot, expected, depths.get(slot, 0))
                if depth:
                    depths[slot] = depth
        return depths

    def _exact(self, hashes: Sequence[BlockHash], alive: int) -> dict[int, int]:
        get, last, depth = self._masks.get, None, 0
        depths: dict[int, int] = {}
        for depth, item in enumerate(hashes):
            mask = get(item, 0)
            if mask is last:
                continue
            rest = alive & mask
            if rest != alive:
                _note(depths, alive & ~rest, depth)
                alive = rest
            if not alive:
                return depths
            last = mask
        _note(depths, alive, len(hashes))
        return depths

    def _extend(self, hashes: Sequence[BlockHash], slot: int, expected: dict[BlockHash, int], depth: int) -> int:
        get, total = self._masks.get, len(hashes)
        while depth < total and (hashes[depth] in expected or get(hashes[depth], 0) >> slot & 1):
            depth += 1
        return depth

    def expect(self, slot: int, hashes: Sequence[BlockHash]) -> Expectation | None:
        """Count blocks as held until :meth:`forget`; ``None`` if the slot is gone."""
        counts = self._expected.get(slot)
        if counts is None:
            return None
        for item in hashes:
            counts[item] = counts.get(item, 0) + 1
        return Expectation(counts, hashes)

    @staticmethod
    def forget(expectation: Expectation) -> None:
        """End an expectation; harmless if the slot was dropped meanwhile."""
        counts = expectation.counts
        for item in expectation.hashes:
            left = counts[item] - 1
            if left:
                counts[item] = left
            else:
                del counts[item]

    def sweep(self, budget: int = 10_000) -> bool:
        """Clear dead bits from up to ``budget`` entries; return whether nothing is left to do."""
        if self._sweeping is None:
            if not self._dead:
                return True
            self._sweeping, self._sweep_bits = iter(list(self._masks)), self._dead
        masks, keep = self._masks, ~self._sweep_bits
        for item in self._sweeping:
            old = masks.get(item, 0)
            rest = old & keep
            if old and not rest:
                del masks[item]
            elif rest != old:
                masks[item] = self._intern(rest)
            budget -= 1
            if budget <= 0:
                return False
        # Slots dropped while this pass was under way keep their bits reserved for the next one.
        self._dead &= keep
        self._sweeping = None
        return not self._dead

    def _intern(self, mask: int) -> int:
        if len(self._interned) >= _MAX_INTERNED:
            self._interned.clear()
        return self._interned.setdefault(mask, mask)


def _note(depths: dict[int, int], bits: int, depth: int) -> None:
    """Record ``depth`` for every slot in ``bits``; no entry for depth 0."""
    while bits and depth:
        low = bits & -bits
        depths[low.bit_length() - 1] = depth
        bits ^= low
