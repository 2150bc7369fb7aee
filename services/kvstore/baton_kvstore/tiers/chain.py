"""The tiers behind memory, the fastest first: who gets which blocks, and who is asked for them.

A block goes to the first tier that takes it (what that refuses, to the next), and at once to every tier that wants
everything. What a tier drops to make room goes to the next one. What is read from a slow tier again and again goes back
to the first. Tiers that fail rest for a while; meanwhile it is as if they were not there.
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
"""Blocks of which reads from slow tiers are counted."""
_FINDERS = 2
_MAX_LOOKUPS = 64
"""Waiting or running, per tier; more are not made, as if nothing had been found."""
_HAND_OVER_S = 5.0
"""Longest time that a tier waits, each time it makes room, for the next ones to take what it drops."""
_SHARE = 0.5
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


@dataclass(eq=False, kw_only=True)
class _Write(Move):
    """Blocks from memory.

    Attributes:
        done: Told in the end which of them some tier has got.
        got: Indices of those.
        pending: Answers that are still to come; one is the caller's, when all tiers were given theirs.
    """

    hashes: Sequence[BlockHash]
    views: Sequence[memoryview]
    done: Callable[[list[bool]], None]
    got: set[int] = field(default_factory=set)
    pending: int = 1


@dataclass(frozen=True)
class Link:
    """A tier with what the chain does with it.

    Attributes:
        write_all: Every block is written here, not only those that no faster tier keeps.
        readers: Threads that read.
    """

    tier: LowerTier
    write_all: bool = False
    readers: int = 2


class Chain:
    """Tiers in order. Methods are called in one event loop, unless they say otherwise.

    Args:
        links: The fastest first; closed with this.
        lookup_timeout_s: Longest time that a look-up may take.
        raise_after: Reads from a slower tier after which a block goes to the first; 0: never.
    """

    def __init__(self, links: Sequence[Link], *, lookup_timeout_s: float, raise_after: int) -> None:
        self.tiers = [link.tier for link in links]
        self.shared = [tier for tier in self.tiers if tier.shared]
        self.counters = ChainCounters()
        self.write_all = any(link.write_all for link in links)
        self._links = links
        self._durable = next((tier for tier in self.tiers if tier.durable), None)
        self._lookup_timeout_s, self._raise_after = lookup_timeout_s, raise_after
        self._readers = {link.tier.name: _pool(link.readers, f"kvstore {link.tier.name} read") for link in links}
        self._finders = {tier.name: _pool(_FINDERS, f"kvstore {tier.name} find") for tier in self.shared}
        self._finding = dict.fromkeys(self._finders, 0)
        self._lock = threading.Lock()
        self._moves: list[Move] = []
        self._reads: OrderedDict[bytes, int] = OrderedDict()
        for at, tier in enumerate(self.tiers[:-1]):
            tier.leaving = functools.partial(self._leaving, at)

    def listen(self, listener: TierListener) -> None:
        """Tell a listener what is in each tier, and then every change."""
        for tier in self.tiers:
            tier.listen(listener)

    def takes(self, kind: KvFormat) -> bool:
        """Whether blocks of this kind can be kept by any tier."""
        return any(tier.takes(kind) for tier in self.tiers)

    def holds(self, kind: KvFormat, block_hash: BlockHash) -> bool:
        """Whether a block can be read, as far as this node knows; never waits."""
        return self.where(kind, block_hash) < len(self.tiers)

    def where(self, kind: KvFormat, block_hash: BlockHash) -> int:
        """Return the number of the fastest tier that holds a block; that behind the last one if none does."""
        return next((at for at, tier in enumerate(self.tiers) if tier.holds(kind, block_hash)), len(self.tiers))

    def surely_holds(self, kind: KvFormat, block_hash: BlockHash) -> bool:
        """Whether a tier holds a block that no other node can have deleted."""
        return any(tier.exact and tier.holds(kind, block_hash) for tier in self.tiers)

    def has_kept(self, kind: KvFormat, block_hash: BlockHash) -> bool:
        """Whether a block need not be written again to become durable."""
        tier = self._durable
        return tier is not None and tier.exact and tier.holds(kind, block_hash)

    def keeps(self, kind: KvFormat, block_hash: BlockHash) -> bool:
        """Whether the tier that makes blocks durable holds one; synced or not."""
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
        """Queue blocks, whose bytes stay as they are until ``done``; ``False``: a queue is full.

        Args:
            kind: What they are.
            hashes: Their names.
            views: Their bytes.
            done: Told, in any thread, which of them some tier has got.
            durable: Also for the tier that makes blocks durable.
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
        everything = list(range(len(hashes)))
        if targets:
            first, *others = targets
            for at in others:
                self._give(write, [self.tiers[at]], everything)
            self._give(write, [t for at, t in enumerate(self.tiers) if at >= first and at not in others], everything)
        self._answered(write)
        return True

    def _give(self, write: _Write, tiers: Sequence[LowerTier], indices: Sequence[int]) -> None:
        """Queue blocks for the first of some tiers that takes them; what it cannot keep goes on to those after it."""
        for number, tier in enumerate(tiers, 1):
            if not usable(tier, write.kind):
                continue
            with self._lock:  # what is deleted from here on is queued behind this
                names = [write.hashes[i] for i in indices]
                kept = [indices[i] for i in write.kept(names)]
                names, views = [write.hashes[i] for i in kept], [write.views[i] for i in kept]
                written = functools.partial(self._written, write, tiers[number:], kept)
                if kept and tier.write(write.kind, names, views, written):
                    write.pending += 1
                    return

    def _written(
        self, write: _Write, further: Sequence[LowerTier], indices: Sequence[int], results: Sequence[bool]
    ) -> None:
        """Hear, in a tier's thread, what it has got."""
        with self._lock:
            write.got.update(i for i, ok in zip(indices, results, strict=True) if ok)
        refused = [i for i, ok in zip(indices, results, strict=True) if not ok]
        if refused:
            self._give(write, further, refused)
        self._answered(write)

    def _answered(self, write: _Write) -> None:
        with self._lock:
            write.pending -= 1
            if write.pending:
                return
            self._moves.remove(write)
        write.done([i in write.got for i in range(len(write.hashes))])

    async def delete(self, kind: KvFormat, hashes: Sequence[BlockHash] | None) -> set[BlockHash]:
        """Forget blocks (``None``: all of the kind) in every tier, for good, and return those known.

        Raises:
            InternalError: Some may be found again.
        """
        answers: list[Future[bool]] = [Future() for _ in self.tiers]
        found: set[BlockHash] = set()
        with self._lock:  # what moves is queued before or knows of this
            for move in self._moves:
                if move.kind == kind:
                    move.unwanted.update(hashes or ())
                    move.cleared = move.cleared or hashes is None
            for tier, answer in zip(self.tiers, answers, strict=True):
                found.update(tier.delete(kind, hashes, answer.set_result))
        if not all([await _result(answer) for answer in answers]):
            raise InternalError("the deletion did not reach every tier")
        return found

    async def sync(self, deadline: float) -> bool:
        """Wait until everything that is to be durable so far is; ``False``: some of it may not be.

        Raises:
            DeadlineError: It took too long.
        """
        if self._durable is None:
            return False
        answer: Future[bool] = Future()
        self._durable.sync(answer.set_result)
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                return await _result(answer)
        except TimeoutError:
            raise DeadlineError("the tiers behind are too slow") from None

    async def find(
        self, kind: KvFormat, hashes: Sequence[BlockHash], deadline: float, *, again: bool = False
    ) -> set[BlockHash]:
        """Ask all tiers that others write to, at once and for a short time, for a chain's blocks.

        Args:
            kind: What they are.
            hashes: Their names.
            deadline: ``time.monotonic()`` seconds.
            again: Ask also for blocks that this node knows of, to be sure.

        Returns:
            Those that a tier said are there.
        """
        loop = asyncio.get_running_loop()
        asks: list[asyncio.Future[set[BlockHash]]] = []
        for tier in self.shared:
            if not usable(tier, kind):
                continue
            if self._finding[tier.name] >= _MAX_LOOKUPS:
                self.counters.skipped_lookups += 1
                continue
            self._finding[tier.name] += 1
            ask = loop.run_in_executor(self._finders[tier.name], tier.find, kind, hashes, again)
            ask.add_done_callback(functools.partial(self._found, tier.name))
            asks.append(ask)
        if not asks:
            return set()
        timeout = min(self._lookup_timeout_s, deadline - time.monotonic())
        ended, slow = await asyncio.wait(asks, timeout=max(0.0, timeout))
        self.counters.skipped_lookups += len(slow)
        return {name for ask in ended if not ask.exception() for name in ask.result()}

    async def read(self, kind: KvFormat, hashes: Sequence[BlockHash], into: Sequence[memoryview]) -> list[bool]:
        """Fill page-aligned buffers, each from the fastest tier that has its block; no tier writes into them after."""
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
                pool, step = self._readers[self.tiers[at].name], max(1, -(-len(group) // self._links[at].readers))
                for part in (group[first : first + step] for first in range(0, len(group), step)):
                    names, views = [hashes[i] for i in part], [into[i] for i in part]
                    reads.append((part, loop.run_in_executor(pool, self._read, at, kind, names, views)))
            await asyncio.wait([read for _, read in reads])  # all, whatever happens: they write into the buffers
            for part, read in reads:
                for i, right in zip(part, read.result(), strict=True):
                    results[i] = right

    async def close(self) -> None:
        """Finish what is queued, from the fastest tier to the slowest; no reads may be running."""
        for pool in (*self._readers.values(), *self._finders.values()):
            await asyncio.to_thread(pool.shutdown)
        for tier in self.tiers:
            await asyncio.to_thread(tier.close)

    # Inside

    def _read(self, at: int, kind: KvFormat, hashes: list[BlockHash], into: list[memoryview]) -> list[bool]:
        """In a reader's thread."""
        with self._moving(kind) as move:
            results = self.tiers[at].read(kind, hashes, into)
            if at and self._raise_after:
                self._raise(
                    move, at, [(name, view) for name, view, ok in zip(hashes, into, results, strict=True) if ok]
                )
        return results

    def _raise(self, move: Move, at: int, blocks: Sequence[tuple[BlockHash, memoryview]]) -> None:
        """Copy blocks that are read again and again to the first tier, if it has time for that."""
        kind = move.kind
        first = next((tier for tier in self.tiers[:at] if usable(tier, kind)), None)
        if first is None:
            return
        often = [(name, view) for name, view in blocks if self._often(kind.key + name) and not first.holds(kind, name)]
        if not often or not first.room(len(often) * kind.block_bytes, _SHARE):
            return
        names, copies = [name for name, _ in often], copies_of(kind, [view for _, view in often])
        self.counters.raised += self._queue(move, first, names, copies)

    def _often(self, key: bytes) -> bool:
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
        """In the thread of the tier that drops."""
        with self._moving(kind) as move:
            yield _Offered(move, self.tiers[at + 1 :], self._queue, self.counters)

    def _queue(self, move: Move, tier: LowerTier, hashes: Sequence[BlockHash], views: Sequence[memoryview]) -> int:
        """Queue what was not deleted meanwhile, in any thread, and return how many blocks."""
        with self._lock:
            kept = move.kept(hashes)
            names = [hashes[i] for i in kept]
            taken = bool(kept) and tier.write(move.kind, names, [views[i] for i in kept], _ignore)
        return len(kept) if taken else 0

    def _found(self, name: str, ask: asyncio.Future[set[BlockHash]]) -> None:
        self._finding[name] -= 1
        error = None if ask.cancelled() else ask.exception()
        if error is not None:
            log.error("looking for blocks in tier %s failed", name, exc_info=error)


class _Offered:
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
            if tier.wait_room(len(hashes) * kind.block_bytes, max(0.0, left), _SHARE):
                taken = self._queue(self._move, tier, hashes, views)
                self._counters.handed_over += taken
                if taken or not self._move.kept(hashes):
                    return
        self._counters.dropped += len(hashes)


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


async def _result(answer: Future[bool]) -> bool:
    """Await an answer that comes from a tier's thread, also when the caller does not wait for it any more."""
    return await asyncio.shield(asyncio.wrap_future(answer))


def _pool(threads: int, name: str) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix=name)


def _ignore(results: list[bool]) -> None:
    """No caller waits for these blocks."""
