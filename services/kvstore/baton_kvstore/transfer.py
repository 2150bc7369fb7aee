"""Pool I/O: per pool a server that blocks are read from, and a fetcher that pulls blocks."""

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
    """Server and fetcher of one pool.

    Attributes:
        server: Serves the pool's blocks to readers.
        fetcher: Pulls blocks into the pool.
        port: Port of the server; 0: any.
        source: Address of the server as sent to clients, once requested.
    """

    server: BlockServer
    fetcher: BlockFetcher
    port: int
    source: common_pb2.KvSource | None = None


class PoolIO:
    """Opens a pool's endpoints at its first use and closes them with the pool.

    Attributes:
        kinds: Pipe kinds, in order of preference.

    Raises:
        ConfigError: A configured pipe kind is not available here.
    """

    def __init__(
        self, config: KVStoreConfig, instance_id: InstanceId, token: Token | None, tls: Tls | None = None
    ) -> None:
        self._config = config
        self._instance_id = instance_id
        self._token = token
        self._tls = None if config.clear_kv else tls
        self.kinds = resolve_kinds(config.pipes, PipeOptions(tls=self._tls))
        self._endpoints: dict[bytes, PoolEndpoints] = {}
        self._closing: set[asyncio.Future[None]] = set()
        self._ports: set[int] = set()

    def source(self, pool: Pool) -> common_pb2.KvSource:
        """Return the source that clients read a pool's blocks from.

        Raises:
            ConfigError: Its pipes cannot listen.
        """
        endpoints = self._endpoints_of(pool)
        if endpoints.source is None:
            endpoints.source = source_to_pb(endpoints.server.source)
        return endpoints.source

    async def pull(
        self,
        pool: Pool,
        source: BlockSource,
        reads: tuple[Sequence[int], Sequence[int], Sequence[int]],
        deadline: float,
        ready: int | None = None,
    ) -> FetchResult:
        """Fetch blocks into a pool's slots. After this returns or raises, no pipe writes into them.

        Args:
            pool: Pool that owns the slots.
            source: Instance to read the blocks from.
            reads: Remote block ids, their generations, and the slots to fill; all of one length.
            deadline: ``time.monotonic()`` seconds.
            ready: Progress of the source at which the first block is computed; ``None``: all blocks are complete.

        Raises:
            BatonError: No block was fetched.
        """
        blocks = dataclasses.replace(SequenceBlocks.pairs(*reads), ready=ready)
        return await self._endpoints_of(pool).fetcher.fetch_async(source, blocks, deadline=deadline)

    def close_pool(self, pool: Pool) -> None:
        """Close a pool's endpoints and memory in the background."""
        endpoints = self._endpoints.pop(pool.key, None)

        def close() -> None:
            if endpoints is not None:
                endpoints.server.close()
                endpoints.fetcher.close()
            pool.arena.close()

        def closed(job: asyncio.Future[None]) -> None:
            self._closing.discard(job)
            if endpoints is not None:
                self._ports.discard(endpoints.port)

        job = asyncio.get_running_loop().run_in_executor(None, close)
        self._closing.add(job)
        job.add_done_callback(closed)

    async def close(self) -> None:
        """Wait until all pools passed to :meth:`close_pool` are closed; no pull may be running."""
        if not self._closing:
            return
        for result in await asyncio.gather(*self._closing, return_exceptions=True):
            if result is not None:
                log.warning("closing a kind of KV: %s", result)

    def _endpoints_of(self, pool: Pool) -> PoolEndpoints:
        endpoints = self._endpoints.get(pool.key)
        if endpoints is None:
            config = self._config
            kind = pool.fingerprint
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
            endpoints = self._endpoints[pool.key] = PoolEndpoints(server, fetcher, port)
            self._ports.add(port)
            log.info("new kind of KV: model %s, %d bytes per block", kind.model, kind.block_bytes)
        return endpoints

    def _free_port(self) -> int:
        """Return the first port from ``--kv-port`` on that no pool uses; 0: any."""
        first = self._config.kv_port
        if not first:
            return 0
        # A pool that is being closed still has its port.
        return next(port for port in range(first, first + len(self._ports) + 1) if port not in self._ports)


MAX_FOLLOWED = 8
"""Maximum number of Puts that follow a running computation, each in its own thread, so others never wait for them."""
_SHARE = 0.25
"""Share of the memory for blocks that are still being computed."""


class FollowerSlots:
    """Limits the Puts that follow a running computation, in number and bytes. Used in one event loop.

    Args:
        capacity_bytes: Capacity of the store, in bytes.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._limit = int(_SHARE * capacity_bytes)
        self._count = self._bytes = 0

    @asynccontextmanager
    async def admit(self, num_bytes: int) -> AsyncIterator[bool]:
        """Yield whether a Put of so many bytes may follow its source until the end of the context."""
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
