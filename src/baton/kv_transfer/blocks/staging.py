"""Reads by way of host memory: blocks of another dtype than this instance's, and arenas that the host cannot address.

Blocks of another dtype are converted out of the source's memory where that is mapped. Elsewhere their bytes arrive in a
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

from baton.kv_cache.arena import Arena
from baton.kv_cache.fingerprint import Fingerprint
from baton.kv_cache.layout import BLOCK_ALIGNMENT, DTYPE_BYTES
from baton.kv_cache.reshard import Segments
from baton.kv_transfer.copy.block_copy import BlockCaster, Cast
from baton.kv_transfer.pipes.base import CastingReadPipe, ReadPipe
from baton.kv_transfer.protocol.deadline import Wait
from baton.kv_transfer.types import BlockReads, Bytes, Generations, Ids, block_spans

AREA_BYTES = 8 << 20
"""Of one staging area; a power of two. Reads are cut to it."""
MAX_AREAS = 8
"""Areas of one :class:`Staging`, and so reads by way of one at once; further ones wait."""


class Staging:
    """Areas that blocks arrive in; made when they are needed, and kept until the fetcher ends. Thread safe.

    Whoever has none gets the next one; nobody gets so many that a newcomer would find none: reads from a source that
    hangs keep theirs until their deadlines. They must not be freed while a pipe is open: NIXL registers them.
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
            owner: Whom it is for: the source.

        Raises:
            DeadlineError, CancelledError: None became free.
        """
        area = self._take(wait, owner)
        try:
            yield area
        finally:
            with self._changed:
                self._free.append(area)
                self._lent[owner] -= 1
                self._lent += Counter()  # without those that have none
                self._changed.notify_all()

    def _take(self, wait: Wait, owner: object) -> Bytes:
        with self._changed:
            while not (self._may_take(owner) and (self._free or self.num_areas < self._max)):
                wait.check("waiting for a staging area")
                self._changed.wait(wait.nap())
            self._lent[owner] += 1
            if self._free:
                return self._free.pop()
            self.num_areas += 1
            return _aligned(self.area_bytes)

    def _may_take(self, owner: object) -> bool:
        mine = self._lent[owner]
        return not mine or mine < self._max // (len(self._lent) + 1)  # an equal part, and one for who comes next


class StagedReader:
    """Reads blocks of one source into this instance's arenas, converted and staged as they need it.

    Args:
        source: What the blocks are at their source.
        target: What they become.
        arriving: Where blocks of another dtype arrive if they cannot be converted in place.
        leaving: Where blocks wait that an arena in device memory takes. Not the same as ``arriving``: a read holds an
            area of each.
    """

    def __init__(self, source: Fingerprint, target: Fingerprint, arriving: Staging, leaving: Staging) -> None:
        self._caster = None if source.kv_dtype == target.kv_dtype else BlockCaster(source.kv_dtype, target.kv_dtype)
        self._units = DTYPE_BYTES[source.kv_dtype], DTYPE_BYTES[target.kv_dtype]
        self._arriving, self._leaving = arriving, leaving

    @property
    def casts(self) -> bool:
        """Whether the source's blocks are of another dtype."""
        return self._caster is not None

    def read(self, pipe: ReadPipe, reads: BlockReads, arena: Arena, wait: Wait) -> Cast:
        """Read blocks; on return nothing writes into the arena any more.

        Args:
            pipe: To the source.
            reads: In range; if they are converted, with segments, all of whose bytes are those of the source's dtype.
            arena: Of the target's rank.
            wait: Deadline and cancel flag.

        Raises:
            BatonError: As :meth:`ReadPipe.read`.
        """
        if arena.mapped:
            return self._read(pipe, reads, arena.blocks, wait)
        total = _nothing_lost(len(reads))
        unit, made = self._units if self._caster is not None else (1, 1)
        with self._leaving.area(wait, pipe) as area:
            for batch in _batches(reads, reads.segments_of(arena.block_bytes), area, unit, made):
                came = self._read(pipe, batch.reads, batch.rows, wait)
                good = np.flatnonzero(came.valid)
                starts, sizes = (batch.segments[:, at] // unit * made for at in (1, 2))
                data = batch.rows[good, : int(sizes.sum())].reshape(-1)
                arena.write_from(data, block_spans(batch.local_ids[good], starts, sizes))
                total.valid[batch.where] &= came.valid
                total.out_of_range[batch.where] |= came.out_of_range
        return total

    def _read(self, pipe: ReadPipe, reads: BlockReads, local: Bytes, wait: Wait) -> Cast:
        """Read into host memory, uint8 [blocks, block_bytes]."""
        caster = self._caster
        if caster is None:
            valid = pipe.read(reads, local, wait)
            return Cast(valid, np.zeros(len(valid), dtype=np.bool_))
        if isinstance(pipe, CastingReadPipe):
            return pipe.read_cast(reads, local, caster, wait)
        total = _nothing_lost(len(reads))
        with self._arriving.area(wait, pipe) as area:
            for batch in _batches(reads, reads.segments_of(0), area, self._units[0], self._units[0]):
                valid = pipe.read(batch.reads, batch.rows, wait)
                good = np.flatnonzero(valid)
                fence: Generations = np.zeros(len(batch.rows), np.uint64)
                leaving = np.column_stack((batch.packed, batch.segments[:, 1:]))
                taken = BlockReads(good, fence[good], batch.local_ids[good], leaving)
                made = caster.read(local, batch.rows, fence, taken, wait)
                valid[good] = made.valid
                total.valid[batch.where] &= valid
                total.out_of_range[batch.where.start + good] |= made.out_of_range
        return total


@dataclass(frozen=True, slots=True, eq=False)
class _Batch:
    """Part of a read, as much as fits into an area.

    Attributes:
        where: Which of the read's blocks these are.
        reads: Into the area: block i to row i, segment after segment.
        rows: The area, uint8 [rows, bytes].
        local_ids: Where the rows go afterwards.
        segments: The read's segments that these are, int64 [m, 3].
        packed: Where each begins in a row, int64 [m], counted as they are at the source.
    """

    where: slice
    reads: BlockReads
    rows: Bytes
    local_ids: Ids
    segments: Segments
    packed: Ids


def _batches(reads: BlockReads, segments: Segments, area: Bytes, unit: int, made: int) -> Iterator[_Batch]:
    """Cut a read so that each part fits into an area; ``made``: bytes in it of every ``unit`` at the source."""
    for some in _cut(segments, len(area) // made * unit, unit):
        packed = np.cumsum(some[:, 2]) - some[:, 2]
        arriving = np.column_stack((some[:, 0], packed, some[:, 2]))
        # A power of two, so that all rows together are the whole area, whatever the blocks: pipes that register the
        # memory they read into know it again.
        row = 1 << max(BLOCK_ALIGNMENT - 1, int(some[:, 2].sum()) // unit * made - 1).bit_length()
        rows = area.reshape(-1, row)
        for at in range(0, len(reads), len(rows)):
            part = reads.take(slice(at, at + len(rows)))
            places = np.arange(len(part))
            staged = BlockReads(part.remote_ids, part.generations, places, arriving, part.source_shard)
            yield _Batch(slice(at, at + len(part)), staged, rows, part.local_ids, some, packed)


def _cut(segments: Segments, most: int, unit: int) -> Iterator[Segments]:
    """Cut segments into groups of at most so many bytes, between elements of ``unit`` bytes."""
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
                group, room = [], most
            step = min(size - done, room // unit * unit)
            group.append((source + done, target + done, step))
            done, room = done + step, room - step
    if group:
        yield np.array(group, dtype=np.int64)


def _nothing_lost(count: int) -> Cast:
    return Cast(np.ones(count, dtype=np.bool_), np.zeros(count, dtype=np.bool_))


def _aligned(size: int) -> Bytes:
    raw = np.empty(size + BLOCK_ALIGNMENT, np.uint8)
    first = -int(raw.__array_interface__["data"][0]) % BLOCK_ALIGNMENT
    return raw[first : first + size]
