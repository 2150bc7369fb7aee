"""Several nodes as one store, without a coordinator: each client places segments by itself.

A segment is stored on its ``replication`` best nodes, where a load finds it again. A segment that was found elsewhere
is copied to the nodes that should have it, and one that is loaded often to further nodes.

A load runs in rounds. Each round asks, at the same time, every node that owns a part of the missing blocks which of
them it holds; then it fetches, at the same time, those of the longest prefix. Leases of fast nodes are not held until
slow ones answer: two loads that each hold what the other one waits for would wait for ever. If a node does not answer,
or does not hold what it should, the next round asks the segment's next node: another replica, or an owner from before
nodes joined or left.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from baton.background import create_task, keep_running
from baton.circuit_breaker import CircuitBreaker
from baton.config.stores import StoreAddress
from baton.errors import BatonError, ConfigError, DeadlineError, QueueFullError, UnavailableError
from baton.kv_transfer.blocks.fetcher import settle
from baton.kv_transfer.connector.background import run_all
from baton.kv_transfer.connector.store.backend import (
    ChainPart,
    LoadCall,
    SaveCall,
    SaveResult,
    StoreBackend,
    StoreOptions,
    StoreUse,
    num_leading,
)
from baton.kv_transfer.connector.store.client import StoreClient, StoreLease
from baton.rpc.redis import (
    LEASE_TTL_S,
    MAX_ANSWER_BYTES,
    Registrations,
    RegistrationWatch,
    cancel_task,
    open_redis,
    store_news_key,
    store_node_key,
)
from baton.rpc.service_token import Token
from baton.types import BlockHash, Tenant

T = TypeVar("T")
log = logging.getLogger(__name__)
_MAX_PREVIOUS = 4
SEGMENT_BLOCKS = 32
"""Blocks per segment, the unit of placement. All clients of a store must agree on it, so it is not an option."""
_GATHER_S = 0.02
"""Seconds for which a lease is held until other nodes answer."""
_LOOK_S = LEASE_TTL_S / 3
_MAX_SEGMENTS = 4096
_MAX_WAITING = 64
_MAX_RUNNING = 2
_COPY_S = 10.0
_HALF_LIFE_S = 2.0


@dataclass(frozen=True, slots=True)
class Segment:
    """The blocks of one segment that belong to a part.

    Attributes:
        key: Hash of the segment's first block, which may be before the part.
        first: Index in the chain of the segment's first block.
        start: Index in the chain of the part's first block in the segment.
        stop: Index in the chain after the part's last block in the segment.
    """

    key: BlockHash
    first: int
    start: int
    stop: int


def segments_of(part: ChainPart, size: int = SEGMENT_BLOCKS) -> Iterator[Segment]:
    """Yield the segments of a part, cut at the chain's segment borders."""
    start = part.start
    while start < part.stop:
        first = start - start % size
        stop = min(first + size, part.stop)
        yield Segment(part.hashes[first], first, start, stop)
        start = stop


class Placement:
    """Rendezvous hashing over some nodes.

    Args:
        nodes: Names of the nodes, spelled the same at every client.
    """

    def __init__(self, nodes: Iterable[str]) -> None:
        self.nodes = tuple(sorted(set(nodes)))
        self._seeds = [xxhash.xxh3_64_intdigest(name.encode()) for name in self.nodes]

    def ranked(self, key: bytes, count: int) -> tuple[str, ...]:
        """Return the ``count`` best nodes for a key, best first; all of them if there are fewer."""
        scores = [xxhash.xxh3_64_intdigest(key, seed) for seed in self._seeds]
        order = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)
        return tuple(self.nodes[i] for i in order[:count])


@dataclass(eq=False)
class Node:
    """One node.

    Attributes:
        name: Address of the node, spelled the same at every client.
        client: Client of the node.
        breaker: Open while the node does not answer.
    """

    name: str
    client: StoreClient
    breaker: CircuitBreaker

    @property
    def up(self) -> bool:
        """Whether the node answered its last calls, as far as is known."""
        return not self.breaker.tripped


