"""KV that the pool has no room for any more stays in host memory: every complete block is copied there, LRU."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence

import numpy as np

from baton.kv_cache.connector import LoadPlan, LoadRequest
from baton.kv_cache.events import HOST, BlocksRemoved, BlocksStored, KVEvent
from baton.kv_transfer.blocks import BlockSource
from baton.kv_transfer.connector.staging import StagingArena
from baton.kv_transfer.connector.store.backend import ChainPart, LoadProgress, StoreOptions, StoreUse
from baton.kv_transfer.connector.store.client import leading
from baton.kv_transfer.connector.store.connector import BackedConnector, SavedPool
from baton.types import BlockHash, BlockId


class HostMemory:
    """A bounded arena of undivided blocks as a store; see :class:`StoreBackend`.

    A block is in one of three states: free, being filled, or found by its hash. Blocks that a load reads are pinned;
    of the others the one that was used longest ago gives way. Changes only in the event loop.

    Args:
        side: The arena, and the copying.
        tell: Told of what came and went, in the loop; ``None``: no events are wanted.

    Attributes:
        num_evicted: Blocks that gave way to others.
    """

    def __init__(self, side: StagingArena, tell: Callable[[list[KVEvent]], None] | None = None) -> None:
        self._side, self._tell = side, tell
        self._slots: OrderedDict[BlockHash, int] = OrderedDict()  # used longest ago first
        self._filling: set[BlockHash] = set()
        self._free = list(range(side.arena.num_blocks))[::-1]
        self._pins: Counter[BlockHash] = Counter()
        self.num_evicted = 0

    @property
    def num_blocks(self) -> int:
        """Blocks that can be found."""
        return len(self._slots)

    def snapshot(self) -> list[BlocksStored]:
        """Return what can be found."""
        return [BlocksStored(None, tuple(self._slots), HOST)] if self._slots else []

    def num_leading(self, hashes: Sequence[BlockHash], start: int, stop: int) -> int:
        """Return how many blocks of a chain are there from ``start`` on; any thread, and true only for the moment."""
        slots, at = self._slots, start
        while at < stop and hashes[at] in slots:
            at += 1
        return at - start

    async def save(
        self,
        source: BlockSource,
        part: ChainPart,
        block_ids: Sequence[BlockId],
        generations: Sequence[int],
        *,
        deadline: float,
    ) -> tuple[int, int]:
        """Copy the blocks that are missing; see :meth:`StoreBackend.save`. ``source`` is this pool and not needed."""
        names = part.wanted
        self._used(names)
        missing = [i for i, name in enumerate(names) if name not in self._slots and name not in self._filling]
        slots = self._take(len(missing))
        missing = missing[: len(slots)]
        wanted = [names[i] for i in missing]
        self._filling.update(wanted)
        valid = np.zeros(len(missing), bool)
        try:
            if missing:
                ids, fences = [block_ids[i] for i in missing], [generations[i] for i in missing]
                valid = await self._side.collect(ids, fences, slots, deadline)
        finally:
            self._filling.difference_update(wanted)
            came = [(name, slot) for name, slot, ok in zip(wanted, slots, valid, strict=True) if ok]
            self._free += [slot for slot, ok in zip(slots, valid, strict=True) if not ok]
            for name, slot in reversed(came):  # of a chain the tail, worthless without its head, goes first
                self._slots[name] = slot
            self._say(BlocksStored(None, tuple(name for name, _ in came), HOST))
        return sum(name in self._slots for name in names), len(came) * self._side.arena.block_bytes

    async def load(
        self,
        part: ChainPart,
        block_ids: Sequence[BlockId],
        progress: LoadProgress,
        *,
        deadline: float,
        cancelled: threading.Event,
    ) -> None:
        """Copy the longest prefix that is there; see :meth:`StoreBackend.load`."""
        count = self.num_leading(part.hashes, part.start, part.stop)
        names = part.wanted[:count]
        progress.pipe, progress.source = "memory", "host memory"
        if not names:
            return
        self._pins.update(names)
        try:
            slots = [self._slots[name] for name in names]
            result = await self._side.deliver(slots, block_ids[:count], deadline=deadline, cancelled=cancelled)
        finally:
            self._pins.subtract(names)
            for name in names:
                if not self._pins[name]:
                    del self._pins[name]
            self._used(names)
        progress.num_blocks, progress.num_bytes = leading(result.valid), result.num_bytes
        progress.seconds = result.seconds

    async def close(self) -> None:
        """Give the memory back."""
        self._side.close()
        self._slots.clear()

    def _used(self, names: Sequence[BlockHash]) -> None:
        for name in reversed(names):
            if name in self._slots:
                self._slots.move_to_end(name)

    def _take(self, count: int) -> list[int]:
        """Take up to ``count`` slots: free ones, then those of the blocks that were used longest ago."""
        short = count - len(self._free)
        gone = []
        if short > 0:
            for name in self._slots:
                if name not in self._pins:
                    gone.append(name)
                    if len(gone) == short:
                        break
        freed = [self._slots.pop(name) for name in gone]
        self._side.arena.generations[freed] += np.uint64(1)
        self._free += freed
        self.num_evicted += len(gone)
        self._say(BlocksRemoved(tuple(gone), HOST))
        return [self._free.pop() for _ in range(min(count, len(self._free)))]

    def _say(self, event: BlocksStored | BlocksRemoved) -> None:
        if event.hashes and self._tell is not None:
            self._tell([event])


class OffloadConnector(BackedConnector):
    """Loads blocks back that the pool has evicted. What is there is known at once.

    Args:
        host: The memory; closed with this.
        options: How much goes on at once.
        pool: The engine's.
        use: Where counts go.
        loop: Where copies are started.
        wake: Makes the engine poll; called from any thread.
    """

    def __init__(
        self,
        host: HostMemory,
        options: StoreOptions,
        *,
        pool: SavedPool,
        use: StoreUse,
        loop: asyncio.AbstractEventLoop,
        wake: Callable[[], None],
    ) -> None:
        super().__init__(host, options, pool=pool, use=use, loop=loop, wake=wake, follows_all=True)
        self._host = host

    def plan_load(self, request: LoadRequest, num_local_tokens: int) -> LoadPlan | None:
        """Plan what is in host memory beyond the local blocks."""
        hope = super().plan_load(request, num_local_tokens)
        if hope is None:
            return None
        start, stop = num_local_tokens // self._block_size, hope.num_tokens // self._block_size
        count = self._host.num_leading(request.hashes, start, stop)
        return LoadPlan(num_local_tokens + count * self._block_size) if count else None
