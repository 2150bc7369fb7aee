"""The chain of tiers below memory, the fastest first: which tier stores and serves which blocks.

A block is written to the first tier that accepts it (if that fails, to the next one), and also to every tier with
``write_all``. Blocks that a tier drops to make room go to the next one. Blocks that are read from a slow tier
repeatedly are copied back to the first. A tier that fails is skipped for a while.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import mmap
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

from baton.errors import DeadlineError, InternalError
from baton.types import BlockHash
from baton_kvstore.tiers.tier import LowerTier
from baton_kvstore.types import PAGE, KvFormat, TierListener, pages

log = logging.getLogger(__name__)

_REMEMBERED = 65536
"""Number of blocks whose reads from slow tiers are counted."""
_FINDERS = 2
_MAX_LOOKUPS = 64
"""Maximum number of waiting and running look-ups per tier; further ones are skipped and find nothing."""
_HAND_OVER_S = 5.0
"""Longest time, in seconds, that a tier waits for slower tiers to accept its blocks each time it makes room."""
_SHARE = 0.5
"""Share of a tier's queue for blocks from other tiers, so that blocks from memory never wait for them."""


@dataclass
class ChainCounters:
    """Numbers of blocks since start, unless a description says otherwise.

    Attributes:
        handed_over: Dropped by a faster tier and queued for a slower one.
        dropped: Dropped by a tier and accepted by no slower one.
        raised: Queued for the first tier because they were read from a slower one repeatedly.
        skipped_lookups: Number of look-ups that were not made or timed out.
    """

    handed_over: int = 0
    dropped: int = 0
    raised: int = 0
    skipped_lookups: int = 0


@dataclass(eq=False)
class Move:
    """Blocks of one KV format that are moving between tiers, and the deletions since the move began.

    Attributes:
        kind: KV format of the blocks.
        unwanted: Blocks that were deleted since.
        cleared: Whether all blocks of the KV format were deleted since.
    """

    kind: KvFormat
    unwanted: set[BlockHash] = field(default_factory=set)
    cleared: bool = False

    def remaining(self, hashes: Sequence[BlockHash]) -> list[int]:
        """Return the indices of the blocks that were not deleted since the move began."""
        return [i for i, name in enumerate(hashes) if not self.cleared and name not in self.unwanted]


@dataclass(eq=False, kw_only=True)
class _Write(Move):
    """Blocks that are written from memory.

    Attributes:
        done: Called at the end with one flag per block: whether some tier holds it.
        written: Indices of the blocks that some tier holds.
        pending: Number of outstanding answers, plus one until all writes are queued.
    """

    hashes: Sequence[BlockHash]
    views: Sequence[memoryview]
    done: Callable[[list[bool]], None]
    written: set[int] = field(default_factory=set)
    pending: int = 1


@dataclass(frozen=True)
class Link:
    """A tier and how the chain uses it.

    Attributes:
        write_all: Whether every block is written to the tier, not only those that no faster tier accepts.
        readers: Number of reader threads.
    """

    tier: LowerTier
    write_all: bool = False
    readers: int = 2


