"""The index of blocks on disk, shared by the writer's thread and reading threads."""

from __future__ import annotations

import contextlib
import logging
import mmap
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from baton.types import BlockHash
from baton_kvstore.tiers.disk.segment import Segment, disk_bytes
from baton_kvstore.types import PAGE, KvFormat, Listeners, LogLimit, TierListener, by_kind, digest_of, pages

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Location:
    """Location of a block's record.

    Attributes:
        segment: Segment that contains the record.
        offset: Offset of the record in the segment.
        sequence: Sequence number of the record.
        digest: XXH3-128 digest of the payload.
        hot: Whether the block was read since it was written, so it is copied when its segment is dropped.
    """

    segment: Segment
    offset: int
    sequence: int
    digest: bytes
    hot: bool = False

    def follows(self, other: Location) -> bool:
        """Whether the record directly follows another one on disk."""
        return self.segment is other.segment and self.offset == other.offset + disk_bytes(self.segment.kind)


@dataclass
class DiskCounters:
    """Numbers of blocks since start, unless a name says otherwise."""

    writes: int = 0
    write_errors: int = 0
    reads: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    checksum_failures: int = 0
    read_errors: int = 0
    evictions: int = 0
    moved: int = 0
    compactions: int = 0
    syncs: int = 0
    cut_bytes: int = 0


