"""Health checks as gRPC defines them (``grpc.health.v1``), for callers that prove nothing.

The servicer of grpcio-health-checking has all watchers of a name share a lock, which one that reads nothing keeps: then
no status can be set, so a service could not even stop. And one that leaves has the others hear of nothing any more.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.errors import QueueFullError

LIVENESS = "liveness"
"""Service that serves as long as the process answers, draining or not: for probes after which it is started again."""
_MAX_WATCHERS = 128
_MAX_WATCHERS_PER_PEER = 32
"""Streams of ``Watch``: of all clients, and from one address."""


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Tells whether services serve. Its watchers are bounded in number, and know nothing of each other."""

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
        """Tell a service's status, and each other one that it takes.

        Raises:
            QueueFullError: Too many watch.
        """
        peer = context.peer().rpartition(":")[0]
        if self._watching.total() >= _MAX_WATCHERS or self._watching[peer] >= _MAX_WATCHERS_PER_PEER:
            raise QueueFullError("too many watch this server's health: ask by Check")
        self._watching[peer] += 1
        told = None
        try:
            while True:
                changed = self._changed
                status = self._statuses.get(request.service, health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
                if status != told:
                    yield health_pb2.HealthCheckResponse(status=status)
                    told = status
                await changed.wait()
        finally:
            self._watching[peer] -= 1
            if not self._watching[peer]:
                del self._watching[peer]
