"""The gRPC server of every Baton service: health, reflection, authentication, errors as statuses; and free ports."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import logging
import os
import random
import socket
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from baton.api.v1 import auth_pb2_grpc
from baton.errors import (
    INTERNAL_TEXT,
    BatonError,
    ConfigError,
    DeadlineError,
    InvalidRequestError,
    PermissionDeniedError,
    QueueFullError,
    UnauthenticatedError,
)
from baton.rpc.addresses import join_address
from baton.rpc.audit import audit, peer_of
from baton.rpc.auth import HEADER, Admits, require_safe_bind
from baton.rpc.connections import ConnectionGuard, max_connections
from baton.rpc.errors import DETAILS_KEY, status_code, status_details
from baton.rpc.proof import REQUEST_KEY, SCHEME, ProofServicer
from baton.rpc.proof import SERVICE as PROOFS
from baton.rpc.service_token import Token
from baton.rpc.tls import CertificateRoles, Tls

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 32 * 1024 * 1024
_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST_PORT = 10000
_PORT_TRIES = 1000
WINDOW = "grpc.http2.lookahead_bytes"
"""Option: bytes of a call that a peer may send before they are read."""
CONNECTION_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # gRPC would measure the link with a ping for most messages of a quiet stream, which costs both ends more than the
    # message. The result sets the flow control window; that is fixed instead, for 20 MB/s over 50 ms.
    ("grpc.http2.bdp_probe", 0),
    (WINDOW, 1024 * 1024),
    # Compressed messages are refused: a message's size is checked after decompression, and a megabyte from an
    # unauthenticated caller can expand to a gigabyte.
    ("grpc.compression_enabled_algorithms_bitset", 1),
    ("grpc.per_message_decompression", 0),
]
"""Options of both servers and channels."""
SETTINGS_TIMEOUT = "grpc.http2.settings_timeout"
"""Option: milliseconds in which a peer acknowledges the settings."""
PENDING_CALLS = ("grpc.server.max_pending_requests", "grpc.server.max_pending_requests_hard_limit")
"""Options: calls that wait for a handler, with their heads in memory; beyond the first some are refused, then all."""
_OPTIONS: list[tuple[str, Any]] = [
    *CONNECTION_OPTIONS,
    ("grpc.so_reuseport", 0),  # a port in use is an error, not a second listener
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.max_concurrent_streams", 4096),  # of one connection; its client keeps more waiting
    ("grpc.server_handshake_timeout_ms", 10_000),
    # Until a peer acknowledges the settings, gRPC bounds neither its metadata nor its streams by them.
    (SETTINGS_TIMEOUT, 5_000),
    *dict.fromkeys(PENDING_CALLS, 256).items(),
    ("grpc.max_connection_idle_ms", 300_000),  # without a call; Baton's own callers leave before (channel.py)
]
_OPEN = (f"/{health.SERVICE_NAME}/", f"/{PROOFS}/")
_REQUEST_S = 1.0
_MAX_REQUEST_BYTES = 1024
_MAX_READING = 4
_MAX_READING_PER_PEER = 2
"""Bounds on the requests of health checks, which need no token: time, length, and how many are read at once.

