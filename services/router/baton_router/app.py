"""One router: HTTP and gRPC in one event loop over one registry, from start to drained end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import resource
import socket
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import uvicorn

from baton.api.v1 import router_pb2_grpc
from baton.config.router import RouterConfig
from baton.errors import BatonError, ConfigError
from baton.rpc.auth import HostRule, is_loopback, require_safe_bind
from baton.rpc.server import GrpcServer, require_free_port
from baton.rpc.service_token import read_token
from baton.rpc.ticket import read_ticket_key
from baton.rpc.tls import read_tls
from baton.tokenizer import TextModelCache
from baton.types import Role
from baton.worker.process import ServiceMetrics, open_span_exporter, serve_metrics
from baton_router.accounts.sources import IN_REDIS, CredentialReload, FileAccounts, RedisAccounts
from baton_router.dispatch.dispatcher import PlacingDispatcher
from baton_router.dispatch.event_loop import TurnBatcher
from baton_router.frontend.admin import administer
from baton_router.frontend.app import create_app
from baton_router.frontend.console.console import watch
from baton_router.frontend.grpc.servicer import SERVICE, RouterServicer, admits_clients
from baton_router.frontend.grpc.ticket import TicketDesk
from baton_router.frontend.http.middleware import HttpOptions
from baton_router.frontend.http.protocol import HttpProtocol
from baton_router.metrics.fast_metrics import GaugeFunction
from baton_router.processor.dialects import ModelDialects
from baton_router.processor.grammars import GrammarCache, GrammarMetrics
from baton_router.processor.input_processor import InputProcessor
from baton_router.processor.output_processor import GenerationMetrics
from baton_router.registry.discovery import discoveries
from baton_router.registry.instance import Status
from baton_router.registry.load import Waiters
from baton_router.registry.registry import Registry
from baton_router.replication.capacity import InstanceCapacity, replica_name
from baton_router.replication.replica import Replica
from baton_router.scheduler.decision import DecisionLog

log = logging.getLogger(__name__)

_BACKLOG = 2048
_KEEP_ALIVE_S = 75
"""How long a connection may idle between two requests. Clients and load balancers keep theirs for 5 to 60 s; the client
should be the one that closes: a server's closing can cross with the next request."""
_CUT_OFF_S = 1.0
"""How long requests that were cut off may take to tell their clients."""
_PRELOAD_LOOK_S = 60.0
_PRELOAD_PATIENCE_S = 10.0
"""How long the router is not ready for want of a tokenizer: one may have to come from afar, and token ids need none."""


