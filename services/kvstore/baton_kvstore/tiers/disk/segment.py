"""One append-only file of records of one kind of KV, and what lies in it, byte for byte.

A segment is a header page and then records, each a header page followed by its payload, padded to whole pages. Integers
are little endian. Every header ends in a checksum that is seeded with the store's own random number and covers where
the header lies, so neither a stale page nor a payload made to look like a header is taken for one.
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
"""Payload of a record that has none."""


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


def disk_bytes(kind: KvFormat) -> int:
    """Return what the record of a block takes in a segment."""
    return PAGE + pages(kind.block_bytes)


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


class Segment:
    """An open segment. The writer's thread appends; any thread reads between ``hold`` and ``let_go``.

    Attributes:
        end: Where the next record goes.
        live_bytes: Of records that can still be found.
        tombstone_bytes: Of deletions, needed as long as an older segment of the kind is there; the rest is garbage.
        written: Where the last record ends that is not a mark.
        synced: Where the part ends that would survive a loss of power.
    """

    def __init__(self, segment_id: int, kind: KvFormat, fd: int, end: int, *, direct: bool) -> None:
        self.segment_id, self.kind = segment_id, kind
        self.end = self.written = self.synced = end
        self.live_bytes = self.tombstone_bytes = 0
        self.direct = direct
        self._fd = fd
        self._mutex = threading.Lock()
        self._users = 1  # the store itself

    def hold(self) -> bool:
        """Keep the file open; ``False`` if it is closed already."""
        with self._mutex:
            if not self._users:
                return False
            self._users += 1
            return True

    def let_go(self) -> None:
        """End a ``hold``; the last one closes the file."""
        with self._mutex:
            self._users -= 1
            if not self._users:
                os.close(self._fd)

    def append(self, writes: Sequence[tuple[Record, memoryview]], secret: int) -> list[int]:
        """Write records with their payloads (empty for a tombstone) at the end and return their offsets.

        What fails leaves the file as it was.

        Raises:
            OSError: Nothing was appended.
        """
        total = sum(record.disk_bytes for record, _ in writes)
        offsets, at = [], self.end
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
        """Fill buffers from consecutive bytes at ``offset``.

        Raises:
            OSError: The file is shorter or cannot be read.
        """
        for at in range(0, len(buffers), _IOV_MAX):
            group = buffers[at : at + _IOV_MAX]
            wanted = sum(len(buffer) for buffer in group)
            done = os.preadv(self._fd, group, offset)
            while done < wanted:
                count = os.preadv(self._fd, _after(group, done), offset + done)
                if count <= 0:
                    raise OSError(f"segment {self.segment_id:016x} ends at {offset + done}")
                done += count
            offset += wanted

    def sync(self, sequence: int, secret: int) -> bool:
        """Make everything appended so far survive a loss of power, and note in the file that it does.

        Args:
            sequence: Of the note.
            secret: Of the store.

        Returns:
            ``False`` if nothing was appended since the last time.

        Raises:
            OSError: It may not survive.
        """
        if self.written <= self.synced:
            return False
        end = self.end
        os.fdatasync(self._fd)
        self.synced = end
        mark = Record(RecordType.MARK, sequence, BlockHash(bytes(HASH_BYTES)), 0, bytes(16))
        with contextlib.suppress(OSError):  # a full disk: a start reads payloads from the mark before on
            self.append([(mark, EMPTY)], secret)
        return True

    def cut(self) -> None:
        """Give up what was not synced, in the file too.

        Raises:
            OSError: It is still in the file.
        """
        self.end = self.written = self.synced
        os.ftruncate(self._fd, self.end)

    def _write(self, parts: Sequence[memoryview], total: int) -> None:
        at = self.end
        for first in range(0, len(parts), _IOV_MAX):
            group = parts[first : first + _IOV_MAX]
            wanted, done = sum(len(part) for part in group), 0
            while done < wanted:
                done += os.pwritev(self._fd, _after(group, done), at + done)
            at += wanted
        if at != self.end + total:
            raise OSError("a record's parts do not add up")


def scan(fd: int, segment_id: int, secret: int, start: int = 0) -> tuple[KvFormat, list[tuple[int, Record]]] | None:
    """Read a segment's record headers.

    A page that is no header where one should be is damage or a torn end; the search goes on page by page behind it, so
    that damage costs the records it hit and no others.

    Args:
        fd: Of the file.
        segment_id: Its number.
        secret: Of the store.
        start: Where to begin; records before it are known.

    Returns:
        Its kind, and offsets and headers; ``None`` if it is not such a segment.
    """
    kind = decode_segment(os.pread(fd, PAGE, 0), segment_id, secret)
    if kind is None:
        return None
    size = os.fstat(fd).st_size
    at = max(PAGE, start)
    found: list[tuple[int, Record]] = []
    while at + PAGE <= size:
        record = decode_record(os.pread(fd, PAGE, at), kind, (segment_id, at), secret)
        if record is None or at + record.disk_bytes > size:
            following = _next_header(fd, kind, segment_id, secret, at + PAGE, size)
            if following is None:
                break
            log.warning("segment %016x is damaged at %d, goes on at %d", segment_id, at, following)
            at = following
            continue
        found.append((at, record))
        at += record.disk_bytes
    return kind, found


def sound_end(fd: int, records: Sequence[tuple[int, Record]], start: int) -> int:
    """Return where the records end that are whole, payloads included.

    What lies before the last mark was synced. Behind it a loss of power may have left anything: those few records are
    read, and what follows the first that is torn was never acknowledged.

    Args:
        fd: Of the file.
        records: From :func:`scan`.
        start: Where it began; everything before was synced.
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


def _after(parts: Sequence[memoryview], done: int) -> Sequence[memoryview]:
    if not done:
        return parts
    left = []
    for part in parts:
        if done >= len(part):
            done -= len(part)
            continue
        left.append(part[done:])
        done = 0
    return left
