"""The router's stream to one decode instance, which carries the calls of all requests that run there.

One ``GenerateMany`` stream per instance: a call begins with a message instead of a stream of its own, and the tokens
that a step of the engine brings to all of its requests come in one message. When the stream breaks, every call on it
fails with what broke it, and the next call opens another.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import Any
from weakref import WeakKeyDictionary

import grpc
import grpc.aio

from baton.api.v1 import worker_pb2
from baton.errors import BatonError, UnavailableError
from baton.rpc.errors import from_rpc_error, from_status
from baton_router.instance import Instance

log = logging.getLogger(__name__)

_CODES = {code.value[0]: code for code in grpc.StatusCode}
_MAX_BATCH_BYTES = 4 * 2**20
"""Starts are sent together up to this size: one message must stay below gRPC's limit."""


class CallEnded(Exception):
    """A call ended otherwise than well.

    Attributes:
        error: What happened, in Baton's own words.
        code: The status it ended with.
    """

    def __init__(self, error: BatonError, code: grpc.StatusCode) -> None:
        super().__init__(error.message)
        self.error, self.code = error, code


class Call:
    """One running ``Generate``: what came and was not read yet. One reader."""

    __slots__ = ("_ended", "_failure", "_items", "_session", "_waiter", "key")

    def __init__(self, session: Session, key: int) -> None:
        self._session = session
        self.key = key
        self._items: deque[int | worker_pb2.GenerateResponse] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._ended = False
        self._failure: CallEnded | None = None

    async def read(self) -> list[int] | worker_pb2.GenerateResponse | None:
        """Return what came next: tokens of sequence 0 alone, all that wait, or a message; ``None`` at the end.

        Raises:
            CallEnded: The call failed, or the stream under it.
        """
        while not self._items:
            if self._failure is not None:
                raise self._failure
            if self._ended:
                return None
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        items = self._items
        item = items.popleft()
        if type(item) is not int:
            return item  # type: ignore[return-value]
        tokens = [item]
        while items and type(items[0]) is int:  # steps that came faster than they could be handed on
            tokens.append(items.popleft())  # type: ignore[arg-type]
        return tokens

    def put(self, item: int | worker_pb2.GenerateResponse) -> None:
        """Take what came."""
        self._items.append(item)
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def end(self, failure: CallEnded | None = None) -> None:
        """Take the end; what came before it is still read."""
        if self._ended:
            return
        self._ended, self._failure = True, failure
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    @property
    def has_ended(self) -> bool:
        """Whether the end is all that is left to read."""
        return self._ended and not self._items

    def fail(self, failure: CallEnded) -> None:
        """Abort the call; its reader gets ``failure`` once it has read what came."""
        if not self._ended:
            self._session.cancel(self.key)
            self.end(failure)

    def close(self) -> None:
        """Abort the call, unless it has ended. Nothing is read any more."""
        if not self._ended:
            self._ended = True
            self._session.cancel(self.key)


class Session:
    """The stream to one instance; ends when it breaks, and is not used again.

    Attributes:
        broken: Whether it has ended.
    """

    def __init__(self, instance: Instance) -> None:
        self._name = instance.instance_id  # not the instance: sessions must not keep it alive
        self._calls: dict[int, Call] = {}
        self._next = 0
        self._outgoing = worker_pb2.GenerateManyRequest()
        self._later: deque[tuple[int, worker_pb2.GenerateRequest]] = deque()
        self._filled = asyncio.Event()
        self.broken = False
        stub: Any = instance.stub  # whose types know the streams of requests that are given as iterators alone
        self._stream = stub.GenerateMany()
        self._reader = asyncio.create_task(self._run(), name=f"session {instance.address}")

    def start(self, request: worker_pb2.GenerateRequest) -> Call:
        """Begin a call."""
        self._next += 1
        call = self._calls[self._next] = Call(self, self._next)
        self._later.append((self._next, request))
        self._filled.set()
        return call

    def cancel(self, key: int) -> None:
        """Abort a call; the instance is told at once."""
        if self._calls.pop(key, None) is not None:
            self._outgoing.cancels.append(key)
            self._filled.set()

    async def _run(self) -> None:
        """Hand out what comes until the stream breaks, then fail what still runs."""
        writer = asyncio.create_task(self._write())
        failure = CallEnded(UnavailableError("the stream broke"), grpc.StatusCode.UNAVAILABLE)
        try:
            await self._read()
        except grpc.aio.AioRpcError as error:
            failure = self._broken(error)
        except asyncio.CancelledError:  # the channel was closed, or this task was cancelled
            failure = CallEnded(UnavailableError("the connection was closed"), grpc.StatusCode.CANCELLED)
        finally:
            self.broken = True
            writer.cancel()
            self._stream.cancel()
            calls, self._calls = self._calls, {}
            for call in calls.values():
                call.end(CallEnded(failure.error, failure.code))

    async def _read(self) -> None:
        calls, read = self._calls, self._stream.read
        while (message := await read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
            for key, token_id in zip(message.token_calls, message.token_ids, strict=True):
                call = calls.get(key)
                if call is not None:
                    call.put(token_id)
            for item in message.messages:
                call = calls.get(item.call)
                if call is not None:
                    call.put(item.response)
            for end in message.ends:
                call = calls.pop(end.call, None)
                if call is not None:
                    call.end(self._failure(end) if end.code else None)

    def _failure(self, end: worker_pb2.CallEnd) -> CallEnded:
        code = _CODES.get(end.code, grpc.StatusCode.UNKNOWN)
        return CallEnded(from_status(code, end.message, end.details), code)

    def _broken(self, error: grpc.aio.AioRpcError) -> CallEnded:
        """Why the stream is gone. Errors of single calls come in their ends: this one is no request's fault."""
        if error.code() in {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN}:
            # gRPC's core says so, now and then, where a connection breaks.
            return CallEnded(UnavailableError(f"the stream broke: {error.details()}"), grpc.StatusCode.UNAVAILABLE)
        return CallEnded(self._rebuilt(error), error.code())

    def _rebuilt(self, error: grpc.aio.AioRpcError) -> BatonError:
        if error.code() is grpc.StatusCode.UNAUTHENTICATED:
            # The caller can do nothing about the token between router and instance.
            return UnavailableError(f"{self._name} refuses this router's token")
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            return UnavailableError(f"{self._name} does not know GenerateMany: it is of another version")
        return from_rpc_error(error)

    async def _write(self) -> None:
        """Send starts and cancellations, all that there are in one message."""
        while True:
            await self._filled.wait()
            self._filled.clear()
            while self._later or self._outgoing.cancels:
                message, self._outgoing = self._outgoing, worker_pb2.GenerateManyRequest()
                size = 0
                while self._later and size < _MAX_BATCH_BYTES:
                    key, request = self._later.popleft()
                    size += 4 * len(request.prompt_token_ids)
                    if key in self._calls:  # not cancelled meanwhile
                        message.starts.add(call=key, request=request)
                try:
                    await self._stream.write(message)
                except (grpc.RpcError, asyncio.InvalidStateError):
                    return  # the reader learns why


class Sessions:
    """The sessions of one router, opened when they are needed. Each ends with its instance's channel."""

    def __init__(self) -> None:
        self._sessions: WeakKeyDictionary[Instance, Session] = WeakKeyDictionary()

    def start(self, instance: Instance, request: worker_pb2.GenerateRequest) -> Call:
        """Begin a call on an instance."""
        session = self._sessions.get(instance)
        if session is None or session.broken:
            session = self._sessions[instance] = Session(instance)
        return session.start(request)
