"""The tiers behind memory, the fastest first: who gets which blocks, and who is asked for them.

A block goes to the first tier that takes it (what that refuses, to the next), and at once to every tier that wants
everything. What a tier drops to make room goes to the next one. What is read from a slow tier again and again goes back
to the first. Tiers that fail rest for a while; meanwhile it is as if they were not there.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from baton.types import BlockHash
from baton_kvstore.tiers.moves import SHARE, ChainCounters, Joint, Move, Offered, WriteCascade, copies_of, usable
from baton_kvstore.tiers.tier import LowerTier
from baton_kvstore.types import KvFormat, TierListener

log = logging.getLogger(__name__)

_REMEMBERED = 65536
"""Blocks of which reads from slow tiers are counted."""
_FINDERS = 2
_MAX_LOOKUPS = 64
"""Waiting or running, per tier; more are not made, as if nothing had been found."""


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
        return self.where(kind, block_hash) is not None

    def where(self, kind: KvFormat, block_hash: BlockHash) -> int | None:
        """Return the number of the fastest tier that holds a block."""
        return next((at for at, tier in enumerate(self.tiers) if tier.holds(kind, block_hash)), None)

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
        move = Move(kind)
        with self._lock:
            self._moves.append(move)

        def end(results: list[bool]) -> None:
            with self._lock:
                self._moves.remove(move)
            done(results)

        joint = Joint(len(targets), len(hashes), end)
        for at in targets[1:]:
            if not self.tiers[at].write(kind, hashes, views, joint.done):
                joint.done([False] * len(hashes))  # another write was faster: this tier goes without
        if targets:
            tiers = [tier for at, tier in enumerate(self.tiers) if at >= targets[0] and at not in targets[1:]]
            WriteCascade(move, tiers, self._lock, joint.done).go_on(hashes, views)
        return True

    def delete(
        self, kind: KvFormat, hashes: Sequence[BlockHash] | None, done: Callable[[bool], None]
    ) -> set[BlockHash]:
        """Forget blocks (``None``: all of the kind) in every tier and return those known.

        Args:
            kind: What they are.
            hashes: Their names.
            done: Told, in any thread, whether they cannot be found again.
        """
        joint = Joint(len(self.tiers), 1, lambda results: done(results[0]), every=True)
        found: set[BlockHash] = set()
        with self._lock:  # what moves is queued before or knows of this
            for move in self._moves:
                if move.kind == kind:
                    move.unwanted.update(hashes or ())
                    move.cleared = move.cleared or hashes is None
            for tier in self.tiers:
                found.update(tier.delete(kind, hashes, lambda right: joint.done([right])))
        return found

    def sync(self, done: Callable[[bool], None]) -> None:
        """Tell, in any thread, whether everything that is to be durable so far is."""
        if self._durable is None:
            done(False)
        else:
            self._durable.sync(done)

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
            parts = [self._part(at, kind, part, hashes, into) for at, part in self._parts(groups)]
            await asyncio.wait(
                [read for _, read in parts]
            )  # all of them, whatever happens: they write into the buffers
            for part, read in parts:
                for i, right in zip(part, read.result(), strict=True):
                    results[i] = right

    async def close(self) -> None:
        """Finish what is queued, from the fastest tier to the slowest; no reads may be running."""
        for pool in (*self._readers.values(), *self._finders.values()):
            await asyncio.to_thread(pool.shutdown)
        for tier in self.tiers:
            await asyncio.to_thread(tier.close)

    # Inside

    def _parts(self, groups: dict[int, list[int]]) -> Iterator[tuple[int, list[int]]]:
        for at, group in groups.items():
            step = max(1, -(-len(group) // self._links[at].readers))
            for first in range(0, len(group), step):
                yield at, group[first : first + step]

    def _part(
        self, at: int, kind: KvFormat, part: list[int], hashes: Sequence[BlockHash], into: Sequence[memoryview]
    ) -> tuple[list[int], asyncio.Future[list[bool]]]:
        pool = self._readers[self.tiers[at].name]
        names, views = [hashes[i] for i in part], [into[i] for i in part]
        return part, asyncio.get_running_loop().run_in_executor(pool, self._read, at, kind, names, views)

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
        if not often or not first.room(len(often) * kind.block_bytes, SHARE):
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
    def _leaving(self, at: int, kind: KvFormat) -> Iterator[Offered]:
        """In the thread of the tier that drops."""
        with self._moving(kind) as move:
            yield Offered(move, self.tiers[at + 1 :], self._queue, self.counters)

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


def _pool(threads: int, name: str) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix=name)


def _ignore(results: list[bool]) -> None:
    """No caller waits for these blocks."""
