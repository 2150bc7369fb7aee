"""One prefill or decode instance: model, engine thread, pipes and gRPC server, started and stopped as a whole."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import socket
from collections.abc import Callable

from baton.api.v1 import worker_pb2_grpc
from baton.config import EngineConfig
from baton.config.worker import WorkerConfig
from baton.engine.build import load_grammars, make_arena
from baton.engine.core import EngineCore
from baton.engine.executor.base import load_executor
from baton.engine.speculation.methods import load_drafter
from baton.errors import BusyError, InvalidRequestError
from baton.kv_cache.events import KVEvent
from baton.kv_transfer.blocks import BlockServer, LinkOptions, MemoryNetwork, ServerOptions, TcpOptions
from baton.rpc.auth import require_clear_pipes, require_safe_bind
from baton.rpc.redis import RedisPresence
from baton.rpc.server import GrpcServer, require_free_port
from baton.rpc.service_token import read_token
from baton.rpc.ticket import Bearer, TicketCheck, read_ticket_key
from baton.rpc.tls import read_tls
from baton.tokenizer.model_files import tokenizer_digest
from baton.types import InstanceId, Role
from baton.worker.connectors import InstanceConnectors
from baton.worker.context import Admission, InstanceContext, InstanceRole, WorkerContext
from baton.worker.decode import DecodeRole
from baton.worker.engine_thread import EngineThread
from baton.worker.events import KvEventLog
from baton.worker.metrics import WorkerMetrics
from baton.worker.prefill import PrefillRole
from baton.worker.process import serve_metrics
from baton.worker.registration import Identity, Registration, redis_registration
from baton.worker.servicer import WorkerServicer
from baton.worker.span_export import open_span_exporter

log = logging.getLogger(__name__)
SERVICE = "baton.api.v1.WorkerService"


_ROLES: dict[Role, Callable[[WorkerContext], InstanceRole]] = {Role.PREFILL: PrefillRole, Role.DECODE: DecodeRole}


class WorkerInstance:
    """A running instance.

    Args:
        role: In which it starts; see :meth:`change_role`.
        config: The service.
        engine_config: Its engine.
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
        *,
        on_failure: Callable[[], None] | None = None,
        memory: MemoryNetwork | None = None,
    ) -> None:
        self._first_role, self._config, self._engine_config = role, config, engine_config
        self._on_failure, self._memory = on_failure, memory
        self._registrations: list[Registration | RedisPresence] = []
        self._stack = contextlib.AsyncExitStack()
        self._server: GrpcServer | None = None
        self._role: InstanceRole | None = None
        self._engine: EngineThread | None = None
        self._changing = asyncio.Lock()

    @property
    def role(self) -> Role:
        """What it is now."""
        return self._first_role if self._role is None else self._role.role

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
        # Blocks of layer groups can be filled from others' whole blocks, and are not read or kept by anybody else.
        alone = self._first_role is Role.DECODE and not config.kvstore and not config.kv_connectors
        grouped = self._engine_config.layer_groups and alone
        executor = load_executor(dataclasses.replace(self._engine_config, layer_groups=grouped))
        self._stack.callback(executor.close)
        # Before there is a pool: its blocks may keep the drafter's KV too.
        drafter = load_drafter(self._engine_config, executor)
        if drafter is not None:
            self._stack.callback(drafter.close)
        shards = make_arena(self._engine_config, executor)
        self._stack.callback(shards.close)
        arena = shards.primary
        events = KvEventLog(arena.epoch)
        loop = asyncio.get_running_loop()
        instance_id = InstanceId(
            config.instance_id or f"{self._first_role}-{socket.gethostname()}-{config.port or arena.epoch.hex()[:8]}"
        )
        metrics = WorkerMetrics()
        spans = open_span_exporter(config.otlp_traces_endpoint, self._first_role, instance_id, metrics.registry)
        if spans is not None:
            self._stack.push_async_callback(asyncio.to_thread, spans.close)
        before = InstanceContext(
            role=self._first_role,
            config=config,
            engine_config=self._engine_config,
            executor=executor,
            shards=shards,
            arena=arena,
            token=token,
            loop=loop,
            wake=self._wake,
            source=lambda: self.context.block_server.source,
            links=LinkOptions(
                token=token,
                tcp=TcpOptions(streams=config.kv_streams, checksums=config.kv_checksums),
                memory=self._memory,
                tls=None if config.clear_kv else tls,
            ),
            tls=tls,
            events=events,
            tiers=[],
            spans=spans,
        )
        self._connectors = connectors = InstanceConnectors(before)
        self._stack.push_async_callback(self._close_connectors)

        def on_events(items: list[KVEvent]) -> None:
            loop.call_soon_threadsafe(events.append, items)

        core = EngineCore(
            self._engine_config,
            executor,
            shards,
            connector=connectors.connector,
            on_events=on_events,
            grammars=await asyncio.to_thread(load_grammars, self._engine_config, executor),
            drafter=drafter,
        )
        core.bound_steps(self._first_role is Role.DECODE)
        self._engine = engine = EngineThread(core, loop, on_failure=self._on_failure)
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
        self.context = context = WorkerContext(
            **vars(before),
            instance_id=instance_id,
            engine=engine,
            fetcher=connectors.fetcher,
            block_server=block_server,
            admission=Admission(),
            metrics=metrics,
            tokenizer_digest=tokenizer_digest(self._engine_config.model),
        )
        self._role = role = _ROLES[self._first_role](context)
        context.metrics.describe_kv(executor.fingerprint)
        context.metrics.watch(engine, lambda: (self._role or role).num_kept(), connectors.store_use, connectors.uses)
        connectors.enter(self._role)
        engine.start()
        self._stack.push_async_callback(engine.stop)
        # An engine that has lost a rank ends also while it has nothing to do.
        executor.watch(engine.fail)
        await self._listen(self._role)

    def _wake(self) -> None:
        """Make the engine look at its connector, once it exists: connectors are built before it."""
        if self._engine is not None:
            self._engine.wake()

    async def _listen(self, role: InstanceRole) -> None:
        config, context = self._config, self.context
        tickets = None
        key = read_ticket_key(config.ticket_key_file)
        if key is not None:
            tickets = TicketCheck(key, Bearer(context.instance_id, context.arena.epoch))
        server = GrpcServer(
            host=config.host,
            port=config.port,
            services=[SERVICE],
            token=context.token,
            tls=context.tls,
            # Clients that come with a ticket have no token.
            admits=(lambda method, _: method == f"/{SERVICE}/Generate") if tickets and context.token else None,
        )
        self._servicer = WorkerServicer(context, role, tickets, self.change_role)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self._servicer, server.server)
        self.port = await server.start()
        self._server = server
        if config.metrics_port:
            metrics = self.context.metrics.registry
            self._stack.callback(serve_metrics(config.host, config.metrics_port, metrics))
        await server.set_serving(True)
        self._register()
        log.info(
            "%s instance %s listening on %s, %d KV blocks of %d tokens, attention %s, pipes %s",
            role.role,
            context.instance_id,
            self.address,
            context.arena.num_blocks // context.executor.layout.num_groups,
            context.engine_config.block_size,
            context.executor.attention_backend,
            ",".join(endpoint.kind for endpoint in context.block_server.endpoints),
        )

    async def change_role(self, role: Role) -> None:
        """Become an instance of the other role, with the same epoch, blocks and events; a drained one is opened again.

        Routers that it registers with hear that it leaves and that it comes.

        Raises:
            BusyError: Requests run, or blocks are kept for others.
            InvalidRequestError: Its blocks hold groups of layers, which others cannot read.
        """
        if role is not self.role and self.context.executor.layout.groups:
            raise InvalidRequestError(
                "this decode instance has layer groups, whose blocks others cannot read: start it with "
                "--no-layer-groups to change its role",
                field="role",
            )
        async with self._changing:
            context, before = self.context, self._role
            assert before is not None  # it was started
            if before.role is role:
                context.admission.draining = False
                return
            was_draining, context.admission.draining = context.admission.draining, True
            try:
                await self._require_idle(before)
                after = _ROLES[role](context)
                try:
                    await context.engine.call(lambda: self._enter(after))
                except BaseException:
                    after.connector.close()
                    await after.close()
                    raise
            except BaseException:
                context.admission.draining = was_draining
                raise
            await asyncio.gather(*(registration.stop() for registration in self._registrations))
            self._role = self._servicer.role = after
            before.connector.close()
            await before.close()
            context.admission.draining = False
            self._register()
            log.info("this is a %s instance now", role)

    def _enter(self, role: InstanceRole) -> None:
        self._connectors.enter(role)
        self.context.engine.core.bound_steps(role.role is Role.DECODE)

    async def _require_idle(self, role: InstanceRole) -> None:
        engine, active = self.context.engine, self.context.admission.active
        stats = await engine.call(engine.core.stats)
        busy = stats.num_running + stats.num_waiting + stats.num_loading
        if active or busy or role.num_kept():
            message = (
                f"the role of an idle instance alone can be changed: here are {active} calls in progress, "
                f"{busy} sequences, and {role.num_kept()} prompts kept for others; drain it first"
            )
            raise BusyError(message, field="role", retry_after_s=1.0)

    def _register(self) -> None:
        config, context = self._config, self.context
        identity = Identity(config.advertise or self.address, context.instance_id, self.role, context.arena.epoch)
        self._registrations = [Registration(x, identity, context.token, context.tls) for x in config.routers]
        if config.redis:
            presence = redis_registration(config.redis, config.redis_prefix, identity, context.token)
            self._registrations.append(presence)
        for registration in self._registrations:
            registration.start()

    async def _close_connectors(self) -> None:
        self._connectors.connector.close()
        if self._role is not None:
            await self._role.close()
        await self._connectors.close()

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
