"""The calls that need a placement ticket: refused by their heads, and their requests read a few at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, aclosing, contextmanager
from typing import Any
from weakref import WeakValueDictionary

import grpc
import grpc.aio

from baton.errors import DeadlineError, PermissionDeniedError, QueueFullError
from baton.rpc.audit import audit, peer_of
from baton.rpc.auth import HEADER
from baton.rpc.ticket import TicketCheck, request_digest

MAX_READS = 8
MAX_READS_PER_PEER = 2
"""Requests that are read at once: of all clients, and from one address."""
READ_S = 10.0
_WAIT_S = 2.0
_MAX_WAITING = 128
"""Each that waits for its turn to be read may have filled its window already."""

_MAX_ENDS = 65536


async def next_ends(ends: asyncio.Queue[bytes], timeout_s: float) -> list[bytes]:
    """Return what a queue has, as soon as it has anything; empty after ``timeout_s`` seconds."""
    try:
        async with asyncio.timeout(timeout_s):
            first = await ends.get()
    except TimeoutError:
        return []
    return [first, *(ends.get_nowait() for _ in range(ends.qsize()))]


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
        self._reads_of_peers = WeakValueDictionary[str, asyncio.Semaphore]()
        self._num_waiting = 0
        self._followers: set[asyncio.Queue[bytes]] = set()

    @contextmanager
    def follow_ends(self) -> Iterator[asyncio.Queue[bytes]]:
        """Yield a queue that gets the nonce of each ticket whose call has ended, however it did."""
        follower = asyncio.Queue[bytes](_MAX_ENDS)
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

        async def call(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
            nonce = b""
            request = None
            try:
                nonce = self._check.nonce(header)
                request = await self._read(requests, context)
                self._check.require(header, request_digest(request))
                async with aclosing(handler.unary_stream(request, context)) as responses:
                    async for response in responses:
                        yield response
            except PermissionDeniedError:
                request = None  # the error's traceback refers to this frame
                self._on_denied()
                audit("denied", over="grpc", peer=peer_of(context), method=self._method, reason="ticket")
                raise
            finally:
                for follower in self._followers:
                    if nonce and not follower.full():
                        follower.put_nowait(nonce)

        return grpc.stream_stream_rpc_method_handler(call, handler.request_deserializer, handler.response_serializer)

    async def _read(self, requests: AsyncIterator[Any], context: Any) -> Any:
        """Return a call's request, when it is its turn.

        Raises:
            QueueFullError: Too many are read.
            DeadlineError: It does not come.
        """
        peer = context.peer().rpartition(":")[0]
        of_peer = self._reads_of_peers.get(peer) or asyncio.Semaphore(MAX_READS_PER_PEER)
        self._reads_of_peers[peer] = of_peer
        async with AsyncExitStack() as turn:
            if self._num_waiting >= _MAX_WAITING:
                raise QueueFullError("too many requests with tickets come at once")
            self._num_waiting += 1
            try:
                async with asyncio.timeout(_WAIT_S):
                    await turn.enter_async_context(of_peer)
                    await turn.enter_async_context(self._reads)
            except TimeoutError as error:
                raise QueueFullError("too many requests with tickets come at once") from error
            finally:
                self._num_waiting -= 1
            try:
                async with asyncio.timeout(READ_S):
                    return await anext(requests)
            except (TimeoutError, StopAsyncIteration) as error:
                raise DeadlineError(f"the request did not come within {READ_S:g} s") from error