class Nodes:
    """The nodes of a store and which of them are up. All methods run in one event loop.

    Segments are placed on the nodes that are up. When these change, the previous placement is remembered for
    ``previous_s``: what a load misses under the new one may still be where the old one put it. A node that is down is
    pinged every ``cooldown_s`` in the background, so no request waits for it.

    Args:
        connect: Makes a client for an address.
        failures: Number of failures in a row after which a node is down.
        cooldown_s: Seconds between two pings of a node that is down.
        previous_s: Seconds for which previous placements are searched.
        use: Counters to update.
    """

    def __init__(
        self,
        connect: Callable[[str], StoreClient],
        *,
        failures: int,
        cooldown_s: float,
        previous_s: float,
        use: StoreUse,
    ) -> None:
        self._connect = connect
        self._failures = failures
        self._cooldown_s = cooldown_s
        self._previous_s = previous_s
        self._use = use
        self._nodes: dict[str, Node] = {}
        self._current = Placement(())
        self._previous: deque[tuple[Placement, float]] = deque(maxlen=_MAX_PREVIOUS)
        self._probe: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    def __len__(self) -> int:
        return len(self._nodes)

    def set(self, names: Iterable[str]) -> None:
        """Set the addresses of all nodes; clients of nodes that left are closed in the background."""
        wanted = set(names)
        for name in [name for name in self._nodes if name not in wanted]:
            node = self._nodes.pop(name)
            log.info("node %s left the KV store", name)
            task = create_task(node.client.close(), "close store node", detail=name)
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        for name in sorted(wanted - self._nodes.keys()):
            self._nodes[name] = Node(name, self._connect(name), CircuitBreaker(self._failures, self._cooldown_s))
        self._replace()

    def owners(self, key: bytes, count: int) -> list[Node]:
        """Return the nodes that should have a segment: the best ``count`` nodes that are up, best first."""
        return [self._nodes[name] for name in self._current.ranked(key, count)]

    def earlier_owners(self, key: bytes, count: int) -> list[Node]:
        """Return the nodes that should have had a segment under previous placements and are up, the latest first."""
        now = time.monotonic()
        while self._previous and self._previous[-1][1] <= now:
            self._previous.pop()
        names = [name for placement, _ in self._previous for name in placement.ranked(key, count)]
        known = (self._nodes.get(name) for name in dict.fromkeys(names))
        return [node for node in known if node is not None and node.up]

    def record_success(self, node: Node) -> None:
        """Record that a node answered."""
        was_up = node.up
        node.breaker.succeeded()
        if not was_up:
            log.info("node %s of the KV store is back", node.name)
            self._replace()

    def record_failure(self, node: Node, error: BatonError) -> None:
        """Record that a call to a node failed; a node that is merely busy still counts as up."""
        self._use.node_failures += 1
        if isinstance(error, QueueFullError):
            return
        was_up = node.up
        node.breaker.failed()
        if was_up and not node.up:
            log.warning("node %s of the KV store is left alone: %s", node.name, error.message)
            self._replace()
            if self._probe is None or self._probe.done():
                self._probe = keep_running(self._ping_all, "store nodes' signs of life")

    async def close(self) -> None:
        if self._probe is not None:
            self._probe.cancel()
            await asyncio.wait([self._probe])
        while self._closing:
            await asyncio.wait(self._closing)
        for node in self._nodes.values():
            await node.client.close()

    def _replace(self) -> None:
        """Replace the placement if the set of nodes that are up has changed."""
        up = [node.name for node in self._nodes.values() if node.up]
        self._use.nodes = len(self._nodes)
        self._use.nodes_resting = len(self._nodes) - len(up)
        placement = Placement(up)
        if placement.nodes == self._current.nodes:
            return
        if self._current.nodes:
            self._previous.appendleft((self._current, time.monotonic() + self._previous_s))
        self._current = placement

    async def _ping_all(self) -> None:
        while resting := [node for node in self._nodes.values() if not node.up]:
            await asyncio.sleep(self._cooldown_s)
            await asyncio.gather(*(self._ping(node) for node in resting))

    async def _ping(self, node: Node) -> None:
        try:
            await node.client.ping()
        except BatonError as error:
            log.debug("node %s of the KV store still rests: %s", node.name, error.message)
        else:
            self.record_success(node)


