"""Channels to other services, and the pauses between attempts to reach them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.rpc.auth import HEADER
from baton.rpc.server import MAX_MESSAGE_BYTES
from baton.rpc.tls import Tls

_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5_000),  # also the time an attempt to connect may take
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.enable_retries", 0),  # retries are decided by whoever owns the request
    ("grpc.use_local_subchannel_pool", 1),  # a restarted peer on the same port gets a fresh connection
]


def open_channel(address: str, *, token: str | None = None, tls: Tls | None = None) -> grpc.aio.Channel:
    """Open an asyncio channel to ``host:port``; every call shows the token, if there is one.

    Args:
        address: ``host:port``.
        token: Shared token, if the services use one.
        tls: Certificates, if they use some.
    """
    interceptors: list[Any] = []
    if token is not None:
        interceptors = [_TokenUnary(token), _TokenStream(token), _TokenBothWays(token)]
    if tls is None:
        return grpc.aio.insecure_channel(address, options=_OPTIONS, interceptors=interceptors)
    options = [*_OPTIONS, *tls.channel_options()]
    return grpc.aio.secure_channel(address, tls.channel_credentials(), options=options, interceptors=interceptors)


class Backoff:
    """Pauses that double from ``first_s`` to ``max_s``, each jittered to 50 to 100 %."""

    def __init__(self, max_s: float, rng: random.Random, first_s: float = 0.05) -> None:
        self._max_s, self._first_s, self._rng = max_s, first_s, rng
        self._pause_s = first_s

    def reset(self) -> None:
        """Begin again with the shortest pause."""
        self._pause_s = self._first_s

    def next_s(self) -> float:
        """Return the next pause in seconds."""
        pause = self._pause_s
        self._pause_s = min(2 * pause, self._max_s)
        return pause * (0.5 + 0.5 * self._rng.random())


async def check_health(address: str, *, timeout_s: float = 1.0, tls: Tls | None = None) -> bool:
    """Whether the server at ``address`` answers its health check with SERVING."""
    async with open_channel(address, tls=tls) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def _with_token(details: grpc.aio.ClientCallDetails, token: str) -> grpc.aio.ClientCallDetails:
    metadata = grpc.aio.Metadata(*(details.metadata or ()))
    metadata.add(HEADER, f"Bearer {token}")
    return grpc.aio.ClientCallDetails(
        details.method, details.timeout, metadata, details.credentials, details.wait_for_ready
    )


class _Token:
    """Adds the token to the calls of one kind; gRPC tells the kinds apart by their base classes."""

    def __init__(self, token: str) -> None:
        self._token = token

    async def _intercept(
        self, continuation: Callable[..., Any], client_call_details: grpc.aio.ClientCallDetails, request: Any
    ) -> Any:
        return await continuation(_with_token(client_call_details, self._token), request)


class _TokenUnary(_Token, grpc.aio.UnaryUnaryClientInterceptor):  # type: ignore[type-arg]
    intercept_unary_unary = _Token._intercept


class _TokenStream(_Token, grpc.aio.UnaryStreamClientInterceptor):  # type: ignore[type-arg]
    intercept_unary_stream = _Token._intercept


class _TokenBothWays(_Token, grpc.aio.StreamStreamClientInterceptor):  # type: ignore[type-arg]
    intercept_stream_stream = _Token._intercept  # type: ignore[assignment]  # by position; only a name differs
