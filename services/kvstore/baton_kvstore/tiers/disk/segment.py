"""One append-only file of records of one kind of KV."""

from __future__ import annotations

import logging
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from baton.hashing import HASH_BYTES
from baton.types import BlockHash
from baton_kvstore.tiers.disk.format import (
    PAGE,
    Record,
    RecordType,
    decode_record,
    decode_segment,
    digest_of,
    encode_record,
    pages,
)
from baton_kvstore.types import KvFormat

log = logging.getLogger(__name__)

_IOV_MAX = 512
_SCAN_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Write:
    """A record and its payload (empty for a tombstone)."""

    record: Record
    payload: memoryview


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

    def append(self, writes: Sequence[Write], secret: int) -> list[int]:
        """Write records at the end and return their offsets. What fails leaves the file as it was.

        Raises:
            OSError: Nothing was appended.
        """
        total = sum(write.record.disk_bytes for write in writes)
        offsets, at = [], self.end
        heads = mmap.mmap(-1, PAGE * len(writes))  # aligned, as O_DIRECT wants it
        parts: list[memoryview] = []
        with memoryview(heads) as view:
            for i, write in enumerate(writes):
                place = self.segment_id, at
                view[i * PAGE : (i + 1) * PAGE] = encode_record(write.record, self.kind, place, secret)
                parts.append(view[i * PAGE : (i + 1) * PAGE])
                parts += _padded(write.payload)
                offsets.append(at)
                at += write.record.disk_bytes
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
        self.tombstone_bytes += PAGE * sum(write.record.type is RecordType.TOMBSTONE for write in writes)
        if writes[-1].record.type is not RecordType.MARK:
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
        self.append([Write(mark, memoryview(b""))], secret)
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
