"""The calls that need a placement ticket: refused by their heads, and their requests read a few at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, aclosing, contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import grpc
import grpc.aio

from baton.api.v1 import common_pb2, worker_pb2
from baton.errors import PermissionDeniedError, QueueFullError
from baton.rpc.audit import audit, peer_of
from baton.rpc.auth import HEADER
from baton.rpc.server import read_message
from baton.rpc.ticket import TicketCheck, request_digest

MAX_READS = 8
MAX_READS_PER_TENANT = 2
"""Requests that are read at once: of all clients, and of one tenant (without tenants: from one address)."""
READ_S = 2.0
READ_BYTES_PER_S = 1_000_000
"""Longest time for a request to come, and the bytes that give it another second."""
_WAIT_S = 2.0
_MAX_WAITING = 128
_MAX_WAITING_PER_TENANT = 32
"""Each that waits for its turn to be read may have filled its window already."""

_MAX_EVENTS = 65536


@dataclass(frozen=True, slots=True)
class CallEvent:
    """What happened to the call of a ticket.

    Attributes:
        nonce: The ticket's.
        ended: Whether the call has ended, however it did; else its request has come and is the ticket's.
    """

    nonce: bytes
    ended: bool


async def next_events(events: asyncio.Queue[CallEvent], timeout_s: float) -> list[CallEvent]:
    """Return what a queue has, as soon as it has anything; empty after ``timeout_s`` seconds."""
    try:
        async with asyncio.timeout(timeout_s):
            first = await events.get()
    except TimeoutError:
        return []
    return [first, *(events.get_nowait() for _ in range(events.qsize()))]


def load_response(load: common_pb2.LoadReport, events: list[CallEvent]) -> worker_pb2.StreamLoadResponse:
    """Return the message with a load and what happened to tickets' calls."""
    return worker_pb2.StreamLoadResponse(
        load=load,
        begun_tickets=[x.nonce for x in events if not x.ended],
        ended_tickets=[x.nonce for x in events if x.ended],
    )


class _Readers:
    """The turns of one tenant's requests to be read."""

    __slots__ = ("__weakref__", "num_waiting", "turns")

    def __init__(self) -> None:
        self.turns = asyncio.Semaphore(MAX_READS_PER_TENANT)
        self.num_waiting = 0


class TicketedCalls(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Admits the calls of a method by the tickets in their heads, which the requests must then match.

    Args:
        check: Verifies the tickets.
        method: ``/package.Service/Method``, whose request is a ``GenerateRequest`` and whose responses are a stream.
        admits_others: Whether calls of other methods need no proof.
        on_denied: Called for each ticket that is refused.
    """

    def __init__(
        self,
        check: TicketCheck,
        method: str,
        *,
        admits_others: bool,
        on_denied: Callable[[], None] = lambda: None,
    ) -> None:
        self._check = check
        self._method = method
        self._admits_others = admits_others
        self._on_denied = on_denied
        self._reads = asyncio.Semaphore(MAX_READS)
        self._readers = WeakValueDictionary[str, _Readers]()
        self._num_waiting = 0
        self._followers: set[asyncio.Queue[CallEvent]] = set()

    @contextmanager
    def follow(self) -> Iterator[asyncio.Queue[CallEvent]]:
        """Yield a queue that gets what happens to the calls of tickets."""
        follower = asyncio.Queue[CallEvent](_MAX_EVENTS)
        self._followers.add(follower)
        try:
            yield follower
        finally:
            self._followers.discard(follower)

    def __call__(self, method: str, header: str | bytes | None) -> bool:
        """Return whether a call is served without a proof; marks its ticket as used.

        Raises:
            PermissionDeniedError: The ticket is missing or refused.
        """
        if method != self._method:
            return self._admits_others
        try:
            self._check.admit(header)
        except PermissionDeniedError:
            self._on_denied()
            raise
        return True

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler: Any = await continuation(handler_call_details)
        if handler is None or handler_call_details.method != self._method:
            return handler
        metadata: Any = handler_call_details.invocation_metadata or ()
        header = next((value for key, value in metadata if key == HEADER), None)

        async def call(_: object, context: Any) -> AsyncIterator[Any]:
            ticket = worker_pb2.TicketBody()
            request = None
            try:
                ticket = self._check.read(header)
                request = await self._read(context, ticket)
                self._check.require(header, request_digest(request))
                self._report(CallEvent(ticket.nonce, ended=False))
                async with aclosing(handler.unary_stream(request, context)) as responses:
                    async for response in responses:
                        yield response
            except PermissionDeniedError:
                request = None  # the error's traceback refers to this frame
                self._on_denied()
                audit("denied", over="grpc", peer=peer_of(context), method=self._method, reason="ticket")
                raise
            finally:
                if ticket.nonce:
                    self._report(CallEvent(ticket.nonce, ended=True))

        return grpc.stream_stream_rpc_method_handler(call, handler.request_deserializer, handler.response_serializer)

    def _report(self, event: CallEvent) -> None:
        for follower in self._followers:
            if not follower.full():
                follower.put_nowait(event)

    async def _read(self, context: Any, ticket: worker_pb2.TicketBody) -> Any:
        """Return a call's request, when it is its turn.

        Raises:
            QueueFullError: Too many are read.
            DeadlineError: It does not come.
        """
        tenant = ticket.tenant_tag.hex() or context.peer().rpartition(":")[0]
        readers = self._readers.get(tenant) or _Readers()
        self._readers[tenant] = readers
        async with AsyncExitStack() as turn:
            if self._num_waiting >= _MAX_WAITING or readers.num_waiting >= _MAX_WAITING_PER_TENANT:
                raise QueueFullError("too many requests with tickets come at once")
            self._num_waiting += 1
            readers.num_waiting += 1
            try:
                async with asyncio.timeout(_WAIT_S):
                    await turn.enter_async_context(readers.turns)
                    await turn.enter_async_context(self._reads)
            except TimeoutError as error:
                raise QueueFullError("too many requests with tickets come at once") from error
            finally:
                self._num_waiting -= 1
                readers.num_waiting -= 1
            read_s = READ_S + ticket.request_bytes / READ_BYTES_PER_S
            return await read_message(context, read_s)
