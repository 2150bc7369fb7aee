"""Segments: append-only files of records of one KV format, and their byte layout.

A segment is a header page followed by records, each a header page and its payload, padded to whole pages. Integers are
little endian. Every header ends in a checksum that is seeded with the store's secret random number and covers the
header's position, so neither a stale page nor a payload crafted to look like a header is accepted as one.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import mmap
import os
import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import xxhash

from baton.hashing import HASH_BYTES
from baton.types import BlockHash
from baton_kvstore.types import MAX_BLOCK_BYTES, PAGE, KvFormat, digest_of, pages

log = logging.getLogger(__name__)

VERSION = 1

_SEGMENT = struct.Struct("<8sIQQ32s32s")
_SEGMENT_MAGIC = b"BATONSEG"
_RECORD = struct.Struct("<4sHHQQ32s32s16s")
_RECORD_MAGIC = b"BREC"
_SUM = struct.Struct("<Q")
_IOV_MAX = 512
_SCAN_BYTES = 1 << 20
EMPTY = memoryview(b"")
"""Payload of a record without one."""


class RecordType(enum.IntEnum):
    """Type of a record: a block, the deletion of a block, or a mark that everything before it was synced."""

    BLOCK = 1
    TOMBSTONE = 2
    MARK = 3


@dataclass(frozen=True, slots=True)
class Record:
    """A record's header.

    Attributes:
        type: Type of the record.
        sequence: Number that rises with every record of a store; of two records of a block the higher one is valid.
        block_hash: Hash of the block; zeros for a mark.
        num_bytes: Size of the payload.
        digest: XXH3-128 digest of the payload.
    """

    type: RecordType
    sequence: int
    block_hash: BlockHash
    num_bytes: int
    digest: bytes

    @property
    def disk_bytes(self) -> int:
        """Size of the record in a segment."""
        return PAGE + pages(self.num_bytes)


def disk_bytes(kind: KvFormat) -> int:
    """Return the size of a block's record in a segment."""
    return PAGE + pages(kind.block_bytes)


def encode_segment(kind: KvFormat, segment_id: int, secret: int) -> bytes:
    """Return a segment's first page."""
    body = _SEGMENT.pack(_SEGMENT_MAGIC, VERSION, segment_id, kind.block_bytes, kind.key, kind.content_key)
    return _page(body, xxhash.xxh3_64_intdigest(body, seed=secret))


def decode_segment(page: bytes, segment_id: int, secret: int) -> KvFormat | None:
    """Return a segment's KV format, or ``None`` if the page is not this segment's first page."""
    body = page[: _SEGMENT.size]
    if not _has_checksum(page, _SEGMENT.size, xxhash.xxh3_64_intdigest(body, seed=secret)):
        return None
    magic, version, number, block_bytes, key, content_key = _SEGMENT.unpack(body)
    if magic != _SEGMENT_MAGIC or version != VERSION or number != segment_id:
        return None
    return KvFormat(key, content_key, block_bytes) if 0 < block_bytes <= MAX_BLOCK_BYTES else None


def encode_record(record: Record, kind: KvFormat, place: tuple[int, int], secret: int) -> bytes:
    """Return a record's header page; ``place`` is its segment's number and its offset in the segment."""
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
    """Return a record's header, or ``None`` if the page is not a valid header at this place."""
    body = page[: _RECORD.size]
    if not body.startswith(_RECORD_MAGIC) or not _has_checksum(page, _RECORD.size, _record_sum(body, place, secret)):
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


def _has_checksum(page: bytes, size: int, checksum: int) -> bool:
    return len(page) >= size + _SUM.size and int(_SUM.unpack_from(page, size)[0]) == checksum


