"""Reads of blocks from segments, those that follow one another at once, in any thread."""

from __future__ import annotations

import contextlib
import logging
import mmap
from collections.abc import Sequence

from baton.types import BlockHash
from baton_kvstore.tiers.disk.format import PAGE, digest_of, disk_bytes, pages
from baton_kvstore.tiers.disk.index import DiskIndex, Location
from baton_kvstore.types import KvFormat

log = logging.getLogger(__name__)


def read_blocks(
    index: DiskIndex,
    kind: KvFormat,
    hashes: Sequence[BlockHash],
    into: Sequence[memoryview],
    damaged: list[tuple[KvFormat, BlockHash, Location]],
) -> list[bool]:
    """Read blocks and check them.

    Args:
        index: Where they lie.
        kind: What they are.
        hashes: Their names.
        into: Page-aligned buffers.
        damaged: Blocks that are not what they should be are added here.

    Returns:
        Which of them are right; what is not there is ``False`` too.
    """
    results = [False] * len(hashes)
    places = [index.find(kind.key, name) for name in hashes]
    first = 0
    while first < len(places):
        stop = first + 1
        while stop < len(places) and _follows(places[stop - 1], places[stop], kind):
            stop += 1
        part = slice(first, stop)
        results[part] = _read_run(index, kind, list(zip(hashes[part], places[part], into[part], strict=True)), damaged)
        first = stop
    return results


def _read_run(
    index: DiskIndex,
    kind: KvFormat,
    blocks: Sequence[tuple[BlockHash, Location | None, memoryview]],
    damaged: list[tuple[KvFormat, BlockHash, Location]],
) -> list[bool]:
    """Blocks whose records follow one another, in one system call."""
    start = blocks[0][1]
    if start is None or not start.segment.hold():
        return [False] * len(blocks)
    counters, size = index.counters, kind.block_bytes
    gap = pages(size) - size
    with contextlib.closing(mmap.mmap(-1, 2 * PAGE)) as scratch, memoryview(scratch) as skipped:
        buffers: list[memoryview] = []
        for _, _, view in blocks:
            buffers += [view, skipped[: gap + PAGE]] if gap else [view, skipped[:PAGE]]
        try:
            start.segment.read(start.offset + PAGE, buffers[:-1])
        except OSError as error:
            counters.read_errors += 1
            log.error("reading %d blocks from disk failed: %s", len(blocks), error)
            damaged += [(kind, name, place) for name, place, _ in blocks if place]
            return [False] * len(blocks)
        finally:
            start.segment.let_go()
            for buffer in buffers[1::2]:
                buffer.release()
    results = []
    for name, place, view in blocks:
        right = place is not None and digest_of(view) == place.digest
        if place is not None and right:
            place.hot = True
            counters.reads += 1
            counters.read_bytes += size
        else:
            counters.checksum_failures += 1
            log.error("a block on disk is damaged: %s", name.hex())
            damaged += [(kind, name, place)] if place else []
        results.append(right)
    return results


def _follows(before: Location | None, after: Location | None, kind: KvFormat) -> bool:
    if before is None or after is None or before.segment is not after.segment:
        return False
    return after.offset == before.offset + disk_bytes(kind)
