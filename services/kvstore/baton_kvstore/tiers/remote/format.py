"""How a block lies in a tier that other nodes share: a header that says what it is, then its bytes.

The header names kind, block and size and carries checksums of itself and of the bytes, so what is torn, cut, swapped
or of somebody else is never taken for a block. Integers are little endian.
"""

from __future__ import annotations

import struct

import xxhash

from baton.types import BlockHash
from baton_kvstore.tiers.disk.format import MAX_BLOCK_BYTES, Kind, digest_of

VERSION = 1
_HEADER = struct.Struct("<4sHHQ32s32s32s16s")
_MAGIC = b"BBLK"
_SUM = struct.Struct("<Q")
HEADER_BYTES = _HEADER.size + _SUM.size


def encode_header(kind: Kind, block_hash: BlockHash, payload: memoryview) -> bytes:
    """Return what comes before a block's bytes."""
    body = _HEADER.pack(_MAGIC, VERSION, 0, len(payload), kind.key, kind.content_key, block_hash, digest_of(payload))
    return body + _SUM.pack(xxhash.xxh3_64_intdigest(body))


def decode_kind(header: bytes) -> Kind | None:
    """Return what kind of block a value is, from its first bytes; ``None``: it is none."""
    body = header[: _HEADER.size]
    if len(header) < HEADER_BYTES or _SUM.unpack_from(header, _HEADER.size)[0] != xxhash.xxh3_64_intdigest(body):
        return None
    magic, version, _, num_bytes, key, content_key, _, _ = _HEADER.unpack(body)
    if magic != _MAGIC or version != VERSION or not 0 < num_bytes <= MAX_BLOCK_BYTES:
        return None
    return Kind(key, content_key, num_bytes)


def decode_block(value: bytes, kind: Kind, block_hash: BlockHash) -> memoryview | None:
    """Return a block's bytes; ``None``: the value is not that very block, whole."""
    if len(value) != HEADER_BYTES + kind.block_bytes or decode_kind(value[:HEADER_BYTES]) != kind:
        return None
    *_, name, digest = _HEADER.unpack_from(value)
    payload = memoryview(value)[HEADER_BYTES:]
    return payload if name == block_hash and digest_of(payload) == digest else None