class Segment:
    """An open segment. The writer's thread appends; any thread reads between ``acquire`` and ``release``.

    Attributes:
        end: Offset of the next record.
        live_bytes: Total size of the records of blocks that are still in the index.
        tombstone_bytes: Total size of the tombstones, needed while an older segment of the KV format exists.
        written: Offset of the end of the last record that is not a mark.
        synced: Offset of the end of the part that survives a loss of power.
    """

    def __init__(self, segment_id: int, kind: KvFormat, fd: int, end: int, *, direct: bool) -> None:
        self.segment_id = segment_id
        self.kind = kind
        self.end = self.written = self.synced = end
        self.live_bytes = self.tombstone_bytes = 0
        self.direct = direct
        self._fd = fd
        self._mutex = threading.Lock()
        self._users = 1  # the store itself

    def acquire(self) -> bool:
        """Keep the file open until :meth:`release`; ``False`` if it is already closed."""
        with self._mutex:
            if not self._users:
                return False
            self._users += 1
            return True

    def release(self) -> None:
        """End an :meth:`acquire`; the last user closes the file."""
        with self._mutex:
            self._users -= 1
            if not self._users:
                os.close(self._fd)

    def append(self, writes: Sequence[tuple[Record, memoryview]], secret: int) -> list[int]:
        """Append records with their payloads (empty for a tombstone) and return their offsets.

        Raises:
            OSError: Nothing was appended; the file is as before.
        """
        total = sum(record.disk_bytes for record, _ in writes)
        offsets: list[int] = []
        at = self.end
        heads = mmap.mmap(-1, PAGE * len(writes))  # aligned, as O_DIRECT wants it
        parts: list[memoryview] = []
        with memoryview(heads) as view:
            for i, (record, payload) in enumerate(writes):
                head = view[i * PAGE : (i + 1) * PAGE]
                head[:] = encode_record(record, self.kind, (self.segment_id, at), secret)
                parts += [head, *_padded(payload)]
                offsets.append(at)
                at += record.disk_bytes
            try:
                self._write(parts, total)
            except OSError:
                os.ftruncate(self._fd, self.end)
                raise
            finally:
                for part in parts:
                    part.release()
        heads.close()
        self.end = at
        self.tombstone_bytes += PAGE * sum(record.type is RecordType.TOMBSTONE for record, _ in writes)
        if writes[-1][0].type is not RecordType.MARK:
            self.written = at
        return offsets

    def read(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Read consecutive bytes at ``offset`` into buffers.

        Raises:
            OSError: The file is too short or cannot be read.
        """
        for at in range(0, len(buffers), _IOV_MAX):
            group = buffers[at : at + _IOV_MAX]
            wanted = sum(len(buffer) for buffer in group)
            done = os.preadv(self._fd, group, offset)
            while done < wanted:
                count = os.preadv(self._fd, _skip_bytes(group, done), offset + done)
                if count <= 0:
                    raise OSError(f"segment {self.segment_id:016x} ends at {offset + done}")
                done += count
            offset += wanted

    def sync(self, sequence: int, secret: int) -> bool:
        """Sync everything appended so far to disk, and append a mark.

        Args:
            sequence: Sequence number of the mark.
            secret: The store's secret, which seeds checksums.

        Returns:
            ``False`` if nothing was appended since the last sync.

        Raises:
            OSError: The sync failed; appended records may be lost.
        """
        if self.written <= self.synced:
            return False
        end = self.end
        os.fdatasync(self._fd)
        self.synced = end
        mark = Record(RecordType.MARK, sequence, BlockHash(bytes(HASH_BYTES)), 0, bytes(16))
        with contextlib.suppress(OSError):  # a full disk: recovery then checks payloads from the previous mark on
            self.append([(mark, EMPTY)], secret)
        return True

    def truncate_unsynced(self) -> None:
        """Discard records that were not synced, also from the file.

        Raises:
            OSError: They are still in the file.
        """
        self.end = self.written = self.synced
        os.ftruncate(self._fd, self.end)

    def _write(self, parts: Sequence[memoryview], total: int) -> None:
        at = self.end
        for first in range(0, len(parts), _IOV_MAX):
            group = parts[first : first + _IOV_MAX]
            wanted = sum(len(part) for part in group)
            done = 0
            while done < wanted:
                done += os.pwritev(self._fd, _skip_bytes(group, done), at + done)
            at += wanted
        if at != self.end + total:
            raise OSError("a record's parts do not add up")


def scan(fd: int, segment_id: int, secret: int, start: int = 0) -> tuple[KvFormat, list[tuple[int, Record]]] | None:
    """Read a segment's record headers.

    An invalid page at a header's position is damage or a torn end; the scan continues page by page behind it, so that
    damage costs only the records it hit.

    Args:
        fd: File descriptor of the segment.
        segment_id: Number of the segment.
        secret: The store's secret, which seeds checksums.
        start: Offset to start at; earlier records are known.

    Returns:
        The KV format, and offsets and headers of the records; ``None`` if the file is not this segment.
    """
    kind = decode_segment(os.pread(fd, PAGE, 0), segment_id, secret)
    if kind is None:
        return None
    size = os.fstat(fd).st_size
    at = max(PAGE, start)
    records: list[tuple[int, Record]] = []
    while at + PAGE <= size:
        record = decode_record(os.pread(fd, PAGE, at), kind, (segment_id, at), secret)
        if record is None or at + record.disk_bytes > size:
            following = _next_header(fd, kind, segment_id, secret, at + PAGE, size)
            if following is None:
                break
            log.warning("segment %016x is damaged at %d, goes on at %d", segment_id, at, following)
            at = following
            continue
        records.append((at, record))
        at += record.disk_bytes
    return kind, records


def sound_end(fd: int, records: Sequence[tuple[int, Record]], start: int) -> int:
    """Return the offset of the end of the intact records, including payloads.

    Everything before the last mark was synced. Behind it a loss of power may have damaged anything, so those records'
    payloads are checked; records after the first torn one were never acknowledged.

    Args:
        fd: File descriptor of the segment.
        records: Offsets and headers from :func:`scan`.
        start: Offset at which the scan started; everything before was synced.
    """
    end = max([start, *(offset + PAGE for offset, record in records if record.type is RecordType.MARK)])
    for offset, record in records:
        if offset < end:
            continue
        if offset != end:
            break
        if record.type is RecordType.BLOCK:
            payload = os.pread(fd, record.num_bytes, offset + PAGE)
            if len(payload) != record.num_bytes or digest_of(memoryview(payload)) != record.digest:
                break
        end = offset + record.disk_bytes
    return end


def _next_header(fd: int, kind: KvFormat, segment_id: int, secret: int, at: int, size: int) -> int | None:
    for offset, page in _pages(fd, at, size):
        record = decode_record(page, kind, (segment_id, offset), secret)
        if record is not None and offset + record.disk_bytes <= size:
            return offset
    return None


def _pages(fd: int, at: int, size: int) -> Iterator[tuple[int, bytes]]:
    while at + PAGE <= size:
        data = os.pread(fd, min(_SCAN_BYTES, size - at), at)
        if not data:
            return
        for i in range(0, len(data) - PAGE + 1, PAGE):
            yield at + i, data[i : i + PAGE]
        at += max(PAGE, len(data) // PAGE * PAGE)


def _padded(payload: memoryview) -> list[memoryview]:
    if not len(payload):
        return []
    short = pages(len(payload)) - len(payload)
    return [payload[:], memoryview(bytes(short))] if short else [payload[:]]


def _skip_bytes(parts: Sequence[memoryview], done: int) -> Sequence[memoryview]:
    if not done:
        return parts
    remaining = []
    for part in parts:
        if done >= len(part):
            done -= len(part)
            continue
        remaining.append(part[done:])
        done = 0
    return remaining
