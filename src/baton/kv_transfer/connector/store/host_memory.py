"""Undivided blocks in this process's host memory: for what passes through to another store, and as a store itself.

What is stored outside of the pool is stored undivided, whatever the pool's parallel shape. Copies both ways are fetches
over the memory pipe: the same code, the same generations and the same mapping between shapes as between two instances.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import numpy as np
import numpy.typing as npt

from baton.errors import DeadlineError
from baton.kv_cache.arena import HostArena
from baton.kv_cache.events import HOST, BlocksRemoved, BlocksStored, KVEvent
from baton.kv_cache.fingerprint import Fingerprint
from baton.kv_cache.shards import KVShards
from baton.kv_transfer.blocks import (
    BlockFetcher,
    BlockServer,
    FetchResult,
    LinkOptions,
    MemoryNetwork,
    SequenceBlocks,
    ServerOptions,
)
from baton.kv_transfer.connector.store.backend import (
    ChainPart,
    LoadCall,
    SaveCall,
    SaveResult,
    StoreBackend,
    num_leading,
)
from baton.types import BlockHash, BlockId, InstanceId

_LANE_BYTES = 4 << 20
_NUM_LANES = 8


class StagingArena:
    """An arena of undivided blocks in this process, and the copying between it and the pool.

    Args:
        pool: The instance's KV pool.
        fingerprint: Fingerprint of the pool's blocks.
        num_blocks: Number of slots in the arena.
        stored: Fingerprint of the arena's blocks; default: that of the pool, undivided.

    Attributes:
        arena: Memory of the arena, which the kernel allocates page by page on first use.
    """

    def __init__(
        self, pool: KVShards, fingerprint: Fingerprint, num_blocks: int, *, stored: Fingerprint | None = None
    ) -> None:
        stored = stored or fingerprint.undivided()
        self.arena = HostArena(num_blocks, stored.block_bytes, private=True)
        network = MemoryNetwork()
        kinds = ("memory",)
        served = ServerOptions(memory=network)
        links = LinkOptions(memory=network)
        self._pool_server = BlockServer(pool, fingerprint, InstanceId("pool"), kinds=kinds, options=served)
        self._side_server = BlockServer(self.arena, stored, InstanceId("side"), kinds=kinds, options=served)
        self._collector = BlockFetcher(self.arena, stored, kinds=kinds, max_threads=2, links=links)
        self._deliverer = BlockFetcher(pool, fingerprint, kinds=kinds, max_threads=2, links=links)

    async def collect(self, call: SaveCall, indexes: Sequence[int], slots: Sequence[int]) -> npt.NDArray[np.bool_]:
        """Copy some of a call's blocks into the first of some slots.

        Args:
            call: The call.
            indexes: Indexes of the blocks in the call's part, at most as many as slots.
            slots: Slots of the arena.

        Returns:
            bool [blocks]: whether a block still had its generation after the copy; other slots must not be used.
        """
        block_ids = [call.block_ids[i] for i in indexes]
        generations = [call.generations[i] for i in indexes]
        blocks = SequenceBlocks.pairs(block_ids, generations, slots[: len(indexes)])
        result = await self._collector.fetch_async(self._pool_server.source, blocks, deadline=call.deadline)
        return result.valid

    async def deliver(
        self, slots: Sequence[int], block_ids: Sequence[BlockId], *, deadline: float, cancelled: threading.Event
    ) -> FetchResult:
        """Copy slots into blocks of the pool, parallel to ``slots``."""
        blocks = SequenceBlocks.pairs(slots, self.arena.generations[list(slots)], block_ids)
        source = self._side_server.source
        return await self._deliverer.fetch_async(source, blocks, deadline=deadline, cancelled=cancelled)

    def close(self) -> None:
        """Close everything; no copy may be running."""
        for fetcher in (self._collector, self._deliverer):
            fetcher.close()
        for server in (self._pool_server, self._side_server):
            server.close()
        self.arena.close()


class StagingLanes(StagingArena):
    """A staging arena that is cut into lanes of a few MiB, one for each transfer that passes through.

    Args:
        pool: The instance's KV pool.
        fingerprint: Fingerprint of the pool's blocks.
        max_blocks: Largest number of slots in a lane.
        stored: Fingerprint of the arena's blocks; default: that of the pool, undivided.

    Attributes:
        lane_blocks: Number of slots in a lane.
    """

    def __init__(
        self, pool: KVShards, fingerprint: Fingerprint, *, max_blocks: int, stored: Fingerprint | None = None
    ) -> None:
        stored = stored or fingerprint.undivided()
        self.lane_blocks = max(1, min(_LANE_BYTES // stored.block_bytes, max_blocks))
        super().__init__(pool, fingerprint, _NUM_LANES * self.lane_blocks, stored=stored)
        self._free: asyncio.Queue[list[int]] = asyncio.Queue()
        for i in range(_NUM_LANES):
            self._free.put_nowait(list(range(i * self.lane_blocks, (i + 1) * self.lane_blocks)))

    async def acquire_lane(self, deadline: float) -> list[int]:
        """Return the slots of a free lane, for the caller's exclusive use until :meth:`release_lane`.

        Raises:
            DeadlineError: No lane became free in time.
        """
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                return await self._free.get()
        except TimeoutError:
            raise DeadlineError("too many other transfers") from None

    def release_lane(self, slots: list[int]) -> None:
        """Make a lane free again; its slots must not be used any more."""
        self._free.put_nowait(slots)

    @asynccontextmanager
    async def lane(self, deadline: float) -> AsyncIterator[list[int]]:
        """Use a lane's slots exclusively; see :meth:`acquire_lane`."""
        slots = await self.acquire_lane(deadline)
        try:
            yield slots
        finally:
            self.release_lane(slots)


