"""A gRPC server as every Baton service runs it: health, reflection, auth, errors as statuses."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import random
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from baton.api.v1 import auth_pb2_grpc
from baton.errors import (
    BatonError,
    ConfigError,
    DeadlineError,
    PermissionDeniedError,
    QueueFullError,
    UnauthenticatedError,
)
from baton.rpc.audit import audit, peer_of
from baton.rpc.auth import HEADER, Admits, require_safe_bind
from baton.rpc.connections import ConnectionGuard, max_connections
from baton.rpc.errors import DETAILS_KEY, status_code, status_details
from baton.rpc.health import HealthServicer
from baton.rpc.ports import promised_ports
from baton.rpc.proof import SCHEME, ProofServicer
from baton.rpc.proof import SERVICE as PROOFS
from baton.rpc.roles import CertificateRoles
from baton.rpc.service_token import Token
from baton.rpc.tls import Tls

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 32 * 1024 * 1024
_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST_PORT = 10000
_PORT_TRIES = 1000
CONNECTION_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # gRPC would measure the link with a ping for most messages of a quiet stream, which costs both ends more than the
    # message. Its answer decides how much may be on its way; that is fixed instead: 20 MB/s over 50 ms.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 1024 * 1024),
    # What is compressed is refused: a message's bound is looked at after it was unpacked, and a megabyte of it, of
    # somebody who knows no token, can be a gigabyte.
    ("grpc.compression_enabled_algorithms_bitset", 1),
    ("grpc.per_message_decompression", 0),
]
"""Of both ends."""
_OPTIONS: list[tuple[str, Any]] = [
    *CONNECTION_OPTIONS,
    ("grpc.so_reuseport", 0),  # a port in use is an error, not a second listener
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.max_concurrent_streams", 4096),  # of one connection; its client keeps more waiting
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 300_000),  # without a call; Baton's own callers leave before (channel.py)
]
_OPEN = (f"/{health.SERVICE_NAME}/", f"/{PROOFS}/")
_REQUEST_S = 10.0
_MAX_AWAITED = 1024
_MAX_AWAITED_PER_PEER = 256
"""Time for the request of a call that needs no token, and so many such calls may be without theirs."""


class GrpcServer:
    """A ``grpc.aio`` server.

    Args:
        host: Address to listen on.
        port: Port; 0 takes a free one.
        services: Full names of the services, for health and reflection.
        token: Shared token that callers must prove, as this server does to them; health checks need none.
        tls: Certificates: what listens wants one of every caller. ``None``: in the clear.
        admits: Whose calls go on without a proof; default: nobody's, and everybody's where there is no token.

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
    ) -> None:
        require_safe_bind(host, token, tls)
        self._host = host
        self._port = port
        self._services = list(services)
        self._tls = tls
        proofs = ProofServicer(token) if token is not None else None
        self._guard: ConnectionGuard | None = None
        self._interceptor = _Interceptor(proofs, admits, tls.roles if tls is not None else None, self._know)
        options = [*_OPTIONS, ("grpc.max_allowed_incoming_connections", max_connections())]
        self.server = grpc.aio.server(interceptors=[self._interceptor], options=options)
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
        address = f"{self._host}:{self._port}"
        require_free_port(self._host, self._port)
        try:
            if self._tls is None:
                port = self.server.add_insecure_port(address)
            else:
                port = self.server.add_secure_port(address, self._tls.server_credentials())
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {address}: the port is in use or not ours", field="port") from error
        await self.server.start()
        self._guard = ConnectionGuard(port)
        self._guard.start()
        return port

    def _know(self, context: Any) -> None:
        """Take note that a call was let through, and over which connection."""
        if self._guard is not None:
            self._guard.know(context)

    async def set_serving(self, serving: bool) -> None:
        """Tell health checks whether this server wants traffic."""
        self._health.set(["", *self._services], serving)

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, give running ones ``grace_s`` seconds, then cancel them."""
        await self.set_serving(False)
        await self.server.stop(grace_s)
        if self._guard is not None:
            await self._guard.close()


def _serve_reflection_v1(names: Sequence[str], server: grpc.aio.Server) -> None:
    """Answer ``grpc.reflection.v1`` too: its messages are v1alpha's, which is all that grpcio-reflection has."""
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
    """Find out now, and without gRPC's own lines in the log, whether a port can be listened on; 0 always can.

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
            raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}", field=field) from error


def free_port() -> int:
    """Return a port of 127.0.0.1 that is free now; see :func:`free_ports`."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Return distinct ports of 127.0.0.1 that are free now.

    They lie below those that the system gives to outgoing connections: between this call and the process that listens,
    a connection would take one of them sooner or later. Nor does another process of this user get one of them from here
    meanwhile. Where too few of them are free the system's own are taken.
    """
    first = _first_ephemeral()
    with ExitStack() as held, promised_ports() as promised:
        ports: list[int] = []
        for _ in range(_PORT_TRIES):
            if len(ports) == count:
                break
            wanted = random.randrange(_LOWEST_PORT, first) if first > _LOWEST_PORT else 0
            port = _bound(held, wanted) if wanted and wanted not in promised else None
            if port is not None:
                ports.append(port)
                promised[port] = time.time()
        while len(ports) < count:
            port = _bound(held, 0)
            assert port is not None  # the system finds one, or raises another error
            ports.append(port)
        return ports


def _first_ephemeral() -> int:
    try:
        return int(_PORT_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0  # not Linux


def _bound(held: ExitStack, port: int) -> int | None:
    """Bind a port until ``held`` ends and return it; ``None``: it is taken."""
    sock = held.enter_context(socket.socket())
    try:
        sock.bind(("127.0.0.1", port))
    except OSError:
        if port == 0:
            raise
        return None
    return int(sock.getsockname()[1])


class _Interceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Sends away who may not call, and turns exceptions of handlers into statuses with details.

    Args:
        proofs: Knows who has proved the token; ``None``: there is none.
        admits: Whose calls go on without that; ``None``: nobody's where there is a token.
        roles: What a caller's certificate lets it call; ``None``: everything.
        know: Hears of each of Baton's calls that is let through, before it begins.
    """

    def __init__(
        self, proofs: ProofServicer | None, admits: Admits | None, roles: CertificateRoles | None, know: Check
    ) -> None:
        self._proofs = proofs
        self._admits = admits
        self._roles = roles
        self._know = know
        self._awaited: Counter[str] = Counter()

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
        is_ours = method.startswith("/baton.")
        if handler is None or not (check is not None or is_ours or is_open):
            return handler
        checks = [] if check is None else [check]
        if is_ours and not is_open:
            if self._roles is not None:
                checks.append(functools.partial(self._check_role, self._roles, method))
            checks.append(self._know)
        guards: dict[str, Callable[..., Any]] = {
            "unary_unary": _guard_unary,
            "stream_unary": _guard_unary,
            "unary_stream": _guard_stream,
            "stream_stream": _guard_stream,
        }
        if is_open:
            handler = self._in_time(handler)
        return handler._replace(
            **{kind: guard(behavior, checks) for kind, guard in guards.items() if (behavior := getattr(handler, kind))}
        )

    def _in_time(self, handler: Any) -> Any:
        """Have a call's one request come soon: gRPC would wait for it as long as the caller likes."""
        codec = handler.request_deserializer, handler.response_serializer

        async def whole(requests: AsyncIterator[Any], context: Any) -> Any:
            return await handler.unary_unary(await self._first(requests, context), context)

        async def stream(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
            async with contextlib.aclosing(
                handler.unary_stream(await self._first(requests, context), context)
            ) as responses:
                async for response in responses:
                    yield response

        if handler.unary_unary is not None:
            return grpc.stream_unary_rpc_method_handler(whole, *codec)
        return grpc.stream_stream_rpc_method_handler(stream, *codec)

    async def _first(self, requests: AsyncIterator[Any], context: Any) -> Any:
        peer = context.peer().rpartition(":")[0]
        if self._awaited.total() >= _MAX_AWAITED or self._awaited[peer] >= _MAX_AWAITED_PER_PEER:
            raise QueueFullError("too many calls are without their requests")
        self._awaited[peer] += 1
        try:
            async with asyncio.timeout(_REQUEST_S):
                return await anext(requests)
        except (TimeoutError, StopAsyncIteration) as error:
            raise DeadlineError(f"the request did not come within {_REQUEST_S:g} s") from error
        finally:
            self._awaited[peer] -= 1
            if not self._awaited[peer]:
                del self._awaited[peer]

    def _check(self, method: str, metadata: Any) -> Check | None:
        """Return what is to be checked once a call's context is there, if anything.

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
"""Looks at a call's context; raises a BatonError if the call may not go on."""


def _refusal(method: str, error: BatonError) -> Any:
    async def refuse(request: Any, context: Any) -> None:
        audit("authentication_failed", over="grpc", peer=peer_of(context), method=method)  # a forged credential's too
        await abort_with(context, error)

    return grpc.stream_unary_rpc_method_handler(refuse)  # at once: a request may never come


def _guard_unary(
    behavior: Callable[[Any, Any], Awaitable[Any]], checks: Sequence[Check]
) -> Callable[[Any, Any], Awaitable[Any]]:
    async def call(request: Any, context: Any) -> Any:
        try:
            for check in checks:
                check(context)
            return await behavior(request, context)
        except BatonError as error:
            await abort_with(context, error)
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except Exception as error:
            await _abort_internal(context, error)

    return call


def _guard_stream(
    behavior: Callable[[Any, Any], AsyncIterator[Any]], checks: Sequence[Check]
) -> Callable[[Any, Any], AsyncIterator[Any]]:
    async def call(request: Any, context: Any) -> AsyncIterator[Any]:
        responses = None
        try:
            for check in checks:
                check(context)
            responses = behavior(request, context)
            async for response in responses:
                yield response
        except BatonError as error:
            await abort_with(context, error)
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except Exception as error:
            await _abort_internal(context, error)
        finally:
            # The handler's own clean-up must run now, not when the garbage collector finds it.
            close = getattr(responses, "aclose", None)
            if close is not None:
                await close()

    return call


async def abort_with(context: Any, error: BatonError) -> None:
    """End a call with an error's status and details."""
    await context.abort(status_code(error), error.message, ((DETAILS_KEY, status_details(error)),))


async def _abort_internal(context: Any, error: Exception) -> None:
    log.exception("a handler failed")
    await context.abort(grpc.StatusCode.INTERNAL, f"internal error: {type(error).__name__}: {error}")
