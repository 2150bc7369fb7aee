"""Which block lies where on disk: shared by the thread that writes and those that look and read."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from baton.types import BlockHash
from baton_kvstore.tiers.disk.segment import Segment
from baton_kvstore.types import Listeners, TierListener


@dataclass(eq=False, slots=True)
class Location:
    """Where a block's record is.

    Attributes:
        hot: Read since it was written: worth being kept when its segment goes.
    """

    segment: Segment
    offset: int
    sequence: int
    digest: bytes
    hot: bool = False


@dataclass
class DiskCounters:
    """Since start; blocks unless a name says otherwise."""

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


@dataclass
class DiskIndex:
    """Blocks by kind and hash. Every method may be called from any thread."""

    counters: DiskCounters = field(default_factory=DiskCounters)

    def __post_init__(self) -> None:
        self._kinds: dict[bytes, dict[BlockHash, Location]] = {}
        self._mutex = threading.Lock()
        self._listeners = Listeners("disk")

    def __len__(self) -> int:
        with self._mutex:
            return sum(len(blocks) for blocks in self._kinds.values())

    def listen(self, listener: TierListener) -> None:
        """Tell a listener what is there, and then every change."""
        with self._mutex:
            for blocks in self._kinds.values():
                if blocks:
                    listener(next(iter(blocks.values())).segment.kind, list(blocks), self._listeners.tier, True)
            self._listeners.add(listener)

    def find(self, key: bytes, block_hash: BlockHash) -> Location | None:
        """Return where a block is."""
        with self._mutex:
            return self._kinds.get(key, {}).get(block_hash)

    def hashes(self, key: bytes) -> list[BlockHash]:
        """Return a kind's blocks."""
        with self._mutex:
            return list(self._kinds.get(key, {}))

    def add(
        self, key: bytes, blocks: Iterable[tuple[BlockHash, Location]], size: int, unwanted: set[BlockHash]
    ) -> None:
        """Make blocks findable that are newer than what is known of them.

        Args:
            key: Their kind.
            blocks: Hashes and places.
            size: That each takes on disk.
            unwanted: Blocks deleted meanwhile, which stay unfindable.
        """
        with self._mutex:
            known = self._kinds.setdefault(key, {})
            new: list[BlockHash] = []
            for block_hash, location in blocks:
                old = known.get(block_hash)
                if block_hash not in unwanted and (old is None or old.sequence < location.sequence):
                    if old is not None:
                        old.segment.live_bytes -= size
                    else:
                        new.append(block_hash)
                    known[block_hash] = location
                    location.segment.live_bytes += size
            if new and self._listeners:
                self._listeners.tell(known[new[0]].segment.kind, new, True)

    def move(self, key: bytes, block_hash: BlockHash, old: Location, new: Location, size: int) -> None:
        """Let a block be found elsewhere, unless it was deleted meanwhile."""
        with self._mutex:
            known = self._kinds.get(key, {})
            if known.get(block_hash) is old:
                known[block_hash] = new
                new.segment.live_bytes += size
                old.segment.live_bytes -= size

    def hide(
        self, key: bytes, hashes: Sequence[BlockHash] | None, size: int, unwanted: Iterable[set[BlockHash]]
    ) -> list[BlockHash]:
        """Make blocks unfindable (``None``: all of the kind) and return those that could be found.

        Args:
            key: Their kind.
            hashes: The blocks.
            size: That each takes on disk.
            unwanted: Of writes on their way: told not to make these blocks findable again.
        """
        with self._mutex:
            known = self._kinds.get(key, {})
            gone = list(known) if hashes is None else hashes
            for names in unwanted:
                names.update(gone)
            found = [name for name in gone if name in known]
            for name in found:
                place = known.pop(name)
                place.segment.live_bytes -= size
            if found and self._listeners:
                self._listeners.tell(place.segment.kind, found, False)
            return found

    def drop(self, key: bytes, block_hash: BlockHash, location: Location, size: int) -> bool:
        """Forget a block if it is still there; ``False`` if it is not."""
        with self._mutex:
            known = self._kinds.get(key, {})
            if known.get(block_hash) is not location:
                return False
            del known[block_hash]
            location.segment.live_bytes -= size
            self._listeners.tell(location.segment.kind, [block_hash], False)
            return True

    def snapshot(self) -> list[tuple[BlockHash, Location]]:
        """Return every block and its place at one moment."""
        with self._mutex:
            return [item for blocks in self._kinds.values() for item in blocks.items()]
