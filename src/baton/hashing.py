"""Chained block hashes: the name of a block's KV content.

``h[0] = H(root || tokens of block 0)``, ``h[i] = H(h[i-1] || tokens of block i)`` with SHA-256 and token ids as
little-endian uint32. The root is a digest of everything else that decides the KV's content (fingerprint and
tenant salt), so equal hashes mean equal KV. SHA-256 because a collision would answer one user with another's KV.

A chain is computed in one call of C where a compiler is, with the processor's SHA instructions where it has them; else
block by block with ``hashlib``. The bytes are the same.
"""

from __future__ import annotations

import array
import ctypes
import functools
import hashlib
import struct
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol, overload

import numpy as np
import numpy.typing as npt

from baton.native import COMPILERS, address_of, load_helper
from baton.types import BlockHash

HASH_SCHEME = "sha256-chain-u32le-v1"
HASH_BYTES = 32
_IN_PLACE = sys.byteorder == "little"
"""Whether an ``array("I")`` lies in memory as it is hashed."""
_MIN_NATIVE = 8
"""Blocks from which on a call of C is cheaper than ``hashlib``."""


@functools.lru_cache(maxsize=4096)
def root_hash(content_key: bytes, cache_salt: str = "") -> BlockHash:
    """Return the parent of every chain's first block.

    Args:
        content_key: Digest of the fingerprint's content fields (see ``Fingerprint.content_key``).
        cache_salt: Separates the prefix caches of tenants; empty: shared.
    """
    salt = cache_salt.encode()
    header = len(content_key).to_bytes(4, "little") + content_key + len(salt).to_bytes(4, "little") + salt
    return BlockHash(hashlib.sha256(HASH_SCHEME.encode() + b"\0" + header).digest())


