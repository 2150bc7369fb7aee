"""Tables from block hashes to sets of slots: one in C, and its twin in Python for where no compiler is.

Both answer the same; :class:`baton_router.indexer.prefix_index.PrefixIndex` says what slots mean. Not thread-safe.
Chains are strings of hashes, 32 bytes each; sets of slots are integers with one bit per slot.
"""

from __future__ import annotations

import ctypes
import functools
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from baton.hashing import HASH_BYTES
from baton.native import COMPILERS, load_helper
from baton_router.indexer.python_table import PythonTable

_MAX_ENTRIES = 2**32 - 2


class BlockTable(Protocol):
    """What an index needs of its table; chains are strings of hashes, 32 bytes each."""

    name: str
    sweep_budget: int
    """Entries that may be swept at a time without anybody noticing."""

    def __len__(self) -> int:
        """Distinct hashes."""
        ...

    def widen(self, slots: int) -> None:
        """Make room for so many slots; slot numbers below are valid from then on."""
        ...

    def store(self, slot: int, chain: bytes) -> tuple[int, int]:
        """Add a slot to blocks' sets; return how many blocks it did not hold before, and how many found no room."""
        ...

    def remove(self, slot: int, chain: bytes) -> int:
        """Take a slot out of blocks' sets; return how many it held."""
        ...

    def match(self, chain: bytes, slots: int) -> dict[int, int]:
        """Return how many leading blocks each of some slots holds, if any."""
        ...

    def match_any(self, chain: bytes, groups: Sequence[int]) -> list[int]:
        """Return how many leading blocks each group of slots holds together."""
        ...

    def sweep(self, dead: int, start: int, budget: int) -> int:
        """Take slots out of every set, beginning at entry ``start``; return where to go on, 0: done."""
        ...

    def clear(self) -> None:
        """Forget everything."""
        ...


def make_table(max_blocks: int, *, native: bool = True) -> BlockTable:
    """Return the fastest table that can be had here; the first call in a process waits for the compiler."""
    library = _library() if native else None
    return PythonTable(max_blocks) if library is None else NativeTable(max_blocks, library)


@functools.cache
def _library(compilers: tuple[str, ...] = COMPILERS) -> Any | None:
    found = load_helper(Path(__file__).with_name("block_table.c"), compilers)
    if found is None:
        return None
    # Called with the interpreter's lock held: a look-up takes less time than a wait for the lock may.
    library = ctypes.PyDLL("block_table", handle=found._handle)
    pointer, data, size, word = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_uint64
    for name, result, *arguments in (
        ("new", pointer, word, word),
        ("free", None, pointer),
        ("count", word, pointer),
        ("widen", ctypes.c_int, pointer, ctypes.c_uint32),
        ("store", ctypes.c_int64, pointer, ctypes.c_uint32, data, size),
        ("remove", word, pointer, ctypes.c_uint32, data, size),
        ("match", size, pointer, data, size, data, pointer),
        ("match_any", None, pointer, data, size, data, size, pointer),
        ("sweep", word, pointer, data, word, word),
    ):
        function = getattr(library, f"baton_table_{name}")
        function.restype, function.argtypes = result, arguments
    return library


class NativeTable:
    """The table in C (``block_table.c``): about 35 bytes per block and slot word, and no object per block."""

    name = "c"
    sweep_budget = 200_000

    def __init__(self, max_blocks: int, library: Any) -> None:
        self._library = library
        self._limit = min(max_blocks, _MAX_ENTRIES)
        self._words = 1
        self._factor = secrets.randbits(64)
        self._table: int | None = None
        self._pairs = (ctypes.c_uint32 * 128)()
        self._store, self._match = library.baton_table_store, library.baton_table_match
        self.clear()

    def __len__(self) -> int:
        return int(self._library.baton_table_count(self._table))

    def __del__(self) -> None:
        if getattr(self, "_table", None):
            self._library.baton_table_free(self._table)

    def clear(self) -> None:
        """Forget everything."""
        old, new = self._table, self._library.baton_table_new(self._limit, self._factor)
        _check(new)
        self._table = new
        self._library.baton_table_free(old)
        _check(not self._library.baton_table_widen(new, self._words))

    def widen(self, slots: int) -> None:
        """Make sets wide enough for so many slots."""
        words = -(-slots // 64)
        if words > self._words:
            _check(not self._library.baton_table_widen(self._table, words))
            self._words = words
            self._pairs = (ctypes.c_uint32 * (128 * words))()

    def store(self, slot: int, chain: bytes) -> tuple[int, int]:
        """Add a slot to blocks' sets."""
        result: int = self._store(self._table, slot, chain, len(chain) // HASH_BYTES)
        _check(result >= 0)
        return result & 0xFFFFFFFF, result >> 32

    def remove(self, slot: int, chain: bytes) -> int:
        """Take a slot out of blocks' sets."""
        return int(self._library.baton_table_remove(self._table, slot, chain, len(chain) // HASH_BYTES))

    def match(self, chain: bytes, slots: int) -> dict[int, int]:
        """Return how many leading blocks each of some slots holds."""
        pairs = self._pairs
        found = self._match(self._table, chain, len(chain) // HASH_BYTES, self._set(slots), pairs)
        if not found:
            return {}
        flat = pairs[: 2 * found]
        return dict(zip(flat[::2], flat[1::2], strict=True))

    def match_any(self, chain: bytes, groups: Sequence[int]) -> list[int]:
        """Return how many leading blocks each group of slots holds together."""
        depths = (ctypes.c_uint32 * len(groups))()
        sets = b"".join(self._set(group) for group in groups)
        self._library.baton_table_match_any(self._table, chain, len(chain) // HASH_BYTES, sets, len(groups), depths)
        return depths[:]

    def sweep(self, dead: int, start: int, budget: int) -> int:
        """Take slots out of every set, some entries at a time."""
        return int(self._library.baton_table_sweep(self._table, self._set(dead), start, budget))

    def _set(self, slots: int) -> bytes:
        return slots.to_bytes(8 * self._words, "little")


def _check(fine: object) -> None:
    if not fine:
        raise MemoryError("no memory for the prefix index")
