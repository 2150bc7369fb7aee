"""The nodes of a store as one client sees them: who is there, who rests, who owned a segment before, who copies it."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import xxhash

from baton.config.stores import StoreAddress
from baton.errors import BatonError, ConfigError, QueueFullError, UnavailableError
from baton.kv_transfer.connector.breaker import CircuitBreaker
from baton.kv_transfer.connector.store.backend import ChainPart, StoreUse
from baton.kv_transfer.connector.store.client import StoreClient
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

log = logging.getLogger(__name__)
_MAX_PREVIOUS = 4
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


class Node:
    """One node.

    Attributes:
        name: Its address, under which clients agree on it.
        client: Speaks to it.
        breaker: Open while it does not answer.
    """

    def __init__(self, name: str, client: StoreClient, breaker: CircuitBreaker) -> None:
        self.name, self.client, self.breaker = name, client, breaker

    @property
    def up(self) -> bool:
        """Whether it answered lately, as far as is known."""
        return not self.breaker.tripped


class Nodes:
    """Keeps track of nodes. All methods run in one event loop.

    Placement goes over the nodes that are up. Whenever these change, the placement before is remembered for
    ``previous_s``: what a read misses under the new one may still lie under the old one. A node that rests is asked for
    a sign of life every ``cooldown_s``, in the background, so no request waits for it.

    Args:
        connect: Makes a client for an address.
        failures: Failures in a row after which a node rests.
        cooldown_s: Seconds between two signs of life that a resting node is asked for.
        previous_s: Seconds for which earlier placements are looked at.
        use: Where counts go.
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
        self._connect, self._failures, self._cooldown_s = connect, failures, cooldown_s
        self._previous_s, self._use = previous_s, use
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
        """Take note of who there is; clients of nodes that left are closed in the background."""
        wanted = set(names)
        for name in [name for name in self._nodes if name not in wanted]:
            node = self._nodes.pop(name)
            log.info("node %s left the KV store", name)
            task = asyncio.get_running_loop().create_task(node.client.close(), name=f"close store node {name}")
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        for name in sorted(wanted - self._nodes.keys()):
            self._nodes[name] = Node(name, self._connect(name), CircuitBreaker(self._failures, self._cooldown_s))
        self._replace()

    def owners(self, key: bytes, count: int) -> list[Node]:
        """Return who should have a segment: the best ``count`` nodes that are up, best first."""
        return [self._nodes[name] for name in self._current.ranked(key, count)]

    def earlier_owners(self, key: bytes, count: int) -> list[Node]:
        """Return who, of the nodes that are up, should have had it under earlier placements, the latest first."""
        now = time.monotonic()
        while self._previous and self._previous[-1][1] <= now:
            self._previous.pop()
        names = [name for placement, _ in self._previous for name in placement.ranked(key, count)]
        found = (self._nodes.get(name) for name in dict.fromkeys(names))
        return [node for node in found if node is not None and node.up]

    def answered(self, node: Node) -> None:
        """Tell that a node did what it was asked."""
        was_up = node.up
        node.breaker.succeeded()
        if not was_up:
            log.info("node %s of the KV store is back", node.name)
            self._replace()

    def failed(self, node: Node, error: BatonError) -> None:
        """Tell that a node did not; one that is merely busy goes on counting as up."""
        self._use.node_failures += 1
        if isinstance(error, QueueFullError):
            return
        was_up = node.up
        node.breaker.failed()
        if was_up and not node.up:
            log.warning("node %s of the KV store is left alone: %s", node.name, error.message)
            self._replace()
            if self._probe is None or self._probe.done():
                self._probe = asyncio.get_running_loop().create_task(self._ask(), name="store nodes' signs of life")

    async def close(self) -> None:
        """Close every client."""
        if self._probe is not None:
            self._probe.cancel()
            await asyncio.wait([self._probe])
        while self._closing:
            await asyncio.wait(self._closing)
        for node in self._nodes.values():
            await node.client.close()

    def _replace(self) -> None:
        """Place anew if those who are up have changed."""
        up = [node.name for node in self._nodes.values() if node.up]
        self._use.nodes, self._use.nodes_resting = len(self._nodes), len(self._nodes) - len(up)
        placement = Placement(up)
        if placement.nodes == self._current.nodes:
            return
        if self._current.nodes:
            self._previous.appendleft((self._current, time.monotonic() + self._previous_s))
        self._current = placement

    async def _ask(self) -> None:
        while resting := [node for node in self._nodes.values() if not node.up]:
            await asyncio.sleep(self._cooldown_s)
            await asyncio.gather(*(self._ask_one(node) for node in resting))

    async def _ask_one(self, node: Node) -> None:
        try:
            await node.client.ping()
        except BatonError as error:
            log.debug("node %s of the KV store still rests: %s", node.name, error.message)
        else:
            self.answered(node)


class Membership(Protocol):
    """Says whom a store consists of. All methods run in one event loop."""

    async def start(self, nodes: Nodes, *, deadline: float) -> None:
        """Have ``nodes`` told who there is, at least once before this returns; called before every use.

        Args:
            nodes: Always the same.
            deadline: ``time.monotonic()`` seconds.

        Raises:
            BatonError: No node answered.
        """

    async def close(self) -> None:
        """Stop telling."""


class FixedMembership:
    """Nodes that were named once and for all."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)

    async def start(self, nodes: Nodes, *, deadline: float) -> None:
        """Tell, once."""
        if not len(nodes):
            nodes.set(self._names)

    async def close(self) -> None:
        """There is nothing to stop."""


_LOOK_S = LEASE_TTL_S / 3


class NodeList(Protocol):
    """Who is told; :class:`~baton.kv_transfer.connector.store.nodes.Nodes` is one."""

    def set(self, names: Iterable[str]) -> None:
        """Take note of the addresses of all nodes there are."""


class RedisMembership:
    """Watches the keys of nodes; see :class:`Membership`.

    Args:
        url: Where Redis is.
        prefix: Put before every key.
        token: The services'; with one, registrations that it has not signed are passed over.
        refused: Hears how many a look passed over.
        now: Monotonic clock.

    Raises:
        ConfigError: The URL cannot be read, or the client is not installed.
    """

    def __init__(
        self,
        url: str,
        prefix: str,
        token: Token | None,
        refused: Callable[[int], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._redis = open_redis(url, most=MAX_ANSWER_BYTES)
        registrations = Registrations(self._redis, store_node_key(prefix, ""), token, _parse, refused)
        self._watch = RegistrationWatch(registrations, store_news_key(prefix), "store nodes", round_s=_LOOK_S, now=now)
        self._looked = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self, nodes: NodeList, *, deadline: float) -> None:
        """Begin to watch; waits for the first look.

        Raises:
            UnavailableError: Redis was not reached in time.
        """
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(nodes), name="discovery of store nodes")
        if not self._looked.is_set():
            try:
                async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                    await self._looked.wait()
            except TimeoutError:
                raise UnavailableError("no node of the KV store is known: Redis is away") from None

    async def close(self) -> None:
        """Stop."""
        if self._task is not None:
            await cancel_task(self._task)
        await self._redis.aclose()

    async def _run(self, nodes: NodeList) -> None:
        def take(addresses: Collection[str]) -> None:
            nodes.set(addresses)
            self._looked.set()

        await self._watch.run(take)


def _parse(fields: Mapping[str, Any]) -> str:
    address = StoreAddress.parse(fields["address"]).nodes
    if len(address) != 1:
        raise ConfigError("that is not one node", field="address")
    return address[0]


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
                log.debug("a segment was not copied from %s to %s: %s", copy.source.name, copy.target.name, error)

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
