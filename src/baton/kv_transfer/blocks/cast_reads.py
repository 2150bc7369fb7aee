"""Reads of blocks of another dtype than this instance's: converted in place, or by way of a staging area.

Where the source's memory is mapped, a read converts out of it. Elsewhere the bytes arrive in a staging area as they are
at the source (checksums are of them) and are converted from there; the area is bounded, and used again.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import numpy as np

from baton.kv_cache.fingerprint import Fingerprint
from baton.kv_cache.layout import BLOCK_ALIGNMENT, DTYPE_BYTES
from baton.kv_cache.reshard import Segments
from baton.kv_transfer.copy.dtype_cast import BlockCaster, Cast
from baton.kv_transfer.pipes.base import CastingReadPipe, ReadPipe
from baton.kv_transfer.protocol.deadline import Wait
from baton.kv_transfer.types import BlockReads, Bytes, Generations

AREA_BYTES = 8 << 20
"""Of one staging area; a power of two. Reads are cut to it."""
MAX_AREAS = 8
"""Areas of a fetcher, and so reads by way of one at once; further ones wait."""


class Staging:
    """Areas that blocks arrive in; made when they are needed, and kept until the fetcher ends. Thread safe.

    They must not be freed while a pipe is open: NIXL registers them.
    """

    def __init__(self, area_bytes: int = AREA_BYTES, max_areas: int = MAX_AREAS) -> None:
        self.area_bytes = area_bytes
        self._max = max_areas
        self._changed = threading.Condition()
        self._free: list[Bytes] = []
        self.num_areas = 0
        """Areas made so far."""

    def num_free(self) -> int:
        """Areas that nobody uses now."""
        with self._changed:
            return len(self._free)

    @contextlib.contextmanager
    def area(self, wait: Wait) -> Iterator[Bytes]:
        """Lend an area, uint8 [area_bytes].

        Raises:
            DeadlineError, CancelledError: None became free.
        """
        area = self._take(wait)
        try:
            yield area
        finally:
            with self._changed:
                self._free.append(area)
                self._changed.notify()

    def _take(self, wait: Wait) -> Bytes:
        with self._changed:
            while not self._free:
                if self.num_areas < self._max:
                    self.num_areas += 1
                    return _aligned(self.area_bytes)
                wait.check("waiting for a staging area")
                self._changed.wait(wait.nap())
            return self._free.pop()


class CastReads:
    """Reads blocks of one source's dtype.

    Args:
        source: What the blocks are at their source.
        target: What they become.
        staging: Where they arrive if they cannot be converted in place.
    """

    def __init__(self, source: Fingerprint, target: Fingerprint, staging: Staging) -> None:
        self._caster = BlockCaster(source.kv_dtype, target.kv_dtype)
        self._unit = DTYPE_BYTES[source.kv_dtype]
        self._staging = staging

    def read(self, pipe: ReadPipe, reads: BlockReads, local: Bytes, wait: Wait) -> Cast:
        """Read blocks and convert them; on return nothing writes into ``local`` any more.

        Args:
            pipe: To the source.
            reads: With segments, all of whose bytes are those of the source's dtype.
            local: uint8 [blocks, block_bytes], the blocks of the target's rank.
            wait: Deadline and cancel flag.

        Raises:
            BatonError: As :meth:`ReadPipe.read`.
        """
        if isinstance(pipe, CastingReadPipe):
            return pipe.read_cast(reads, local, self._caster, wait)
        count = len(reads)
        cast = Cast(np.ones(count, dtype=np.bool_), np.zeros(count, dtype=np.bool_))
        with self._staging.area(wait) as area:
            for segments in _cut(reads.segments_of(0), len(area), self._unit):
                self._by_way_of(area, pipe, reads, segments, local, cast, wait)
        return cast

    def _by_way_of(
        self, area: Bytes, pipe: ReadPipe, reads: BlockReads, segments: Segments, local: Bytes, cast: Cast, wait: Wait
    ) -> None:
        """Read segments that fit into an area, so many blocks at a time as fit, and convert those that are valid."""
        packed = np.cumsum(segments[:, 2]) - segments[:, 2]
        arriving = np.column_stack((segments[:, 0], packed, segments[:, 2]))
        leaving = np.column_stack((packed, segments[:, 1], segments[:, 2]))
        # A power of two, so that all rows together are the whole area, whatever the blocks: pipes that register the
        # memory they read into know it again.
        row = 1 << max(BLOCK_ALIGNMENT - 1, int(segments[:, 2].sum()) - 1).bit_length()
        rows = area.reshape(-1, row)
        for at in range(0, len(reads), len(rows)):
            part = reads.take(slice(at, at + len(rows)))
            places = np.arange(len(part))
            staged = BlockReads(part.remote_ids, part.generations, places, arriving, part.source_shard)
            came = pipe.read(staged, rows, wait)
            good = places[came]
            fence: Generations = np.zeros(len(rows), np.uint64)
            made = self._caster.read(
                local, rows, fence, BlockReads(good, fence[good], part.local_ids[good], leaving), wait
            )
            came[good] = made.valid
            cast.valid[at : at + len(part)] &= came
            cast.out_of_range[at + good] |= made.out_of_range


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


def _aligned(size: int) -> Bytes:
    raw = np.empty(size + BLOCK_ALIGNMENT, np.uint8)
    first = -int(raw.__array_interface__["data"][0]) % BLOCK_ALIGNMENT
    return raw[first : first + size]
