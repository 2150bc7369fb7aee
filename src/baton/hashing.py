"""Chained block hashes: the name of a block's KV content.

``h[0] = H(root || tokens of block 0)``, ``h[i] = H(h[i-1] || tokens of block i)`` with SHA-256 and token ids as
little-endian uint32. The root is a digest of everything else that decides the KV's content (fingerprint and
tenant salt), so equal hashes mean equal KV. SHA-256 because a collision would answer one user with another's KV.
"""

from __future__ import annotations

import array
import hashlib
import sys
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from baton.types import BlockHash

HASH_SCHEME = "sha256-chain-u32le-v1"
HASH_BYTES = 32


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
    if isinstance(token_ids, list) and sys.byteorder == "little":
        return np.frombuffer(array.array("I", token_ids), dtype="<u4")  # twice as fast as asking numpy for it
    return np.ascontiguousarray(token_ids, dtype="<u4")


def block_hashes(
    token_ids: Sequence[int] | npt.NDArray[np.uint32], block_size: int, parent: BlockHash, *, start: int = 0
) -> list[BlockHash]:
    """Return the hashes of the full blocks of ``token_ids[start:]``; an incomplete last block has none.

    Args:
        token_ids: The whole sequence.
        block_size: Tokens per block.
        parent: Hash of the block that ends at ``start``, or the root hash.
        start: First token to hash; a multiple of ``block_size``.
    """
    data = as_token_array(token_ids).tobytes()
    stride = 4 * block_size
    sha256, previous = hashlib.sha256, bytes(parent)
    out: list[BlockHash] = []
    for at in range(4 * start, len(data) - stride + 1, stride):
        previous = sha256(previous + data[at : at + stride]).digest()
        out.append(BlockHash(previous))
    return out
