"""The disk tier's log of segments: one thread appends, deletes, moves and checkpoints; any thread reads.

Room is made by dropping the oldest segment, of whatever kind: blocks in it that were read since they were written move
to the log's end first, up to half of it. A disk that is full before the bound is reached bounds it lower, until
others have freed room. Segments of which most is garbage are emptied the same way. A moved record
keeps its sequence number, so wherever a block's records lie, the highest number counts. A tombstone may be forgotten
when no segment older than its own is left: what it deleted lies before it.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from baton.types import BlockHash
from baton_kvstore.tiers.disk.directory import Covered, Directory, Known, encode_checkpoint, recover
from baton_kvstore.tiers.disk.index import DiskIndex, Location
from baton_kvstore.tiers.disk.segment import EMPTY, Record, RecordType, Segment, disk_bytes, encode_segment, scan
from baton_kvstore.tiers.tier import Leaving, Offer, no_next_tier
from baton_kvstore.types import PAGE, KvFormat, LogLimit, digest_of, pages

log = logging.getLogger(__name__)
T = TypeVar("T")

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})

_COPY_BYTES = 8 << 20
"""Of blocks that are moved or offered at once."""
_GARBAGE = 0.5
"""Share of a segment above which it is worth emptying."""
_TOMBSTONES = 256
"""In one system call."""


class DiskLog:
    """Segments and index of one directory.

    Args:
        path: The directory.
        max_bytes: Of all segments together, at any moment.
        segment_bytes: Where a segment ends.
        direct: Go around the page cache where blocks are whole pages.

    Attributes:
        max_bytes: As given.
        index: What can be found.
        full: Whether the disk was full before ``max_bytes`` were used, and has no more room since.
        leaving: Where blocks go that are dropped to make room.

    Raises:
        ConfigError: The directory cannot be used.
        OSError: It cannot be read.
    """

    def __init__(self, path: str, *, max_bytes: int, segment_bytes: int, direct: bool = True) -> None:
        self._directory = Directory(path)
        self.max_bytes = max_bytes
        self.full = False
        self._limit = self._room_when_full = 0
        self._unreadable = LogLimit()
        self._segment_bytes = min(segment_bytes, max(2 * PAGE, max_bytes // 8 // PAGE * PAGE))
        self._direct = direct
        self.index = DiskIndex()
        self.leaving: Leaving = no_next_tier
        try:
            found = recover(self._directory, direct=direct)
        except BaseException:
            self._directory.close()
            raise
        self._sequence = found.sequence
        self._segments = {segment.segment_id: segment for segment in found.segments}
        self._next_segment = found.next_segment
        self._active = {segment.kind.key: segment for segment in found.segments}
        self.index.counters.cut_bytes = found.cut_bytes
        for kind in {segment.kind for segment in found.segments}:
            self.index.add(kind, found.blocks[kind.key].items())

    @property
    def used_bytes(self) -> int:
        """Of all segments."""
        return sum(segment.end for segment in list(self._segments.values()))

    @property
    def num_segments(self) -> int:
        """Files."""
        return len(self._segments)

    def write(
        self, kind: KvFormat, hashes: Sequence[BlockHash], views: Sequence[memoryview], unwanted: set[BlockHash]
    ) -> list[bool]:
        """Append blocks, not synced yet, and return which of them can be found now.

        Raises:
            OSError: Those that cannot be found were not written.
        """
        size = disk_bytes(kind)
        if 4 * (size + PAGE) > self.max_bytes:
            return [False] * len(hashes)
        # A second record of a block would be the one that counts, and be lost if it is torn: the first is good.
        new = [i for i, name in enumerate(hashes) if self.index.find(kind, name) is None]
        done = 0
        while done < len(new):
            names, left = [hashes[i] for i in new[done:]], [views[i] for i in new[done:]]
            done += self._on_disk(size, functools.partial(self._write_some, kind, names, left, unwanted))
        return [self.index.find(kind, name) is not None for name in hashes]

    def _write_some(
        self, kind: KvFormat, hashes: Sequence[BlockHash], views: Sequence[memoryview], unwanted: set[BlockHash]
    ) -> int:
        """Append as many blocks as fit into one segment, and return how many."""
        size = disk_bytes(kind)
        self._make_room(min(len(hashes) * size, max(size, self._segment_bytes)))
        segment = self._segment_for(kind, size)
        count = min(len(hashes), max(1, (self._segment_bytes - segment.end) // size))
        self._append(segment, hashes[:count], views[:count], unwanted)
        return count

    def _append(
        self, segment: Segment, hashes: Sequence[BlockHash], views: Sequence[memoryview], unwanted: set[BlockHash]
    ) -> None:
        kind, count = segment.kind, len(hashes)
        records = [
            Record(RecordType.BLOCK, self._sequence + i, name, kind.block_bytes, digest_of(view))
            for i, (name, view) in enumerate(zip(hashes, views, strict=True))
        ]
        self._sequence += count
        offsets = segment.append(list(zip(records, views, strict=True)), self._directory.secret)
        self.index.counters.writes += count
        self.index.counters.written_bytes += count * disk_bytes(kind)
        blocks = [
            (record.block_hash, Location(segment, offset, record.sequence, record.digest))
            for record, offset in zip(records, offsets, strict=True)
        ]
        self.index.add(kind, blocks, unwanted)

    def bury(self, kind: KvFormat, hashes: Sequence[BlockHash]) -> None:
        """Append tombstones of blocks that were hidden, so that a restart does not find them either.

        Raises:
            OSError: They were not written.
        """
        step = max(1, min(_TOMBSTONES, self._segment_bytes // 4 // PAGE))
        for at in range(0, len(hashes), step):
            names = hashes[at : at + step]
            self._on_disk(len(names) * PAGE, functools.partial(self._bury_some, kind, names))

    def _bury_some(self, kind: KvFormat, names: Sequence[BlockHash]) -> None:
        self._make_room(len(names) * PAGE)
        segment = self._segment_for(kind, len(names) * PAGE)
        records = [Record(RecordType.TOMBSTONE, self._sequence + i, name, 0, bytes(16)) for i, name in enumerate(names)]
        self._sequence += len(names)
        segment.append([(record, EMPTY) for record in records], self._directory.secret)

    def clear(self, kind: KvFormat) -> None:
        """Delete a kind's files; its blocks were hidden before.

        Raises:
            OSError: Some may be left.
        """
        for segment in [segment for segment in self._segments.values() if segment.kind.key == kind.key]:
            self._remove(segment)
        self._directory.sync()

    def sync(self) -> None:
        """Make everything written so far survive a loss of power.

        Raises:
            OSError: It may not.
        """
        for segment in self._segments.values():
            self._sync_segment(segment)

    def checkpoint(self) -> None:
        """Write the index of what is synced to a file, for the next start.

        Raises:
            OSError: The last one stays.
        """
        covered = {number: Covered(segment.synced) for number, segment in sorted(self._segments.items())}
        for name, place in self.index.snapshot():
            entry = covered.get(place.segment.segment_id)
            if entry is not None and place.offset < entry.end:
                entry.blocks.append(Known(place.offset, place.sequence, name, place.digest))
        self._directory.write_checkpoint(encode_checkpoint(self._sequence, covered.items(), self._directory.secret))

    def compact(self) -> bool:
        """Empty one full segment of which most is garbage; ``False`` if there is none.

        Raises:
            OSError: It stays as it is.
        """
        for segment in list(self._segments.values()):
            full = segment is not self._active.get(segment.kind.key)
            needed = segment.live_bytes + (0 if self._is_first(segment) else segment.tombstone_bytes)
            if full and needed < (1 - _GARBAGE) * (segment.end - PAGE):
                self._retire(segment, lambda place: True, segment.end)
                self.index.counters.compactions += 1
                return True
        return False

    def close(self) -> None:
        """Close every file and give the directory back; no reads may be running."""
        for segment in self._segments.values():
            segment.let_go()
        self._segments.clear()
        self._directory.close()

    # Inside

    def _segment_for(self, kind: KvFormat, size: int) -> Segment:
        segment = self._active.get(kind.key)
        if segment is not None and (segment.end + size <= self._segment_bytes or segment.end == PAGE):
            return segment
        if segment is not None:
            self._sync_segment(segment)  # from here on only what is active can be unsynced
        number = self._next_segment
        self._next_segment += 1
        aligned = self._direct and kind.block_bytes % PAGE == 0
        fd = self._directory.create_segment(number)
        try:
            try:
                os.pwrite(fd, encode_segment(kind, number, self._directory.secret), 0)
                os.fsync(fd)
            finally:
                os.close(fd)
            self._directory.sync()
            fd = self._directory.open_segment(number, direct=aligned)
        except OSError:
            with contextlib.suppress(OSError):  # each try on a full disk would leave a file
                self._directory.remove_segment(number)
            raise
        segment = Segment(number, kind, fd, PAGE, direct=aligned)
        self._segments[number] = self._active[kind.key] = segment
        return segment

    def _sync_segment(self, segment: Segment) -> None:
        try:
            synced = segment.sync(self._sequence, self._directory.secret)
        except OSError:
            self._doubt(segment)
            raise
        if synced:
            self._sequence += 1
            self.index.counters.syncs += 1

    def _doubt(self, segment: Segment) -> None:
        """Forget what a failed sync may have lost: the kernel says of the same pages only once that they are gone."""
        for name, place in self.index.snapshot():
            if place.segment is segment and place.offset >= segment.synced:
                self.index.drop(segment.kind, name, place)
        self._close_end(segment)
        with contextlib.suppress(OSError):  # a start would find what is whole of it, deletions of it apart
            segment.cut()

    def _make_room(self, size: int) -> None:
        """Drop oldest segments; leaves room for what :meth:`_retire` may copy, so that the bound always holds."""
        slack = self._segment_bytes // 2 + 2 * PAGE
        if self.full and self.used_bytes + self._directory.free_bytes() > self._room_when_full + self._segment_bytes:
            self.full = False
            log.warning("the disk of the disk tier has room again")
        limit, least = (self._limit, 1) if self.full else (self.max_bytes, 0)
        while len(self._segments) > least and self.used_bytes + size + slack > limit:
            oldest = self._segments[min(self._segments)]
            self._evict(oldest, lambda place: place.hot, min(oldest.end, self._segment_bytes) // 2)

    def _on_disk(self, size: int, work: Callable[[], T]) -> T:
        """Do what needs so much room on disk; while the disk is full, drop the oldest segments for it.

        Raises:
            OSError: It failed for another reason, or that gave no room.
        """
        freed = 0
        while True:
            try:
                return work()
            except OSError as error:
                if error.errno not in _FULL or len(self._segments) < 2 or freed > size + self._segment_bytes:
                    raise
                if not self.full:
                    log.warning(
                        "the disk of the disk tier is full at %d bytes of %d (%s): its oldest blocks make room",
                        self.used_bytes,
                        self.max_bytes,
                        error,
                    )
                self.full = True
                self.index.counters.write_errors += 1
                self._limit = self.used_bytes
                self._room_when_full = self.used_bytes + self._directory.free_bytes()
                oldest = self._segments[min(self._segments)]
                freed += oldest.end
                self._evict(oldest, lambda place: False, 0)  # there is no room for what was read, either

    def _evict(self, oldest: Segment, keep: Callable[[Location], bool], max_bytes: int) -> None:
        before = len(self.index)
        with self.leaving(oldest.kind) as offer:
            self._retire(oldest, keep, max_bytes, offer)
        self.index.counters.evictions += before - len(self.index)

    def _retire(
        self, segment: Segment, keep: Callable[[Location], bool], max_bytes: int, offer: Offer | None = None
    ) -> None:
        """Copy what is to be kept to the log's end, offer the rest to the tier behind, then delete a segment."""
        kind, size = segment.kind, disk_bytes(segment.kind)
        self._close_end(segment)
        with self._directory.reading(segment.segment_id) as fd:
            result = scan(fd, segment.segment_id, self._directory.secret)
        records = [] if result is None else result[1]
        is_first, carried = self._is_first(segment), False
        kept: list[tuple[Record, Location]] = []
        gone: list[tuple[Record, Location]] = []
        for offset, record in records:
            if record.type is RecordType.TOMBSTONE:
                if not is_first:
                    target = self._segment_for(kind, PAGE)
                    target.append([(record, EMPTY)], self._directory.secret)
                    carried = True
                continue
            if record.type is not RecordType.BLOCK:
                continue
            place = self.index.find(kind, record.block_hash)
            if place is None or place.segment is not segment or place.offset != offset:
                continue
            stays = keep(place) and (len(kept) + 1) * size <= max_bytes
            (kept if stays else gone).append((record, place))
        if kept or carried:
            self._copy(kind, kept)
        if offer is not None:
            wanted = offer.wanted([record.block_hash for record, _ in gone])
            for found in self._read_batches(kind, [item for item in gone if item[0].block_hash in wanted]):
                offer.take([record.block_hash for record, _, _ in found], [view for _, _, view in found])
        for _, record in records:
            place = self.index.find(kind, record.block_hash)
            if place is not None and place.segment is segment:
                self.index.drop(kind, record.block_hash, place)
        self._remove(segment)
        self._directory.sync()

    def _is_first(self, segment: Segment) -> bool:
        """Whether a segment is the oldest of its kind."""
        key = segment.kind.key
        return segment.segment_id == min(n for n, other in self._segments.items() if other.kind.key == key)

    def _copy(self, kind: KvFormat, kept: Sequence[tuple[Record, Location]]) -> None:
        moved: list[tuple[BlockHash, Location, Location]] = []
        for batch in self._read_batches(kind, kept):
            for record, place, view in batch:
                target = self._segment_for(kind, disk_bytes(kind))
                (offset,) = target.append([(record, view)], self._directory.secret)
                moved.append((record.block_hash, place, Location(target, offset, record.sequence, record.digest)))
        self.sync()  # what lies in the old segment goes only when its copies are safe, tombstones included
        for name, old, new in moved:
            self.index.move(kind, name, old, new)
        self.index.counters.moved += len(moved)

    def _read_batches(
        self, kind: KvFormat, blocks: Sequence[tuple[Record, Location]]
    ) -> Iterator[list[tuple[Record, Location, memoryview]]]:
        """Read blocks of a segment that is about to go; those that are damaged are lost, wherever they lie."""
        step, size, counters = max(1, _COPY_BYTES // disk_bytes(kind)), pages(kind.block_bytes), self.index.counters
        for at in range(0, len(blocks), step):
            batch = blocks[at : at + step]
            memory = memoryview(mmap.mmap(-1, len(batch) * size))  # aligned, and freed with its last user
            found: list[tuple[Record, Location, memoryview]] = []
            for i, (record, place) in enumerate(batch):
                view = memory[i * size : i * size + kind.block_bytes]
                try:
                    place.segment.read(place.offset + PAGE, [view])
                except OSError as error:
                    counters.read_errors += 1
                    if (more := self._unreadable.due()) is not None:
                        log.error("a block of a segment that goes cannot be read: %s%s", error, more)
                    continue
                if digest_of(view) == record.digest:
                    found.append((record, place, view))
                else:
                    counters.checksum_failures += 1
            if found:
                yield found

    def _close_end(self, segment: Segment) -> None:
        """Append no more to a segment."""
        if self._active.get(segment.kind.key) is segment:
            del self._active[segment.kind.key]

    def _remove(self, segment: Segment) -> None:
        self._directory.remove_segment(segment.segment_id)
        del self._segments[segment.segment_id]
        self._close_end(segment)
        segment.let_go()
