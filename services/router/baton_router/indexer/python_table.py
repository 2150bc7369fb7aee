"""The prefix index's table in plain Python, for where no compiler is: what ``block_table.c`` does, in short."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from baton.hashing import HASH_BYTES

_MAX_INTERNED = 65_536


class PythonTable:
    """A dictionary from hashes to integers, about 170 bytes per block. Sets are interned: few differ."""

    name = "python"
    sweep_budget = 20_000

    def __init__(self, max_blocks: int) -> None:
        self._limit = max_blocks
        self._sets: dict[bytes, int] = {}
        self._interned: dict[int, int] = {}
        self._sweeping: Iterator[bytes] = iter(())

    def __len__(self) -> int:
        return len(self._sets)

    def clear(self) -> None:
        """Forget everything."""
        self._sets.clear()
        self._interned.clear()

    def widen(self, slots: int) -> None:
        """Integers are as wide as they need to be."""

    def store(self, slot: int, chain: bytes) -> tuple[int, int]:
        """Add a slot to blocks' sets."""
        sets, bit, added, refused = self._sets, 1 << slot, 0, 0
        room = self._limit - len(sets)
        last_old: int | None = None
        new = bit
        for item in _split(chain):
            old = sets.get(item, 0)
            if old & bit:
                continue
            if not old:
                if room <= 0:
                    refused += 1
                    continue
                room -= 1
            if old is not last_old:
                last_old, new = old, self._intern(old | bit)
            sets[item] = new
            added += 1
        return added, refused

    def remove(self, slot: int, chain: bytes) -> int:
        """Take a slot out of blocks' sets."""
        sets, bit, gone = self._sets, 1 << slot, 0
        for item in _split(chain):
            old = sets.get(item, 0)
            if not old & bit:
                continue
            gone += 1
            self._put(item, old & ~bit)
        return gone

    def match(self, chain: bytes, slots: int) -> dict[int, int]:
        """Return how many leading blocks each of some slots holds."""
        get, last, depth = self._sets.get, None, 0
        depths: dict[int, int] = {}
        for depth, item in enumerate(_split(chain)):
            held = get(item, 0)
            if held is last:
                continue
            rest = slots & held
            if rest != slots:
                _note(depths, slots & ~rest, depth)
                slots = rest
            if not slots:
                return depths
            last = held
        _note(depths, slots, len(chain) // HASH_BYTES)
        return depths

    def match_any(self, chain: bytes, groups: Sequence[int]) -> list[int]:
        """Return how many leading blocks each group of slots holds together."""
        depths = [len(chain) // HASH_BYTES] * len(groups)
        left = dict(enumerate(groups))
        for depth, item in enumerate(_split(chain)):
            held = self._sets.get(item, 0)
            for at in [at for at, group in left.items() if not group & held]:
                depths[at] = depth
                del left[at]
            if not left:
                break
        return depths

    def sweep(self, dead: int, start: int, budget: int) -> int:
        """Take slots out of every set, some entries at a time."""
        if start == 0:
            self._sweeping = iter(list(self._sets))
        for at, item in enumerate(self._sweeping, start + 1):
            old = self._sets.get(item, 0)
            if old & dead:
                self._put(item, old & ~dead)
            if at - start >= budget:
                return at
        return 0

    def _put(self, item: bytes, slots: int) -> None:
        if slots:
            self._sets[item] = self._intern(slots)
        else:
            del self._sets[item]

    def _intern(self, slots: int) -> int:
        if len(self._interned) >= _MAX_INTERNED:
            self._interned.clear()
        return self._interned.setdefault(slots, slots)


def _split(chain: bytes) -> Iterator[bytes]:
    return (chain[at : at + HASH_BYTES] for at in range(0, len(chain), HASH_BYTES))


def _note(depths: dict[int, int], bits: int, depth: int) -> None:
    """Record ``depth`` for every slot in ``bits``; no entry for depth 0."""
    while bits and depth:
        low = bits & -bits
        depths[low.bit_length() - 1] = depth
        bits ^= low
