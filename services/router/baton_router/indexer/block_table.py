"""The table of the prefix index, from block hashes to sets of slots (``native/block_table.c``). Not thread-safe.

:class:`baton_router.indexer.prefix_index.PrefixIndex` says what slots mean. Chains are strings of hashes, 32 bytes
each; sets of slots are integers with one bit per slot.
"""

from __future__ import annotations

import ctypes
import secrets
from collections.abc import Sequence
from typing import Any

from baton.hashing import HASH_BYTES
from baton.native import function

_MAX_ENTRIES = 2**32 - 2
_POINTER, _DATA, _SIZE, _WORD = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_uint64


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
_sweep = _function("sweep", _WORD, _POINTER, _DATA, _WORD, _WORD)


class BlockTable:
    """About 35 bytes per block and slot word, and no Python object per block.

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
        """Distinct hashes."""
        return int(_count(self._table))

    def __del__(self) -> None:
        if getattr(self, "_table", None):
            _free(self._table)

    def clear(self) -> None:
        """Forget everything."""
        old, new = self._table, _new(self._limit, self._factor)
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
        found = _match(self._table, chain, len(chain) // HASH_BYTES, self._set(slots), pairs)
        if not found:
            return {}
        flat = pairs[: 2 * found]
        return dict(zip(flat[::2], flat[1::2], strict=True))

    def match_any(self, chain: bytes, groups: Sequence[int]) -> list[int]:
        """Return how many leading blocks each group of slots holds together."""
        depths = (ctypes.c_uint32 * len(groups))()
        sets = b"".join(self._set(group) for group in groups)
        _match_any(self._table, chain, len(chain) // HASH_BYTES, sets, len(groups), depths)
        return depths[:]

    def sweep(self, dead: int, start: int, budget: int) -> int:
        """Take slots out of ``budget`` entries' sets, from entry ``start`` on; return where to go on, 0: done."""
        return int(_sweep(self._table, self._set(dead), start, budget))

    def _set(self, slots: int) -> bytes:
        return slots.to_bytes(8 * self._words, "little")


def _check(fine: object) -> None:
    if not fine:
        raise MemoryError("no memory for the prefix index")
