"""Token ids of a whole prompt, as one array: from JSON, into messages, checked, without an object per id.

A prompt of 4 KB has a thousand ids. As Python integers they are made, looked at and written out one by one, several
times on their way; as an ``array("I")`` that happens in one call of C each.
"""

from __future__ import annotations

import ctypes
import threading
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from baton.native import function

if TYPE_CHECKING:
    TokenIds: TypeAlias = array[int]
else:
    TokenIds = array  # which has no parameters at run time before Python 3.12
"""Ids as ``array("I")``: 32 bits each."""

_SCRATCH_WORDS = 65_536
_FIELDS = 5
"""Words that the helper in C writes of a list that it found, before the ids."""
_MAX_BYTES = 2**31 - 1
# With the interpreter's lock held: a call takes less time than a wait for the lock may.
_pack_ids = function("pack_ids", ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, keep_lock=True)
_max_id = function("max_id", ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t, keep_lock=True)
_find_ids = function("find_ids", ctypes.c_int, keep_lock=True)
_own = threading.local()
_BYTES = tuple(bytes((value,)) for value in range(256))
_MOST_BYTES = 5
"""That a varint of 32 bits can take."""


class FoundIds(TokenIds):
    """Ids as they came in a text, with what was made of them on the way. They stay as they are.

    Attributes:
        most: The largest one.
        packed: What :func:`pack_ids` returns of them.
    """

    __slots__ = ("most", "packed")

    most: int
    packed: bytes


def token_ids(ids: Sequence[int]) -> TokenIds:
    """Return ids as an array; one that already is is not copied.

    Raises:
        OverflowError: One is negative or needs more than 32 bits.
    """
    return ids if isinstance(ids, array) and ids.typecode == "I" else array("I", ids)


def max_id(ids: TokenIds) -> int:
    """Return the largest id; 0 of none."""
    if type(ids) is FoundIds:
        return ids.most
    return int(_max_id(*ids.buffer_info()))


def pack_ids(ids: TokenIds) -> bytes:
    """Return ids as the payload of a packed protobuf field."""
    if type(ids) is FoundIds:
        return ids.packed
    address, count = ids.buffer_info()
    scratch = _scratch(-(-_MOST_BYTES * count // 4))
    return scratch.view[: _pack_ids(address, count, scratch.address)].tobytes()


def varint(value: int) -> bytes:
    """Return a protobuf varint."""
    if value < 0x80:
        return _BYTES[value]
    if value < 0x4000:
        return _BYTES[value & 0x7F | 0x80] + _BYTES[value >> 7]
    if value < 0x200000:
        return _BYTES[value & 0x7F | 0x80] + _BYTES[value >> 7 & 0x7F | 0x80] + _BYTES[value >> 14]
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def find_ids(text: bytes, key: bytes) -> tuple[FoundIds, bytes] | None:
    """Take a list of ids out of a JSON object, before the rest of it is parsed.

    Args:
        text: The object.
        key: A key of it; nothing that JSON would escape.

    Returns:
        The ids, and the object with an empty list in their place; ``None`` if there is no such list, if it is empty
        or holds anything but ids, or if that cannot be said for sure. What is not valid JSON is not found
        out here.
    """
    size = len(text)
    if size > _MAX_BYTES:
        return None
    scratch = _scratch(_FIELDS + size)
    if not _find_ids(text, size, key, scratch.pointer):
        return None
    words = scratch.words
    begin, end, count, most, packed = words[:_FIELDS]
    ids = FoundIds("I", words[_FIELDS : _FIELDS + count])
    at = 4 * (_FIELDS + count)
    ids.most, ids.packed = most, scratch.view[at : at + packed].tobytes()
    return ids, text[: begin + 1] + text[end - 1 :]


class _Scratch:
    """Memory that the helper in C writes into: as words, as bytes, its address and that as a pointer."""

    __slots__ = ("address", "pointer", "view", "words")

    def __init__(self, words: int) -> None:
        self.words = array("I", bytes(4 * words))
        self.view = memoryview(self.words).cast("B")
        self.address = self.words.buffer_info()[0]
        self.pointer = ctypes.c_void_p(self.address)


def _scratch(words: int) -> _Scratch:
    """Return so many 32-bit words at least, which are this thread's until it asks again: memory that is warm."""
    if words > _SCRATCH_WORDS:
        return _Scratch(words)
    try:
        found: _Scratch = _own.scratch
    except AttributeError:
        found = _own.scratch = _Scratch(_SCRATCH_WORDS)
    return found
