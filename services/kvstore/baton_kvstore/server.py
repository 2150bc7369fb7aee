"""A complete KV store in one object, for the service's process and for tests."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable

from baton.api.v1 import kvstore_pb2, kvstore_pb2_grpc
from baton.background import keep_running
from baton.config.kvstore import KVStoreConfig
from baton.errors import ConfigError
from baton.rpc.addresses import join_address
from baton.rpc.auth import require_clear_pipes
from baton.rpc.redis import RedisPresence, store_news_key, store_node_key
from baton.rpc.server import GrpcServer, require_free_port
from baton.rpc.service_token import read_token
from baton.rpc.tls import read_tls
from baton.types import Epoch, InstanceId
from baton.worker.process import open_span_exporter, serve_metrics
from baton_kvstore.events import StoreEvents
from baton_kvstore.memory.pool import Quotas
from baton_kvstore.memory.store import BlockStore
from baton_kvstore.metrics import StoreMetrics
from baton_kvstore.service import KvStoreServicer
from baton_kvstore.tiers.disk.tier import DiskTier
from baton_kvstore.tiers.open import open_chain
from baton_kvstore.tiers.saver import Watermarks
from baton_kvstore.tiers.tiered_store import TieredStore
from baton_kvstore.transfer import PoolIO

log = logging.getLogger(__name__)

SERVICE = kvstore_pb2.DESCRIPTOR.services_by_name["KvStoreService"].full_name
EXPIRY_INTERVAL_S = 0.5


class KVStoreServer:
    """Serves one store over gRPC and pipes.

    Attributes:
        address: ``host:port`` of the gRPC server, once started.
        store: The store in memory; use it in the event loop's thread only.
        tiers: The store in memory and its lower tiers.
        events: KV events for routers.
        disk: The disk tier, if configured.

    Raises:
        ConfigError: The token file cannot be read, or is missing off loopback, or the disk tier cannot be opened.
    """

    def __init__(self, config: KVStoreConfig) -> None:
        self._config = config
        self._token = token = read_token(config.token_file)
        tls = read_tls(config)
        require_clear_pipes(config, tls)
        self.epoch = Epoch(secrets.token_bytes(16))
        self.instance_id = InstanceId(config.instance_id or f"kvstore-{self.epoch.hex()[:8]}")
        self.address = ""
        self.events = StoreEvents(self.epoch)
        self._pool_io = PoolIO(config, self.instance_id, token, tls)
        chain = open_chain(config)
        self.store = BlockStore(
            config.capacity_bytes,
            max_pools=config.max_fingerprints,
            max_leases=config.max_leases,
            clock=time.monotonic,
            on_close=self._pool_io.close_pool,
            behind=bool(chain.tiers),
            eviction=config.eviction,
            quotas=Quotas(config.tenant_bytes, config.tenant_disk_bytes),
        )
        self.tiers = TieredStore(self.store, chain, Watermarks(config.memory_full, config.memory_spare))
        self.disk = next((tier for tier in chain.tiers if isinstance(tier, DiskTier)), None)
        self.metrics = StoreMetrics(self.store, self.tiers, self.disk)
        self._spans = open_span_exporter(
            config.otlp_traces_endpoint, "kvstore", self.instance_id, self.metrics.registry
        )
        self._grpc = GrpcServer(host=config.host, port=config.port, services=[SERVICE], token=token, tls=tls)
        self._servicer = KvStoreServicer(
            config,
            instance_id=self.instance_id,
            epoch=self.epoch,
            tiers=self.tiers,
            pool_io=self._pool_io,
            metrics=self.metrics,
            events=self.events,
            spans=self._spans,
        )
        kvstore_pb2_grpc.add_KvStoreServiceServicer_to_server(self._servicer, self._grpc.server)
        self._expiry: asyncio.Task[None] | None = None
        self._presence: RedisPresence | None = None
        self._end_scrapes: Callable[[], None] | None = None

    async def start(self) -> None:
        """Listen, and report as serving to health checks.

        Raises:
            ConfigError: A port cannot be opened.
        """
        config = self._config
        require_free_port(config.host, config.kv_port, field="kv_port")  # listened on only when the first blocks come
        self.tiers.start()
        self.events.start(self.tiers)
        self.metrics.start()
        port = await self._grpc.start()
        if config.metrics_port:
            try:
                self._end_scrapes = serve_metrics(config.host, config.metrics_port, self.metrics.registry)
            except ConfigError:
                await self._grpc.stop(0)
                raise
        self.address = join_address(config.host, port)
        self._expiry = keep_running(self._expire, "lease expiry")
        await self._grpc.set_serving(True)
        if config.register_redis:
            # The address also decides which blocks a node keeps, so that of a restarted one should be the same.
            self._presence = RedisPresence(
                config.register_redis,
                key=store_node_key(config.register_prefix, self.instance_id),
                value={"address": join_address(config.advertise_host or config.host, port)},
                token=self._token,
                news=store_news_key(config.register_prefix),
                name=self.instance_id,
            )
            self._presence.start()
        log.info(
            "kvstore instance %s listening on %s, %d bytes for blocks, pipes %s",
            self.instance_id,
            self.address,
            config.capacity_bytes,
            ",".join(self._pool_io.kinds),
        )

    async def stop(self, grace_s: float = 0.0) -> None:
        """Refuse new calls, let running ones finish within ``grace_s`` seconds, then close everything."""
        if self._presence is not None:
            await self._presence.stop()
        self.events.close()
        await self._grpc.stop(grace_s)
        self.metrics.stop()
        if self._expiry is not None:
            self._expiry.cancel()
            await asyncio.wait([self._expiry])
        if self._end_scrapes is not None:
            await asyncio.to_thread(self._end_scrapes)
        if self._spans is not None:
            await asyncio.to_thread(self._spans.close)
        await self.tiers.close()
        self.store.close()
        await self._pool_io.close()

    async def _expire(self) -> None:
        """End expired leases also while no calls arrive, so that metrics are correct."""
        while True:
            await asyncio.sleep(EXPIRY_INTERVAL_S)
            expired = self.store.expire()
            self.tiers.saver.kick()
            if expired:
                log.warning("%d leases ran out without having been released", expired)
            self.metrics.refresh()
