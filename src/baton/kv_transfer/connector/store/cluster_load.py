"""One load from several nodes, in rounds.

Each round asks, at the same time, every node that owns a part of what is missing which of it is there; then fetches, at
the same time, what belongs to the longest prefix. A node that is slow to answer is not waited for with the leases of
others in hand: two loads that each hold what the other one waits for would wait for ever. Where a node does not answer,
or has not got what it should, the next round asks the segment's next node: another replica, or who owned it before
nodes came or went.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from baton.errors import BatonError, DeadlineError, UnavailableError
from baton.kv_transfer.connector.background import run_all, settle
from baton.kv_transfer.connector.store.backend import ChainPart, LoadProgress, StoreOptions, StoreUse
from baton.kv_transfer.connector.store.client import StoreLease, leading
from baton.kv_transfer.connector.store.nodes import Node, Nodes, Segment, segments_of
from baton.types import BlockHash, BlockId, Tenant

T = TypeVar("T")

_TOGETHER_S = 0.02
"""How long a lease is held for the answers of other nodes."""


@dataclass(frozen=True, slots=True)
class Placed:
    """Where blocks lie, and what is known of it.

    Attributes:
        nodes: The nodes.
        copies: Copies blocks to where they should be.
        heat: Knows what is loaded often.
        options: How patiently nodes are used.
        use: Where counts go.
        segment_blocks: Unit of placement, in blocks.
    """

    nodes: Nodes
    copies: Copies
    heat: Heat
    options: StoreOptions
    use: StoreUse
    segment_blocks: int


@dataclass(eq=False)
class _Piece:
    """A segment that is being loaded.

    Attributes:
        owners: Who should have it.
        left: Who has not been asked in vain yet, in the order in which they are asked.
        first: Who is asked first.
        missed: Who had not got all of it, and the first block that was not there, counted in the part.
        found: Who brought (the last of) it.
    """

    segment: Segment
    owners: list[Node]
    left: list[Node]
    first: Node | None
    missed: dict[Node, int] = field(default_factory=dict)
    found: Node | None = None


@dataclass(eq=False)
class _Group:
    """What one node is asked for in a round: positions in the part, rising, and the pieces that they belong to."""

    at: list[int] = field(default_factory=list)
    pieces: list[_Piece] = field(default_factory=list)
    piece_of: list[_Piece] = field(default_factory=list)
    lease: StoreLease | None = None

    @property
    def has_choice(self) -> bool:
        """Whether another node could be asked for all of it."""
        return all(len(piece.left) > 1 for piece in self.pieces)


class ClusterLoad:
    """One load; see :meth:`StoreBackend.load` for what it takes."""

    def __init__(
        self,
        cluster: Placed,
        part: ChainPart,
        block_ids: Sequence[BlockId],
        progress: LoadProgress,
        *,
        deadline: float,
        cancelled: threading.Event,
    ) -> None:
        self._cluster, self._part, self._block_ids, self._progress = cluster, part, block_ids, progress
        self._deadline, self._cancelled = deadline, cancelled
        self._hashes = part.wanted
        self._valid = np.zeros(len(part), np.bool_)
        self._sources: dict[str, None] = {}
        # Replicas take turns, so that all of them stay in use; one order for a whole load, so that it needs few nodes.
        self._turns = {node: random.random() for node in cluster.nodes}
        self._pieces = [self._piece(segment) for segment in segments_of(part, cluster.segment_blocks)]

    def _piece(self, segment: Segment) -> _Piece:
        cluster, count = self._cluster, self._cluster.options.replication
        more = cluster.heat.hit(segment.key)
        owners = cluster.nodes.owners(segment.key, count + more)
        left = sorted(owners, key=self._turns.__getitem__)
        left += [node for node in cluster.nodes.earlier_owners(segment.key, count) if node not in owners]
        return _Piece(segment, owners, left, left[0] if left else None)

    async def run(self) -> None:
        """Go round after round; each brings blocks or strikes a node off a segment's list."""
        try:
            while groups := self._groups():
                if time.monotonic() >= self._deadline:
                    raise DeadlineError("no time is left for the store")
                await self._round(groups)
        finally:
            self._copy()
        if len(self._part) and not any(node.up for node in self._cluster.nodes) and not self._progress.num_blocks:
            failures = "; ".join(self._progress.failures) or "every node is left alone"
            self._progress.failures.clear()
            raise UnavailableError(f"no node of the KV store answers: {failures}")

    def _groups(self) -> dict[Node, _Group]:
        """Return whom to ask for what of the part's rest, up to the first segment that no node is left for."""
        groups: dict[Node, _Group] = {}
        limit = self._cluster.options.blocks_per_call
        for piece in self._pieces:
            span = range(piece.segment.start - self._part.start, piece.segment.stop - self._part.start)
            at = [i for i in span if not self._valid[i]]
            if not at:
                continue
            while piece.left and not piece.left[0].up:
                piece.left.pop(0)
            if not piece.left:
                break
            group = groups.setdefault(piece.left[0], _Group())
            at = at[: limit - len(group.at)]
            if not at:
                continue
            group.at += at
            group.pieces.append(piece)
            group.piece_of += [piece] * len(at)
        return groups

    async def _round(self, groups: dict[Node, _Group]) -> None:
        asks = {asyncio.create_task(self._ask(node, group)): node for node, group in groups.items()}
        pending, there = set(asks), self._valid.copy()
        try:
            while pending:
                answered = await _some(pending)
                pending -= answered
                leased = {asks[ask]: groups[asks[ask]] for ask in answered}
                for ask in answered:
                    self._note_answer(asks[ask], ask, groups[asks[ask]], there)
                hoped = there.copy()
                hoped[[i for ask in pending for i in groups[asks[ask]].at]] = True
                await self._fetch_all(leased, leading(hoped))
                _release(leased)
        finally:
            for ask in pending:
                ask.cancel()
            await settle(asks)
            _release(groups)

    def _note_answer(
        self, node: Node, ask: asyncio.Task[StoreLease | None], group: _Group, there: npt.NDArray[np.bool_]
    ) -> None:
        """Take note of what a node leased, in ``there``, and of what it has not got or that it failed."""
        try:
            lease = ask.result()
        except BatonError as error:
            self._failed(node, group.pieces, error)
            return
        self._cluster.nodes.answered(node)
        count = 0 if lease is None else len(lease)
        there[group.at[:count]] = True
        if count < len(group.at) and not (lease is not None and lease.more):
            self._missed(node, group, count)

    async def _ask(self, node: Node, group: _Group) -> StoreLease | None:
        names = [self._hashes[i] for i in group.at]
        group.lease = await node.client.lease(names, deadline=self._deadline_of(group), tenant=self._part.tenant)
        return group.lease

    async def _fetch_all(self, groups: dict[Node, _Group], stop: int) -> None:
        """Fetch what was leased of the part's first ``stop`` blocks."""
        wanted = []
        for node, group in groups.items():
            if group.lease is not None:
                at = [i for i in group.at[: len(group.lease)] if i < stop]
                if at:
                    wanted.append((node, group, group.lease, at))

        async def fetch(node: Node, group: _Group, lease: StoreLease, at: list[int]) -> None:
            ids = [self._block_ids[i] for i in at]
            result = await node.client.fetch(lease, ids, deadline=self._deadline_of(group), cancelled=self._cancelled)
            self._valid[at] = result.valid
            self._progress.num_bytes += result.num_bytes
            self._progress.pipe = result.pipe_kind
            self._sources[lease.source.instance_id] = None
            for i, valid in enumerate(result.valid):
                if valid:
                    group.piece_of[i].found = node
                else:
                    self._missed(node, group, i)

        started = time.perf_counter()
        try:
            answers = await run_all(fetch(*item) for item in wanted)
        finally:
            self._progress.seconds += time.perf_counter() - started
            self._progress.num_blocks = leading(self._valid)
            self._progress.source = ",".join(self._sources)
        for (node, group, _, _), answer in zip(wanted, answers, strict=True):
            if isinstance(answer, BatonError):
                if self._cancelled.is_set():
                    raise answer
                self._failed(node, group.pieces, answer)

    def _deadline_of(self, group: _Group) -> float:
        """The load's deadline, or half the way to it while another node could still be asked."""
        now = time.monotonic()
        return now + (self._deadline - now) / 2 if group.has_choice else self._deadline

    def _failed(self, node: Node, pieces: Sequence[_Piece], error: BatonError) -> None:
        self._cluster.nodes.failed(node, error)
        self._progress.failures.append(f"store {node.name}: {error.message}")
        for piece in pieces:
            if node in piece.left:
                piece.left.remove(node)

    def _missed(self, node: Node, group: _Group, at: int) -> None:
        """Take note that a node has not got the block at a position of its group."""
        piece = group.piece_of[at]
        piece.missed.setdefault(node, group.at[at])
        self._cluster.copies.forget(piece.segment.key, node)
        if node in piece.left:
            piece.left.remove(node)

    def _copy(self) -> None:
        """See to it that what was found lies where it should."""
        cluster, replication = self._cluster, self._cluster.options.replication
        found = self._progress.num_blocks
        for piece in self._pieces:
            segment = piece.segment
            stop = min(segment.stop, self._part.start + found)
            if piece.found is None or stop <= segment.start:
                return
            cluster.use.failovers += piece.found is not piece.first
            earlier = cluster.nodes.earlier_owners(segment.key, replication)
            for rank, node in enumerate(piece.owners):
                lacks = piece.missed.get(node, found) < found
                is_new = bool(earlier) and node not in earlier
                if node is not piece.found and node.up and (lacks or is_new or rank >= replication):
                    names = self._part.hashes[segment.first : stop]
                    cluster.copies.add(Copy(segment.key, names, piece.found, node, self._part.tenant))


