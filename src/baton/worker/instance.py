"""One prefill or decode instance: model, engine thread, pipes and gRPC server, started and stopped as a whole."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from prometheus_client import start_http_server

from baton.api.v1 import worker_pb2_grpc
from baton.config import EngineConfig
from baton.config.worker import WorkerConfig
from baton.engine.build import make_arena
from baton.engine.core import EngineCore
from baton.engine.executor.base import Executor, load_executor
from baton.errors import ConfigError
from baton.kv_cache.arena import Arena
from baton.kv_cache.connector import KVConnector
from baton.kv_cache.events import KVEvent
from baton.kv_cache.shards import KVShards
from baton.kv_transfer.blocks import BlockServer, BlockSource, LinkOptions, MemoryNetwork, ServerOptions, TcpOptions
from baton.rpc.auth import admits_services, read_token, require_clear_pipes, require_safe_bind
from baton.rpc.server import GrpcServer, require_free_port
from baton.rpc.tls import Tls, read_tls
from baton.tokenizer.model_files import tokenizer_digest
from baton.types import InstanceId, Role
from baton.worker.admission import Admission
from baton.worker.engine_thread import EngineThread
from baton.worker.events import KvEventLog
from baton.worker.metrics import WorkerMetrics
from baton.worker.redis_registration import RedisRegistration
from baton.worker.registration import Identity, Registration
from baton.worker.servicer import WorkerContext, WorkerServicerBase
from baton.worker.tiers import TierBoard

log = logging.getLogger(__name__)
SERVICE = "baton.api.v1.WorkerService"


@dataclass(frozen=True)
class Parts:
    """What exists before the role's own parts are built.

    Attributes:
        role: Prefill or decode.
        shards: The KV pool's memory, of all ranks.
        arena: This process's part of it, whose generations fence all parts.
        wake: Makes the engine poll its connector; any thread may call it.
        source: Returns where this instance's blocks can be read, once it listens.
        links: How other instances' blocks are reached.
        tiers: Where connectors say what they keep outside the pool.
        tls: Certificates, if the services use some.
    """

    role: Role
    config: WorkerConfig
    engine_config: EngineConfig
    executor: Executor
    shards: KVShards
    arena: Arena
    token: str | None
    loop: asyncio.AbstractEventLoop
    wake: Callable[[], None]
    source: Callable[[], BlockSource]
    links: LinkOptions = field(default_factory=LinkOptions)
    tls: Tls | None = None
    tiers: TierBoard = field(default_factory=TierBoard)


class RoleParts(Protocol):
    """What a role adds."""

    @property
    def open_calls(self) -> frozenset[str]:
        """Calls that want no token, because what they are given proves that it may be asked for."""

    @property
    def connector(self) -> KVConnector:
        """The engine's connector."""

    def servicer(self, context: WorkerContext) -> WorkerServicerBase:
        """Build the role's calls."""

    async def close(self) -> None:
        """Release what the role opened; the engine has stopped by then."""


RoleFactory = Callable[[Parts], RoleParts]


