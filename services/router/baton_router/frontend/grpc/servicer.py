"""The gRPC router service: text in and out, registration, and what the router knows."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from baton.api.v1 import router_pb2, router_pb2_grpc
from baton.rpc.auth import HEADER, Admits, admits_services
from baton.types import ORDER_HEADER, Order
from baton_router.accounts.accounts import Accounts
from baton_router.frontend.grpc import generate as grpc_generate
from baton_router.frontend.grpc.ticket import TicketDesk
from baton_router.processor.input_processor import InputProcessor
from baton_router.registry.registry import Registry
from baton_router.types import Account

SERVICE = "baton.api.v1.RouterService"
_FOR_CLIENTS = frozenset(f"/{SERVICE}/{name}" for name in ("Generate", "Route", "NoteDirect", "ListModels"))


class RouterServicer(router_pb2_grpc.RouterServiceServicer):
    """Answers ``baton.api.v1.RouterService``; the server's interceptors turn errors into statuses.

    Args:
        processor: For Generate and Route.
        registry: For everything about instances.
        tickets: For requests that run without this router between.
        accounts: Whose API keys clients show; ``None``: there are none.
    """

    def __init__(
        self, processor: InputProcessor, registry: Registry, tickets: TicketDesk, accounts: Accounts | None = None
    ) -> None:
        self._accounts = accounts
        self._tickets = tickets
        self._pipeline = processor
        self._registry = registry

    async def Generate(
        self, request: router_pb2.RouterGenerateRequest, context: Any
    ) -> AsyncIterator[router_pb2.RouterGenerateResponse]:
        """Generate; see ``grpc_generate.generate``."""
        order = _metadata(context, ORDER_HEADER)
        responses: Any = grpc_generate.generate(
            self._pipeline, request, self._account(context), Order.parse(ORDER_HEADER, order) if order else None
        )
        async with aclosing(responses):
            async for response in responses:
                yield response

    async def Route(self, request: router_pb2.RouteRequest, context: Any) -> router_pb2.RouteResponse:
        """Say where a prompt would go, or place it and give a ticket."""
        account = self._account(context)
        if request.HasField("direct"):
            return await self._tickets.place(request.direct, account)
        return await grpc_generate.route(self._pipeline, request, account)

    async def NoteDirect(self, request: router_pb2.NoteDirectRequest, context: Any) -> router_pb2.NoteDirectResponse:
        """Hear how a request that runs by a ticket stands."""
        return router_pb2.NoteDirectResponse(known=self._tickets.note(request))

    async def ListModels(self, request: router_pb2.ListModelsRequest, context: Any) -> router_pb2.ListModelsResponse:
        """Say which models are served."""
        return grpc_generate.list_models(self._pipeline)

    async def Register(self, request: router_pb2.RegisterRequest, context: Any) -> router_pb2.RegisterResponse:
        """Make an instance known."""
        return self._registry.register(request)

    async def Heartbeat(self, request: router_pb2.HeartbeatRequest, context: Any) -> router_pb2.HeartbeatResponse:
        """Keep an instance's lease."""
        return router_pb2.HeartbeatResponse(known=self._registry.heartbeat(request.lease_id))

    async def Deregister(self, request: router_pb2.DeregisterRequest, context: Any) -> router_pb2.DeregisterResponse:
        """Forget an instance that leaves."""
        self._registry.deregister(request.lease_id)
        return router_pb2.DeregisterResponse()

    async def ListInstances(
        self, request: router_pb2.ListInstancesRequest, context: Any
    ) -> router_pb2.ListInstancesResponse:
        """Say which instances there are."""
        return router_pb2.ListInstancesResponse(instances=[x.describe() for x in self._registry.instances()])

    def _account(self, context: Any) -> Account | None:
        """Return whose API key a call shows; ``None``: there are no keys, or a service calls."""
        if self._accounts is None:
            return None
        return self._accounts.identify(_metadata(context, HEADER))


def admits_clients(token: str | None, accounts: Accounts | None) -> Admits:
    """Return the rule of a router: clients show an API key where there are some, services the token where there is one.

    Args:
        token: Shared by the services; it opens every call.
        accounts: Whose API keys open the calls that generate.
    """
    services = admits_services(token)
    if accounts is None:
        return services

    def admits(method: str, header: str | bytes | None) -> bool:
        if token is not None and services(method, header):
            return True
        if method not in _FOR_CLIENTS:
            return token is None
        return accounts.identify(_text(header)) is not None

    return admits


def _metadata(context: Any, name: str) -> str:
    return _text(next((value for key, value in context.invocation_metadata() or () if key == name), None))


def _text(header: str | bytes | None) -> str:
    return header.decode("latin-1") if isinstance(header, bytes) else header or ""
