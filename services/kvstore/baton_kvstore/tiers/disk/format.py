"""What lies in a segment file, byte for byte.

A segment is a header page and then records, each a header page followed by its payload, padded to whole pages. Integers
are little endian. Every header ends in a checksum that is seeded with the store's own random number and covers where
the header lies, so neither a stale page nor a payload made to look like a header is taken for one.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass

import xxhash

from baton.types import BlockHash
from baton_kvstore.types import KvFormat

PAGE = 4096
VERSION = 1
MAX_BLOCK_BYTES = 1 << 32
"""Largest payload that a header may announce."""

_STORE = struct.Struct("<8sI8s")
_STORE_MAGIC = b"BATONDSK"
_SEGMENT = struct.Struct("<8sIQQ32s32s")
_SEGMENT_MAGIC = b"BATONSEG"
_RECORD = struct.Struct("<4sHHQQ32s32s16s")
_RECORD_MAGIC = b"BREC"
_SUM = struct.Struct("<Q")


class RecordType(enum.IntEnum):
    """What a record says: here is a block; forget that block; everything before me was synced."""

    BLOCK = 1
    TOMBSTONE = 2
    MARK = 3


@dataclass(frozen=True, slots=True)
class Record:
    """A record's header.

    Attributes:
        sequence: Rises with every record of a store; of two records of a block the higher one counts.
        digest: XXH3-128 of the payload.
    """

    type: RecordType
    sequence: int
    block_hash: BlockHash
    num_bytes: int
    digest: bytes

    @property
    def disk_bytes(self) -> int:
        """What it takes in a segment."""
        return PAGE + pages(self.num_bytes)


def pages(num_bytes: int) -> int:
    """Round up to whole pages."""
    return -(-num_bytes // PAGE) * PAGE


def disk_bytes(kind: KvFormat) -> int:
    """Return what the record of a block takes in a segment."""
    return PAGE + pages(kind.block_bytes)


def digest_of(payload: memoryview) -> bytes:
    """XXH3-128 of a payload."""
    return bytes(xxhash.xxh3_128_digest(payload))


def encode_store(secret: int) -> bytes:
    """Return the content of the file that makes a directory a store."""
    body = _STORE.pack(_STORE_MAGIC, VERSION, secret.to_bytes(8, "little"))
    return body + _SUM.pack(xxhash.xxh3_64_intdigest(body))


def decode_store(data: bytes) -> tuple[int, int] | None:
    """Return version and secret, or ``None`` if it is not such a file."""
    if len(data) != _STORE.size + _SUM.size:
        return None
    body = data[: _STORE.size]
    magic, version, secret = _STORE.unpack(body)
    if magic != _STORE_MAGIC or _SUM.unpack(data[_STORE.size :])[0] != xxhash.xxh3_64_intdigest(body):
        return None
    return version, int.from_bytes(secret, "little")


def encode_segment(kind: KvFormat, segment_id: int, secret: int) -> bytes:
    """Return a segment's first page."""
    body = _SEGMENT.pack(_SEGMENT_MAGIC, VERSION, segment_id, kind.block_bytes, kind.key, kind.content_key)
    return _page(body, xxhash.xxh3_64_intdigest(body, seed=secret))


def decode_segment(page: bytes, segment_id: int, secret: int) -> KvFormat | None:
    """Return what a segment holds, or ``None`` if the page is not the first of this very segment."""
    body = page[: _SEGMENT.size]
    if not _holds(page, _SEGMENT.size, xxhash.xxh3_64_intdigest(body, seed=secret)):
        return None
    magic, version, number, block_bytes, key, content_key = _SEGMENT.unpack(body)
    if magic != _SEGMENT_MAGIC or version != VERSION or number != segment_id:
        return None
    return KvFormat(key, content_key, block_bytes) if 0 < block_bytes <= MAX_BLOCK_BYTES else None


def encode_record(record: Record, kind: KvFormat, place: tuple[int, int], secret: int) -> bytes:
    """Return a record's header page. ``place`` is its segment's number and its offset there."""
    body = _RECORD.pack(
        _RECORD_MAGIC,
        VERSION,
        record.type,
        record.sequence,
        record.num_bytes,
        record.block_hash,
        kind.key,
        record.digest,
    )
    return _page(body, _record_sum(body, place, secret))


def decode_record(page: bytes, kind: KvFormat, place: tuple[int, int], secret: int) -> Record | None:
    """Return a record's header, or ``None`` if the page is not that of a record at this place."""
    body = page[: _RECORD.size]
    if not body.startswith(_RECORD_MAGIC) or not _holds(page, _RECORD.size, _record_sum(body, place, secret)):
        return None
    _, version, number, sequence, num_bytes, block_hash, key, digest = _RECORD.unpack(body)
    if version != VERSION or key != kind.key:
        return None
    expected = {RecordType.BLOCK: kind.block_bytes, RecordType.TOMBSTONE: 0, RecordType.MARK: 0}.get(number)
    if num_bytes != expected:
        return None
    return Record(RecordType(number), sequence, BlockHash(block_hash), num_bytes, digest)


def _record_sum(body: bytes, place: tuple[int, int], secret: int) -> int:
    where = struct.pack("<QQ", *place)
    return int(xxhash.xxh3_64_intdigest(body + where, seed=secret))


def _page(body: bytes, checksum: int) -> bytes:
    return (body + _SUM.pack(checksum)).ljust(PAGE, b"\0")


def _holds(page: bytes, size: int, checksum: int) -> bool:
    return len(page) >= size + _SUM.size and int(_SUM.unpack_from(page, size)[0]) == checksum
