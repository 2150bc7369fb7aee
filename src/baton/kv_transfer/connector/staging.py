"""Undivided blocks beside an instance's pool, whatever the pool's parallel shape: what is kept outside is kept whole.

Copies both ways are fetches over the memory pipe: the same code, the same generations and the same map between shapes
as between two instances.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import numpy as np
import numpy.typing as npt

from baton.errors import DeadlineError
from baton.kv_cache.arena import HostArena
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
from baton.types import BlockId, InstanceId

_LANE_BYTES = 4 << 20
_NUM_LANES = 8


class StagingArena:
    """An arena of undivided blocks in this process, and the copying between it and the pool.

    Args:
        pool: The instance's.
        fingerprint: What its blocks are.
        num_blocks: Slots of the arena.
        kept: What the arena's blocks are; default: the same, undivided.

    Attributes:
        arena: Its memory, which the kernel gives page by page as it is used.
    """

    def __init__(
        self, pool: KVShards, fingerprint: Fingerprint, num_blocks: int, *, kept: Fingerprint | None = None
    ) -> None:
        whole = kept or fingerprint.undivided()
        self.arena = HostArena(num_blocks, whole.block_bytes, private=True)
        network = MemoryNetwork()
        kinds, served, links = ("memory",), ServerOptions(memory=network), LinkOptions(memory=network)
        self._pool_server = BlockServer(pool, fingerprint, InstanceId("pool"), kinds=kinds, options=served)
        self._side_server = BlockServer(self.arena, whole, InstanceId("side"), kinds=kinds, options=served)
        self._collector = BlockFetcher(self.arena, whole, kinds=kinds, max_threads=2, links=links)
        self._deliverer = BlockFetcher(pool, fingerprint, kinds=kinds, max_threads=2, links=links)

    async def collect(
        self, block_ids: Sequence[BlockId], generations: Sequence[int], slots: Sequence[int], deadline: float
    ) -> npt.NDArray[np.bool_]:
        """Copy blocks of the pool into the first slots and return which of them did not change meanwhile."""
        blocks = SequenceBlocks.pairs(block_ids, generations, slots[: len(block_ids)])
        result = await self._collector.fetch_async(self._pool_server.source, blocks, deadline=deadline)
        return result.valid

    async def deliver(
        self, slots: Sequence[int], block_ids: Sequence[BlockId], *, deadline: float, cancelled: threading.Event
    ) -> FetchResult:
        """Copy slots into blocks of the pool."""
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


class Lanes(StagingArena):
    """A side arena for what passes through: cut into lanes of a few MiB, one for each transfer.

    Args:
        pool: The instance's.
        fingerprint: What its blocks are.
        max_blocks: Slots of a lane, at most.
        kept: What a slot holds; default: the same, undivided.

    Attributes:
        lane_blocks: Slots of a lane.
    """

    def __init__(
        self, pool: KVShards, fingerprint: Fingerprint, *, max_blocks: int, kept: Fingerprint | None = None
    ) -> None:
        whole = kept or fingerprint.undivided()
        self.lane_blocks = max(1, min(_LANE_BYTES // whole.block_bytes, max_blocks))
        super().__init__(pool, fingerprint, _NUM_LANES * self.lane_blocks, kept=whole)
        self._free: asyncio.Queue[list[int]] = asyncio.Queue()
        for i in range(_NUM_LANES):
            self._free.put_nowait(list(range(i * self.lane_blocks, (i + 1) * self.lane_blocks)))

    async def take(self, deadline: float) -> list[int]:
        """Have a lane's slots to oneself, until :meth:`give`.

        Raises:
            DeadlineError: None became free in time.
        """
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                return await self._free.get()
        except TimeoutError:
            raise DeadlineError("too many other transfers") from None

    def give(self, slots: list[int]) -> None:
        """Give a lane back; its slots must not be used any more."""
        self._free.put_nowait(slots)

    @asynccontextmanager
    async def lane(self, deadline: float) -> AsyncIterator[list[int]]:
        """Have a lane's slots to oneself; see :meth:`take`."""
        slots = await self.take(deadline)
        try:
            yield slots
        finally:
            self.give(slots)
