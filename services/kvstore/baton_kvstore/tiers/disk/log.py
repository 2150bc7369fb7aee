"""The disk tier's log of segments: one thread appends, deletes, moves and checkpoints; any thread reads.

Room is made by dropping the oldest segment, of any KV format: its blocks that were read since they were written are
first copied to the log's end, up to half a segment. If the disk is full before the size limit is reached, the limit is
lowered until there is free space again. Segments that are mostly garbage are compacted the same way. A copied record
keeps its sequence number, so of all records of a block the one with the highest number is valid. A tombstone is dropped
when no older segment of its KV format is left.
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
from baton_kvstore.tiers.disk.directory import CheckpointBlock, CheckpointSegment, Directory, encode_checkpoint, recover
from baton_kvstore.tiers.disk.index import DiskIndex, Location
from baton_kvstore.tiers.disk.segment import EMPTY, Record, RecordType, Segment, disk_bytes, encode_segment, scan
from baton_kvstore.tiers.tier import Leaving, Offer, no_next_tier
from baton_kvstore.types import PAGE, KvFormat, LogLimit, digest_of, pages

log = logging.getLogger(__name__)
T = TypeVar("T")

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})

_COPY_BYTES = 8 << 20
"""Size of the blocks that are copied or handed over at once, in bytes."""
_GARBAGE = 0.5
"""Share of garbage above which a segment is compacted."""
_TOMBSTONES = 256
"""Maximum number of tombstones written in one system call."""


class DiskLog:
    """Segments and index of one directory.

    Args:
        path: Path of the directory.
        max_bytes: Maximum total size of all segments, at any moment.
        segment_bytes: Maximum size of one segment.
        direct: Whether to bypass the page cache where blocks are whole pages.

    Attributes:
        max_bytes: Maximum total size of all segments.
        index: Index of the blocks.
        full: Whether the disk became full before ``max_bytes`` were used, and has no free space since.
        leaving: Opens the hand-over of blocks that are dropped to make room.

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
            recovered = recover(self._directory, direct=direct)
        except BaseException:
            self._directory.close()
            raise
        self._sequence = recovered.sequence
        self._segments = {segment.segment_id: segment for segment in recovered.segments}
        self._next_segment = recovered.next_segment
        self._active = {segment.kind.key: segment for segment in recovered.segments}
        self.index.counters.cut_bytes = recovered.cut_bytes
        for kind in {segment.kind for segment in recovered.segments}:
            self.index.add(kind, recovered.blocks[kind.key].items())

    @property
    def used_bytes(self) -> int:
        """Total size of all segments."""
        return sum(segment.end for segment in list(self._segments.values()))

    @property
    def num_segments(self) -> int:
        """Number of segment files."""
        return len(self._segments)

    def write(
        self, kind: KvFormat, hashes: Sequence[BlockHash], views: Sequence[memoryview], unwanted: set[BlockHash]
    ) -> list[bool]:
        """Append blocks without syncing them, and return for each whether it is stored now.

        Raises:
            OSError: Blocks that are not in the index were not written.
        """
        size = disk_bytes(kind)
        if 4 * (size + PAGE) > self.max_bytes:
            return [False] * len(hashes)
        # A second record of a block would supersede the first, and lose the block if it is torn.
        new = [i for i, name in enumerate(hashes) if self.index.find(kind, name) is None]
        done = 0
        while done < len(new):
            names = [hashes[i] for i in new[done:]]
            payloads = [views[i] for i in new[done:]]
            done += self._retry_when_full(size, functools.partial(self._write_batch, kind, names, payloads, unwanted))
        return [self.index.find(kind, name) is not None for name in hashes]

    def _write_batch(
        self, kind: KvFormat, hashes: Sequence[BlockHash], views: Sequence[memoryview], unwanted: set[BlockHash]
    ) -> int:
        """Append as many blocks as fit into one segment, and return their number."""
        size = disk_bytes(kind)
        self._make_room(min(len(hashes) * size, max(size, self._segment_bytes)))
        segment = self._segment_for(kind, size)
        count = min(len(hashes), max(1, (self._segment_bytes - segment.end) // size))
        self._append(segment, hashes[:count], views[:count], unwanted)
        return count

    def _append(
        self, segment: Segment, hashes: Sequence[BlockHash], views: Sequence[memoryview], unwanted: set[BlockHash]
    ) -> None:
        kind = segment.kind
        count = len(hashes)
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

    def append_tombstones(self, kind: KvFormat, hashes: Sequence[BlockHash]) -> None:
        """Append tombstones of blocks that were removed from the index, so that a restart does not find them.

        Raises:
            OSError: Some tombstones were not written.
        """
        step = max(1, min(_TOMBSTONES, self._segment_bytes // 4 // PAGE))
        for at in range(0, len(hashes), step):
            names = hashes[at : at + step]
            self._retry_when_full(len(names) * PAGE, functools.partial(self._append_tombstone_batch, kind, names))

    def _append_tombstone_batch(self, kind: KvFormat, names: Sequence[BlockHash]) -> None:
        self._make_room(len(names) * PAGE)
        segment = self._segment_for(kind, len(names) * PAGE)
        records = [Record(RecordType.TOMBSTONE, self._sequence + i, name, 0, bytes(16)) for i, name in enumerate(names)]
        self._sequence += len(names)
        segment.append([(record, EMPTY) for record in records], self._directory.secret)

    def clear(self, kind: KvFormat) -> None:
        """Delete the files of a KV format whose blocks were removed from the index.

        Raises:
            OSError: Some files may be left.
        """
        for segment in [segment for segment in self._segments.values() if segment.kind.key == kind.key]:
            self._remove_segment(segment)
        self._directory.sync()

    def sync(self) -> None:
        """Sync everything written so far to disk.

        Raises:
            OSError: The sync failed; written blocks may be lost.
        """
        for segment in self._segments.values():
            self._sync_segment(segment)

    def checkpoint(self) -> None:
        """Write the index of the synced blocks to the checkpoint file, for the next start.

        Raises:
            OSError: The previous checkpoint stays.
        """
        covered = {number: CheckpointSegment(segment.synced) for number, segment in sorted(self._segments.items())}
        for name, place in self.index.snapshot():
            entry = covered.get(place.segment.segment_id)
            if entry is not None and place.offset < entry.end:
                entry.blocks.append(CheckpointBlock(place.offset, place.sequence, name, place.digest))
        self._directory.write_checkpoint(encode_checkpoint(self._sequence, covered.items(), self._directory.secret))

    def compact(self) -> bool:
        """Compact one full segment that is mostly garbage; ``False`` if there is none.

        Raises:
            OSError: The segment stays.
        """
        for segment in list(self._segments.values()):
            full = segment is not self._active.get(segment.kind.key)
            needed = segment.live_bytes + (0 if self._is_first(segment) else segment.tombstone_bytes)
            if full and needed < (1 - _GARBAGE) * (segment.end - PAGE):
                self._retire_segment(segment, lambda place: True, segment.end)
                self.index.counters.compactions += 1
                return True
        return False

    def close(self) -> None:
        """Close all files and unlock the directory; no reads may be running."""
        for segment in self._segments.values():
            segment.release()
        self._segments.clear()
        self._directory.close()

    # Inside

    def _segment_for(self, kind: KvFormat, size: int) -> Segment:
        segment = self._active.get(kind.key)
        if segment is not None and (segment.end + size <= self._segment_bytes or segment.end == PAGE):
            return segment
        if segment is not None:
            self._sync_segment(segment)  # only the active segment can have unsynced records
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
            with contextlib.suppress(OSError):  # otherwise each attempt on a full disk leaves a file
                self._directory.remove_segment(number)
            raise
        segment = Segment(number, kind, fd, PAGE, direct=aligned)
        self._segments[number] = self._active[kind.key] = segment
        return segment

    def _sync_segment(self, segment: Segment) -> None:
        try:
            synced = segment.sync(self._sequence, self._directory.secret)
        except OSError:
            self._forget_unsynced(segment)
            raise
        if synced:
            self._sequence += 1
            self.index.counters.syncs += 1

    def _forget_unsynced(self, segment: Segment) -> None:
        """Drop the blocks that a failed sync may have lost: the kernel reports the loss of a page only once."""
        for name, place in self.index.snapshot():
            if place.segment is segment and place.offset >= segment.synced:
                self.index.drop(segment.kind, name, place)
        self._seal(segment)
        with contextlib.suppress(OSError):  # otherwise a restart finds intact records, but not their deletions
            segment.truncate_unsynced()

    def _make_room(self, size: int) -> None:
        """Drop the oldest segments; reserve room for what :meth:`_retire_segment` copies, so the limit holds."""
        slack = self._segment_bytes // 2 + 2 * PAGE
        if self.full and self.used_bytes + self._directory.free_bytes() > self._room_when_full + self._segment_bytes:
            self.full = False
            log.warning("the disk of the disk tier has room again")
        limit = self._limit if self.full else self.max_bytes
        min_segments = 1 if self.full else 0
        while len(self._segments) > min_segments and self.used_bytes + size + slack > limit:
            oldest = self._segments[min(self._segments)]
            self._evict_segment(oldest, lambda place: place.hot, min(oldest.end, self._segment_bytes) // 2)

    def _retry_when_full(self, size: int, work: Callable[[], T]) -> T:
        """Call ``work``, which needs ``size`` bytes; while the disk is full, drop the oldest segment and retry.

        Raises:
            OSError: ``work`` failed for another reason, or dropping segments gave no room.
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
                self._evict_segment(oldest, lambda place: False, 0)  # a full disk has no room for copies

    def _evict_segment(self, oldest: Segment, keep: Callable[[Location], bool], max_bytes: int) -> None:
        before = len(self.index)
        with self.leaving(oldest.kind) as offer:
            self._retire_segment(oldest, keep, max_bytes, offer)
        self.index.counters.evictions += before - len(self.index)

    def _retire_segment(
        self, segment: Segment, keep: Callable[[Location], bool], max_bytes: int, offer: Offer | None = None
    ) -> None:
        """Delete a segment after copying some blocks to the log's end and handing the others to the next tier.

        Args:
            segment: The segment to delete.
            keep: Returns whether a block is worth copying.
            max_bytes: Maximum size of the copied records.
            offer: Accepts the other blocks; ``None``: they are dropped.
        """
        kind = segment.kind
        size = disk_bytes(kind)
        self._seal(segment)
        with self._directory.reading(segment.segment_id) as fd:
            result = scan(fd, segment.segment_id, self._directory.secret)
        records = [] if result is None else result[1]
        is_first = self._is_first(segment)
        has_tombstones = False
        kept: list[tuple[Record, Location]] = []
        dropped: list[tuple[Record, Location]] = []
        for offset, record in records:
            if record.type is RecordType.TOMBSTONE:
                if not is_first:
                    target = self._segment_for(kind, PAGE)
                    target.append([(record, EMPTY)], self._directory.secret)
                    has_tombstones = True
                continue
            if record.type is not RecordType.BLOCK:
                continue
            place = self.index.find(kind, record.block_hash)
            if place is None or place.segment is not segment or place.offset != offset:
                continue
            stays = keep(place) and (len(kept) + 1) * size <= max_bytes
            (kept if stays else dropped).append((record, place))
        if kept or has_tombstones:
            self._copy_to_end(kind, kept)
        if offer is not None:
            wanted = offer.wanted([record.block_hash for record, _ in dropped])
            for batch in self._read_batches(kind, [item for item in dropped if item[0].block_hash in wanted]):
                offer.hand_over([record.block_hash for record, _, _ in batch], [view for _, _, view in batch])
        for _, record in records:
            place = self.index.find(kind, record.block_hash)
            if place is not None and place.segment is segment:
                self.index.drop(kind, record.block_hash, place)
        self._remove_segment(segment)
        self._directory.sync()

    def _is_first(self, segment: Segment) -> bool:
        """Whether a segment is the oldest of its KV format."""
        key = segment.kind.key
        return segment.segment_id == min(n for n, other in self._segments.items() if other.kind.key == key)

    def _copy_to_end(self, kind: KvFormat, kept: Sequence[tuple[Record, Location]]) -> None:
        moved: list[tuple[BlockHash, Location, Location]] = []
        for batch in self._read_batches(kind, kept):
            for record, place, view in batch:
                target = self._segment_for(kind, disk_bytes(kind))
                (offset,) = target.append([(record, view)], self._directory.secret)
                moved.append((record.block_hash, place, Location(target, offset, record.sequence, record.digest)))
        self.sync()  # the old segment is deleted only when copies and tombstones are safe
        for name, old, new in moved:
            self.index.move(kind, name, old, new)
        self.index.counters.moved += len(moved)

    def _read_batches(
        self, kind: KvFormat, blocks: Sequence[tuple[Record, Location]]
    ) -> Iterator[list[tuple[Record, Location, memoryview]]]:
        """Read blocks of a segment that will be deleted, in batches; damaged blocks are left out."""
        step = max(1, _COPY_BYTES // disk_bytes(kind))
        size = pages(kind.block_bytes)
        counters = self.index.counters
        for at in range(0, len(blocks), step):
            batch = blocks[at : at + step]
            memory = memoryview(mmap.mmap(-1, len(batch) * size))  # aligned, and freed with its last user
            intact: list[tuple[Record, Location, memoryview]] = []
            for i, (record, place) in enumerate(batch):
                view = memory[i * size : i * size + kind.block_bytes]
                try:
                    place.segment.read(place.offset + PAGE, [view])
                except OSError as error:
                    counters.read_errors += 1
                    if (more := self._unreadable.due()) is not None:
                        log.error("a block of a segment to be deleted cannot be read: %s%s", error, more)
                    continue
                if digest_of(view) == record.digest:
                    intact.append((record, place, view))
                else:
                    counters.checksum_failures += 1
            if intact:
                yield intact

    def _seal(self, segment: Segment) -> None:
        """Stop appending to a segment."""
        if self._active.get(segment.kind.key) is segment:
            del self._active[segment.kind.key]

    def _remove_segment(self, segment: Segment) -> None:
        self._directory.remove_segment(segment.segment_id)
        del self._segments[segment.segment_id]
        self._seal(segment)
        segment.release()
