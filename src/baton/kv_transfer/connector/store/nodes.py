"""The nodes of a store as one client sees them: who is there, who is resting, who owned a segment before."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from baton.errors import BatonError, QueueFullError
from baton.kv_transfer.connector.breaker import CircuitBreaker
from baton.kv_transfer.connector.store.client import StoreClient
from baton.kv_transfer.connector.store.placement import Placement
from baton.kv_transfer.connector.store.use import StoreUse

log = logging.getLogger(__name__)

_MAX_PREVIOUS = 4


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
            BatonError: Nobody knows.
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
