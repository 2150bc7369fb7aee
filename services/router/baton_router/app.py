"""One router: HTTP and gRPC in one event loop over one registry, from start to drained end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import resource
import socket
import ssl
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn

from baton.background import create_task
from baton.config.router import RouterConfig
from baton.errors import BatonError, ConfigError
from baton.rpc.addresses import is_loopback, join_address
from baton.rpc.auth import HostRule, require_safe_bind
from baton.rpc.server import PENDING_CALLS, WINDOW, GrpcServer, require_free_port
from baton.rpc.service_token import Token, read_token
from baton.rpc.ticket import read_ticket_key
from baton.rpc.tls import Tls, read_tls
from baton.tokenizer import TextModelCache
from baton.types import Role
from baton.worker.process import ServiceMetrics, open_span_exporter, serve_metrics
from baton_router.accounts import IN_REDIS, Accounts, CredentialReload, FileAccounts, RedisAccounts
from baton_router.admission.background import BackgroundSlots
from baton_router.dispatch.dispatcher import PlacingDispatcher
from baton_router.dispatch.event_loop import TurnBatcher
from baton_router.frontend.app import administer, create_app
from baton_router.frontend.batches.endpoints import BatchEndpoints, BatchLimits
from baton_router.frontend.batches.redis_store import RedisBatchStore
from baton_router.frontend.batches.runner import BatchRunner
from baton_router.frontend.batches.sqlite_store import SqliteBatchStore
from baton_router.frontend.batches.store import BatchStore
from baton_router.frontend.console.console import DebugEndpoints
from baton_router.frontend.grpc.intake import Intake
from baton_router.frontend.grpc.servicer import SERVICE, RouterServicer, admits_clients
from baton_router.frontend.grpc.ticket import TicketDesk
from baton_router.frontend.http.bodies import MAX_BODY_BYTES
from baton_router.frontend.http.listener import TlsListener
from baton_router.frontend.http.middleware import HttpOptions
from baton_router.frontend.http.protocol import HttpProtocol
from baton_router.frontend.openai.generation import PostEndpoints
from baton_router.frontend.openai.speculative_prefill import SpeculativePrefill
from baton_router.metrics import GaugeFunction
from baton_router.processor.dialects import ModelDialects
from baton_router.processor.grammars import GrammarCache, GrammarMetrics
from baton_router.processor.input_processor import InputProcessor
from baton_router.processor.output_processor import GenerationMetrics
from baton_router.registry.instance import Status
from baton_router.registry.load import Waiters
from baton_router.registry.registry import Registry
from baton_router.replication.capacity import InstanceCapacity, replica_name
from baton_router.replication.replica import Replica
from baton_router.scheduler.decision import DecisionLog

if TYPE_CHECKING:
    from baton.otlp import OtlpExporter
    from baton_router.registry.discovery import Discovery

log = logging.getLogger(__name__)

_BACKLOG = 2048
_MAX_PENDING = 1024
"""gRPC calls that wait for a handler: a burst of clients may have many."""
_WINDOW_BYTES = 64 * 1024
"""Bytes of a gRPC call that gRPC keeps before it is read: a client may open thousands."""
_KEEP_ALIVE_S = 75
"""Seconds that a connection may idle between two requests. Clients and load balancers keep theirs for 5 to 60 s; the
client should be the one that closes: a close by the server can cross with the next request."""
_CUT_OFF_S = 1.0
"""Seconds that requests that were broken off have to notify their clients."""
_PRELOAD_LOOK_S = 60.0
_PRELOAD_PATIENCE_S = 10.0
"""Seconds that the router waits for the tokenizer before it is ready: it may have to be downloaded, and requests with
token ids need none."""


@dataclass(frozen=True)
class _Credentials:
    """What this router proves, and what callers must show.

    Attributes:
        token: Shared token of the services; ``None``: they use none.
        tls: Certificates; ``None``: no TLS.
        source: Source of the API keys; ``None``: none are needed.
        https: TLS context of the HTTP server; ``None``: it serves plain HTTP.
    """

    token: Token | None
    tls: Tls | None
    source: FileAccounts | RedisAccounts | None
    https: ssl.SSLContext | None

    @property
    def accounts(self) -> Accounts | None:
        """Holders of the API keys; ``None``: none are needed."""
        return self.source.accounts if self.source is not None else None


def _read_credentials(config: RouterConfig) -> _Credentials:
    """Read token, certificates and API keys, and check that they allow the configured address."""
    token = read_token(config.token_file)
    tls = read_tls(config)
    require_safe_bind(config.host, token, tls)
    source = _open_accounts(config)
    if not (source or config.open_http or is_loopback(config.host)):
        raise ConfigError(
            f"HTTP on {config.host}, which others can reach, needs --api-keys (or --open-http)", field="host"
        )
    if source and tls is None and not is_loopback(config.host):
        log.warning(
            "API keys reach %s in the clear: give --tls-cert, or keep all but a proxy with TLS away from this port",
            config.host,
        )
    https = tls.http_context() if tls is not None and config.http_tls else None
    return _Credentials(token, tls, source, https)


@dataclass(frozen=True)
class _Cluster:
    """The instances, where they are found, and the other routers.

    Attributes:
        registry: The instances.
        discoveries: Sources of instances, beside the command line and registrations.
        replica: This router among others; ``None``: it is alone.
    """

    registry: Registry
    discoveries: list[Discovery]
    replica: Replica | None


def _build_cluster(config: RouterConfig, credentials: _Credentials, metrics: ServiceMetrics) -> _Cluster:
    waiters = Waiters()
    capacity = InstanceCapacity(
        replica_name(config),
        config.max_inflight_per_instance,
        config.replicas,
        shared=bool(config.redis),
        freed=waiters.wake,
    )
    token = credentials.token
    registry = Registry(config, metrics, token=token, tls=credentials.tls, waiters=waiters, limit=capacity.set_limit)
    replica = Replica(config, registry, capacity, metrics, token=token) if config.redis else None
    sources: list[Discovery] = []
    if config.discover:  # imported here: it loads an HTTP client that other routers do not need
        from baton_router.registry.discovery import discoveries

        sources = discoveries(config, registry, token, credentials.tls)
    return _Cluster(registry, sources, replica)


@dataclass(frozen=True)
class _Pipeline:
    """What a request passes through, from text to the instances.

    Attributes:
        tokenizers: Loaded tokenizers.
        grammars: Compiled grammars.
        spans: Exporter of traces; ``None``: they are not exported.
        decisions: Placements of the latest requests.
        turns: Joins the output of many requests in one turn of the event loop.
        dispatcher: Admits, places and sends requests.
        processor: Turns requests into tokens, and tokens into text.
        tickets: Places requests whose clients call the decode instance directly.
    """

    tokenizers: TextModelCache
    grammars: GrammarCache
    spans: OtlpExporter | None
    decisions: DecisionLog
    turns: TurnBatcher
    dispatcher: PlacingDispatcher
    processor: InputProcessor
    tickets: TicketDesk


def text_models(config: RouterConfig) -> TextModelCache:
    """Return what loads the tokenizers and templates of models, and their sampling defaults."""
    return TextModelCache(config.model, generation_config=config.generation_config == "auto")


def _build_pipeline(config: RouterConfig, cluster: _Cluster, metrics: ServiceMetrics) -> _Pipeline:
    spans = open_span_exporter(
        config.otlp_traces_endpoint, "router", replica_name(config), metrics, config.trace_sample_rate
    )
    turns = TurnBatcher()
    decisions = DecisionLog()
    dispatcher = PlacingDispatcher(config, cluster.registry, metrics, decisions, turns)
    tokenizers = text_models(config)
    GaugeFunction(
        "baton_router_slow_tokenizers",
        "Loaded tokenizers that run on the library that is ten times slower",
        metrics,
        lambda: tokenizers.num_slow,
    )
    grammars = GrammarCache(GrammarMetrics(metrics))
    processor = InputProcessor(
        dispatcher,
        tokenizers,
        GenerationMetrics(metrics),
        decisions,
        spans,
        allow_special_tokens=config.allow_special_tokens,
        admission=dispatcher.admission,
        grammars=grammars,
    )
    processor.max_retention_s = config.max_retention_s
    processor.dialects = ModelDialects(config.tool_dialect, config.reasoning_dialect)
    tickets = TicketDesk(read_ticket_key(config.ticket_key_file), processor, dispatcher, metrics)
    return _Pipeline(tokenizers, grammars, spans, decisions, turns, dispatcher, processor, tickets)


@dataclass(frozen=True)
class _Web:
    """The HTTP side.

    Attributes:
        server: The HTTP server.
        insight: Answers of ``/debug`` and the console, which gRPC gives too.
        batches: Runs batches; ``None``: there is no store for them.
        batch_store: Store of files and batches; ``None``: there is none.
        posts: Endpoints that take a body.
    """

    server: HttpServer
    insight: DebugEndpoints
    batches: BatchRunner | None
    batch_store: BatchStore | None
    posts: PostEndpoints


def _build_web(
    config: RouterConfig,
    credentials: _Credentials,
    cluster: _Cluster,
    pipeline: _Pipeline,
    metrics: ServiceMetrics,
    is_ready: Callable[[], bool],
    now: Callable[[], float],
) -> _Web:
    registry = cluster.registry
    keyed = credentials.accounts is not None
    store = _open_batch_store(config)
    limits = BatchLimits(
        config.batch_file_bytes,
        config.batch_lines,
        config.batch_tenant_files,
        config.batch_tenant_bytes,
        config.batch_tenant_batches,
    )
    batches = BatchEndpoints(store, limits, now=now)
    front = create_app(
        pipeline.processor,
        pipeline.dispatcher,
        registry=metrics,
        options=HttpOptions(
            accounts=credentials.accounts,
            strict_fields=config.strict_fields,
            max_body_bytes=config.max_body_bytes,
            request_timeout_s=config.request_timeout_s,
            cors_origins=config.cors_origins,
            hosts=HostRule.of_server(config.host, config.allowed_hosts, keyed=keyed),
            metrics_port=config.metrics_port,
            max_sequences=config.max_request_sequences,
            max_connections=_max_connections(),
            access_log=config.access_log,
        ),
        ready=is_ready,
        refused=lambda: Counter(str(x.role) for x in registry.instances() if x.status is Status.REFUSED),
        steps=pipeline.turns,
        batches=batches,
    )
    runner = None
    slots = BackgroundSlots(pipeline.dispatcher.admission)
    if config.speculative_prefill:
        front.posts.speculative_prefill = SpeculativePrefill(pipeline.processor, slots, metrics)
    if store is not None:
        runner = BatchRunner(
            store, front.posts, credentials.accounts, slots, metrics, limits.lines, limits.tenant_bytes, now
        )
        batches.on_change = runner.wake
    insight = DebugEndpoints(
        front.app,
        pipeline.decisions,
        registry,
        metrics,
        policy=config.policy,
        replicas=cluster.replica.report if cluster.replica is not None else None,
        queue=pipeline.dispatcher.admission.queue,
        background=lambda: slots.num_running,
    )
    administer(front.app, pipeline.processor, registry)
    server = HttpServer(
        uvicorn.Config(
            front.app,
            lifespan="off",
            http=HttpProtocol.serving(front.posts),
            ws="none",
            log_config=None,
            access_log=False,
            proxy_headers=False,  # the client's address is not used
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=math.ceil(config.drain_timeout_s + _CUT_OFF_S),
        ),
        credentials.https,
        _max_connections(),
    )
    return _Web(server, insight, runner, store, front.posts)


class RouterApp:
    """Everything a router process runs.

    Args:
        config: Configuration of the router.
        now: Clock of files and batches, in Unix seconds.

    Attributes:
        metrics: Metrics of the process.
        registry: The instances.
        dispatcher: Admits, places and sends requests.
        processor: Turns requests into tokens, and tokens into text.
        http_port: Port of HTTP, once it is started.
        grpc_port: Port of gRPC, once it is started.
        on_http_failure: Called when HTTP is not served any more because of an error.

    Raises:
        ConfigError: A file cannot be read, or the address is open to others without authentication.
    """

    def __init__(self, config: RouterConfig, now: Callable[[], float] = time.time) -> None:
        self._config = config
        self.metrics = ServiceMetrics("router")
        self._credentials = _read_credentials(config)
        self._cluster = _build_cluster(config, self._credentials, self.metrics)
        self._pipeline = _build_pipeline(config, self._cluster, self.metrics)
        self._web = _build_web(
            config, self._credentials, self._cluster, self._pipeline, self.metrics, self.is_ready, now
        )
        self._http = self._web.server
        self.registry = self._cluster.registry
        self.dispatcher = self._pipeline.dispatcher
        self.processor = self._pipeline.processor
        self._reload = CredentialReload(self._credentials.source, self._credentials.tls, self._credentials.https)
        self._preload = _TokenizerPreload(self._pipeline.tokenizers, self.registry)
        self._grpc: GrpcServer | None = None
        self._end_scrapes: Callable[[], None] | None = None
        self._serving: asyncio.Task[None] | None = None
        self.http_port = 0
        self.grpc_port = 0
        self.on_http_failure: Callable[[], None] = lambda: None

    def is_ready(self) -> bool:
        """Whether requests can be served now."""
        return not self._http.should_exit and bool(self.registry.ready(Role.DECODE)) and self._preload.done

    async def start(self) -> None:
        """Listen, connect to the instances, and answer health checks with SERVING.

        Raises:
            ConfigError: A port is in use, or the tokenizer that was named cannot be loaded.
        """
        require_free_port(self._config.host, self._config.metrics_port, field="metrics_port")
        if self._config.model:
            await self._pipeline.tokenizers.get(self._config.model)
        await self._reload.start()
        sock = listen(self._config.host, self._config.port)
        self.http_port = sock.getsockname()[1]
        try:
            self._grpc = await self._start_grpc()
        except ConfigError:
            sock.close()
            raise
        self.registry.start()
        self._preload.start()
        self._pipeline.tickets.start()
        for discovery in self._cluster.discoveries:
            discovery.start()
        if self._cluster.replica is not None:
            self._cluster.replica.start()
        if self._config.metrics_port:
            self._end_scrapes = serve_metrics(
                self._config.host,
                self._config.metrics_port,
                self.metrics,
                allowed_hosts=self._config.allowed_hosts,
            )
        self._serving = create_task(
            self._http.serve(sockets=[sock]), "http", on_failure=lambda error: self.on_http_failure()
        )
        await self._http.wait_started(self._serving)
        if self._web.batches is not None:
            self._web.batches.start()
        await self._grpc.set_serving(True)
        log.info(
            "serving %s=%s grpc=%s policy=%s prefill=%d decode=%d",
            "http" if self._credentials.https is None else "https",
            join_address(self._config.host, self.http_port),
            join_address(self._config.host, self.grpc_port),
            self._config.policy,
            len(self._config.prefill),
            len(self._config.decode),
        )

    async def _start_grpc(self) -> GrpcServer:
        server = GrpcServer(
            host=self._config.host,
            port=self._config.grpc_port,
            services=[SERVICE],
            token=self._credentials.token,
            tls=self._credentials.tls,
            admits=admits_clients(self._credentials.accounts),
            # Only clients send long messages here. What is longer is refused before it has arrived.
            max_message_bytes=self._config.max_body_bytes or MAX_BODY_BYTES,
            options={WINDOW: _WINDOW_BYTES, **dict.fromkeys(PENDING_CALLS, _MAX_PENDING)},
        )
        servicer = RouterServicer(
            self.processor,
            self.registry,
            self._pipeline.tickets,
            self._credentials.accounts,
            access_log=self._config.access_log,
        )
        servicer.insight = self._web.insight
        Intake(servicer, self.processor, self._web.posts.max_body_bytes).add_to(server.server)
        self.grpc_port = await server.start()
        return server

    async def stop(self) -> None:
        """Stop accepting, let running requests end for ``drain_timeout_s`` seconds, then break them off."""
        self._http.should_exit = True
        if self._web.batches is not None:
            await self._web.batches.close()
        posts = self._web.posts
        if (prefill := posts.speculative_prefill) is not None:
            posts.speculative_prefill = None  # requests that end from now on start none
            await prefill.close()
        time_is_up = asyncio.get_running_loop().call_later(self._config.drain_timeout_s, self.dispatcher.cut_off)
        ends: list[Awaitable[None]] = []
        if self._serving is not None:
            ends.append(self._serving)
        if self._grpc is not None:
            ends.append(self._grpc.stop(self._config.drain_timeout_s + _CUT_OFF_S))
        await asyncio.gather(*ends)
        time_is_up.cancel()
        if self._web.batch_store is not None:
            await self._web.batch_store.close()
        await self._preload.close()
        await self._pipeline.tickets.close()
        await self._reload.close()
        for discovery in self._cluster.discoveries:
            await discovery.close()
        if self._cluster.replica is not None:
            await self._cluster.replica.close()
        await self.registry.close()
        await asyncio.to_thread(self._pipeline.grammars.close)
        if self._pipeline.spans is not None:
            await asyncio.to_thread(self._pipeline.spans.close)
        if self._end_scrapes is not None:
            await asyncio.to_thread(self._end_scrapes)


def _max_connections() -> int:
    """Return the maximum number of HTTP connections: some descriptors are reserved for instances and files."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if most == resource.RLIM_INFINITY else max(16, most - max(96, most // 4))