async def _some(pending: set[asyncio.Task[T]]) -> set[asyncio.Task[T]]:
    """Wait for an answer, and a moment longer for others; returns those that are there."""
    answered, left = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
    if left:
        answered, _ = await asyncio.wait(pending, timeout=_TOGETHER_S)
    return answered


def _release(groups: dict[Node, _Group]) -> None:
    """Give leases back, each once."""
    for node, group in groups.items():
        if group.lease is not None:
            node.client.release(group.lease)
            group.lease = None


log = logging.getLogger(__name__)

_MAX_SEGMENTS = 4096
_MAX_WAITING = 64
_MAX_RUNNING = 2
_COPY_S = 10.0
_HALF_LIFE_S = 2.0


class Heat:
    """Loads per second of the segments used last: a count that halves every two seconds, divided by its weight.

    Args:
        limit: Loads per second from which on a segment deserves another replica; 0: never.
        clock: Seconds.
    """

    def __init__(self, limit: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._clock = limit, clock
        self._counts: OrderedDict[bytes, tuple[float, float]] = OrderedDict()

    def hit(self, key: bytes) -> int:
        """Count a load and return how many more replicas the segment deserves."""
        if not self._limit:
            return 0
        now = self._clock()
        count, then = self._counts.pop(key, (0.0, now))
        count = count * math.exp2((then - now) / _HALF_LIFE_S) + 1.0
        self._counts[key] = count, now
        if len(self._counts) > _MAX_SEGMENTS:
            self._counts.popitem(last=False)
        return int(count * math.log(2.0) / _HALF_LIFE_S / self._limit)


@dataclass(frozen=True, slots=True)
class Copy:
    """A segment's leading blocks, to be copied from a node that has them to one that should.

    Attributes:
        key: Names the segment.
        hashes: Its blocks from its first one on.
        tenant: Whose blocks these are; ``None``: none.
    """

    key: BlockHash
    hashes: Sequence[BlockHash]
    source: Node
    target: Node
    tenant: Tenant | None = None


class Copies:
    """Has nodes copy segments from each other, a few at a time. All methods run in one event loop."""

    def __init__(self, use: StoreUse) -> None:
        self._use = use
        self._waiting: deque[Copy] = deque()
        self._running: set[asyncio.Task[None]] = set()
        self._done: OrderedDict[tuple[bytes, str], int] = OrderedDict()

    def forget(self, key: bytes, node: Node) -> None:
        """Take note that a node has not got (all of) a segment."""
        self._done.pop((key, node.name), None)

    def add(self, copy: Copy) -> None:
        """Have a segment copied, unless that was done before, or too much is to be done already."""
        mark = copy.key, copy.target.name
        if self._done.get(mark, 0) >= len(copy.hashes):
            return
        if len(self._waiting) >= _MAX_WAITING:
            self._use.skipped_copies += 1
            return
        self._done[mark] = len(copy.hashes)
        self._done.move_to_end(mark)
        if len(self._done) > _MAX_SEGMENTS:
            self._done.popitem(last=False)
        self._waiting.append(copy)
        if len(self._running) < _MAX_RUNNING:
            task = asyncio.get_running_loop().create_task(self._work(), name="copy between store nodes")
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def close(self) -> None:
        """End what is running and forget what waits."""
        self._waiting.clear()
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running)

    async def _work(self) -> None:
        while self._waiting:
            copy = self._waiting.popleft()
            try:
                await self._copy(copy)
            except BatonError as error:
                self._use.skipped_copies += 1
                self.forget(copy.key, copy.target)
                log.info("a segment was not copied from %s to %s: %s", copy.source.name, copy.target.name, error)

    async def _copy(self, copy: Copy) -> None:
        deadline = time.monotonic() + _COPY_S
        lease = await copy.source.client.lease(copy.hashes, deadline=deadline, tenant=copy.tenant)
        if lease is None:
            self.forget(copy.key, copy.target)
            return
        try:
            stored, _ = await copy.target.client.put(
                lease.source,
                copy.hashes[: len(lease)],
                lease.block_ids.tolist(),
                lease.generations.tolist(),
                deadline=deadline,
                tenant=copy.tenant,
            )
        finally:
            copy.source.client.release(lease)
        self._use.copied_blocks += sum(stored)
