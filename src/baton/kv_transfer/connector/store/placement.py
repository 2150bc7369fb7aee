"""Which nodes of a store keep which blocks: rendezvous hashing, computed by every client for itself.

Each node scores each key, and the highest scores win. So all clients that know the same nodes agree without asking
anybody, and a node that comes or goes moves the keys that it wins or held, no others.

The unit is a segment: ``SEGMENT_BLOCKS`` consecutive blocks of a chain, counted from the chain's beginning and named by
the first one's hash. ``benchmarks/store/placement.py`` compares units.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import xxhash

from baton.kv_transfer.connector.store.backend import ChainPart
from baton.types import BlockHash

SEGMENT_BLOCKS = 32
"""All clients of a store must agree on it, so it is no option."""


@dataclass(frozen=True, slots=True)
class Segment:
    """The blocks of one segment that belong to a part.

    Attributes:
        key: Hash of the segment's first block, which may lie before the part.
        first: Where the segment begins in the chain.
        start: First block of the part in it, counted in the chain.
        stop: The block after the last one.
    """

    key: BlockHash
    first: int
    start: int
    stop: int


def segments_of(part: ChainPart, size: int = SEGMENT_BLOCKS) -> Iterator[Segment]:
    """Cut a part at the chain's segment borders."""
    start = part.start
    while start < part.stop:
        first = start - start % size
        stop = min(first + size, part.stop)
        yield Segment(part.hashes[first], first, start, stop)
        start = stop


class Placement:
    """Rendezvous hashing over some nodes.

    Args:
        nodes: Their names; the same spelling at every client.
    """

    def __init__(self, nodes: Iterable[str]) -> None:
        self.nodes = tuple(sorted(set(nodes)))
        self._seeds = [xxhash.xxh3_64_intdigest(name.encode()) for name in self.nodes]

    def ranked(self, key: bytes, count: int) -> tuple[str, ...]:
        """Return the ``count`` best nodes for a key, best first; all of them if there are fewer."""
        scores = [xxhash.xxh3_64_intdigest(key, seed) for seed in self._seeds]
        order = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)
        return tuple(self.nodes[i] for i in order[:count])
