"""One prefill or decode instance: model, engine thread, pipes and gRPC server, started and stopped as a whole."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import random
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc.aio

from baton.api.v1 import router_pb2, router_pb2_grpc, worker_pb2_grpc
from baton.background import keep_running
from baton.config import EngineConfig
from baton.config.worker import WorkerConfig
from baton.engine.build import load_grammars, make_arena
from baton.engine.core import EngineCore
from baton.engine.executor.base import load_executor
from baton.engine.speculation.methods import load_drafter
from baton.errors import BusyError, ConfigError, InvalidRequestError, PermissionDeniedError
from baton.kv_cache.events import KVEvent
from baton.kv_transfer.blocks import BlockServer, LinkOptions, MemoryNetwork, ServerOptions, TcpOptions
from baton.logs import Absence
from baton.rpc.addresses import join_address
from baton.rpc.auth import require_clear_pipes, require_safe_bind
from baton.rpc.channel import open_channel
from baton.rpc.convert import role_to_pb
from baton.rpc.errors import readable
from baton.rpc.redis import RedisPresence, instance_key, news_key
from baton.rpc.server import GrpcServer, require_free_port
from baton.rpc.service_token import Token, read_token
from baton.rpc.ticket import Bearer, TicketCheck, read_ticket_key
from baton.rpc.ticketed_calls import TicketedCalls
from baton.rpc.tls import Tls, read_tls
from baton.tokenizer.model_files import tokenizer_digest
from baton.types import Epoch, InstanceId, Role
from baton.worker.connectors import InstanceConnectors
from baton.worker.context import Admission, InstanceContext, InstanceRole, LoadedModel, WorkerContext
from baton.worker.decode import DecodeRole
from baton.worker.engine_thread import EngineThread
from baton.worker.events import KvEventLog
from baton.worker.metrics import WorkerMetrics
from baton.worker.prefill import PrefillRole
from baton.worker.process import StopRequest, open_span_exporter, run_service, serve_metrics
from baton.worker.servicer import WorkerServicer

log = logging.getLogger(__name__)
SERVICE = "baton.api.v1.WorkerService"
CALL_TIMEOUT_S = 5.0
FIRST_BACKOFF_S = 0.1
LAST_BACKOFF_S = 2.0


_HANGING_STOP_S = 10.0
"""Time to close everything after an engine step that has not ended, in seconds."""
_ROLES: dict[Role, Callable[[WorkerContext], InstanceRole]] = {Role.PREFILL: PrefillRole, Role.DECODE: DecodeRole}


class WorkerInstance:
    """A prefill or decode instance.

    Args:
        role: Role in which the instance starts; see :meth:`change_role`.
        config: Configuration of the service.
        engine_config: Configuration of the engine.
        on_failure: Called in the event loop when the engine fails and cannot continue.
        memory: Connects the instances of one process, for the ``memory`` pipe.

    Attributes:
        port: Port of the gRPC server, once started.
        context: Parts of the running instance, once started.
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
        self._first_role = role
        self._config = config
        self._engine_config = engine_config
        self._on_failure = on_failure
        self._memory = memory
        self._registrations: list[Registration | RedisPresence] = []
        self._stack = contextlib.AsyncExitStack()
        self._server: GrpcServer | None = None
        self._role: InstanceRole | None = None
        self._engine: EngineThread | None = None
        self._changing = asyncio.Lock()

    @property
    def role(self) -> Role:
        """Current role."""
        return self._first_role if self._role is None else self._role.role

    @property
    def address(self) -> str:
        """``host:port`` of the gRPC server."""
        return join_address(self._config.host, self.port)

    async def start(self) -> None:
        """Load the model, listen, register.

        Raises:
            ConfigError: The configuration cannot work; everything opened so far is closed again.
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
        model = self._load_model()
        base = self._make_base(model, token, tls)
        self._connectors = InstanceConnectors(base)
        self._stack.push_async_callback(self._close_connectors)
        self._engine = engine = await self._make_engine(base)
        self.context = context = WorkerContext(
            base=base,
            engine=engine,
            fetcher=self._connectors.fetcher,
            block_server=self._serve_blocks(base),
            admission=Admission(),
            tokenizer_digest=tokenizer_digest(self._engine_config.model),
        )
        self._role = role = _ROLES[self._first_role](context)
        base.metrics.describe_kv(model.fingerprint)
        base.metrics.watch(
            engine, lambda: (self._role or role).num_kept(), self._connectors.store_use, self._connectors.uses
        )
        self._connectors.set_role(role)
        engine.start()
        self._stack.push_async_callback(engine.stop)
        # A lost rank stops the engine even while it is idle.
        model.executor.watch(engine.fail)
        await self._listen(role)

    def _load_model(self) -> LoadedModel:
        """Load the model and its drafter, and allocate the KV pool."""
        # Blocks with layer groups can be filled from other instances' whole blocks, but others cannot read them.
        alone = self._first_role is Role.DECODE and not self._config.kvstore and not self._config.kv_connectors
        layer_groups = self._engine_config.layer_groups and alone
        executor = load_executor(dataclasses.replace(self._engine_config, layer_groups=layer_groups))
        self._stack.callback(executor.close)
        if getattr(executor, "state_blocks", 0) and (self._config.kvstore or self._config.kv_connectors):
            field = "kvstore" if self._config.kvstore else "kv_connectors"
            why = "keeps recurrent states, which stores, files and host memory do not take"
            raise ConfigError(f"{executor.fingerprint.model} {why}", field=field)
        # Before the pool is allocated: its blocks may contain the drafter's KV too.
        drafter = load_drafter(self._engine_config, executor)
        if drafter is not None:
            self._stack.callback(drafter.close)
        shards = make_arena(self._engine_config, executor)
        self._stack.callback(shards.close)
        return LoadedModel(executor, drafter, shards)

    def _make_base(self, model: LoadedModel, token: Token | None, tls: Tls | None) -> InstanceContext:
        config = self._config
        epoch = model.arena.epoch
        default_id = f"{self._first_role}-{socket.gethostname()}-{config.port or epoch.hex()[:8]}"
        instance_id = InstanceId(config.instance_id or default_id)
        metrics = WorkerMetrics()
        spans = open_span_exporter(config.otlp_traces_endpoint, self._first_role, instance_id, metrics.registry)
        if spans is not None:
            self._stack.push_async_callback(asyncio.to_thread, spans.close)
        links = LinkOptions(
            token=token,
            tcp=TcpOptions(streams=config.kv_streams, checksums=config.kv_checksums),
            memory=self._memory,
            tls=None if config.clear_kv else tls,
        )
        return InstanceContext(
            role=self._first_role,
            instance_id=instance_id,
            config=config,
            engine_config=self._engine_config,
            model=model,
            token=token,
            tls=tls,
            loop=asyncio.get_running_loop(),
            wake_engine=self._wake_engine,
            get_source=lambda: self.context.block_server.source,
            links=links,
            events=KvEventLog(epoch),
            metrics=metrics,
            spans=spans,
        )

    async def _make_engine(self, base: InstanceContext) -> EngineThread:
        def append_events(events: list[KVEvent]) -> None:
            base.loop.call_soon_threadsafe(base.events.append, events)

        core = EngineCore(
            self._engine_config,
            base.model.executor,
            base.model.shards,
            connector=self._connectors.connector,
            on_events=append_events,
            grammars=await asyncio.to_thread(load_grammars, self._engine_config, base.model.executor),
            drafter=base.model.drafter,
        )
        core.limit_step_time(self._first_role is Role.DECODE)
        timeout_s = self._config.step_timeout_s
        return EngineThread(core, base.loop, on_failure=self._on_failure, step_timeout_s=timeout_s)

    def _serve_blocks(self, base: InstanceContext) -> BlockServer:
        config = self._config
        block_server = BlockServer(
            base.model.shards,
            base.model.fingerprint,
            base.instance_id,
            kinds=config.pipes,
            host=config.host,
            token=base.token,
            options=ServerOptions(
                port=config.kv_port,
                advertise_host=config.advertise.rpartition(":")[0] or None,
                memory=self._memory,
                tls=None if config.clear_kv else base.tls,
            ),
        )
        self._stack.callback(block_server.close)
        return block_server

    def _wake_engine(self) -> None:
        """Make the engine poll its connector; without effect until it exists (connectors are built before it)."""
        if self._engine is not None:
            self._engine.wake()

    async def _listen(self, role: InstanceRole) -> None:
        config = self._config
        context = self.context
        base = context.base
        tickets = None
        key = read_ticket_key(config.ticket_key_file)
        if key is not None:
            check = TicketCheck(key, Bearer(base.instance_id, base.model.arena.epoch))
            denied = base.metrics.requests.labels("generate", PermissionDeniedError.code)
            tickets = TicketedCalls(
                check, f"/{SERVICE}/Generate", admits_others=base.token is None, on_denied=denied.inc
            )
        server = GrpcServer(
            host=config.host,
            port=config.port,
            services=[SERVICE],
            token=base.token,
            tls=base.tls,
            admits=tickets,
        )
        self._servicer = WorkerServicer(context, role, tickets, self.change_role)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self._servicer, server.server)
        self.port = await server.start()
        self._server = server
        if config.metrics_port:
            self._stack.callback(serve_metrics(config.host, config.metrics_port, base.metrics.registry))
        await server.set_serving(True)
        self._register()
        log.info(
            "%s instance %s listening on %s, %d KV blocks of %d tokens, attention %s, pipes %s",
            role.role,
            base.instance_id,
            self.address,
            base.model.num_blocks,
            base.engine_config.block_size,
            base.model.executor.attention_backend,
            ",".join(endpoint.kind for endpoint in context.block_server.endpoints),
        )

    async def change_role(self, role: Role) -> None:
        """Switch to the other role, with the same epoch, blocks and events; a drained instance accepts requests again.

        The instance deregisters from its routers, and registers again in its new role.

        Raises:
            BusyError: Requests run, or blocks are kept for other instances.
            InvalidRequestError: The blocks have layer groups, which other instances cannot read.
        """
        context = self.context
        if role is not self.role and context.base.model.executor.layout.groups:
            raise InvalidRequestError(
                "this decode instance has layer groups, whose blocks others cannot read: start it with "
                "--no-layer-groups to change its role",
                field="role",
            )
        async with self._changing:
            before = self._role
            assert before is not None  # the instance was started
            if before.role is role:
                context.admission.draining = False
                return
            was_draining = context.admission.draining
            context.admission.draining = True
            try:
                await self._require_idle(before)
                after = _ROLES[role](context)
                try:
                    await context.engine.call(lambda: self._enter_role(after))
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

    def _enter_role(self, role: InstanceRole) -> None:
        self._connectors.set_role(role)
        self.context.engine.core.limit_step_time(role.role is Role.DECODE)

    async def _require_idle(self, role: InstanceRole) -> None:
        engine = self.context.engine
        active = self.context.admission.active
        stats = await engine.call(engine.core.stats)
        busy = stats.num_running + stats.num_waiting + stats.num_loading
        if active or busy or role.num_kept():
            message = (
                f"only an idle instance can change its role: {active} calls in progress, "
                f"{busy} sequences, {role.num_kept()} prompts kept for others; drain it first"
            )
            raise BusyError(message, field="role", retry_after_s=1.0)

    def _register(self) -> None:
        config = self._config
        base = self.context.base
        identity = Identity(config.advertise or self.address, base.instance_id, self.role, base.model.arena.epoch)
        self._registrations = [Registration(router, identity, base.token, base.tls) for router in config.routers]
        if config.redis:
            presence = redis_registration(config.redis, config.redis_prefix, identity, base.token)
            self._registrations.append(presence)
        for registration in self._registrations:
            registration.start()

    async def _close_connectors(self) -> None:
        self._connectors.connector.close()
        if self._role is not None:
            await self._role.close()
        await self._connectors.close()

    async def stop(self, drain_s: float) -> None:
        """Deregister from the routers, drain running calls for at most ``drain_s`` seconds, then close everything."""
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


@dataclass(frozen=True, slots=True)
class Identity:
    """What an instance registers as."""

    address: str
    instance_id: InstanceId
    role: Role
    epoch: Epoch


class Registration:
    """Registers with one router and renews the lease until :meth:`stop`; registers again if the router lost it.

    Args:
        router: gRPC address of the router.
        identity: Address, name, role and epoch to register.
        token: Shared token, if the services use one.
        tls: Certificates, if the services use them.
    """

    def __init__(self, router: str, identity: Identity, token: Token | None, tls: Tls | None = None) -> None:
        self._router = router
        self._identity = identity
        self._token = token
        self._tls = tls
        self._task: asyncio.Task[None] | None = None
        self._lease_id = ""
        self._interval = FIRST_BACKOFF_S

    def start(self) -> None:
        self._task = keep_running(self._run, "registration", detail=self._router)

    async def stop(self) -> None:
        """Stop renewing, and deregister."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.wait([self._task])
        if not self._lease_id:
            return
        async with open_channel(self._router, token=self._token, tls=self._tls) as channel:
            stub = router_pb2_grpc.RouterServiceStub(channel)
            try:
                await stub.Deregister(router_pb2.DeregisterRequest(lease_id=self._lease_id), timeout=1.0)
            except grpc.aio.AioRpcError as error:
                # A router that is gone has no use for a goodbye: it ends first when all ends.
                level = logging.DEBUG if error.code() == grpc.StatusCode.UNAVAILABLE else logging.INFO
                log.log(level, "router %s did not hear the goodbye: %s", self._router, error.code().name)

    async def _run(self) -> None:
        backoff = FIRST_BACKOFF_S
        absence = Absence(log, "router %s answers again", self._router)
        async with open_channel(self._router, token=self._token, tls=self._tls) as channel:
            stub = router_pb2_grpc.RouterServiceStub(channel)
            while True:
                try:
                    interval = await self._renew(stub)
                    absence.record_return()
                    backoff = FIRST_BACKOFF_S
                except grpc.aio.AioRpcError as error:
                    absence.record_failure("router %s is away: %s %s", self._router, error.code().name, error.details())
                    interval = backoff
                    backoff = min(2 * backoff, LAST_BACKOFF_S)
                # Jitter: instances must not call all at once after a router's restart.
                await asyncio.sleep(interval * random.uniform(0.8, 1.0))

    async def _renew(self, stub: router_pb2_grpc.RouterServiceAsyncStub) -> float:
        """Send a heartbeat or register; returns seconds until the next renewal."""
        if self._lease_id:
            beat = await stub.Heartbeat(router_pb2.HeartbeatRequest(lease_id=self._lease_id), timeout=CALL_TIMEOUT_S)
            if readable(beat).known:
                return self._interval
            log.info("router %s forgot this instance: registering again", self._router)
        identity = self._identity
        answer = await stub.Register(
            router_pb2.RegisterRequest(
                address=identity.address,
                instance_id=identity.instance_id,
                role=role_to_pb(identity.role),
                epoch=identity.epoch,
            ),
            timeout=CALL_TIMEOUT_S,
        )
        self._lease_id = readable(answer).lease_id
        self._interval = answer.ttl_ms / 3000
        log.info("registered with router %s", self._router)
        return self._interval