class DiskIndex:
    """Locations of blocks by KV format and hash. Methods may be called from any thread."""

    def __init__(self) -> None:
        self.counters = DiskCounters()
        self._kinds: dict[bytes, dict[BlockHash, Location]] = {}
        self._mutex = threading.Lock()
        self._listeners = Listeners("disk")
        self._unreadable = LogLimit()
        self._broken = LogLimit()
        self._damaged: list[tuple[KvFormat, BlockHash, Location]] = []

    def __len__(self) -> int:
        with self._mutex:
            return sum(len(blocks) for blocks in self._kinds.values())

    def listen(self, listener: TierListener) -> None:
        """Report all blocks to a listener, and then every change."""
        with self._mutex:
            blocks = (item for kind in self._kinds.values() for item in kind.items())
            self._listeners.add(listener, by_kind((place.segment.kind, name) for name, place in blocks))

    def find(self, kind: KvFormat, block_hash: BlockHash) -> Location | None:
        """Return the location of a block, or ``None``."""
        with self._mutex:
            return self._kinds.get(kind.key, {}).get(block_hash)

    def hashes(self, kind: KvFormat) -> list[BlockHash]:
        """Return the hashes of a KV format's blocks."""
        with self._mutex:
            return list(self._kinds.get(kind.key, {}))

    def add(
        self, kind: KvFormat, blocks: Iterable[tuple[BlockHash, Location]], unwanted: Iterable[BlockHash] = ()
    ) -> None:
        """Add blocks whose records are newer than the known ones, except those in ``unwanted``."""
        size = disk_bytes(kind)
        new: list[BlockHash] = []
        with self._mutex:
            known = self._kinds.setdefault(kind.key, {})
            for block_hash, location in blocks:
                old = known.get(block_hash)
                if block_hash not in unwanted and (old is None or old.sequence < location.sequence):
                    if old is not None:
                        old.segment.live_bytes -= size
                    else:
                        new.append(block_hash)
                    known[block_hash] = location
                    location.segment.live_bytes += size
            self._listeners.notify(kind, new, True)

    def move(self, kind: KvFormat, block_hash: BlockHash, old: Location, new: Location) -> None:
        """Change the location of a block, unless it was deleted meanwhile."""
        with self._mutex:
            known = self._kinds.get(kind.key, {})
            if known.get(block_hash) is old:
                known[block_hash] = new
                new.segment.live_bytes += disk_bytes(kind)
                old.segment.live_bytes -= disk_bytes(kind)

    def hide(
        self, kind: KvFormat, hashes: Sequence[BlockHash] | None, unwanted: Iterable[set[BlockHash]]
    ) -> list[BlockHash]:
        """Remove blocks from the index and return those that were in it.

        Args:
            kind: KV format of the blocks.
            hashes: Hashes of the blocks; ``None``: all of the KV format.
            unwanted: The ``unwanted`` sets of unfinished writes; the blocks are added to them.
        """
        with self._mutex:
            known = self._kinds.get(kind.key, {})
            names = list(known) if hashes is None else hashes
            for unwanted_names in unwanted:
                unwanted_names.update(names)
            removed = [name for name in dict.fromkeys(names) if name in known]  # a caller may name a block twice
            for name in removed:
                known.pop(name).segment.live_bytes -= disk_bytes(kind)
            self._listeners.notify(kind, removed, False)
            return removed

    def drop(self, kind: KvFormat, block_hash: BlockHash, location: Location) -> bool:
        """Remove a block if it is still at this location; ``False`` if it is not."""
        with self._mutex:
            known = self._kinds.get(kind.key, {})
            if known.get(block_hash) is not location:
                return False
            del known[block_hash]
            location.segment.live_bytes -= disk_bytes(kind)
            self._listeners.notify(kind, [block_hash], False)
            return True

    def snapshot(self) -> list[tuple[BlockHash, Location]]:
        """Return all blocks and their locations at one moment."""
        with self._mutex:
            return [item for blocks in self._kinds.values() for item in blocks.items()]

    def read(self, kind: KvFormat, hashes: Sequence[BlockHash], into: Sequence[memoryview]) -> list[bool]:
        """Read and check blocks; adjacent records are read in one system call.

        Args:
            kind: KV format of the blocks.
            hashes: Hashes of the blocks.
            into: One page-aligned buffer per block.

        Returns:
            One flag per block; ``False``: missing, or damaged (see :meth:`forget_damaged`).
        """
        results = [False] * len(hashes)
        places = [(i, place) for i, name in enumerate(hashes) if (place := self.find(kind, name)) is not None]
        runs: list[list[tuple[int, Location]]] = []
        for i, place in places:
            if runs and place.follows(runs[-1][-1][1]):
                runs[-1].append((i, place))
            else:
                runs.append([(i, place)])
        for run in runs:
            rights = self._read_run(kind, [(hashes[i], place, into[i]) for i, place in run])
            for (i, _), right in zip(run, rights, strict=True):
                results[i] = right
        return results

    def forget_damaged(self) -> list[tuple[KvFormat, BlockHash]]:
        """Remove the blocks that were damaged in reads since the last call, and return them for deletion from disk."""
        removed = []
        while self._damaged:
            kind, name, place = self._damaged.pop()
            if self.drop(kind, name, place):
                removed.append((kind, name))
        return removed

    def _read_run(self, kind: KvFormat, blocks: Sequence[tuple[BlockHash, Location, memoryview]]) -> list[bool]:
        """Read blocks with adjacent records in one system call."""
        start = blocks[0][1]
        if not start.segment.acquire():
            return [False] * len(blocks)
        counters = self.counters
        size = kind.block_bytes
        gap = pages(size) - size
        with contextlib.closing(mmap.mmap(-1, 2 * PAGE)) as scratch, memoryview(scratch) as skipped:
            buffers: list[memoryview] = []
            for _, _, view in blocks:
                buffers += [view, skipped[: gap + PAGE]]
            try:
                start.segment.read(start.offset + PAGE, buffers[:-1])
            except OSError as error:
                counters.read_errors += 1
                if (more := self._unreadable.due()) is not None:
                    log.error("reading %d blocks from disk failed: %s%s", len(blocks), error, more)
                self._damaged += [(kind, name, place) for name, place, _ in blocks]
                return [False] * len(blocks)
            finally:
                start.segment.release()
                for buffer in buffers[1::2]:
                    buffer.release()
        results = []
        for name, place, view in blocks:
            right = digest_of(view) == place.digest
            if right:
                place.hot = True
                counters.reads += 1
                counters.read_bytes += size
            else:
                counters.checksum_failures += 1
                if (more := self._broken.due()) is not None:
                    log.error("a block on disk is damaged: %s%s", name.hex(), more)
                self._damaged.append((kind, name, place))
            results.append(right)
        return results
