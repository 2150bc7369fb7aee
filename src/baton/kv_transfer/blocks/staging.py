"""Reads by way of host memory: blocks of another KV type than this instance's, and arenas the host cannot address.

Blocks of another type are converted out of the source's memory where that is mapped. Elsewhere their bytes arrive in a
staging area as they are at the source (checksums are of them) and are converted from there. Blocks for an arena in
device memory arrive in a staging area too, and those that are valid are copied to the device afterwards. Areas are
bounded, and used again.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from baton.kv_cache.arena import Arena
from baton.kv_cache.fingerprint import Fingerprint
from baton.kv_cache.layout import BLOCK_ALIGNMENT, SCALE_BYTES
from baton.kv_cache.reshard import CODE_BYTES, Casts, Segments, Spans, cast_rows, cast_spans
from baton.kv_transfer.native_copy import Cast, read_casting
from baton.kv_transfer.pipes.base import CastingReadPipe, DeviceReadPipe, ReadPipe
from baton.kv_transfer.streams import Wait
from baton.kv_transfer.types import BlockReads, Bytes, Generations, Ids, block_spans

AREA_BYTES = 8 << 20
"""Size of a staging area in bytes, a power of two. Reads are cut to it."""
MAX_AREAS = 8
"""Areas of one :class:`Staging`, and so reads by way of one at once; further ones wait."""
_ALIGNED = 4
"""Bytes of the largest number."""


class Staging:
    """Areas that blocks arrive in; made when they are needed, and kept until the fetcher ends. Thread safe.

    An owner without an area gets the next free one; no owner gets so many that none is left for a new one: reads from
    a source that hangs keep theirs until their deadlines. Areas must not be freed while a pipe is open: NIXL registers
    them.
    """

    def __init__(self, area_bytes: int = AREA_BYTES, max_areas: int = MAX_AREAS) -> None:
        self.area_bytes = area_bytes
        self._max = max_areas
        self._changed = threading.Condition()
        self._free: list[Bytes] = []
        self._lent: Counter[object] = Counter()
        self.num_areas = 0
        """Areas made so far."""

    def num_free(self) -> int:
        """Areas that are unused now."""
        with self._changed:
            return len(self._free)

    @contextlib.contextmanager
    def area(self, wait: Wait, owner: object) -> Iterator[Bytes]:
        """Lend an area, uint8 [area_bytes].

        Args:
            wait: Deadline and cancel flag.
            owner: The source that the area is used for.

        Raises:
            DeadlineError, CancelledError: None became free.
        """
        area = self._acquire_area(wait, owner)
        try:
            yield area
        finally:
            with self._changed:
                self._free.append(area)
                self._lent[owner] -= 1
                self._lent += Counter()  # without those that have none
                self._changed.notify_all()

    def _acquire_area(self, wait: Wait, owner: object) -> Bytes:
        with self._changed:
            while not (self._may_acquire(owner) and (self._free or self.num_areas < self._max)):
                wait.record_progress()
                wait.check("waiting for a staging area")
                self._changed.wait(wait.nap())
            self._lent[owner] += 1
            if self._free:
                return self._free.pop()
            self.num_areas += 1
            return _aligned(self.area_bytes)

    def _may_acquire(self, owner: object) -> bool:
        count = self._lent[owner]
        return not count or count < self._max // (len(self._lent) + 1)  # an equal part, and one for the next owner


class StagedReader:
    """Reads blocks of one source into this instance's arenas, converted and staged as they need it.

    Args:
        source: Fingerprint of the source's blocks.
        target: Fingerprint of this instance's blocks.
        arriving: Areas for blocks of another dtype that cannot be converted in place.
        leaving: Areas for blocks bound for an arena in device memory. Not those of ``arriving``: a read uses an area
            of each.
    """

    def __init__(self, source: Fingerprint, target: Fingerprint, arriving: Staging, leaving: Staging) -> None:
        self.casts = source.kv_dtype != target.kv_dtype
        """Whether the source's blocks are of another KV type."""
        self._arriving = arriving
        self._leaving = leaving

    def read(self, pipe: ReadPipe, reads: BlockReads, arena: Arena, wait: Wait) -> Cast:
        """Read blocks; on return nothing writes into the arena any more.

        Args:
            pipe: Pipe to the source.
            reads: Blocks to copy, in range; with ``casts`` if they are converted.
            arena: Arena of the target's rank.
            wait: Deadline and cancel flag.

        Raises:
            BatonError: As :meth:`ReadPipe.read`.
        """
        if arena.mapped:
            return self._read(pipe, reads, arena.blocks, wait)
        if isinstance(pipe, DeviceReadPipe) and not self.casts and pipe.reaches(arena):
            valid = pipe.read_device(reads, arena, wait)
            return Cast(valid, np.zeros(len(valid), dtype=np.bool_))
        total = _nothing_lost(len(reads))
        with self._leaving.area(wait, pipe) as area:
            batches = (
                _cast_batches(reads, area, target=True) if self.casts else _batches(reads, area, arena.block_bytes)
            )
            for batch in batches:
                came = self._read(pipe, batch.reads, batch.rows, wait)
                good = np.flatnonzero(came.valid)
                parts = [
                    batch.rows[good, at : at + size] for at, (_, size) in zip(batch.packed, batch.spans, strict=True)
                ]
                data = np.concatenate(parts, axis=1).reshape(-1)
                arena.write_from(data, block_spans(batch.local_ids[good], batch.spans[:, 0], batch.spans[:, 1]))
                total.valid[batch.where] &= came.valid
                total.out_of_range[batch.where] |= came.out_of_range
        return total

    def _read(self, pipe: ReadPipe, reads: BlockReads, local: Bytes, wait: Wait) -> Cast:
        """Read into host memory, uint8 [blocks, block_bytes]."""
        if not self.casts:
            valid = pipe.read(reads, local, wait)
            return Cast(valid, np.zeros(len(valid), dtype=np.bool_))
        if isinstance(pipe, CastingReadPipe):
            return pipe.read_cast(reads, local, wait)
        total = _nothing_lost(len(reads))
        with self._arriving.area(wait, pipe) as area:
            for batch in _cast_batches(reads, area, target=False):
                valid = pipe.read(batch.reads, batch.rows, wait)
                good = np.flatnonzero(valid)
                fence: Generations = np.zeros(len(batch.rows), np.uint64)
                taken = BlockReads(
                    good, fence[good], batch.local_ids[good], batch.reads.segments, casts=batch.reads.casts
                )
                made = read_casting(local, batch.rows, fence, taken, wait)
                valid[good] = made.valid
                total.valid[batch.where] &= valid
                total.out_of_range[batch.where.start + good] |= made.out_of_range
        return total


