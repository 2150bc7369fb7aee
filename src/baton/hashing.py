"""Chained block hashes: the name of a block's KV content.

``h[0] = H(root || tokens of block 0)``, ``h[i] = H(h[i-1] || tokens of block i)`` with SHA-256 and token ids as
little-endian uint32. The root is a digest of everything else that decides the KV's content (fingerprint and
tenant salt), so equal hashes mean equal KV. SHA-256 because a collision would answer one user with another's KV.

A chain is computed in one call of C, with the processor's SHA instructions where it has them.
"""

from __future__ import annotations

import array
import ctypes
import functools
import hashlib
import struct
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import overload

import numpy as np
import numpy.typing as npt

from baton.native import address_of, function
from baton.types import BlockHash

HASH_SCHEME = "sha256-chain-u32le-v1"
HASH_BYTES = 32
_IN_PLACE = sys.byteorder == "little"
"""Whether an ``array("I")`` lies in memory as it is hashed."""
_HAS_SHA = bool(function("has_sha", ctypes.c_int)())
"""Whether the processor has instructions for SHA-256."""
# With the interpreter's lock held: a chain takes less time than a wait for the lock may.
_hash_chain = function(
    *("hash_chain", None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t),
    *(ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p),
    keep_lock=True,
)


@functools.lru_cache(maxsize=4096)
def root_hash(content_key: bytes, cache_salt: str = "", adapter: str = "") -> BlockHash:
    """Return the parent of every chain's first block.

    Args:
        content_key: Digest of the fingerprint's content fields (see ``Fingerprint.content_key``).
        cache_salt: Separates the prefix caches of tenants; empty: shared.
        adapter: Id of the adapter that the request is computed with; empty: none.
    """
    fields = (content_key, cache_salt.encode(), *([adapter.encode()] if adapter else []))
    header = b"".join(len(field).to_bytes(4, "little") + field for field in fields)
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
    if _IN_PLACE and isinstance(token_ids, array.array) and token_ids.typecode == "I":
        address, length = token_ids.buffer_info()
    else:
        token_ids = as_token_array(token_ids)
        address = address_of(token_ids)
        length = len(token_ids)
    count = max(0, length - start) // block_size
    return HashChain(hash_memory(address + 4 * start, 4 * block_size, count, parent))


def block_hashes(
    token_ids: Sequence[int] | npt.NDArray[np.uint32], block_size: int, parent: BlockHash, *, start: int = 0
) -> list[BlockHash]:
    """Return what :func:`hash_chain` does as a list."""
    data = hash_chain(token_ids, block_size, parent, start=start).data
    return [BlockHash(data[at : at + HASH_BYTES]) for at in range(0, len(data), HASH_BYTES)]


def state_hashes(block_hash: BlockHash, count: int) -> list[BlockHash]:
    """Return the names of the ``count`` blocks that hold a snapshot of recurrent states.

    Args:
        block_hash: Hash of the block after which these are the states; the first of them has this name, too.
        count: Number of blocks, at least 1.
    """
    digests = (hashlib.sha256(b"state\0" + i.to_bytes(4, "little") + block_hash).digest() for i in range(1, count))
    return [block_hash, *map(BlockHash, digests)]


def hash_memory(address: int, stride: int, count: int, parent: bytes, *, instructions: bool = _HAS_SHA) -> bytes:
    """Hash ``count`` pieces of ``stride`` bytes of memory, each with the hash before it.

    Args:
        address: Where the first piece begins.
        stride: Bytes of a piece.
        count: Pieces.
        parent: What stands before the first piece, 32 bytes.
        instructions: Use the processor's instructions for SHA-256; it must have them.

    Returns:
        The hashes, 32 bytes each.
    """
    if not count:
        return b""
    out = bytes(count * HASH_BYTES)  # not shared yet: filled in place instead of copied once more
    _hash_chain(address, stride, count, parent, instructions, out)
    return out
