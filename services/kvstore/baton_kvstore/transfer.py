"""How the bytes of a pool come and go: per pool a server that lets its blocks be read and a fetcher that pulls."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from baton.api.v1 import common_pb2
from baton.config.kvstore import KVStoreConfig
from baton.kv_transfer.blocks import (
    BlockFetcher,
    BlockServer,
    BlockSource,
    FetchResult,
    LinkOptions,
    SequenceBlocks,
    ServerOptions,
)
from baton.kv_transfer.pipes.base import PipeOptions
from baton.kv_transfer.pipes.registry import resolve_kinds
from baton.kv_transfer.types import source_to_pb
from baton.rpc.service_token import Token
from baton.rpc.tls import Tls
from baton.types import InstanceId
from baton_kvstore.memory.pool import Pool

log = logging.getLogger(__name__)


@dataclass
class PoolEndpoints:
    """One pool's way in and out.

    Attributes:
        source: Where its blocks can be read, once that was asked for.
    """

    server: BlockServer
    fetcher: BlockFetcher
    port: int
    source: common_pb2.KvSource | None = None


class PoolIO:
    """Opens a lane with a pool's first use and closes it with the pool.

    Attributes:
        kinds: Of pipe, in order of preference.

    Raises:
        ConfigError: One that was named cannot work here.
    """

    def __init__(
        self, config: KVStoreConfig, instance_id: InstanceId, token: Token | None, tls: Tls | None = None
    ) -> None:
        self._config, self._instance_id, self._token = config, instance_id, token
        self._tls = None if config.clear_kv else tls
        self.kinds = resolve_kinds(config.pipes, PipeOptions(tls=self._tls))
        self._lanes: dict[bytes, PoolEndpoints] = {}
        self._closing: set[asyncio.Future[None]] = set()
        self._ports: set[int] = set()

    def source(self, pool: Pool) -> common_pb2.KvSource:
        """Return where a pool's blocks can be read.

        Raises:
            ConfigError: Its pipes cannot listen.
        """
        lane = self._of(pool)
        if lane.source is None:
            lane.source = source_to_pb(lane.server.source)
        return lane.source

    async def pull(
        self,
        pool: Pool,
        source: BlockSource,
        reads: tuple[Sequence[int], Sequence[int], Sequence[int]],
        deadline: float,
        ready: int | None = None,
    ) -> FetchResult:
        """Fetch blocks into a pool's slots. When this returns or raises, no pipe writes into them any more.

        Args:
            pool: Whose slots.
            source: Where the blocks live.
            reads: Remote block ids, their generations, and the slots to fill.
            deadline: ``time.monotonic()`` seconds.
            ready: The source's progress before it computes them; ``None``: they are complete.

        Raises:
            BatonError: Nothing came.
        """
        blocks = dataclasses.replace(SequenceBlocks.pairs(*reads), ready=ready)
        return await self._of(pool).fetcher.fetch_async(source, blocks, deadline=deadline)

    def close_pool(self, pool: Pool) -> None:
        """Close a pool's lane and memory in the background."""
        lane = self._lanes.pop(pool.key, None)

        def close() -> None:
            if lane is not None:
                lane.server.close()
                lane.fetcher.close()
            pool.arena.close()

        def closed(job: asyncio.Future[None]) -> None:
            self._closing.discard(job)
            if lane is not None:
                self._ports.discard(lane.port)

        job = asyncio.get_running_loop().run_in_executor(None, close)
        self._closing.add(job)
        job.add_done_callback(closed)

    async def close(self) -> None:
        """Wait until everything that ``close_pool`` began is closed; no pull may be running."""
        if not self._closing:
            return
        for result in await asyncio.gather(*self._closing, return_exceptions=True):
            if result is not None:
                log.warning("closing a kind of KV: %s", result)

    def _of(self, pool: Pool) -> PoolEndpoints:
        lane = self._lanes.get(pool.key)
        if lane is None:
            config, kind = self._config, pool.fingerprint
            port = self._free_port()
            options = ServerOptions(port=port, advertise_host=config.advertise_host or None, tls=self._tls)
            server = BlockServer(
                pool.arena,
                kind,
                self._instance_id,
                kinds=self.kinds,
                host=config.host,
                token=self._token,
                options=options,
            )
            fetcher = BlockFetcher(
                pool.arena,
                kind,
                kinds=self.kinds,
                max_threads=config.pull_workers + MAX_FOLLOWED,
                links=LinkOptions(token=self._token, tls=self._tls),
            )
            lane = self._lanes[pool.key] = PoolEndpoints(server, fetcher, port)
            self._ports.add(port)
            log.info("new kind of KV: model %s, %d bytes per block", kind.model, kind.block_bytes)
        return lane

    def _free_port(self) -> int:
        """Return the first port from ``--kv-port`` on that no pool has; 0: any."""
        first = self._config.kv_port
        if not first:
            return 0
        # A pool that is being closed still has its port.
        return next(port for port in range(first, first + len(self._ports) + 1) if port not in self._ports)


MAX_FOLLOWED = 8
"""Computations that are followed at once, each by a thread of its own: other Puts never wait for them."""
_SHARE = 0.25
"""Of the memory, for blocks that are being computed."""


class FollowerSlots:
    """Lets a few such Puts in. Used in one event loop.

    Args:
        capacity_bytes: Of the store.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._limit = int(_SHARE * capacity_bytes)
        self._count = self._bytes = 0

    @asynccontextmanager
    async def turn(self, num_bytes: int) -> AsyncIterator[bool]:
        """Say whether a Put of so much may follow its source, which it does until the end of the context."""
        if self._count >= MAX_FOLLOWED or self._bytes + num_bytes > self._limit:
            yield False
            return
        self._count += 1
        self._bytes += num_bytes
        try:
            yield True
        finally:
            self._count -= 1
            self._bytes -= num_bytes