class Membership(Protocol):
    """Source of a store's node addresses. All methods run in one event loop."""

    async def start(self, nodes: Nodes, *, deadline: float) -> None:
        """Set the addresses in ``nodes``, at least once before this returns; called before every use.

        Args:
            nodes: The store's nodes, the same object in every call.
            deadline: Time limit, in seconds of ``time.monotonic()``.

        Raises:
            BatonError: The addresses could not be read in time.
        """

    async def close(self) -> None:
        """Stop updating the nodes."""


class FixedMembership:
    """A fixed list of nodes."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)

    async def start(self, nodes: Nodes, *, deadline: float) -> None:
        if not len(nodes):
            nodes.set(self._names)

    async def close(self) -> None:
        """Do nothing."""


class NodeList(Protocol):
    """Receiver of node addresses: :class:`Nodes`, or a router's list of stores."""

    def set(self, names: Iterable[str]) -> None:
        """Set the addresses of all nodes."""


class RedisMembership:
    """The nodes that register themselves in a Redis; see :class:`Membership`.

    Args:
        url: URL of the Redis.
        prefix: Prefix of all keys.
        token: Token of the services; if set, registrations that it has not signed are not accepted.
        refused: Called with the number of registrations that one read did not accept.

    Raises:
        ConfigError: The URL cannot be read, or the client is not installed.
    """

    def __init__(self, url: str, prefix: str, token: Token | None, refused: Callable[[int], None]) -> None:
        self._redis = open_redis(url, most=MAX_ANSWER_BYTES)
        registrations = Registrations(self._redis, store_node_key(prefix, ""), token, _parse, refused)
        self._watch = RegistrationWatch(registrations, store_news_key(prefix), "store nodes", round_s=_LOOK_S)
        self._looked = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self, nodes: NodeList, *, deadline: float) -> None:
        """Begin to watch the registrations; waits for the first read.

        Raises:
            UnavailableError: Redis was not reached in time.
        """
        if self._task is None:
            self._task = keep_running(partial(self._run, nodes), "discovery of store nodes")
        if not self._looked.is_set():
            try:
                async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                    await self._looked.wait()
            except TimeoutError:
                raise UnavailableError("no node of the KV store is known: Redis is away") from None

    async def close(self) -> None:
        if self._task is not None:
            await cancel_task(self._task)
        await self._redis.aclose()

    async def _run(self, nodes: NodeList) -> None:
        def set_nodes(addresses: Collection[str]) -> None:
            nodes.set(addresses)
            self._looked.set()

        await self._watch.run(set_nodes)


def _parse(fields: Mapping[str, Any]) -> str:
    address = StoreAddress.parse(fields["address"]).nodes
    if len(address) != 1:
        raise ConfigError("that is not one node", field="address")
    return address[0]


