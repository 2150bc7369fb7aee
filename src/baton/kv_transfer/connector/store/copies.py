"""Copies between nodes that a client sees to in the background, and the count of which segments are hot."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.errors import BatonError
from baton.kv_transfer.connector.store.nodes import Node
from baton.kv_transfer.connector.store.use import StoreUse
from baton.types import BlockHash, Tenant

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
        tenant: Whose blocks these are; ``None``: nobody's.
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