class HostMemoryStore(StoreBackend):
    """Evicted blocks of the pool in a bounded arena: every complete block is copied there, least recently used out.

    A slot is in one of three states: free, being filled, or found by its hash. Blocks that a load reads are pinned.
    Changes only in the event loop.

    Args:
        staging: The arena, and the copying.
        on_events: Called in the loop with blocks that were stored or removed; ``None``: no events.

    Attributes:
        num_evicted: Number of blocks removed to make room for others.
    """

    name = "host memory"

    def __init__(self, staging: StagingArena, on_events: Callable[[list[KVEvent]], None] | None = None) -> None:
        self._staging = staging
        self._on_events = on_events
        self._slots: OrderedDict[BlockHash, int] = OrderedDict()  # least recently used first
        self._filling: set[BlockHash] = set()
        self._free = list(range(staging.arena.num_blocks))[::-1]
        self._pins: Counter[BlockHash] = Counter()
        self.num_evicted = 0

    @property
    def num_blocks(self) -> int:
        """Number of blocks that can be found by their hash."""
        return len(self._slots)

    def snapshot(self) -> list[BlocksStored]:
        """Return all blocks that can be found as if they had just been stored."""
        return [BlocksStored(None, tuple(self._slots), HOST)] if self._slots else []

    def count_leading(self, part: ChainPart) -> int:
        slots = self._slots
        index = part.start
        while index < part.stop and part.hashes[index] in slots:
            index += 1
        return index - part.start

    async def save(self, call: SaveCall) -> SaveResult:
        """Copy the missing blocks. The call's source is this instance's pool and is not needed."""
        names = call.part.wanted
        self._mark_used(names)
        missing = [i for i, name in enumerate(names) if name not in self._slots and name not in self._filling]
        slots = self._allocate_slots(len(missing))
        missing = missing[: len(slots)]
        wanted = [names[i] for i in missing]
        self._filling.update(wanted)
        valid = np.zeros(len(missing), bool)
        try:
            if missing:
                valid = await self._staging.collect(call, missing, slots)
        finally:
            self._filling.difference_update(wanted)
            stored = [(name, slot) for name, slot, ok in zip(wanted, slots, valid, strict=True) if ok]
            self._free += [slot for slot, ok in zip(slots, valid, strict=True) if not ok]
            for name, slot in reversed(stored):  # of a chain the tail, useless without its head, is evicted first
                self._slots[name] = slot
            self._emit(BlocksStored(None, tuple(name for name, _ in stored), HOST))
        return SaveResult(sum(name in self._slots for name in names), len(stored) * self._staging.arena.block_bytes)

    async def load(self, call: LoadCall) -> None:
        progress = call.progress
        progress.pipe = "memory"
        progress.source = self.name
        count = self.count_leading(call.part)
        names = call.part.wanted[:count]
        if not names:
            return
        self._pins.update(names)
        try:
            slots = [self._slots[name] for name in names]
            targets = call.block_ids[:count]
            result = await self._staging.deliver(slots, targets, deadline=call.deadline, cancelled=call.cancelled)
        finally:
            self._pins.subtract(names)
            for name in names:
                if not self._pins[name]:
                    del self._pins[name]
            self._mark_used(names)
        progress.num_blocks = num_leading(result.valid)
        progress.num_bytes = result.num_bytes
        progress.seconds = result.seconds

    async def close(self) -> None:
        self._staging.close()
        self._slots.clear()

    def _mark_used(self, names: Sequence[BlockHash]) -> None:
        for name in reversed(names):
            if name in self._slots:
                self._slots.move_to_end(name)

    def _allocate_slots(self, count: int) -> list[int]:
        """Return up to ``count`` slots: free ones, then those of the least recently used blocks that are not pinned."""
        short = count - len(self._free)
        evicted = []
        if short > 0:
            for name in self._slots:
                if name not in self._pins:
                    evicted.append(name)
                    if len(evicted) == short:
                        break
        slots = [self._slots.pop(name) for name in evicted]
        self._staging.arena.generations[slots] += np.uint64(1)
        self._free += slots
        self.num_evicted += len(evicted)
        self._emit(BlocksRemoved(tuple(evicted), HOST))
        return [self._free.pop() for _ in range(min(count, len(self._free)))]

    def _emit(self, event: BlocksStored | BlocksRemoved) -> None:
        if event.hashes and self._on_events is not None:
            self._on_events([event])