class Heat:
    """Loads per second of recently used segments: a count that halves every two seconds, divided by its weight.

    Args:
        limit: Loads per second for each further replica of a segment; 0: never.
        clock: Monotonic clock in seconds.
    """

    def __init__(self, limit: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._clock = clock
        self._counts: OrderedDict[bytes, tuple[float, float]] = OrderedDict()

    def hit(self, key: bytes) -> int:
        """Count a load and return the number of further replicas for the segment."""
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
    """Leading blocks of a segment, to be copied from one node to another.

    Attributes:
        key: Key of the segment.
        hashes: Hashes of the leading blocks.
        source: Node that holds the blocks.
        target: Node that should hold the blocks.
        tenant: Tenant that owns the blocks; ``None``: no tenant.
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

    def forget_copy(self, key: bytes, node: Node) -> None:
        """Record that a node does not hold all of a segment."""
        self._done.pop((key, node.name), None)

    def add(self, copy: Copy) -> None:
        """Have a segment copied, unless that was done before or too many copies are waiting."""
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
            task = keep_running(self._work, "copy between store nodes")
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def close(self) -> None:
        """Cancel running and waiting copies."""
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
                self.forget_copy(copy.key, copy.target)
                log.debug("a segment was not copied from %s to %s: %s", copy.source.name, copy.target.name, error)

    async def _copy(self, copy: Copy) -> None:
        deadline = time.monotonic() + _COPY_S
        lease = await copy.source.client.lease(copy.hashes, deadline=deadline, tenant=copy.tenant)
        if lease is None:
            self.forget_copy(copy.key, copy.target)
            return
        try:
            stored, _ = await copy.target.client.put_blocks(
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


class StoreCluster(StoreBackend):
    """A store of several nodes.

    Args:
        membership: Source of the nodes' addresses.
        connect: Makes a client for an address.
        options: Address, limits and replication of the store.
        use: Counters to update.
        segment_blocks: Blocks per segment, the unit of placement; the same at every client.
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
        self.name = options.shown_address
        self.options = options
        self.use = use
        self.segment_blocks = segment_blocks
        self.nodes = Nodes(
            connect,
            failures=options.failures,
            cooldown_s=options.cooldown_s,
            previous_s=options.previous_s,
            use=use,
        )
        self.copies = Copies(use)
        self.heat = Heat(options.hot_loads_per_s)
        self._membership = membership

    async def save(self, call: SaveCall) -> SaveResult:
        """Let each block's owners pull it. A node that fails costs only its own copy.

        Blocks that are being computed only count once all their owners have copied them; otherwise the connector
        saves them again when they are complete.
        """
        is_early = call.ready is not None
        held = np.full(len(call.part), is_early)
        num_bytes = 0
        for indexes, answer in await self._put_to_owners(call):
            stored: list[bool] | bool = False
            if not isinstance(answer, BatonError):
                stored, moved = answer
                num_bytes += moved
            held[indexes] = held[indexes] & stored if is_early else held[indexes] | stored
        return SaveResult(int(held.sum()), num_bytes)

    async def _put_to_owners(self, call: SaveCall) -> list[tuple[list[int], tuple[list[bool], int] | BatonError]]:
        """Put blocks to all their owners; returns, per node, the blocks' indexes in the part and the node's answer."""
        await self._membership.start(self.nodes, deadline=call.deadline)
        part = call.part
        hashes = part.wanted
        groups: dict[Node, list[int]] = {}
        for segment in segments_of(part, self.segment_blocks):
            for node in self.nodes.owners(segment.key, self.options.replication):
                groups.setdefault(node, []).extend(range(segment.start - part.start, segment.stop - part.start))
        if not groups:
            raise UnavailableError("no node of the KV store answers")

        async def put_to(node: Node, indexes: list[int]) -> tuple[list[bool], int]:
            return await node.client.put_blocks(
                call.source,
                [hashes[i] for i in indexes],
                [call.block_ids[i] for i in indexes],
                [call.generations[i] for i in indexes],
                deadline=call.deadline,
                tenant=part.tenant,
                ready=call.ready,
            )

        answers = await run_all(put_to(node, indexes) for node, indexes in groups.items())
        for node, answer in zip(groups, answers, strict=True):
            if isinstance(answer, BatonError):
                self.nodes.record_failure(node, answer)
            else:
                self.nodes.record_success(node)
        return list(zip(groups.values(), answers, strict=True))

    async def load(self, call: LoadCall) -> None:
        await self._membership.start(self.nodes, deadline=call.deadline)
        await ClusterLoad(self, call).run()

    async def close(self) -> None:
        await self._membership.close()
        await self.copies.close()
        await self.nodes.close()


@dataclass(eq=False)
class _Piece:
    """A segment that is being loaded.

    Attributes:
        owners: Nodes that should hold the segment.
        candidates: Nodes that have not failed or missed a block yet, in the order in which they are asked.
        first: The node that is asked first.
        missed: Nodes that did not hold all of the segment, with the index in the part of the first missing block.
        source: The node that the segment's last blocks came from.
    """

    segment: Segment
    owners: list[Node]
    candidates: list[Node]
    first: Node | None
    missed: dict[Node, int] = field(default_factory=dict)
    source: Node | None = None


@dataclass(eq=False)
class _Group:
    """Blocks that one node is asked for in a round.

    Attributes:
        indexes: Indexes of the blocks in the part, rising.
        pieces: The pieces that the blocks belong to.
        piece_of: The piece of each block, parallel to ``indexes``.
        lease: Lease on the blocks, until it is released.
    """

    indexes: list[int] = field(default_factory=list)
    pieces: list[_Piece] = field(default_factory=list)
    piece_of: list[_Piece] = field(default_factory=list)
    lease: StoreLease | None = None

    @property
    def has_choice(self) -> bool:
        """Whether other nodes could be asked for all of the blocks."""
        return all(len(piece.candidates) > 1 for piece in self.pieces)


class ClusterLoad:
    """One load from a cluster."""

    def __init__(self, cluster: StoreCluster, call: LoadCall) -> None:
        part = call.part
        self._cluster = cluster
        self._call = call
        self._part = part
        self._progress = call.progress
        self._hashes = part.wanted
        self._valid = np.zeros(len(part), np.bool_)
        self._sources: dict[str, None] = {}
        # Replicas take turns, so that all of them stay in use; one order for a whole load, so that it needs few nodes.
        self._turns = {node: random.random() for node in cluster.nodes}
        self._pieces = [self._piece(segment) for segment in segments_of(part, cluster.segment_blocks)]

    def _piece(self, segment: Segment) -> _Piece:
        cluster = self._cluster
        replication = cluster.options.replication
        owners = cluster.nodes.owners(segment.key, replication + cluster.heat.hit(segment.key))
        candidates = sorted(owners, key=self._turns.__getitem__)
        candidates += [node for node in cluster.nodes.earlier_owners(segment.key, replication) if node not in owners]
        return _Piece(segment, owners, candidates, candidates[0] if candidates else None)

    async def run(self) -> None:
        """Run rounds; each brings blocks or removes a node from a segment's candidates."""
        try:
            while groups := self._groups():
                if time.monotonic() >= self._call.deadline:
                    raise DeadlineError("no time is left for the store")
                await self._round(groups)
        finally:
            self._copy_misplaced()
        if len(self._part) and not any(node.up for node in self._cluster.nodes) and not self._progress.num_blocks:
            failures = "; ".join(self._progress.failures) or "every node is left alone"
            self._progress.failures.clear()
            raise UnavailableError(f"no node of the KV store answers: {failures}")

    def _groups(self) -> dict[Node, _Group]:
        """Return the missing blocks by the node to ask, up to the first segment that has no candidates left."""
        groups: dict[Node, _Group] = {}
        limit = self._cluster.options.blocks_per_call
        for piece in self._pieces:
            span = range(piece.segment.start - self._part.start, piece.segment.stop - self._part.start)
            missing = [i for i in span if not self._valid[i]]
            if not missing:
                continue
            while piece.candidates and not piece.candidates[0].up:
                piece.candidates.pop(0)
            if not piece.candidates:
                break
            group = groups.setdefault(piece.candidates[0], _Group())
            missing = missing[: limit - len(group.indexes)]
            if not missing:
                continue
            group.indexes += missing
            group.pieces.append(piece)
            group.piece_of += [piece] * len(missing)
        return groups

    async def _round(self, groups: dict[Node, _Group]) -> None:
        asks = {asyncio.create_task(self._lease_blocks(node, group)): node for node, group in groups.items()}
        pending = set(asks)
        available = self._valid.copy()
        try:
            while pending:
                answered = await _first_answers(pending)
                pending -= answered
                leased = {asks[ask]: groups[asks[ask]] for ask in answered}
                for ask in answered:
                    self._note_answer(asks[ask], ask, groups[asks[ask]], available)
                hoped = available.copy()
                hoped[[i for ask in pending for i in groups[asks[ask]].indexes]] = True
                await self._fetch_leased(leased, num_leading(hoped))
                _release_leases(leased)
        finally:
            for ask in pending:
                ask.cancel()
            await settle(asks)
            _release_leases(groups)

    def _note_answer(
        self, node: Node, ask: asyncio.Task[StoreLease | None], group: _Group, available: npt.NDArray[np.bool_]
    ) -> None:
        """Mark what a node leased in ``available``, and record a failure or the first block that it does not hold."""
        try:
            lease = ask.result()
        except BatonError as error:
            self._record_failure(node, group.pieces, error)
            return
        self._cluster.nodes.record_success(node)
        count = 0 if lease is None else len(lease)
        available[group.indexes[:count]] = True
        if count < len(group.indexes) and not (lease is not None and lease.more):
            self._record_miss(node, group, count)

    async def _lease_blocks(self, node: Node, group: _Group) -> StoreLease | None:
        group.lease = await node.client.lease(
            [self._hashes[i] for i in group.indexes],
            deadline=self._deadline_of(group),
            tenant=self._part.tenant,
            traceparent=self._part.traceparent,
        )
        return group.lease

    async def _fetch_leased(self, groups: dict[Node, _Group], stop: int) -> None:
        """Fetch the leased blocks among the part's first ``stop`` blocks."""
        wanted = []
        for node, group in groups.items():
            if group.lease is not None:
                indexes = [i for i in group.indexes[: len(group.lease)] if i < stop]
                if indexes:
                    wanted.append((node, group, group.lease, indexes))

        async def fetch(node: Node, group: _Group, lease: StoreLease, indexes: list[int]) -> None:
            ids = [self._call.block_ids[i] for i in indexes]
            result = await node.client.fetch(
                lease, ids, deadline=self._deadline_of(group), cancelled=self._call.cancelled
            )
            self._valid[indexes] = result.valid
            self._progress.num_bytes += result.num_bytes
            self._progress.pipe = result.pipe_kind
            self._sources[lease.source.instance_id] = None
            for i, valid in enumerate(result.valid):
                if valid:
                    group.piece_of[i].source = node
                else:
                    self._record_miss(node, group, i)

        started = time.perf_counter()
        try:
            answers = await run_all(fetch(*item) for item in wanted)
        finally:
            self._progress.seconds += time.perf_counter() - started
            self._progress.num_blocks = num_leading(self._valid)
            self._progress.source = ",".join(self._sources)
        for (node, group, _, _), answer in zip(wanted, answers, strict=True):
            if isinstance(answer, BatonError):
                if self._call.cancelled.is_set():
                    raise answer
                self._record_failure(node, group.pieces, answer)

    def _deadline_of(self, group: _Group) -> float:
        """Return the load's deadline, or half the way to it while another node could still be asked."""
        now = time.monotonic()
        return now + (self._call.deadline - now) / 2 if group.has_choice else self._call.deadline

    def _record_failure(self, node: Node, pieces: Sequence[_Piece], error: BatonError) -> None:
        self._cluster.nodes.record_failure(node, error)
        self._progress.failures.append(f"store {node.name}: {error.message}")
        for piece in pieces:
            if node in piece.candidates:
                piece.candidates.remove(node)

    def _record_miss(self, node: Node, group: _Group, index: int) -> None:
        """Record that a node does not hold a block of its group."""
        piece = group.piece_of[index]
        piece.missed.setdefault(node, group.indexes[index])
        self._cluster.copies.forget_copy(piece.segment.key, node)
        if node in piece.candidates:
            piece.candidates.remove(node)

    def _copy_misplaced(self) -> None:
        """Have loaded segments copied to the nodes that should hold them and do not."""
        cluster = self._cluster
        replication = cluster.options.replication
        num_blocks = self._progress.num_blocks
        for piece in self._pieces:
            segment = piece.segment
            stop = min(segment.stop, self._part.start + num_blocks)
            if piece.source is None or stop <= segment.start:
                return
            cluster.use.failovers += piece.source is not piece.first
            earlier = cluster.nodes.earlier_owners(segment.key, replication)
            for rank, node in enumerate(piece.owners):
                lacks = piece.missed.get(node, num_blocks) < num_blocks
                is_new = bool(earlier) and node not in earlier
                if node is not piece.source and node.up and (lacks or is_new or rank >= replication):
                    names = self._part.hashes[segment.first : stop]
                    cluster.copies.add(Copy(segment.key, names, piece.source, node, self._part.tenant))


async def _first_answers(pending: set[asyncio.Task[T]]) -> set[asyncio.Task[T]]:
    """Wait for an answer, and a moment longer for others; returns the tasks that are done."""
    answered, left = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
    if left:
        answered, _ = await asyncio.wait(pending, timeout=_GATHER_S)
    return answered


def _release_leases(groups: dict[Node, _Group]) -> None:
    """Release the groups' leases, each once."""
    for node, group in groups.items():
        if group.lease is not None:
            node.client.release(group.lease)
            group.lease = None