class RouterApp:
    """Everything a router process runs.

    Args:
        config: What to run.

    Raises:
        ConfigError: A file cannot be read, or the address is open to others without authentication.
    """

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        token = read_token(config.token_file)
        self._tls = read_tls(config)
        require_safe_bind(config.host, token, self._tls)
        accounts = _accounts(config)
        if not (accounts or config.open_http or is_loopback(config.host)):
            raise ConfigError(
                f"HTTP on {config.host}, which others can reach, needs --api-keys (or --open-http)", field="host"
            )
        if accounts and self._tls is None and not is_loopback(config.host):
            log.warning(
                "API keys reach %s in the clear: give --tls-cert, or keep all but a proxy with TLS away from this port",
                config.host,
            )
        self._accounts = accounts.accounts if accounts is not None else None
        self.metrics = ServiceMetrics("router")
        self._spans = open_span_exporter(
            config.otlp_traces_endpoint, "router", replica_name(config), self.metrics, config.trace_sample_rate
        )
        steps = TurnBatcher()
        waiters = Waiters()
        capacity = InstanceCapacity(
            replica_name(config),
            config.max_inflight_per_instance,
            config.replicas,
            shared=bool(config.redis),
            freed=waiters.wake,
        )
        self.registry = Registry(
            config, self.metrics, token=token, tls=self._tls, waiters=waiters, limit=capacity.admitted
        )
        decisions = DecisionLog()
        self.dispatcher = PlacingDispatcher(config, self.registry, self.metrics, decisions, steps)
        self.replica = Replica(config, self.registry, capacity, self.metrics, token=token) if config.redis else None
        self.discoveries = discoveries(config, self.registry, token, self._tls)
        self._tokenizers = TextModelCache(config.model)
        GaugeFunction(
            "baton_router_slow_tokenizers",
            "Loaded tokenizers that run on the library that is ten times slower",
            self.metrics,
            lambda: self._tokenizers.num_slow,
        )
        self._preload = _TokenizerPreload(self._tokenizers, self.registry)
        self._grammars = GrammarCache(GrammarMetrics(self.metrics))
        self.processor = InputProcessor(
            self.dispatcher,
            self._tokenizers,
            GenerationMetrics(self.metrics),
            decisions,
            self._spans,
            allow_special_tokens=config.allow_special_tokens,
            admission=self.dispatcher.admission,
            grammars=self._grammars,
        )
        self.processor.dialects = ModelDialects(config.tool_dialect, config.reasoning_dialect)
        self.tickets = TicketDesk(
            read_ticket_key(config.ticket_key_file), self.processor, self.dispatcher, self.metrics
        )
        self._token = token
        self._grpc: GrpcServer | None = None
        options = HttpOptions(
            accounts=self._accounts,
            strict_fields=config.strict_fields,
            request_timeout_s=config.request_timeout_s,
            cors_origins=config.cors_origins,
            hosts=HostRule.of_server(config.host, config.allowed_hosts, keyed=self._accounts is not None),
            metrics_port=config.metrics_port,
            max_sequences=config.max_request_sequences,
            max_connections=_most_connections(),
            access_log=config.access_log,
        )
        http = create_app(
            self.processor,
            self.dispatcher,
            registry=self.metrics,
            options=options,
            ready=self.is_ready,
            refused=self._refused,
            steps=steps,
        )
        self._insight = watch(
            http.app,
            decisions=decisions,
            registry=self.registry,
            metrics=self.metrics,
            policy=config.policy,
            replicas=self.replica.report if self.replica is not None else None,
            queued=self._queued,
        )
        administer(http.app, self.processor, self.registry)
        https = self._tls.http_context() if self._tls is not None and config.http_tls else None
        self._reload = CredentialReload(accounts, self._tls, https)
        self._http = _HttpServer(
            _HttpConfig(
                http.app,
                https,
                lifespan="off",
                http=HttpProtocol.serving(http.posts),
                ws="none",
                log_config=None,
                access_log=False,
                proxy_headers=False,  # nothing looks at the client's address
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=math.ceil(config.drain_timeout_s + _CUT_OFF_S),
            )
        )
        self._end_scrapes: Callable[[], None] | None = None
        self._serving: asyncio.Task[None] | None = None
        self.http_port = 0
        self.grpc_port = 0

    def is_ready(self) -> bool:
        """Whether requests can be served now."""
        return not self._http.should_exit and bool(self.registry.ready(Role.DECODE)) and self._preload.over

    def _queued(self) -> tuple[int, int]:
        queue = self.dispatcher.admission.queue
        return len(queue), queue.tokens

    def _refused(self) -> dict[str, int]:
        return dict(Counter(str(x.role) for x in self.registry.instances() if x.status is Status.REFUSED))

    async def start(self) -> None:
        """Listen, connect to the instances, and answer health checks with SERVING.

        Raises:
            ConfigError: A port is in use, or the tokenizer that was named cannot be loaded.
        """
        require_free_port(self._config.host, self._config.metrics_port, field="metrics_port")
        if self._config.model:
            await self._tokenizers.get(self._config.model)
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
        self.tickets.start()
        for discovery in self.discoveries:
            discovery.start()
        if self.replica is not None:
            self.replica.start()
        if self._config.metrics_port:
            self._end_scrapes = serve_metrics(
                self._config.host,
                self._config.metrics_port,
                self.metrics,
                allowed_hosts=self._config.allowed_hosts,
            )
        self._serving = asyncio.create_task(self._http.serve(sockets=[sock]), name="http")
        await self._http.wait_started(self._serving)
        await self._grpc.set_serving(True)
        log.info(
            "serving %s=%s:%d grpc=%s:%d policy=%s prefill=%d decode=%d",
            "https" if self._tls is not None and self._config.http_tls else "http",
            self._config.host,
            self.http_port,
            self._config.host,
            self.grpc_port,
            self._config.policy,
            len(self._config.prefill),
            len(self._config.decode),
        )

    async def _start_grpc(self) -> GrpcServer:
        server = GrpcServer(
            host=self._config.host,
            port=self._config.grpc_port,
            services=[SERVICE],
            token=self._token,
            tls=self._tls,
            admits=admits_clients(self._accounts),
        )
        servicer = RouterServicer(
            self.processor, self.registry, self.tickets, self._accounts, access_log=self._config.access_log
        )
        servicer.insight = self._insight
        router_pb2_grpc.add_RouterServiceServicer_to_server(servicer, server.server)
        self.grpc_port = await server.start()
        return server

    async def stop(self) -> None:
        """Stop accepting, let running requests end for ``drain_timeout_s``, then cut them off."""
        self._http.should_exit = True
        time_is_up = asyncio.get_running_loop().call_later(self._config.drain_timeout_s, self.dispatcher.cut_off)
        ends: list[Awaitable[None]] = []
        if self._serving is not None:
            ends.append(self._serving)
        if self._grpc is not None:
            ends.append(self._grpc.stop(self._config.drain_timeout_s + _CUT_OFF_S))
        await asyncio.gather(*ends)
        time_is_up.cancel()
        await self._preload.close()
        await self.tickets.close()
        await self._reload.close()
        for discovery in self.discoveries:
            await discovery.close()
        if self.replica is not None:
            await self.replica.close()
        await self.registry.close()
        await asyncio.to_thread(self._grammars.close)
        if self._spans is not None:
            await asyncio.to_thread(self._spans.close)
        if self._end_scrapes is not None:
            await asyncio.to_thread(self._end_scrapes)


