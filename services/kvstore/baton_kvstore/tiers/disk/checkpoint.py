"""The index as a file, so that a start need not read every record's header."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field

import xxhash

from baton.types import BlockHash
from baton_kvstore.tiers.disk.format import VERSION

_HEAD = struct.Struct("<8sIQI")
_MAGIC = b"BATONIDX"
_SEGMENT = struct.Struct("<QQQ")
_ENTRY = struct.Struct("<QQ32s16s")
_SUM = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Known:
    """A block of a segment that could be found."""

    offset: int
    sequence: int
    block_hash: BlockHash
    digest: bytes


@dataclass(slots=True)
class Covered:
    """What a checkpoint knows of a segment: everything before ``end``."""

    end: int
    blocks: list[Known] = field(default_factory=list)


def encode_checkpoint(sequence: int, segments: Iterable[tuple[int, Covered]], secret: int) -> bytes:
    """Return the file's content.

    Args:
        sequence: The next record's.
        segments: Numbers, and what is covered of each.
        secret: Of the store.
    """
    rows = list(segments)
    out = bytearray(_HEAD.pack(_MAGIC, VERSION, sequence, len(rows)))
    for segment_id, covered in rows:
        out += _SEGMENT.pack(segment_id, covered.end, len(covered.blocks))
        for known in covered.blocks:
            out += _ENTRY.pack(known.offset, known.sequence, known.block_hash, known.digest)
    out += _SUM.pack(xxhash.xxh3_64_intdigest(out, seed=secret))
    return bytes(out)


def decode_checkpoint(data: bytes, secret: int) -> tuple[int, dict[int, Covered]] | None:
    """Return the next sequence and what is known of each segment, or ``None`` if it is not a whole checkpoint."""
    end = len(data) - _SUM.size
    if end < _HEAD.size:
        return None
    if _SUM.unpack_from(data, end)[0] != xxhash.xxh3_64_intdigest(memoryview(data)[:end], seed=secret):
        return None
    magic, version, sequence, count = _HEAD.unpack_from(data)
    if magic != _MAGIC or version != VERSION:
        return None
    segments: dict[int, Covered] = {}
    at = _HEAD.size
    for _ in range(count):
        if end - at < _SEGMENT.size:
            return None
        segment_id, covered_end, num_blocks = _SEGMENT.unpack_from(data, at)
        at += _SEGMENT.size
        if num_blocks * _ENTRY.size > end - at:
            return None
        rows = _ENTRY.iter_unpack(memoryview(data)[at : at + num_blocks * _ENTRY.size])
        segments[segment_id] = Covered(covered_end, [Known(o, s, BlockHash(h), d) for o, s, h, d in rows])
        at += num_blocks * _ENTRY.size
    return (sequence, segments) if at == end else None