@dataclass(frozen=True, slots=True, eq=False)
class _Batch:
    """Part of a read, as much as fits into an area.

    Attributes:
        where: Slice of the read's blocks.
        reads: Reads of the blocks into the area, block i to row i. Their conversions read rows, or write them.
        rows: The area, uint8 [rows, bytes].
        local_ids: Blocks that the rows are copied to afterwards.
        spans: Bytes of the blocks beyond the area that a row holds.
        packed: Offset in a row of each of these spans, [m].
    """

    where: slice
    reads: BlockReads
    rows: Bytes
    local_ids: Ids
    spans: Spans
    packed: Ids


def _batches(reads: BlockReads, area: Bytes, block_bytes: int) -> Iterator[_Batch]:
    """Cut a read of bytes as they are so that each part fits into an area; ``block_bytes``: of whole blocks."""
    for some in _cut(reads.segments_of(block_bytes), len(area)):
        packed = np.cumsum(some[:, 2]) - some[:, 2]
        staged = np.column_stack((some[:, 0], packed, some[:, 2]))
        for where, part, rows in _rows_of(reads, area, int(some[:, 2].sum())):
            into = BlockReads(part.remote_ids, part.generations, np.arange(len(part)), staged, part.source_shard)
            yield _Batch(where, into, rows, part.local_ids, some[:, 1:], packed)