def _most_connections() -> int:
    """How many HTTP connections may be open at once: a part of the descriptors is for instances and files."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if most == resource.RLIM_INFINITY else max(16, most - max(96, most // 4))


def _accounts(config: RouterConfig) -> FileAccounts | RedisAccounts | None:
    if config.api_keys == IN_REDIS:
        return RedisAccounts(config.redis, config.redis_prefix, config.tenant_secret_file)
    if not config.api_keys:
        return None
    return FileAccounts(config.api_keys, config.tenant_secret_file, shared=bool(config.redis))


class _TokenizerPreload:
    """Loads the served model's tokenizer, once, as soon as an instance says which model that is: no request waits.

    Args:
        tokenizers: Where it is kept.
        registry: The instances.
    """

    def __init__(self, tokenizers: TextModelCache, registry: Registry) -> None:
        self._tokenizers = tokenizers
        self._registry = registry
        self._task: asyncio.Task[None] | None = None
        self.over = False
        """Whether it is loaded, cannot be, or takes too long to be waited for."""

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="preload of the tokenizer")

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
            self.over = True

    def _give_up(self) -> None:
        self.over = True


class _HttpConfig(uvicorn.Config):
    """uvicorn's configuration with a TLS context of ours, which can be renewed."""

    def __init__(self, app: Any, context: ssl.SSLContext | None, **options: Any) -> None:
        super().__init__(app, **options)
        self._context = context

    @property
    def is_ssl(self) -> bool:
        return self._context is not None and self.loaded  # while it loads it would make one of files

    def load(self) -> None:
        super().load()
        self.ssl = self._context


class _HttpServer(uvicorn.Server):
    """uvicorn, except that signals belong to the process and not to one of its servers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def wait_started(self, serving: asyncio.Task[None]) -> None:
        """Wait until requests are answered.

        Raises:
            ConfigError: It ended instead.
        """
        while not self.started:
            await asyncio.wait([serving], timeout=0.005)
            if serving.done():
                raise ConfigError(f"the HTTP server did not start: {serving.exception()}", field="port")


def listen(host: str, port: int) -> socket.socket:
    """Return a listening TCP socket; port 0 takes a free one.

    Raises:
        ConfigError: The port is in use, or the address is not ours.
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
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}", field="port") from error
    return sock
