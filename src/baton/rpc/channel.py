"""Channels to other services, and the pauses between attempts to reach them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any, cast

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.rpc.auth import HEADER
from baton.rpc.proof import SERVICE, Prover, certificate_digest
from baton.rpc.server import CONNECTION_OPTIONS
from baton.rpc.service_token import Token
from baton.rpc.tls import Tls

_OPTIONS: list[tuple[str, Any]] = [
    *CONNECTION_OPTIONS,
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5_000),  # also the timeout of an attempt to connect
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.enable_retries", 0),  # retries are decided by the owner of the request
    ("grpc.client_idle_timeout_ms", 240_000),  # before the server closes an idle connection, so that no call meets that
    ("grpc.use_local_subchannel_pool", 1),  # a restarted peer on the same port gets a fresh connection
]


def open_channel(address: str, *, token: Token | None = None, tls: Tls | None = None) -> grpc.aio.Channel:
    """Open an asyncio channel; before its first call both ends prove the token, if there is one.

    Args:
        address: ``host:port`` of the server.
        token: Shared token, if the services use one. It is not sent, and a service that does not know it gets no call.
        tls: Certificates, if the services use TLS.
    """
    options = _OPTIONS if tls is None else [*_OPTIONS, *tls.channel_options()]
    shown, credentials = (b"", None) if tls is None else tls.channel_credentials()
    prover = Prover(token, address, certificate_digest(shown)) if token is not None else None
    interceptors: list[Any] = [] if prover is None else [kind(prover) for kind in (_Unary, _Stream, _BothWays)]
    if credentials is None:
        channel = grpc.aio.insecure_channel(address, options=options, interceptors=interceptors)
    else:
        channel = grpc.aio.secure_channel(address, credentials, options=options, interceptors=interceptors)
    if prover is not None:
        prover.attach(channel)
    return channel


class Backoff:
    """Pauses that double from ``first_s`` to ``max_s``, each jittered to 50 to 100 %."""

    def __init__(self, max_s: float, rng: random.Random, first_s: float = 0.05) -> None:
        self._max_s = max_s
        self._first_s = first_s
        self._rng = rng
        self._pause_s = first_s

    def reset(self) -> None:
        """Start over with the shortest pause."""
        self._pause_s = self._first_s

    def next_s(self) -> float:
        """Return the next pause in seconds."""
        pause = self._pause_s
        self._pause_s = min(2 * pause, self._max_s)
        return pause * (0.5 + 0.5 * self._rng.random())


async def check_health(address: str, *, service: str = "", timeout_s: float = 1.0, tls: Tls | None = None) -> bool:
    """Whether the server at ``address`` answers its health check, of all or one of its services, with SERVING."""
    return not await why_unhealthy(address, service=service, timeout_s=timeout_s, tls=tls)


async def why_unhealthy(address: str, *, service: str = "", timeout_s: float = 1.0, tls: Tls | None = None) -> str:
    """Return why a server is not healthy, as the end of a sentence that begins with its address; empty: it serves.

    Args:
        address: ``host:port`` of the server.
        service: One of its services; empty: all of them.
        timeout_s: Longest wait for an answer, in seconds.
        tls: Certificates, if the services use TLS.
    """
    async with open_channel(address, tls=tls) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            match error.code():
                case grpc.StatusCode.DEADLINE_EXCEEDED:
                    return f"does not answer within {timeout_s:g} s"
                case grpc.StatusCode.NOT_FOUND:
                    return f"has no service {service}"
            details = error.details() or ""
            if "Connection refused" in details:
                return "refuses the connection: nothing listens there"
            return f"does not answer: {error.code().name} {details}".rstrip()
        return "" if answer.status == health_pb2.HealthCheckResponse.SERVING else "is not serving"


class _Proved:
    """Proves the token before calls of one kind; gRPC distinguishes the kinds by their base classes."""

    def __init__(self, prover: Prover) -> None:
        self._prover = prover

    async def _intercept(
        self, continuation: Callable[..., Any], client_call_details: grpc.aio.ClientCallDetails, request: Any
    ) -> Any:
        details = client_call_details
        method = cast("bytes", details.method).decode()  # its type says str
        if method.startswith(f"/{SERVICE}/"):  # the proof itself
            return await continuation(details, request)
        began = time.monotonic()
        timeout_s = details.timeout
        header = await self._prover.header(method, timeout_s, details.wait_for_ready)
        if timeout_s is not None:
            timeout_s = max(0.0, timeout_s - (time.monotonic() - began))
        metadata = grpc.aio.Metadata(*(details.metadata or ()))
        metadata.add(HEADER, header)
        details = grpc.aio.ClientCallDetails(
            details.method, timeout_s, metadata, details.credentials, details.wait_for_ready
        )
        return await continuation(details, request)


class _Unary(_Proved, grpc.aio.UnaryUnaryClientInterceptor):  # type: ignore[type-arg]
    intercept_unary_unary = _Proved._intercept


class _Stream(_Proved, grpc.aio.UnaryStreamClientInterceptor):  # type: ignore[type-arg]
    intercept_unary_stream = _Proved._intercept


class _BothWays(_Proved, grpc.aio.StreamStreamClientInterceptor):  # type: ignore[type-arg]
    intercept_stream_stream = _Proved._intercept  # type: ignore[assignment]  # by position; only a name differs
