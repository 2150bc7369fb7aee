"""Exact prefix index: how many leading blocks of a hash chain does each instance hold?

A table maps a block hash to a set with one bit per *slot*. An instance owns a slot (and one more for each lower tier it
reports) until it restarts, sends a snapshot or leaves; then the slot is dropped in O(1) and its dead bits are swept out
later, some entries at a time, so that no request waits for it.

A look-up narrows the set of slots that hold *every* block so far, and ends at the first block that none holds. So the
answer is exact whatever the order in which blocks were stored and removed, also for an instance that evicted a parent
before its child. Nearly all of its cost would be cache misses of the table; a chain that was stored in one go lies side
by side and is compared in sequence instead (see ``native/block_table.c``).

On top of this lie *pending* chains: the chain of a request that was just placed counts as held by its instances until
the request ends, so that a burst of one prompt goes to one place instead of everywhere. For an instance that sends no
events, the prompts sent to it stand in (see :class:`baton_router.indexer.events.ApproxIndex`).

Not thread-safe; the router calls it from its event loop only. The block hash names content (model, block size and
tenant salt are in the chain's root), so tenants, models and instances with blocks of another size cannot be mixed up:
a prompt has one chain per block size, and each is looked up among the slots of the instances it is made for.
"""

from __future__ import annotations

import ctypes
import secrets
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import msgspec

from baton.hashing import HASH_BYTES, HashChain
from baton.native import function
from baton.types import BlockHash

_MAX_ENTRIES = 2**32 - 2
_POINTER = ctypes.c_void_p
_DATA = ctypes.c_char_p
_SIZE = ctypes.c_size_t
_WORD = ctypes.c_uint64
Place = Callable[[int, int], int]
SWEEP_ENTRIES = 200_000
"""Entries swept at a time by default: a millisecond or a few."""
_MAX_DEAD = 64
"""Dropped slots, or as many as there are live ones, that may wait to be swept."""


class _Node(msgspec.Struct, eq=False):
    """A run of blocks; ``counts``: pending chains per owner that reach its end."""

    data: bytes
    parent: _Node | None
    children: dict[bytes, _Node] = msgspec.field(default_factory=dict)
    counts: dict[int, int] = msgspec.field(default_factory=dict)


class PendingChain(msgspec.Struct, eq=False):
    """A chain that counts as held by an owner until :meth:`release`, which must be called once.

    Attributes:
        tree: Tree that it is part of.
        owner: Owner that it is pending for.
        leaf: Node of its last block.
        over: Whether it was released.
    """

    tree: PendingBlocks
    owner: int
    leaf: _Node
    over: bool = False

    def release(self) -> None:
        """Stop counting the chain; harmless if the owner's slot was dropped meanwhile."""
        self.over = True
        self.tree._remove(self.owner, self.leaf)


class _Walk(NamedTuple):
    """How far a chain follows the tree.

    Attributes:
        data: The chain.
        passed: Nodes whose whole run it shares, from the root's child on.
        at: Bytes of the chain up to the last one's end.
        below: The node that it shares ``shared`` bytes more with, if there is one; it parts or ends within it.
    """

    data: bytes
    passed: list[_Node]
    at: int
    below: _Node | None
    shared: int