def _open_accounts(config: RouterConfig) -> FileAccounts | RedisAccounts | None:
    if config.api_keys == IN_REDIS:
        return RedisAccounts(config.redis, config.redis_prefix, config.tenant_secret_file)
    if not config.api_keys:
        return None
    return FileAccounts(config.api_keys, config.tenant_secret_file, shared=bool(config.redis))


def _open_batch_store(config: RouterConfig) -> BatchStore | None:
    if config.batch_store == IN_REDIS:
        return RedisBatchStore(config.redis, config.redis_prefix)
    if not config.batch_store:
        return None
    if config.redis:
        log.warning("only routers on this host share the batches in %s: --batch-store redis", config.batch_store)
    return SqliteBatchStore(Path(config.batch_store))


class _TokenizerPreload:
    """Loads the served model's tokenizer as soon as an instance reports the model, so that no request waits for it.

    Args:
        tokenizers: Cache to load it into.
        registry: The instances.

    Attributes:
        done: Whether it is loaded, cannot be, or takes too long to be waited for.
    """

    def __init__(self, tokenizers: TextModelCache, registry: Registry) -> None:
        self._tokenizers = tokenizers
        self._registry = registry
        self._task: asyncio.Task[None] | None = None
        self.done = False

    def start(self) -> None:
        self._task = create_task(self._run(), "preload of the tokenizer")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while not self._registry.ready(Role.DECODE):
            await self._registry.wait_changed(_PRELOAD_LOOK_S)
        late = asyncio.get_running_loop().call_later(_PRELOAD_PATIENCE_S, self._give_up)
        try:
            await self._tokenizers.get(self._registry.model_info().path)
        except BatonError as error:
            log.warning("prompts can only be token ids as it is: %s", error)
        finally:
            late.cancel()
            self.done = True

    def _give_up(self) -> None:
        self.done = True


