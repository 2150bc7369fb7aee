"""Several nodes as one store, without a coordinator: each client places segments by itself.

A segment goes to its ``replication`` best nodes; a load finds it there again. One that was found elsewhere than where
it should be is copied to where it should be, and one that is loaded often to further nodes.

A load goes in rounds. Each asks, at the same time, every node that owns a part of what is missing which of it is there;
then fetches, at the same time, what belongs to the longest prefix. A node that is slow to answer is not waited for with
the leases of others in hand: two loads that each hold what the other one waits for would wait for ever. Where a node
does not answer, or has not got what it should, the next round asks the segment's next node: another replica, or who
owned it before nodes came or went.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

import numpy as np
import numpy.typing as npt

from baton.errors import BatonError, DeadlineError, UnavailableError
from baton.kv_transfer.blocks import BlockSource
from baton.kv_transfer.connector.background import run_all, settle
from baton.kv_transfer.connector.store.backend import ChainPart, LoadProgress, StoreOptions, StoreUse
from baton.kv_transfer.connector.store.client import StoreClient, StoreLease, leading
from baton.kv_transfer.connector.store.nodes import (
    SEGMENT_BLOCKS,
    Copies,
    Copy,
    Heat,
    Membership,
    Node,
    Nodes,
    Segment,
    segments_of,
)
from baton.types import BlockId

T = TypeVar("T")
_TOGETHER_S = 0.02
"""How long a lease is held for the answers of other nodes."""


class StoreCluster:
    """A store of several nodes; see :class:`StoreBackend`.

    Args:
        membership: Says who they are.
        connect: Makes a client for an address.
        options: How patiently they are used.
        use: Where counts go.
        segment_blocks: Unit of placement, in blocks; the same at every client.
    """

    follows: ClassVar[bool] = True

    def __init__(
        self,
        membership: Membership,
        connect: Callable[[str], StoreClient],
        options: StoreOptions,
        use: StoreUse,
        *,
        segment_blocks: int = SEGMENT_BLOCKS,
    ) -> None:
        self.options, self.use, self.segment_blocks = options, use, segment_blocks
        self.nodes = Nodes(
            connect,
            failures=options.failures,
            cooldown_s=options.cooldown_s,
            previous_s=options.previous_s,
            use=use,
        )
        self.copies, self.heat = Copies(use), Heat(options.hot_loads_per_s)
        self._membership = membership

    async def save(
        self,
        source: BlockSource,
        part: ChainPart,
        block_ids: Sequence[BlockId],
        generations: Sequence[int],
        *,
        deadline: float,
        ready: int | None = None,
    ) -> tuple[int, int]:
        """Let each block's owners pull it; see :meth:`FollowingBackend.save`. A node that fails costs its copy alone.

        Of blocks that are being computed all owners must have taken their copy: they are told of the others again.
        """
        held, moved = np.full(len(part), ready is not None), 0
        for at, answer in await self._put(source, part, block_ids, generations, ready, deadline=deadline):
            there, num_bytes = (False, 0) if isinstance(answer, BatonError) else answer
            held[at] = held[at] | there if ready is None else held[at] & there
            moved += num_bytes
        return int(held.sum()), moved

    async def _put(
        self,
        source: BlockSource,
        part: ChainPart,
        block_ids: Sequence[BlockId],
        generations: Sequence[int],
        ready: int | None,
        *,
        deadline: float,
    ) -> list[tuple[list[int], tuple[list[bool], int] | BatonError]]:
        """Put blocks to all their owners; returns, per node, which of the part these were and what it answered."""
        await self._membership.start(self.nodes, deadline=deadline)
        hashes = part.wanted
        groups: dict[Node, list[int]] = {}
        for segment in segments_of(part, self.segment_blocks):
            for node in self.nodes.owners(segment.key, self.options.replication):
                groups.setdefault(node, []).extend(range(segment.start - part.start, segment.stop - part.start))
        if not groups:
            raise UnavailableError("no node of the KV store answers")

        async def put(node: Node, at: list[int]) -> tuple[list[bool], int]:
            names, ids, marks = [hashes[i] for i in at], [block_ids[i] for i in at], [generations[i] for i in at]
            tenant = part.tenant
            return await node.client.put(source, names, ids, marks, deadline=deadline, tenant=tenant, ready=ready)

        answers = await run_all(put(node, at) for node, at in groups.items())
        for node, answer in zip(groups, answers, strict=True):
            if isinstance(answer, BatonError):
                self.nodes.failed(node, answer)
            else:
                self.nodes.answered(node)
        return list(zip(groups.values(), answers, strict=True))

    async def load(
        self,
        part: ChainPart,
        block_ids: Sequence[BlockId],
        progress: LoadProgress,
        *,
        deadline: float,
        cancelled: threading.Event,
    ) -> None:
        """Copy the longest prefix that the nodes hold; see :meth:`StoreBackend.load`."""
        await self._membership.start(self.nodes, deadline=deadline)
        await ClusterLoad(self, part, block_ids, progress, deadline=deadline, cancelled=cancelled).run()

    async def close(self) -> None:
        """Close every connection."""
        await self._membership.close()
        await self.copies.close()
        await self.nodes.close()


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
        cluster: StoreCluster,
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
        part, deadline = self._part, self._deadline_of(group)
        group.lease = await node.client.lease(
            names, deadline=deadline, tenant=part.tenant, traceparent=part.traceparent
        )
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
