"""Blocks on their way from one tier to another."""

from __future__ import annotations

import functools
import mmap
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from baton.types import BlockHash
from baton_kvstore.tiers.tier import LowerTier
from baton_kvstore.types import PAGE, KvFormat, pages

_HAND_OVER_S = 5.0
"""Longest time that a tier waits, each time it makes room, for the next ones to take what it drops."""
SHARE = 0.5
"""Of a tier's queue, for blocks that do not come from memory: those of memory must not wait for them."""


@dataclass
class ChainCounters:
    """Since start; blocks.

    Attributes:
        handed_over: Queued for a slower tier when a faster one dropped them.
        dropped: Not taken then by any.
        raised: Queued for the first tier because they were read from a slower one again.
        skipped_lookups: Look-ups not made, or too slow.
    """

    handed_over: int = 0
    dropped: int = 0
    raised: int = 0
    skipped_lookups: int = 0


@dataclass(eq=False)
class Move:
    """Blocks of one kind on their way, and what was deleted since it began."""

    kind: KvFormat
    unwanted: set[BlockHash] = field(default_factory=set)
    cleared: bool = False

    def kept(self, hashes: Sequence[BlockHash]) -> list[int]:
        """Return which blocks were not deleted meanwhile, as indices."""
        return [i for i, name in enumerate(hashes) if not self.cleared and name not in self.unwanted]


class Offered:
    """What one tier drops, for those behind it; in that tier's thread. See :class:`baton_kvstore.tiers.tier.Offer`."""

    def __init__(
        self,
        move: Move,
        tiers: Sequence[LowerTier],
        queue: Callable[[Move, LowerTier, Sequence[BlockHash], Sequence[memoryview]], int],
        counters: ChainCounters,
    ) -> None:
        self._move, self._tiers, self._queue, self._counters = move, tiers, queue, counters
        self._deadline = time.monotonic() + _HAND_OVER_S

    def wanted(self, hashes: Sequence[BlockHash]) -> set[BlockHash]:
        """Return which of them a slower tier could take and does not have."""
        kind = self._move.kind
        held = {name for name in hashes if any(tier.holds(kind, name) for tier in self._tiers)}
        if not any(usable(tier, kind) for tier in self._tiers):
            self._counters.dropped += len(hashes) - len(held)
            return set()
        return set(hashes) - held

    def take(self, hashes: Sequence[BlockHash], views: Sequence[memoryview]) -> None:
        """Queue blocks for the first slower tier that has room in time."""
        kind = self._move.kind
        for tier in self._tiers:
            left = self._deadline - time.monotonic()
            if not usable(tier, kind):
                continue
            if tier.wait_room(len(hashes) * kind.block_bytes, max(0.0, left), SHARE):
                taken = self._queue(self._move, tier, hashes, views)
                self._counters.handed_over += taken
                if taken or not self._move.kept(hashes):
                    return
        self._counters.dropped += len(hashes)


class WriteCascade:
    """One write on its way down the tiers: what one refuses is offered to the next, unless it was deleted meanwhile.

    Args:
        move: Hears of deletions; told of them under ``lock``.
        tiers: Those that may be tried, the fastest first.
        lock: Held by a deletion while all tiers are told.
        done: Told, in any thread, which blocks some tier has got.
    """

    def __init__(
        self, move: Move, tiers: Sequence[LowerTier], lock: threading.Lock, done: Callable[[list[bool]], None]
    ) -> None:
        self._move, self._left, self._lock, self._done = move, list(tiers), lock, done

    def go_on(self, hashes: Sequence[BlockHash], views: Sequence[memoryview]) -> None:
        """Queue blocks, whose bytes stay as they are until ``done``, for the next tier."""
        while self._left:
            tier = self._left.pop(0)
            if not usable(tier, self._move.kind):
                continue
            with self._lock:  # what is deleted from here on is queued behind this
                kept = self._move.kept(hashes)
                names, bytes_ = [hashes[i] for i in kept], [views[i] for i in kept]
                told = functools.partial(self._written, hashes, views, kept)
                taken = bool(kept) and tier.write(self._move.kind, names, bytes_, told)
            if taken:
                return
        self._done([False] * len(hashes))

    def _written(
        self,
        hashes: Sequence[BlockHash],
        views: Sequence[memoryview],
        kept: Sequence[int],
        results: Sequence[bool],
    ) -> None:
        """Hear, in a tier's thread, what it has of the blocks ``kept``."""
        there = {i for i, ok in zip(kept, results, strict=True) if ok}
        left = [i for i in kept if i not in there]
        outer = self._done

        def rest(more: list[bool]) -> None:
            there.update(i for i, ok in zip(left, more, strict=True) if ok)
            outer([i in there for i in range(len(hashes))])

        if left:
            self._done = rest
            self.go_on([hashes[i] for i in left], [views[i] for i in left])
        else:
            rest([])


class Joint:
    """One answer of several tiers: per block whether any (``every``: whether each) said yes."""

    def __init__(self, count: int, size: int, done: Callable[[list[bool]], None], *, every: bool = False) -> None:
        self._left, self._done, self._every = count, done, every
        self._results = [every] * size
        self._lock = threading.Lock()
        if not count:
            done(self._results)

    def done(self, results: Sequence[bool]) -> None:
        """Hear of one tier."""
        with self._lock:
            pairs = zip(self._results, results, strict=True)
            self._results = [a and b if self._every else a or b for a, b in pairs]
            self._left -= 1
            last = not self._left
        if last:
            self._done(self._results)


def usable(tier: LowerTier, kind: KvFormat) -> bool:
    """Whether a tier takes such blocks, and is not left alone."""
    return tier.takes(kind) and not tier.resting


def copies_of(kind: KvFormat, views: Sequence[memoryview]) -> list[memoryview]:
    """Copy blocks into memory of their own, aligned as a disk wants it and freed with its last user."""
    size = max(PAGE, pages(kind.block_bytes))
    memory = memoryview(mmap.mmap(-1, len(views) * size))
    copies = [memory[i * size : i * size + kind.block_bytes] for i in range(len(views))]
    for copy, view in zip(copies, views, strict=True):
        copy[:] = view
    return copies