def _cast_batches(reads: BlockReads, area: Bytes, *, target: bool) -> Iterator[_Batch]:
    """Cut a read that converts so that what it reads, or writes (``target``), fits into an area part by part."""
    assert reads.casts is not None
    first = 2 if target else 0
    for casts in _cut_casts(reads.casts, len(area), target=target):
        spans = cast_spans(casts, target=target)
        packed, size = _pack(spans)
        staged = casts.copy()
        for column in (first, first + 1):
            at = casts[:, column]
            index = np.maximum(np.searchsorted(spans[:, 0], at, side="right") - 1, 0)
            staged[:, column] = np.where(at < 0, -1, packed[index] + at - spans[index, 0])
        source = spans if not target else cast_spans(casts, target=False)
        into = packed if not target else np.zeros(len(source), np.int64)
        segments = np.column_stack((source[:, 0], into, source[:, 1]))
        for where, part, rows in _rows_of(reads, area, size):
            ids = part.remote_ids, part.generations, np.arange(len(part))
            into_rows = BlockReads(*ids, segments, part.source_shard, casts=staged)
            yield _Batch(where, into_rows, rows, part.local_ids, spans, packed)


def _rows_of(reads: BlockReads, area: Bytes, size: int) -> Iterator[tuple[slice, BlockReads, Bytes]]:
    """Cut a read into as many blocks as an area has rows of ``size`` bytes; yields which, the read, and the rows."""
    # A power of two, so that all rows together are the whole area, whatever the blocks: pipes that register the
    # memory they read into know it again.
    rows = area.reshape(-1, 1 << max(BLOCK_ALIGNMENT - 1, size - 1).bit_length())
    for at in range(0, len(reads), len(rows)):
        part = reads.select(slice(at, at + len(rows)))
        yield slice(at, at + len(part)), part, rows


def _pack(spans: Spans) -> tuple[Ids, int]:
    """Put bytes of a block one behind the other, each aligned as it is in the block; returns places and total size."""
    places = np.empty(len(spans), np.int64)
    at = 0
    for index, (first, size) in enumerate(spans.tolist()):
        places[index] = at + (first - at) % _ALIGNED
        at = int(places[index]) + size
    return places, at


def _cut(segments: Segments, most: int) -> Iterator[Segments]:
    """Cut segments into groups of at most so many bytes."""
    if int(segments[:, 2].sum()) <= most:
        yield segments
        return
    group: list[tuple[int, int, int]] = []
    room = most
    for source, target, size in segments.tolist():
        done = 0
        while done < size:
            if not room:
                yield np.array(group, dtype=np.int64)
                group = []
                room = most
            step = min(size - done, room)
            group.append((source + done, target + done, step))
            done = done + step
            room = room - step
    if group:
        yield np.array(group, dtype=np.int64)


def _cut_casts(casts: Casts, most: int, *, target: bool) -> Iterator[Casts]:
    """Cut conversions, between rows, into groups that read, or write, at most so many bytes when they are packed."""
    at, code = (2, 7) if target else (0, 6)
    each = casts[:, 5] * CODE_BYTES[casts[:, code]] + np.where(casts[:, at + 1] < 0, 0, SCALE_BYTES)
    gap = 2 * _ALIGNED  # before the numbers and before the scales
    if int((each * casts[:, 4]).sum()) + gap * len(casts) <= most:
        yield casts
        return
    group: list[npt.NDArray[np.int64]] = []
    room = most
    for row, size in zip(casts, each.tolist(), strict=True):
        done = 0
        while done < row[4]:
            step = min(int(row[4]) - done, (room - gap) // size)
            if step < 1:
                if not group:
                    raise ValueError(f"an area of {most} bytes has no room for a row of {size}")
                yield np.array(group)
                group = []
                room = most
                continue
            group.append(cast_rows(row, done, step))
            done = done + step
            room = room - step * size - gap
    if group:
        yield np.array(group)


def _nothing_lost(count: int) -> Cast:
    return Cast(np.ones(count, dtype=np.bool_), np.zeros(count, dtype=np.bool_))


def _aligned(size: int) -> Bytes:
    raw = np.empty(size + BLOCK_ALIGNMENT, np.uint8)
    first = -int(raw.__array_interface__["data"][0]) % BLOCK_ALIGNMENT
    return raw[first : first + size]