def as_token_array(token_ids: Sequence[int] | npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Return token ids as a contiguous uint32 array, without copying one that already is."""
    if isinstance(token_ids, list | array.array) and sys.byteorder == "little":
        if isinstance(token_ids, list) or token_ids.typecode != "I":
            token_ids = array.array("I", token_ids)  # twice as fast as asking numpy for it
        return np.frombuffer(token_ids, dtype="<u4")
    return np.ascontiguousarray(token_ids, dtype="<u4")


class HashChain(Sequence[BlockHash]):
    """The hashes of a sequence's blocks as one string of bytes, 32 each.

    The index reads the string as it is; a ``bytes`` object per block is made only for those that are looked at.
    """

    __slots__ = ("data",)

    def __init__(self, data: bytes = b"") -> None:
        self.data = data

    @classmethod
    def of(cls, hashes: Iterable[BlockHash]) -> HashChain:
        """Return the same hashes as a chain; one that is a chain already is not copied."""
        return hashes if isinstance(hashes, cls) else cls(b"".join(hashes))

    def __len__(self) -> int:
        return len(self.data) // HASH_BYTES

    def __iter__(self) -> Iterator[BlockHash]:
        return (BlockHash(item) for (item,) in struct.iter_unpack(f"{HASH_BYTES}s", self.data))

    @overload
    def __getitem__(self, at: int) -> BlockHash: ...
    @overload
    def __getitem__(self, at: slice) -> HashChain: ...
    def __getitem__(self, at: int | slice) -> BlockHash | HashChain:
        if isinstance(at, slice):
            start, stop, step = at.indices(len(self))
            if step != 1:
                return HashChain.of([self[i] for i in range(start, stop, step)])
            return HashChain(self.data[start * HASH_BYTES : max(start, stop) * HASH_BYTES])
        begin = (at + len(self) if at < 0 else at) * HASH_BYTES
        if not 0 <= begin < len(self.data):
            raise IndexError(f"no block {at} in a chain of {len(self)}")
        return BlockHash(self.data[begin : begin + HASH_BYTES])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HashChain) and self.data == other.data

    def __hash__(self) -> int:
        return hash(self.data)

    def __repr__(self) -> str:
        return f"HashChain({len(self)} blocks)"


def hash_chain(
    token_ids: Sequence[int] | npt.NDArray[np.uint32], block_size: int, parent: BlockHash, *, start: int = 0
) -> HashChain:
    """Return the hashes of the full blocks of ``token_ids[start:]``; an incomplete last block has none.

    Args:
        token_ids: The whole sequence.
        block_size: Tokens per block.
        parent: Hash of the block that ends at ``start``, or the root hash.
        start: First token to hash; a multiple of ``block_size``.
    """
    function = native_chain()
    if function is not None and _IN_PLACE and isinstance(token_ids, array.array) and token_ids.typecode == "I":
        address, length = token_ids.buffer_info()
        count = max(0, length - start) // block_size
        return HashChain(function.at(address + 4 * start, 4 * block_size, count, parent))
    tokens = as_token_array(token_ids)
    count = max(0, len(tokens) - start) // block_size
    data = tokens[start : start + count * block_size]
    if function is None or count < _MIN_NATIVE:
        return HashChain(python_chain(data, 4 * block_size, parent))
    return HashChain(function(data, 4 * block_size, parent))


def block_hashes(
    token_ids: Sequence[int] | npt.NDArray[np.uint32], block_size: int, parent: BlockHash, *, start: int = 0
) -> list[BlockHash]:
    """Return what :func:`hash_chain` does as a list."""
    data = hash_chain(token_ids, block_size, parent, start=start).data
    return [BlockHash(data[at : at + HASH_BYTES]) for at in range(0, len(data), HASH_BYTES)]


def python_chain(data: npt.NDArray[np.uint32], stride: int, parent: bytes) -> bytes:
    """Hash pieces of ``stride`` bytes one after the other with ``hashlib``."""
    raw, sha256, previous = data.tobytes(), hashlib.sha256, bytes(parent)
    out = []
    for at in range(0, len(raw), stride):
        previous = sha256(previous + raw[at : at + stride]).digest()
        out.append(previous)
    return b"".join(out)


class ChainFunction(Protocol):
    """The chain in C."""

    def __call__(self, data: npt.NDArray[np.uint32], stride: int, parent: bytes) -> bytes:
        """Hash pieces of ``stride`` bytes of an array."""

    def at(self, address: int, stride: int, count: int, parent: bytes) -> bytes:
        """Hash ``count`` pieces of ``stride`` bytes of memory."""


class _NativeChain:
    """See :class:`ChainFunction`."""

    def __init__(self, library: ctypes.CDLL, *, instructions: bool) -> None:
        # Called with the interpreter's lock held: a chain takes less time than a wait for the lock may.
        self._function = ctypes.PyDLL("hashing", handle=library._handle).baton_hash_chain
        size, pointer = ctypes.c_size_t, ctypes.c_void_p
        self._function.argtypes = [pointer, size, size, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p]
        self._function.restype = None
        self._fast = int(instructions and library.baton_has_sha())

    def __call__(self, data: npt.NDArray[np.uint32], stride: int, parent: bytes) -> bytes:
        return self.at(address_of(data), stride, data.nbytes // stride, parent)

    def at(self, address: int, stride: int, count: int, parent: bytes) -> bytes:
        if not count:
            return b""
        out = bytes(count * HASH_BYTES)  # of nobody else yet: filled in place instead of copied once more
        self._function(address, stride, count, parent, self._fast, out)
        return out


@functools.cache
def native_chain(compilers: tuple[str, ...] = COMPILERS, *, instructions: bool = True) -> ChainFunction | None:
    """Return :func:`python_chain` in C; ``None``: there is no compiler. The first call waits for the compiler.

    Args:
        compilers: The first of them that is there is used.
        instructions: Use the processor's own instructions for SHA-256 if it has them.
    """
    library = load_helper(Path(__file__).with_name("hashing.c"), compilers)
    if library is None:
        return None
    return _NativeChain(library, instructions=instructions)