gRPC reads a message whole, up to the longest of any call.
"""


class GrpcServer:
    """A ``grpc.aio`` server.

    Args:
        host: Address to listen on.
        port: Port, 0 to 65535; 0: a free one.
        services: Full names of the services, for health and reflection.
        token: Shared token that callers must prove, as this server does to them; health checks need none.
        tls: Certificates; every caller must show one. ``None``: no TLS.
        admits: Decides which calls are served without a proof; ``None``: none, or all where there is no token.
            One that is an interceptor as well intercepts the calls that are allowed.
        max_message_bytes: Longest message that is received, in bytes.
        options: gRPC options that differ from those of services.

    Raises:
        ConfigError: Off loopback with neither token nor certificates.
    """

    def __init__(
        self,
        *,
        host: str,
        port: int,
        services: Sequence[str],
        token: Token | None = None,
        tls: Tls | None = None,
        admits: Admits | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        options: Mapping[str, int] | None = None,
    ) -> None:
        require_safe_bind(host, token, tls)
        self._host = host
        self._port = port
        self._services = list(services)
        self._tls = tls
        proofs = ProofServicer(token) if token is not None else None
        self._guard = ConnectionGuard()
        roles = tls.roles if tls is not None else None
        self._interceptor = _Interceptor(proofs, admits, roles, self._guard.mark_known)
        own = {
            "grpc.max_receive_message_length": max_message_bytes,
            "grpc.max_allowed_incoming_connections": max_connections(),
            **(options or {}),
        }
        all_options = list((dict(_OPTIONS) | own).items())
        more: list[Any] = [admits] if isinstance(admits, grpc.aio.ServerInterceptor) else []
        self.server = grpc.aio.server(interceptors=[self._interceptor, *more], options=all_options)
        if proofs is not None:
            auth_pb2_grpc.add_AuthServiceServicer_to_server(proofs, self.server)
        self._health = HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        names = [*self._services, health.SERVICE_NAME, reflection.SERVICE_NAME]
        reflection.enable_server_reflection(names, self.server)
        _serve_reflection_v1(names, self.server)

    async def start(self) -> int:
        """Listen and return the port.

        Raises:
            ConfigError: The port is in use or the address is not ours.
        """
        address = join_address(self._host, self._port)
        require_free_port(self._host, self._port)
        try:
            if self._tls is None:
                port = self.server.add_insecure_port(address)
            else:
                port = self.server.add_secure_port(address, self._tls.server_credentials())
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {address}: the port is in use or not ours", field="port") from error
        await self.server.start()
        self._guard.start(port)
        return port

    async def set_serving(self, serving: bool) -> None:
        """Set the answer of health checks."""
        self._health.set(["", *self._services], serving)

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, give running ones ``grace_s`` seconds, then cancel them."""
        await self.set_serving(False)
        await self.server.stop(grace_s)
        await self._guard.close()


def _serve_reflection_v1(names: Sequence[str], server: grpc.aio.Server) -> None:
    """Serve ``grpc.reflection.v1`` too: its messages are those of v1alpha, the only version in grpcio-reflection."""
    call = grpc.stream_stream_rpc_method_handler(
        reflection.aio.ReflectionServicer(names).ServerReflectionInfo,  # type: ignore[attr-defined]
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    service = grpc.method_handlers_generic_handler(
        "grpc.reflection.v1.ServerReflection", {"ServerReflectionInfo": call}
    )
    server.add_generic_rpc_handlers((service,))


def require_free_port(host: str, port: int, *, field: str = "port") -> None:
    """Check that a port can be listened on, before gRPC does, which would log lines of its own; 0 always can.

    Raises:
        ConfigError: It is in use or not ours.
    """
    if port == 0:
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), port))
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {join_address(host, port)}: {error.strerror or error}", field=field
            ) from error


def free_port() -> int:
    """Return a port of 127.0.0.1 that is free now; see :func:`free_ports`."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Return distinct ports of 127.0.0.1 that are free now.

    They are below the range for outgoing connections: between this call and the process that listens, a connection
    would occupy one of them sooner or later. Other processes of this user do not get the same ones from here meanwhile.
    Where too few of them are free, ports of the system's range are returned.
    """
    first = _first_ephemeral()
    with ExitStack() as sockets, promised_ports() as promised:
        ports: list[int] = []
        for _ in range(_PORT_TRIES):
            if len(ports) == count:
                break
            wanted = random.randrange(_LOWEST_PORT, first) if first > _LOWEST_PORT else 0
            port = _bind(sockets, wanted) if wanted and wanted not in promised else None
            if port is not None:
                ports.append(port)
                promised[port] = time.time()
        while len(ports) < count:
            port = _bind(sockets, 0)
            assert port is not None  # the system finds one, or raises another error
            ports.append(port)
        return ports