class Chain:
    """The tiers below memory. Methods are called in one event loop, unless documented otherwise.

    Args:
        links: Tiers, the fastest first; closed with the chain.
        lookup_timeout_s: Timeout of a look-up in shared tiers, in seconds.
        raise_after: Number of reads from a slower tier after which a block is copied to the first; 0: never.

    Attributes:
        tiers: Tiers, the fastest first.
        shared: Tiers that other nodes write to.
        write_all: Whether some tier stores every block.
    """

    def __init__(self, links: Sequence[Link], *, lookup_timeout_s: float, raise_after: int) -> None:
        self.tiers = [link.tier for link in links]
        self.shared = [tier for tier in self.tiers if tier.shared]
        self.counters = ChainCounters()
        self.write_all = any(link.write_all for link in links)
        self._links = links
        self._durable = next((tier for tier in self.tiers if tier.durable), None)
        self._lookup_timeout_s = lookup_timeout_s
        self._raise_after = raise_after
        self._readers = {
            link.tier.name: ThreadPoolExecutor(link.readers, f"kvstore {link.tier.name} read") for link in links
        }
        self._finders = {tier.name: ThreadPoolExecutor(_FINDERS, f"kvstore {tier.name} find") for tier in self.shared}
        self._finding = dict.fromkeys(self._finders, 0)
        self._lock = threading.Lock()
        self._moves: list[Move] = []
        self._reads: OrderedDict[bytes, int] = OrderedDict()
        for at, tier in enumerate(self.tiers[:-1]):
            tier.leaving = functools.partial(self._leaving, at)

    def listen(self, listener: TierListener) -> None:
        """Report the blocks of each tier to a listener, and then every change."""
        for tier in self.tiers:
            tier.listen(listener)

    def takes(self, kind: KvFormat) -> bool:
        """Whether some tier can store blocks of this KV format."""
        return any(tier.takes(kind) for tier in self.tiers)

    def holds(self, kind: KvFormat, block_hash: BlockHash) -> bool:
        """Whether a block can be read, as far as this node knows; does not block."""
        return self.fastest_tier(kind, block_hash) < len(self.tiers)

    def fastest_tier(self, kind: KvFormat, block_hash: BlockHash) -> int:
        """Return the index of the fastest tier that holds a block, or ``len(self.tiers)`` if none does."""
        return next((at for at, tier in enumerate(self.tiers) if tier.holds(kind, block_hash)), len(self.tiers))

    def surely_holds(self, kind: KvFormat, block_hash: BlockHash) -> bool:
        """Whether a tier holds a block that no other node can have deleted."""
        return any(tier.exact and tier.holds(kind, block_hash) for tier in self.tiers)

    def is_durable(self, kind: KvFormat, block_hash: BlockHash) -> bool:
        """Whether the durable tier surely holds a block, so it need not be written again."""
        tier = self._durable
        return tier is not None and tier.exact and tier.holds(kind, block_hash)

    def in_durable_tier(self, kind: KvFormat, block_hash: BlockHash) -> bool:
        """Whether the durable tier holds a block, synced or not."""
        return self._durable is not None and self._durable.holds(kind, block_hash)

    def write(
        self,
        kind: KvFormat,
        hashes: Sequence[BlockHash],
        views: Sequence[memoryview],
        done: Callable[[list[bool]], None],
        *,
        durable: bool = False,
    ) -> bool:
        """Queue blocks to be written; ``False`` if a queue is full.

        Args:
            kind: KV format of the blocks.
            hashes: Hashes of the blocks.
            views: Bytes of the blocks, which must not change until ``done`` is called.
            done: Called in any thread with one flag per block: whether some tier holds it.
            durable: Whether the durable tier must store the blocks too.
        """
        targets: list[int] = []
        for at, link in enumerate(self._links):
            wanted = not targets or link.write_all or (durable and link.tier is self._durable)
            if wanted and usable(link.tier, kind):
                targets.append(at)
        num_bytes = len(hashes) * kind.block_bytes
        if not all(self.tiers[at].room(num_bytes) for at in targets):
            return False
        write = _Write(kind, hashes=hashes, views=views, done=done)
        with self._lock:
            self._moves.append(write)
        indices = list(range(len(hashes)))
        if targets:
            first, *others = targets
            for at in others:
                self._queue_write(write, [self.tiers[at]], indices)
            self._queue_write(
                write, [t for at, t in enumerate(self.tiers) if at >= first and at not in others], indices
            )
        self._finish_answer(write)
        return True

    def _queue_write(self, write: _Write, tiers: Sequence[LowerTier], indices: Sequence[int]) -> None:
        """Queue blocks for the first tier that accepts them; what it cannot store goes on to the tiers after it."""
        for number, tier in enumerate(tiers, 1):
            if not usable(tier, write.kind):
                continue
            with self._lock:  # later deletions are queued behind this write
                names = [write.hashes[i] for i in indices]
                remaining = [indices[i] for i in write.remaining(names)]
                names = [write.hashes[i] for i in remaining]
                views = [write.views[i] for i in remaining]
                done = functools.partial(self._on_written, write, tiers[number:], remaining)
                if remaining and tier.write(write.kind, names, views, done):
                    write.pending += 1
                    return

    def _on_written(
        self, write: _Write, further: Sequence[LowerTier], indices: Sequence[int], results: Sequence[bool]
    ) -> None:
        """Handle a tier's answer, in the tier's thread."""
        with self._lock:
            write.written.update(i for i, ok in zip(indices, results, strict=True) if ok)
        refused = [i for i, ok in zip(indices, results, strict=True) if not ok]
        if refused:
            self._queue_write(write, further, refused)
        self._finish_answer(write)

    def _finish_answer(self, write: _Write) -> None:
        with self._lock:
            write.pending -= 1
            if write.pending:
                return
            self._moves.remove(write)
        write.done([i in write.written for i in range(len(write.hashes))])

    async def delete(self, kind: KvFormat, hashes: Sequence[BlockHash] | None) -> set[BlockHash]:
        """Delete blocks (``None``: all of the KV format) from every tier, and return those that were known.

        Raises:
            InternalError: The deletion did not reach every tier; some blocks may be found again.
        """
        answers: list[Future[bool]] = [Future() for _ in self.tiers]
        known: set[BlockHash] = set()
        with self._lock:  # a move is either queued before this, or sees the deletion
            for move in self._moves:
                if move.kind == kind:
                    move.unwanted.update(hashes or ())
                    move.cleared = move.cleared or hashes is None
            for tier, answer in zip(self.tiers, answers, strict=True):
                known.update(tier.delete(kind, hashes, answer.set_result))
        if not all([await _result(answer) for answer in answers]):
            raise InternalError("the deletion did not reach every tier")
        return known

    async def sync(self, deadline: float) -> bool:
        """Wait until all durable writes so far are synced; ``False`` if some may be lost.

        Raises:
            DeadlineError: The deadline passed first.
        """
        if self._durable is None:
            return False
        answer: Future[bool] = Future()
        self._durable.sync(answer.set_result)
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                return await _result(answer)
        except TimeoutError:
            raise DeadlineError("the lower tiers are too slow") from None

    async def find(
        self, kind: KvFormat, hashes: Sequence[BlockHash], deadline: float, *, again: bool = False
    ) -> set[BlockHash]:
        """Look up a chain's blocks in all shared tiers at once, for at most ``lookup_timeout_s``.

        Args:
            kind: KV format of the blocks.
            hashes: Hashes of the blocks, in order.
            deadline: ``time.monotonic()`` seconds.
            again: Whether to look up also blocks that this node already knows.

        Returns:
            The blocks that some tier holds.
        """
        loop = asyncio.get_running_loop()
        lookups: list[asyncio.Future[set[BlockHash]]] = []
        for tier in self.shared:
            if not usable(tier, kind):
                continue
            if self._finding[tier.name] >= _MAX_LOOKUPS:
                self.counters.skipped_lookups += 1
                continue
            self._finding[tier.name] += 1
            lookup = loop.run_in_executor(self._finders[tier.name], tier.find, kind, hashes, again)
            lookup.add_done_callback(functools.partial(self._end_lookup, tier.name))
            lookups.append(lookup)
        if not lookups:
            return set()
        timeout = min(self._lookup_timeout_s, deadline - time.monotonic())
        finished, slow = await asyncio.wait(lookups, timeout=max(0.0, timeout))
        self.counters.skipped_lookups += len(slow)
        return {name for lookup in finished if not lookup.exception() for name in lookup.result()}

    async def read(self, kind: KvFormat, hashes: Sequence[BlockHash], into: Sequence[memoryview]) -> list[bool]:
        """Read each block from the fastest tier that holds it; no tier writes into the buffers afterwards.

        Args:
            kind: KV format of the blocks.
            hashes: Hashes of the blocks.
            into: One page-aligned buffer of ``kind.block_bytes`` per block.

        Returns:
            One flag per block: whether its buffer was filled.
        """
        loop = asyncio.get_running_loop()
        results = [False] * len(hashes)
        tried: list[int] = [-1] * len(hashes)
        while True:
            groups: dict[int, list[int]] = {}
            for i, name in enumerate(hashes):
                if results[i]:
                    continue
                later = range(tried[i] + 1, len(self.tiers))
                at = next((at for at in later if self.tiers[at].holds(kind, name)), len(self.tiers))
                tried[i] = at
                if at < len(self.tiers):
                    groups.setdefault(at, []).append(i)
            if not groups:
                return results
            reads: list[tuple[list[int], asyncio.Future[list[bool]]]] = []
            for at, group in groups.items():
                pool = self._readers[self.tiers[at].name]
                step = max(1, -(-len(group) // self._links[at].readers))
                for part in (group[first : first + step] for first in range(0, len(group), step)):
                    names = [hashes[i] for i in part]
                    views = [into[i] for i in part]
                    reads.append((part, loop.run_in_executor(pool, self._read, at, kind, names, views)))
            await asyncio.wait(
                [read for _, read in reads]
            )  # wait for all, also after failures: they write into the buffers
            for part, read in reads:
                for i, right in zip(part, read.result(), strict=True):
                    results[i] = right

    async def close(self) -> None:
        """Finish queued writes and close, from the fastest tier to the slowest; no reads may be running."""
        for pool in (*self._readers.values(), *self._finders.values()):
            await asyncio.to_thread(pool.shutdown)
        for tier in self.tiers:
            await asyncio.to_thread(tier.close)

    # Inside

    def _read(self, at: int, kind: KvFormat, hashes: list[BlockHash], into: list[memoryview]) -> list[bool]:
        """Read from one tier, in a reader's thread."""
        with self._moving(kind) as move:
            results = self.tiers[at].read(kind, hashes, into)
            if at and self._raise_after:
                self._raise(
                    move, at, [(name, view) for name, view, ok in zip(hashes, into, results, strict=True) if ok]
                )
        return results

    def _raise(self, move: Move, at: int, blocks: Sequence[tuple[BlockHash, memoryview]]) -> None:
        """Copy repeatedly read blocks to the first tier, if its queue has room."""
        kind = move.kind
        first = next((tier for tier in self.tiers[:at] if usable(tier, kind)), None)
        if first is None:
            return
        often = [
            (name, view) for name, view in blocks if self._count_read(kind.key + name) and not first.holds(kind, name)
        ]
        if not often or not first.room(len(often) * kind.block_bytes, _SHARE):
            return
        names = [name for name, _ in often]
        copies = copies_of(kind, [view for _, view in often])
        self.counters.raised += self._queue(move, first, names, copies)

    def _count_read(self, key: bytes) -> bool:
        """Count a read of a block, and return whether the block reached ``raise_after``."""
        with self._lock:
            count = self._reads.pop(key, 0) + 1
            if count >= self._raise_after:
                return True
            self._reads[key] = count
            if len(self._reads) > _REMEMBERED:
                self._reads.popitem(last=False)
        return False

    @contextmanager
    def _moving(self, kind: KvFormat) -> Iterator[Move]:
        move = Move(kind)
        with self._lock:
            self._moves.append(move)
        try:
            yield move
        finally:
            with self._lock:
                self._moves.remove(move)

    @contextmanager
    def _leaving(self, at: int, kind: KvFormat) -> Iterator[_Offered]:
        """Open the hand-over of blocks that tier ``at`` drops, in that tier's thread."""
        with self._moving(kind) as move:
            yield _Offered(self, move, self.tiers[at + 1 :])

    def _queue(self, move: Move, tier: LowerTier, hashes: Sequence[BlockHash], views: Sequence[memoryview]) -> int:
        """Queue the blocks of a move that were not deleted since, in any thread, and return their number."""
        with self._lock:
            remaining = move.remaining(hashes)
            names = [hashes[i] for i in remaining]
            accepted = bool(remaining) and tier.write(move.kind, names, [views[i] for i in remaining], _ignore)
        return len(remaining) if accepted else 0

    def _end_lookup(self, name: str, lookup: asyncio.Future[set[BlockHash]]) -> None:
        self._finding[name] -= 1
        error = None if lookup.cancelled() else lookup.exception()
        if error is not None:
            log.error("looking for blocks in tier %s failed", name, exc_info=error)


class _Offered:
    """The :class:`~baton_kvstore.tiers.tier.Offer` of one tier to the slower ones; used in that tier's thread."""

    def __init__(self, chain: Chain, move: Move, tiers: Sequence[LowerTier]) -> None:
        self._queue = chain._queue
        self._counters = chain.counters
        self._move = move
        self._tiers = tiers
        self._deadline = time.monotonic() + _HAND_OVER_S

    def wanted(self, hashes: Sequence[BlockHash]) -> set[BlockHash]:
        kind = self._move.kind
        held = {name for name in hashes if any(tier.holds(kind, name) for tier in self._tiers)}
        if not any(usable(tier, kind) for tier in self._tiers):
            self._counters.dropped += len(hashes) - len(held)
            return set()
        return set(hashes) - held

    def hand_over(self, hashes: Sequence[BlockHash], views: Sequence[memoryview]) -> None:
        kind = self._move.kind
        for tier in self._tiers:
            left = self._deadline - time.monotonic()
            if not usable(tier, kind):
                continue
            if tier.wait_room(len(hashes) * kind.block_bytes, max(0.0, left), _SHARE):
                count = self._queue(self._move, tier, hashes, views)
                self._counters.handed_over += count
                if count or not self._move.remaining(hashes):
                    return
        self._counters.dropped += len(hashes)

    take = hand_over  # older name, for tiers of other packages


def usable(tier: LowerTier, kind: KvFormat) -> bool:
    """Whether a tier can store blocks of this KV format and is not resting."""
    return tier.takes(kind) and not tier.resting


def copies_of(kind: KvFormat, views: Sequence[memoryview]) -> list[memoryview]:
    """Copy blocks into new page-aligned memory, which is freed with its last user."""
    size = max(PAGE, pages(kind.block_bytes))
    memory = memoryview(mmap.mmap(-1, len(views) * size))
    copies = [memory[i * size : i * size + kind.block_bytes] for i in range(len(views))]
    for copy, view in zip(copies, views, strict=True):
        copy[:] = view
    return copies


async def _result(answer: Future[bool]) -> bool:
    """Await an answer from a tier's thread; cancelling the caller does not cancel the answer."""
    return await asyncio.shield(asyncio.wrap_future(answer))


def _ignore(results: list[bool]) -> None:
    """No caller waits for these blocks."""