class HttpServer(uvicorn.Server):
    """uvicorn's server without its signal handlers: the process handles signals.

    Args:
        config: uvicorn's configuration.
        context: TLS context, which can be renewed; ``None``: plain HTTP.
        max_connections: Most TLS connections that are open.

    Attributes:
        listeners: Listeners of the TLS sockets, one per socket; empty with plain HTTP and before the start.
    """

    def __init__(self, config: uvicorn.Config, context: ssl.SSLContext | None, max_connections: int) -> None:
        super().__init__(config)
        self._context = context
        self._max_connections = max_connections
        self.listeners: list[TlsListener] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept the connections of some sockets."""
        if self._context is None:
            await super().startup(sockets)
            return
        await super().startup([])
        for sock in sockets or ():
            self.listeners.append(TlsListener(sock, self._context, self._connection, self._max_connections))
            self.listeners[-1].start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept nothing more, and end the connections."""
        await asyncio.gather(*(listener.close() for listener in self.listeners))
        await super().shutdown(sockets)

    def _connection(self) -> HttpProtocol:
        kind: Any = self.config.http_protocol_class
        connection: HttpProtocol = kind(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return connection

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def wait_started(self, serving: asyncio.Task[None]) -> None:
        """Wait until requests are answered.

        Raises:
            ConfigError: The server ended instead.
        """
        while not self.started:
            await asyncio.wait([serving], timeout=0.005)
            if serving.done():
                raise ConfigError(f"the HTTP server did not start: {serving.exception()}", field="port")


def listen(host: str, port: int) -> socket.socket:
    """Return a listening TCP socket; for port 0 the system chooses a free one.

    Raises:
        ConfigError: The port is in use, or the address is not one of this machine.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, proto)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}: {error}", field="host") from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise ConfigError(f"cannot listen on {join_address(host, port)}: {error.strerror}", field="port") from error
    return sock