def _first_ephemeral() -> int:
    try:
        return int(_PORT_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0  # not Linux


def _bind(sockets: ExitStack, port: int) -> int | None:
    """Bind a port until ``sockets`` closes and return it; ``None``: it is in use."""
    sock = sockets.enter_context(socket.socket())
    try:
        sock.bind(("127.0.0.1", port))
    except OSError:
        if port == 0:
            raise
        return None
    return int(sock.getsockname()[1])


class _Interceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Rejects calls that are not allowed, and turns exceptions of handlers into statuses with details.

    Args:
        proofs: Checks the callers' credentials; ``None``: there is no token.
        admits: Decides which calls are served without a credential; ``None``: none where there is a token.
        roles: Rules of what a caller's certificate lets it call; ``None``: everything.
        on_allowed: Called with the context of each of Baton's calls that is allowed, before it begins.
    """

    def __init__(
        self, proofs: ProofServicer | None, admits: Admits | None, roles: CertificateRoles | None, on_allowed: Check
    ) -> None:
        self._proofs = proofs
        self._admits = admits
        self._roles = roles
        self._on_allowed = on_allowed
        self._reading: Counter[str] = Counter()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        method = handler_call_details.method
        try:
            check = self._check(method, handler_call_details.invocation_metadata or ())
        except BatonError as error:
            return _refusal(method, error)
        handler: Any = await continuation(handler_call_details)
        is_open = method.startswith(_OPEN)
        is_baton = method.startswith("/baton.")
        if handler is None or not (check is not None or is_baton or is_open):
            return handler
        checks = [] if check is None else [check]
        if is_baton and not is_open:
            if self._roles is not None:
                checks.append(functools.partial(self._check_role, self._roles, method))
            checks.append(self._on_allowed)
        guards: dict[str, Callable[..., Any]] = {
            "unary_unary": _guard_unary,
            "stream_unary": _guard_unary,
            "unary_stream": _guard_stream,
            "stream_stream": _guard_stream,
        }
        if method.startswith(f"/{PROOFS}/"):
            handler = _from_head(handler)
        elif is_open:
            handler = self._bounded(handler)
        return handler._replace(
            **{kind: guard(behavior, checks) for kind, guard in guards.items() if (behavior := getattr(handler, kind))}
        )

    def _bounded(self, handler: Any) -> Any:
        """Bound the one request of a health check: gRPC would wait for it, however long it takes and gets."""
        parse = handler.request_deserializer

        async def whole(_: object, context: Any) -> Any:
            return await handler.unary_unary(await self._read(context, parse), context)

        async def stream(_: object, context: Any) -> AsyncIterator[Any]:
            async with contextlib.aclosing(
                handler.unary_stream(await self._read(context, parse), context)
            ) as responses:
                async for response in responses:
                    yield response

        if handler.unary_unary is not None:
            return grpc.stream_unary_rpc_method_handler(whole, None, handler.response_serializer)
        return grpc.stream_stream_rpc_method_handler(stream, None, handler.response_serializer)

    async def _read(self, context: Any, parse: Callable[[bytes], Any]) -> Any:
        """Read a request; where too many are being read, return the empty one, whose answer is the server's health."""
        peer = context.peer().rpartition(":")[0]
        if self._reading.total() >= _MAX_READING or self._reading[peer] >= _MAX_READING_PER_PEER:
            return parse(b"")
        self._reading[peer] += 1
        try:
            data = await read_message(context, _REQUEST_S)
        finally:
            self._reading[peer] -= 1
            if not self._reading[peer]:
                del self._reading[peer]
        return _parse(data, parse)

    def _check(self, method: str, metadata: Any) -> Check | None:
        """Return the check that needs a call's context, if there is one.

        Raises:
            BatonError: The caller may not call.
        """
        if (self._proofs is None and self._admits is None) or method.startswith(_OPEN):
            return None
        given = next((value for key, value in metadata if key == HEADER), None)
        if self._proofs is not None and isinstance(given, str) and given.startswith(SCHEME):
            return self._proofs.check(method, given)
        if self._admits is not None and self._admits(method, given):
            return None
        raise UnauthenticatedError("this call needs proof of the shared token (--token-file), or an API key")

    @staticmethod
    def _check_role(roles: CertificateRoles, method: str, context: Any) -> None:
        uris = [uri.decode("utf-8", "replace") for uri in context.auth_context().get("peer_uri", ())]
        try:
            roles.require_call(uris, method)
        except PermissionDeniedError:
            audit("denied", over="grpc", peer=peer_of(context), certificate=" ".join(uris), method=method)
            raise


Check: TypeAlias = Callable[[Any], None]
"""Checks a call by its context; raises a BatonError if it is not allowed."""


def _refusal(method: str, error: BatonError) -> Any:
    async def refuse(request: Any, context: Any) -> None:
        if isinstance(error, PermissionDeniedError):
            audit("denied", over="grpc", peer=peer_of(context), method=method, reason=error.field or "")
        else:
            audit("authentication_failed", over="grpc", peer=peer_of(context), method=method)  # a forged one's too
        await abort_with(context, error)

    return grpc.stream_unary_rpc_method_handler(refuse)  # at once: a request may never come


async def read_message(context: Any, timeout_s: float) -> Any:
    """Return the one message of a call whose handler gets a stream of them, as the handler's deserializer makes it.

    The stream's iterator would keep the message, and a cycle with the call, until garbage is collected twice.

    Raises:
        DeadlineError: It did not come in time.
    """
    try:
        async with asyncio.timeout(timeout_s):
            data = await context.read()
    except TimeoutError as error:
        raise DeadlineError(f"the request did not come within {timeout_s:.3g} s") from error
    if data is grpc.aio.EOF:  # type: ignore[attr-defined]
        raise DeadlineError("the call ended without a request")
    return data


def _from_head(handler: Any) -> Any:
    """Return a handler of a unary call whose request is in its metadata; its message is not read."""

    async def call(_: object, context: Any) -> Any:
        data = next((value for key, value in context.invocation_metadata() if key == REQUEST_KEY), b"")
        return await handler.unary_unary(_parse(data, handler.request_deserializer), context)

    return grpc.stream_unary_rpc_method_handler(call, None, handler.response_serializer)


def _parse(data: bytes, parse: Callable[[bytes], Any]) -> Any:
    """Parse a request of a caller that may be anybody."""
    if len(data) > _MAX_REQUEST_BYTES:
        raise InvalidRequestError(f"the request has {len(data)} bytes; {_MAX_REQUEST_BYTES} are the most")
    try:
        return parse(data)
    except DecodeError as error:
        raise InvalidRequestError("the request cannot be read") from error


def _guard_unary(
    behavior: Callable[[Any, Any], Awaitable[Any]], checks: Sequence[Check]
) -> Callable[[Any, Any], Awaitable[Any]]:
    async def call(request: Any, context: Any) -> Any:
        try:
            async with _errors_as_statuses(context):
                for check in checks:
                    check(context)
                return await behavior(request, context)
        except grpc.aio.AbortError as aborted:
            # The call's state keeps it, and so the frames of its traceback, which must not have the call in turn.
            del request, context
            aborted.__context__ = None
            raise aborted.with_traceback(None) from None

    return call


def _guard_stream(
    behavior: Callable[[Any, Any], AsyncIterator[Any]], checks: Sequence[Check]
) -> Callable[[Any, Any], AsyncIterator[Any]]:
    async def call(request: Any, context: Any) -> AsyncIterator[Any]:
        responses = None
        try:
            async with _errors_as_statuses(context):
                for check in checks:
                    check(context)
                responses = behavior(request, context)
                async for response in responses:
                    yield response
        except grpc.aio.AbortError as aborted:
            del request, context  # as above
            aborted.__context__ = None
            raise aborted.with_traceback(None) from None
        finally:
            # The handler's own clean-up must run now, not when the garbage collector finds it.
            close = getattr(responses, "aclose", None)
            if close is not None:
                await close()

    return call


@contextlib.asynccontextmanager
async def _errors_as_statuses(context: Any) -> AsyncIterator[None]:
    """End a call with the status of what its handler raises."""
    try:
        yield
    except BatonError as error:
        await abort_with(context, error)
    except (asyncio.CancelledError, grpc.aio.AbortError):
        raise
    except Exception:
        log.exception("a handler failed")
        await context.abort(grpc.StatusCode.INTERNAL, INTERNAL_TEXT)


async def abort_with(context: Any, error: BatonError) -> None:
    """End a call with an error's status and details."""
    await context.abort(status_code(error), error.message, ((DETAILS_KEY, status_details(error)),))


LIVENESS = "liveness"
"""Service that is SERVING as long as the process answers, draining or not: for probes that restart it."""
_MAX_WATCHERS = 128
_MAX_WATCHERS_PER_PEER = 32
"""Maximum streams of ``Watch``: of all clients, and from one address."""


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Health checks as gRPC defines them (``grpc.health.v1``), for callers without a proof.

    In the servicer of grpcio-health-checking all watchers of a name share a lock, which a watcher that reads nothing
    keeps: then no status can be set, so a service could not even stop. And one that leaves stops the updates of the
    others. Here watchers are independent of each other, and bounded in number.
    """

    def __init__(self) -> None:
        self._statuses: dict[str, Any] = {LIVENESS: health_pb2.HealthCheckResponse.SERVING}
        self._changed = asyncio.Event()
        self._watching: Counter[str] = Counter()

    def set(self, names: Iterable[str], serving: bool) -> None:
        """Set the status of services; the empty name is the server's."""
        kind = health_pb2.HealthCheckResponse
        self._statuses |= dict.fromkeys(names, kind.SERVING if serving else kind.NOT_SERVING)
        self._changed.set()
        self._changed = asyncio.Event()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Any) -> health_pb2.HealthCheckResponse:
        if request.service not in self._statuses:
            await context.abort(grpc.StatusCode.NOT_FOUND)
        return health_pb2.HealthCheckResponse(status=self._statuses[request.service])

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: Any
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """Yield a service's status, and each change of it.

        Raises:
            QueueFullError: There are too many watchers.
        """
        peer = context.peer().rpartition(":")[0]
        if self._watching.total() >= _MAX_WATCHERS or self._watching[peer] >= _MAX_WATCHERS_PER_PEER:
            raise QueueFullError("too many watch this server's health: ask by Check")
        self._watching[peer] += 1
        sent = None
        try:
            while True:
                changed = self._changed
                status = self._statuses.get(request.service, health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
                if status != sent:
                    yield health_pb2.HealthCheckResponse(status=status)
                    sent = status
                await changed.wait()
        finally:
            self._watching[peer] -= 1
            if not self._watching[peer]:
                del self._watching[peer]


PROMISED_S = 180.0
"""Seconds that a port is reserved for the process that got it: enough for a deployment to start on a busy machine."""
_MOST_BYTES = 1 << 20


@contextlib.contextmanager
def promised_ports() -> Iterator[dict[int, float]]:
    """Yield ports that processes of this user got lately and may not listen on yet, with the time of each.

    Ports that the caller adds are reserved as well. The ports are in a file, which is locked meanwhile; where it cannot
    be used there are none.
    """
    path = Path(tempfile.gettempdir()) / f"baton-ports-{os.getuid()}"
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:
        yield {}
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        now = time.time()
        promised = dict[int, float]()
        for line in os.pread(file, _MOST_BYTES, 0).decode("ascii", "replace").splitlines():
            with contextlib.suppress(ValueError):  # other programs may have written there
                port, at = line.split()
                if now - PROMISED_S < float(at) <= now:
                    promised[int(port)] = float(at)
        yield promised
        text = "".join(f"{port} {at}\n" for port, at in promised.items())
        with contextlib.suppress(OSError):  # a full disk
            os.ftruncate(file, 0)
            os.pwrite(file, text.encode("ascii"), 0)
    finally:
        os.close(file)