def redis_registration(url: str, prefix: str, identity: Identity, token: Token | None) -> RedisPresence:
    """Return a registration in Redis, for routers with ``--discover redis``.

    Args:
        url: URL of the Redis.
        prefix: Prefix of every key.
        identity: Address, name, role and epoch to register.
        token: Shared token that signs the registration; ``None``: it is not signed.

    Raises:
        ConfigError: The URL is malformed, or the Redis client is not installed.
    """
    return RedisPresence(
        url,
        key=instance_key(prefix, identity.instance_id),
        value={"address": identity.address, "role": identity.role.value, "epoch": identity.epoch.hex()},
        token=token,
        news=news_key(prefix),
        name=str(identity.instance_id),
    )


def main(role: Role, argv: Sequence[str] | None = None) -> int:
    """Run the process of an instance until it is asked to stop; see :func:`~baton.worker.process.run_service`.

    Args:
        role: Role in which the instance starts.
        argv: Command line; ``None``: the process's own.
    """

    async def serve(config: WorkerConfig, engine_config: EngineConfig) -> int:
        stop = StopRequest()
        instance = WorkerInstance(role, config, engine_config, on_failure=stop.fail)
        await instance.start()
        await stop.wait()
        if instance.context.engine.hangs:
            # The device's library may also hang in what closes it. Its supervisor must see the process end.
            end = threading.Timer(_HANGING_STOP_S, os._exit, (1,))
            end.daemon = True
            end.start()
        await instance.stop(config.drain_timeout_s if stop.exit_code == 0 else 0.0)
        return stop.exit_code

    return run_service(role, f"Run a {role} instance.", (WorkerConfig, EngineConfig), serve, argv)