class WorkerInstance:
    """A running instance.

    Args:
        role: Prefill or decode.
        config: The service.
        engine_config: Its engine.
        build: Makes the role's own parts.
        on_failure: Called in the loop when the engine cannot go on.
        memory: Joins the instances of one process, for the ``memory`` pipe.

    Attributes:
        port: Of the gRPC server, once started.
        context: The parts, once started.
    """

    port: int
    context: WorkerContext

    def __init__(
        self,
        role: Role,
        config: WorkerConfig,
        engine_config: EngineConfig,
        build: RoleFactory,
        *,
        on_failure: Callable[[], None] | None = None,
        memory: MemoryNetwork | None = None,
    ) -> None:
        self._role, self._config, self._engine_config, self._build = role, config, engine_config, build
        self._on_failure, self._memory = on_failure, memory
        self._registrations: list[Registration | RedisRegistration] = []
        self._stack = contextlib.AsyncExitStack()
        self._server: GrpcServer | None = None

    @property
    def address(self) -> str:
        """host:port of the gRPC server."""
        return f"{self._config.host}:{self.port}"

    async def start(self) -> None:
        """Load the model, listen, register.

        Raises:
            ConfigError: Something cannot work; everything opened so far is closed again.
        """
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise

    async def _start(self) -> None:
        config = self._config
        token = read_token(config.token_file)
        tls = read_tls(config)
        require_safe_bind(config.host, token, tls)
        require_clear_pipes(config, tls)
        # Before the model is loaded, which may take minutes.
        require_free_port(config.host, config.port)
        require_free_port(config.host, config.kv_port, field="kv_port")
        require_free_port(config.host, config.metrics_port, field="metrics_port")
        executor = load_executor(self._engine_config)
        self._stack.callback(executor.close)
        shards = make_arena(self._engine_config, executor)
        self._stack.callback(shards.close)
        arena = shards.primary
        wake, tiers = _Wake(), TierBoard()
        loop = asyncio.get_running_loop()
        parts = self._build(
            Parts(
                role=self._role,
                config=config,
                engine_config=self._engine_config,
                executor=executor,
                shards=shards,
                arena=arena,
                token=token,
                loop=loop,
                wake=wake,
                source=lambda: self.context.block_server.source,
                links=LinkOptions(
                    token=token,
                    tcp=TcpOptions(streams=config.kv_streams, checksums=config.kv_checksums),
                    memory=self._memory,
                    tls=None if config.clear_kv else tls,
                ),
                tls=tls,
                tiers=tiers,
            )
        )
        self._stack.push_async_callback(parts.close)
        events = KvEventLog(arena.epoch)
        tiers.bind(events.append)

        def on_events(items: list[KVEvent]) -> None:
            loop.call_soon_threadsafe(events.append, items)

        core = EngineCore(self._engine_config, executor, shards, connector=parts.connector, on_events=on_events)
        engine = EngineThread(core, loop, on_failure=self._on_failure)
        wake.target = engine.wake
        instance_id = InstanceId(
            config.instance_id or f"{self._role}-{socket.gethostname()}-{config.port or arena.epoch.hex()[:8]}"
        )
        options = ServerOptions(
            port=config.kv_port,
            advertise_host=config.advertise.rpartition(":")[0] or None,
            memory=self._memory,
            tls=None if config.clear_kv else tls,
        )
        block_server = BlockServer(
            shards,
            executor.fingerprint,
            instance_id,
            kinds=config.pipes,
            host=config.host,
            token=token,
            options=options,
        )
        self._stack.callback(block_server.close)
        self.context = WorkerContext(
            role=self._role,
            instance_id=instance_id,
            config=config,
            engine_config=self._engine_config,
            executor=executor,
            engine=engine,
            shards=shards,
            arena=arena,
            block_server=block_server,
            events=events,
            tiers=tiers,
            admission=Admission(),
            metrics=WorkerMetrics(),
            tokenizer_digest=tokenizer_digest(self._engine_config.model),
        )
        self.context.metrics.watch(lambda: engine.stats, lambda: (engine.num_steps, engine.step_seconds))
        engine.start()
        self._stack.push_async_callback(engine.stop)
        # An engine that has lost a rank ends also while it has nothing to do.
        executor.watch(engine.fail)
        await self._listen(parts, token, tls)

    async def _listen(self, parts: RoleParts, token: str | None, tls: Tls | None) -> None:
        config, context = self._config, self.context
        server = GrpcServer(
            host=config.host,
            port=config.port,
            services=[SERVICE],
            token=token,
            tls=tls,
            admits=admits_services(token, open_to_all=parts.open_calls),
        )
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(parts.servicer(context), server.server)
        self.port = await server.start()
        self._server = server
        if config.metrics_port:
            self._serve_metrics()
        await server.set_serving(True)
        identity = Identity(config.advertise or self.address, context.instance_id, context.role, context.arena.epoch)
        self._registrations.extend(Registration(router, identity, token, tls) for router in config.routers)
        if config.redis:
            self._registrations.append(RedisRegistration(config.redis, config.redis_prefix, identity))
        for registration in self._registrations:
            registration.start()
        log.info(
            "%s instance %s listening on %s, %d KV blocks of %d tokens, attention %s, pipes %s",
            context.role,
            context.instance_id,
            self.address,
            context.arena.num_blocks,
            context.engine_config.block_size,
            context.executor.attention_backend,
            ",".join(endpoint.kind for endpoint in context.block_server.endpoints),
        )

    async def stop(self, drain_s: float) -> None:
        """Leave the routers, let running calls end for ``drain_s`` seconds, then close everything."""
        admission = self.context.admission
        log.info("draining: %d calls in progress", admission.active)
        await asyncio.gather(*(registration.stop() for registration in self._registrations))
        if self._server is not None:
            await self._server.set_serving(False)
            left = await admission.drain(drain_s)
            if left:
                log.warning("%d calls did not end within %g s and are cut off", left, drain_s)
            await self._server.stop(0.5)
        await self._stack.aclose()

    def _serve_metrics(self) -> None:
        config = self._config
        try:
            server, thread = start_http_server(
                config.metrics_port, addr=config.host, registry=self.context.metrics.registry
            )
        except OSError as error:
            message = f"cannot serve metrics on {config.host}:{config.metrics_port}: {error.strerror}"
            raise ConfigError(message, field="metrics_port") from error

        def close() -> None:
            server.shutdown()
            server.server_close()
            thread.join(5.0)

        self._stack.callback(close)


class _Wake:
    """Wakes the engine once it exists; connectors are built before it."""

    target: Callable[[], None] | None = None

    def __call__(self) -> None:
        if self.target is not None:
            self.target()