class PendingBlocks:
    """Blocks that running requests will make instances hold, before any event says so: a radix tree with counts.

    A node is a run of blocks that all chains through it share, so a chain is stored once however many requests and
    owners it is pending for, and costs as many steps as it has branches. Hashes are chained: two chains that agree in
    one block agree in all blocks before it, so the block at which they part is found by binary search. Owners are
    numbers chosen by the caller and never reused.
    """

    def __init__(self) -> None:
        self._root = _Node(b"", None)
        self._bytes: dict[int, int] = {}
        """Of the distinct hashes that are pending, by owner."""
        self._walked: _Walk | None = None
        """The latest walk, kept until the tree changes: a chain is usually looked up, then added for two owners."""

    def num_blocks(self, owner: int) -> int:
        """Distinct blocks pending for an owner."""
        return self._bytes.get(owner, 0) // HASH_BYTES

    def add(self, owner: int, chain: HashChain) -> PendingChain:
        """Count a whole chain, from its first block on, as held by ``owner``."""
        data, passed, at, below, shared = self._walk(chain.data)
        if below is not None:
            passed.append(self._split(below, shared))
            at += shared
        node = passed[-1] if passed else self._root
        if at < len(data):
            leaf = _Node(data[at:], node)
            node.children[data[at : at + HASH_BYTES]] = leaf
            node = leaf
            passed.append(leaf)
        for step in passed:
            counts = step.counts
            if owner in counts:
                counts[owner] += 1
            else:
                counts[owner] = 1
                self._bytes[owner] = self._bytes.get(owner, 0) + len(step.data)
        self._walked = _Walk(data, passed, len(data), None, 0)
        return PendingChain(self, owner, node)

    def _remove(self, owner: int, node: _Node) -> None:
        self._walked = None
        while node.parent is not None:
            node.counts[owner] -= 1
            if not node.counts[owner]:
                del node.counts[owner]
                self._bytes[owner] -= len(node.data)
                if not self._bytes[owner]:
                    del self._bytes[owner]
            if not node.counts:
                del node.parent.children[node.data[:HASH_BYTES]]
            node = node.parent

    def match(self, chain: HashChain) -> dict[int, int]:
        """Return per owner how many leading blocks are pending for it, if any."""
        depths: dict[int, int] = {}
        if not self._root.children:
            return depths
        _, passed, end, below, shared = self._walk(chain.data)
        at = 0
        for node in passed:
            at += len(node.data)
            depths.update(dict.fromkeys(node.counts, at // HASH_BYTES))
        if below is not None:
            depths.update(dict.fromkeys(below.counts, (end + shared) // HASH_BYTES))
        return depths

    def _walk(self, data: bytes) -> _Walk:
        walked = self._walked
        if walked is not None and walked.data is data:
            return walked
        node = self._root
        at = 0
        passed: list[_Node] = []
        below = None
        shared = 0
        while at < len(data):
            below = node.children.get(data[at : at + HASH_BYTES])
            if below is None:
                break
            shared = _shared(below, data, at)
            if shared < len(below.data):
                break
            node = below
            at += shared
            below = None
            passed.append(node)
        self._walked = walked = _Walk(data, passed, at, below, shared)
        return walked

    def _split(self, node: _Node, at: int) -> _Node:
        """Cut a node in two and return the upper one; the lower one stays itself, and with it the leaf it may be."""
        assert node.parent is not None
        upper = _Node(node.data[:at], node.parent, counts=dict(node.counts))
        node.parent.children[node.data[:HASH_BYTES]] = upper
        node.data = node.data[at:]
        node.parent = upper
        upper.children[node.data[:HASH_BYTES]] = node
        return upper


def _shared(node: _Node, data: bytes, at: int) -> int:
    """Return how many bytes of a node's run agree with ``data`` from ``at`` on; the first block does."""
    if data.startswith(node.data, at):
        return len(node.data)
    size = min(len(node.data), len(data) - at)
    if node.data[size - HASH_BYTES : size] == data[at + size - HASH_BYTES : at + size]:
        return size
    low = 1
    high = size // HASH_BYTES
    while high - low > 1:
        middle = (low + high) // 2
        begin = (middle - 1) * HASH_BYTES
        if node.data[begin : begin + HASH_BYTES] == data[at + begin : at + begin + HASH_BYTES]:
            low = middle
        else:
            high = middle
    return low * HASH_BYTES


def _function(name: str, result: Any, *arguments: Any) -> Any:
    # With the interpreter's lock held: a look-up takes less time than a wait for the lock may.
    return function(f"table_{name}", result, *arguments, keep_lock=True)


_new = _function("new", _POINTER, _WORD, _WORD)
_free = _function("free", None, _POINTER)
_count = _function("count", _WORD, _POINTER)
_widen = _function("widen", ctypes.c_int, _POINTER, ctypes.c_uint32)
_store = _function("store", ctypes.c_int64, _POINTER, ctypes.c_uint32, _DATA, _SIZE)
_remove = _function("remove", _WORD, _POINTER, ctypes.c_uint32, _DATA, _SIZE)
_match = _function("match", _SIZE, _POINTER, _DATA, _SIZE, _DATA, _POINTER)
_match_any = _function("match_any", None, _POINTER, _DATA, _SIZE, _DATA, _SIZE, _POINTER)
_match_rows = _function(
    "held",
    None,
    _POINTER,
    _DATA,
    _SIZE,
    _POINTER,
    _SIZE,
    ctypes.c_double,
    ctypes.c_double,
    _POINTER,
    _POINTER,
    _SIZE,
    _POINTER,
    _POINTER,
)
_sweep = _function("sweep", _WORD, _POINTER, _DATA, _WORD, _WORD)


class BlockTable:
    """From block hashes to sets of slots (``native/block_table.c``): about 35 bytes per block and slot word.

    Chains are strings of hashes, 32 bytes each; sets of slots are integers with one bit per slot.

    Args:
        max_blocks: Distinct hashes that are kept.

    Raises:
        MemoryError: From any method that adds something.
    """

    def __init__(self, max_blocks: int) -> None:
        self._limit = min(max_blocks, _MAX_ENTRIES)
        self._words = 1
        self._factor = secrets.randbits(64)
        self._table: int | None = None
        self._pairs = (ctypes.c_uint32 * 128)()
        self.clear()

    def __len__(self) -> int:
        return int(_count(self._table))

    def __del__(self) -> None:
        if getattr(self, "_table", None):
            _free(self._table)

    def clear(self) -> None:
        old = self._table
        new = _new(self._limit, self._factor)
        _check(new)
        self._table = new
        _free(old)
        _check(not _widen(new, self._words))

    def widen(self, slots: int) -> None:
        """Make room for so many slots; slot numbers below are valid from then on."""
        words = -(-slots // 64)
        if words > self._words:
            _check(not _widen(self._table, words))
            self._words = words
            self._pairs = (ctypes.c_uint32 * (128 * words))()

    def store(self, slot: int, chain: bytes) -> tuple[int, int]:
        """Add a slot to blocks' sets; return how many blocks it did not hold before, and how many found no room."""
        result: int = _store(self._table, slot, chain, len(chain) // HASH_BYTES)
        _check(result >= 0)
        return result & 0xFFFFFFFF, result >> 32

    def remove(self, slot: int, chain: bytes) -> int:
        """Take a slot out of blocks' sets; return how many it held."""
        return int(_remove(self._table, slot, chain, len(chain) // HASH_BYTES))

    def match(self, chain: bytes, slots: int) -> dict[int, int]:
        """Return how many leading blocks each of some slots holds, if any."""
        pairs = self._pairs
        num_slots = _match(self._table, chain, len(chain) // HASH_BYTES, self._set(slots), pairs)
        if not num_slots:
            return {}
        flat = pairs[: 2 * num_slots]
        return dict(zip(flat[::2], flat[1::2], strict=True))

    def match_any(self, chain: bytes, groups: Sequence[int]) -> list[int]:
        """Return how many leading blocks each group of slots holds together."""
        depths = (ctypes.c_uint32 * len(groups))()
        sets = b"".join(self._set(group) for group in groups)
        _match_any(self._table, chain, len(chain) // HASH_BYTES, sets, len(groups), depths)
        return depths[:]

    def match_rows(
        self,
        chain: bytes,
        rows: tuple[int, int],
        which: tuple[float, float],
        pending: tuple[array[int], array[int]],
        out: int,
    ) -> None:
        """Raise the leading tokens that rows hold of a chain to what is found; see ``native/block_table.c``.

        Args:
            chain: A chain.
            rows: Where the rows are in memory, and how many.
            which: The chain's format, and the time.
            pending: Rows that count as holders in any case, and how many blocks each has.
            out: Where a float64 per row is in memory.
        """
        where, depths = pending
        size = len(chain) // HASH_BYTES
        _match_rows(
            *(self._table, chain, size, *rows, *which),
            where.buffer_info()[0],
            depths.buffer_info()[0],
            len(where),
            self._pairs,
            out,
        )

    def sweep(self, dead: int, start: int, budget: int) -> int:
        """Take slots out of ``budget`` entries' sets, from entry ``start`` on; return where to go on, 0: done."""
        return int(_sweep(self._table, self._set(dead), start, budget))

    def _set(self, slots: int) -> bytes:
        return slots.to_bytes(8 * self._words, "little")


def _check(fine: object) -> None:
    if not fine:
        raise MemoryError("no memory for the prefix index")


class PrefixIndex:
    """Which slots hold which blocks.

    Args:
        max_blocks: Distinct hashes kept at most (about 40 bytes each). Beyond that new ones are not taken: match
            rates come out too low, never too high.

    Attributes:
        news: Receives every chain that a placement here makes pending; ``None``: unused.
    """

    def __init__(self, max_blocks: int = 4_000_000) -> None:
        self.max_blocks = max_blocks
        self.news: deque[tuple[PendingChain, Sequence[BlockHash]]] | None = None
        self._table = BlockTable(max_blocks)
        self._pending = PendingBlocks()
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

    def add(self) -> int:
        """Return a new, empty slot."""
        self._num_owners += 1
        return self._add(self._num_owners)

    def drop(self, slot: int) -> None:
        """Forget a slot, everything it holds and everything pending for it."""
        owner = self._drop(slot)
        if owner is not None:
            del self._slots[owner]

    def replace(self, slot: int) -> int:
        """Return an empty slot in the place of another one, whose pending chains it takes over."""
        owner = self._drop(slot)
        return self.add() if owner is None else self._add(owner)

    def _add(self, owner: int) -> int:
        if self._dead.bit_count() >= max(_MAX_DEAD, self._live.bit_count()):
            # Slots die faster than they are swept: every word of slots would be paid for by every block.
            while not self.sweep(_MAX_ENTRIES):
                pass
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
            self._dead = 0
            self._sweep_from = 0
            self._sweep_bits = 0
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
        return self._counts.get(slot, 0)

    def match(self, hashes: Sequence[BlockHash], slots: int) -> dict[int, int]:
        """Return, per slot that holds any, the number of leading blocks it holds, pending ones included.

        Args:
            hashes: A chain.
            slots: Bit mask of the slots in question.
        """
        chain = HashChain.of(hashes)
        depths = self._table.match(chain.data, slots & self._live)
        for owner, depth in self._pending.match(chain).items():
            slot = self._slots.get(owner, -1)
            if slot >= 0 and slots >> slot & 1 and depth > depths.get(slot, 0):
                depths[slot] = depth
        return depths

    def match_any(self, hashes: Sequence[BlockHash], groups: Sequence[int]) -> list[int]:
        """Return how many leading blocks each group of slots holds together, without pending ones.

        Args:
            hashes: A chain.
            groups: Bit masks; e.g. the slots of one instance's tiers, down to the one in question.
        """
        return self._table.match_any(HashChain.of(hashes).data, [group & self._live for group in groups])

    def match_rows(
        self, chain: HashChain, rows: tuple[int, int], which: tuple[float, float], place: Place, out: int
    ) -> None:
        """Raise the leading tokens that instances hold of a chain, pending ones included, to what is found.

        What :meth:`match` is for slots; this is for rows of :class:`~baton_router.indexer.events.IndexColumns`,
        which calls it.

        Args:
            chain: A chain.
            rows: Where the rows are in memory, and how many.
            which: The chain's format, and the time.
            place: Returns the row of an owner, or the default.
            out: Where a float64 per row is in memory.
        """
        pending = self._pending.match(chain)
        rows_of_owners = array("q", map(place, pending, repeat(-1)))
        self._table.match_rows(chain.data, rows, which, (rows_of_owners, array("q", pending.values())), out)

    def add_pending(self, slot: int, hashes: Sequence[BlockHash]) -> PendingChain | None:
        """Count a whole chain as held until it is released; ``None`` if the slot is gone."""
        owner = self._owners.get(slot)
        return None if owner is None else self._pending.add(owner, HashChain.of(hashes))

    def owner(self, slot: int) -> int:
        """Return the owner of a slot: kept over snapshots and never reused; 0: it has none."""
        return self._owners.get(slot, 0)

    def num_pending(self, slot: int) -> int:
        """Distinct blocks that are pending for a slot."""
        return self._pending.num_blocks(self._owners.get(slot, 0))

    def sweep(self, budget: int = SWEEP_ENTRIES) -> bool:
        """Clear dead bits from about ``budget`` entries; return whether nothing is left to do."""
        if not self._sweep_bits:
            if not self._dead:
                return True
            self._sweep_from = 0
            self._sweep_bits = self._dead
        self._sweep_from = self._table.sweep(self._sweep_bits, self._sweep_from, budget)
        if self._sweep_from:
            return False
        # Slots dropped while this pass was under way keep their bits reserved for the next one.
        self._dead &= ~self._sweep_bits
        self._sweep_bits = 0
        return not self._dead
