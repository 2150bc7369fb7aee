"""``GenerateMany``: many calls of ``Generate`` on one gRPC stream; the client's end.

A call begins with a message instead of a stream of its own, and the tokens that a step of the engine brings to all of
its requests come in one message. When the stream breaks, every call on it fails with what broke it. The client
(:class:`CallStream`) hands what comes to one :class:`Reader` per call; ``baton.rpc.multiplex_server`` is the other end.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Collection
from typing import Protocol

import grpc
from google.protobuf.message import DecodeError

from baton.api.v1 import worker_pb2
from baton.errors import BatonError, InternalError, UnavailableError
from baton.rpc.errors import from_status
from baton.rpc.http2.message_stream import CLOSED, MessageSink, MessageStream, StreamEnded

log = logging.getLogger(__name__)

_MAX_BATCH_BYTES = 4 * 2**20
"""Starts are sent together up to this size: one message must stay below gRPC's limit."""
_CODES = {code.value[0]: code for code in grpc.StatusCode}


class CallEnded(Exception):
    """A call ended otherwise than well.

    Attributes:
        error: What happened, in Baton's own words.
        code: The status it ended with.
    """

    def __init__(self, error: BatonError, code: grpc.StatusCode) -> None:
        super().__init__(error.message)
        self.error, self.code = error, code


class FastPath(Protocol):
    """Takes tokens of a call in one step each, as its reader would in many. Must not block or raise."""

    def push(self, token_id: int, now: float) -> bool:
        """Take a token that came ``now``, by ``time.perf_counter()``.

        Returns:
            Whether it was taken; if not, it goes to the reader, as all that comes behind it.
        """

    def send(self) -> None:
        """Send what the tokens made, when all that others got in the same turn of the event loop is made, too."""


class Reader(Protocol):
    """Takes what a call brings, in order, while the event loop reads the instance's stream: must not block or raise."""

    def on_tokens(self, token_ids: list[int]) -> None:
        """Take tokens of sequence 0 that came with nothing else."""

    def on_message(self, response: worker_pb2.GenerateResponse) -> None:
        """Take a message."""

    def on_end(self, failure: CallEnded | None) -> None:
        """Take the end, the last thing there is; ``None``: the call ended well."""

    def fast_path(self) -> FastPath | None:
        """Return what takes the tokens that come from now on, until anything else does; ``None``: the reader itself."""


class Opens(Protocol):
    """Connects to an instance: a :class:`baton.rpc.http2.message_stream.Dialer`."""

    async def open(self, method: str, sink: MessageSink) -> MessageStream:
        """Begin a call."""


class Call:
    """One running ``Generate``. What came in one turn of the event loop is handed on together.

    Attributes:
        items: Tokens and messages that came; :meth:`flush` hands them on.
        ended: Whether the end has come, or the reader does not wait for it any more.
    """

    __slots__ = ("_failure", "_held", "_reader", "_stream", "ended", "items", "key")

    def __init__(self, stream: CallStream, key: int, reader: Reader) -> None:
        self._stream = stream
        self.key = key
        self._reader: Reader | None = reader
        self.items: deque[int | worker_pb2.GenerateResponse] = deque()
        self._failure: CallEnded | None = None
        self._held = False
        self.ended = False

    def end(self, failure: CallEnded | None = None) -> None:
        """Take the end; what came before it is handed on first."""
        if not self.ended:
            self.ended, self._failure = True, failure

    def flush(self) -> None:
        """Hand on what came."""
        items = self.items
        while items and self._reader is not None and not self._held:
            item = items.popleft()
            if not isinstance(item, int):
                self._reader.on_message(item)
                continue
            tokens = [item]
            while items and isinstance(token := items[0], int):
                tokens.append(token)
                items.popleft()
            self._reader.on_tokens(tokens)
        if self.ended and self._reader is not None and not self._held:
            if self._failure is None:
                self._stream.deliver_end(self)
            else:
                self.tell_end()

    def take(self) -> None:
        """Hand on what came in this turn, and ask the reader whether it has a fast path behind that."""
        self.flush()
        if self._reader is not None and not self._held and not self.ended:
            path = self._reader.fast_path()
            if path is not None:
                self._stream.fast[self.key] = path

    def tell_end(self) -> None:
        """Hand on the end, unless the reader has left or holds the call."""
        if self._reader is not None and not self._held:
            reader, self._reader = self._reader, None
            reader.on_end(self._failure)

    def hold(self, held: bool) -> None:
        """Keep what comes from now on, or go on handing it on: for a reader whose own reader is slow."""
        self._held = held
        self._stream.fast.pop(self.key, None)
        if not held:
            self.flush()

    def fail(self, failure: CallEnded) -> None:
        """Abort the call; its reader gets ``failure`` behind what came."""
        if not self.ended:
            self._stream.cancel(self.key)
            self.end(failure)
            self._held = False
            self.flush()

    def close(self) -> None:
        """Abort the call, unless it has ended. Nothing is handed on any more."""
        self._reader = None
        if not self.ended:
            self.ended = True
            self._stream.cancel(self.key)


class CallStream:
    """A stream to one instance; ends when it or its connection breaks, and is not used again.

    Args:
        dialer: Connects to the instance.
        name: Of the instance, for errors.
        deliver: Has :meth:`CallStream.flush` called soon, for a stream on which something came.
        deliver_end: Has :meth:`Call.tell_end` called soon, for a call that has ended well.

    Attributes:
        broken: Whether it has ended.
        fast: What takes tokens of calls in place of their readers, while nothing else comes.
    """

    METHOD = f"/{worker_pb2.DESCRIPTOR.services_by_name['WorkerService'].full_name}/GenerateMany"

    def __init__(
        self,
        dialer: Opens,
        name: str,
        deliver: Callable[[CallStream], None],
        deliver_end: Callable[[Call], None],
    ) -> None:
        self._name, self._deliver, self.deliver_end = name, deliver, deliver_end
        self.broken = False
        self.fast: dict[int, FastPath] = {}
        self._calls: dict[int, Call] = {}
        self._touched: dict[int, Call] = {}
        """To which something came that is not handed on yet."""
        self._pushed: dict[int, FastPath] = {}
        """Which took something that is not sent yet."""
        self._next = 0
        self._cancels: list[int] = []
        self._silent: Collection[str] | None = None
        self._later: deque[tuple[int, worker_pb2.GenerateRequest]] = deque()
        self._loop = asyncio.get_running_loop()
        self._waking = False
        self._stream: MessageStream | None = None
        self._opening = asyncio.create_task(self._open(dialer), name=f"calls of {name}")

    def start(self, request: worker_pb2.GenerateRequest, reader: Reader) -> Call:
        """Begin a call.

        Args:
            request: What to send.
            reader: Takes what comes, from the next turn of the event loop on.
        """
        self._next += 1
        call = self._calls[self._next] = Call(self, self._next, reader)
        self._later.append((self._next, request))
        self._wake()
        return call

    def cancel(self, key: int) -> None:
        """Abort a call; the instance is told at once."""
        self.fast.pop(key, None)
        if self._calls.pop(key, None) is not None:
            self._cancels.append(key)
            self._wake()

    def tell_silent(self, addresses: Collection[str]) -> None:
        """Tell the instance which prefill instances do not answer; replaces what was told before."""
        self._silent = addresses
        self._wake()

    # --- the connection ---

    async def _open(self, dialer: Opens) -> None:
        try:
            self._stream = await dialer.open(self.METHOD, self)
        except StreamEnded as end:
            self.on_end(end)
        except asyncio.CancelledError:  # the dialer was closed
            self.on_end(StreamEnded(grpc.StatusCode.CANCELLED, CLOSED))
        else:
            self._wake()

    def on_message(self, message: bytes) -> None:
        """Take a message of the instance."""
        try:
            self._take(worker_pb2.GenerateManyResponse.FromString(message))
        except (ValueError, DecodeError) as error:
            text = f"{self._name}: a message of GenerateMany cannot be read: {error}"
            self._break(CallEnded(InternalError(text), grpc.StatusCode.INTERNAL))

    def on_end(self, end: StreamEnded) -> None:
        """Take the end of the stream."""
        self._break(self._failed(end))

    def on_writable(self) -> None:
        """Say what could not be said before."""
        self._wake()

    def _break(self, failure: CallEnded) -> None:
        """End the stream, and fail what still runs."""
        self.broken = True
        if self._stream is not None:
            self._stream.close()
        calls, self._calls = self._calls, {}
        self._later.clear()
        self.fast.clear()
        if calls and not (self._touched or self._pushed):
            self._deliver(self)
        self._touched |= calls
        for call in calls.values():
            call.end(failure)

    def _wake(self) -> None:
        """Send, when this turn of the event loop has said all."""
        if not self._waking:
            self._waking = True
            self._loop.call_soon(self._send)

    def _send(self) -> None:
        self._waking = False
        stream = self._stream
        try:
            while stream is not None and stream.writable and (message := self._gather()) is not None:
                stream.send(message.SerializeToString())
        except Exception:
            log.exception("nothing can be sent to %s any more", self._name)
            self._break(CallEnded(UnavailableError("the stream broke"), grpc.StatusCode.UNAVAILABLE))

    def _gather(self) -> worker_pb2.GenerateManyRequest | None:
        """Return what is to be said, as much as one message may have; ``None``: nothing."""
        message, size = worker_pb2.GenerateManyRequest(), 0
        while self._later and size < _MAX_BATCH_BYTES:
            key, request = self._later.popleft()
            if key in self._calls:  # not cancelled meanwhile
                message.starts.add(call=key, request=request)
                size += len(request.prompt_token_ids)
        if self._cancels:
            message.cancels.extend(self._cancels)
            self._cancels.clear()
        if self._silent is not None:
            message.silent.addresses.extend(sorted(self._silent))
            message.silent.SetInParent()
            self._silent = None
        return message if message.starts or message.cancels or message.HasField("silent") else None

    def _take(self, message: worker_pb2.GenerateManyResponse) -> None:
        """Keep what a message brings, to hand it on with what others bring.

        Raises:
            ValueError: It makes no sense.
        """
        # Lists of what repeated fields hold are quicker to walk than the fields.
        keys, token_ids = message.token_calls[:], message.token_ids[:]
        touched: dict[int, Call] = {}
        calls, fast, pushed, now = self._calls, self.fast, self._pushed, time.perf_counter()
        idle = not (self._touched or pushed)
        try:
            for key, token_id in zip(keys, token_ids, strict=True):
                if (path := fast.get(key)) is not None:
                    if path.push(token_id, now):
                        pushed[key] = path
                        continue
                    del fast[key]
                if (call := calls.get(key)) is not None:
                    touched[key] = call
                    call.items.append(token_id)
            for item in message.messages[:]:
                if (call := calls.get(item.call)) is not None:
                    touched[item.call] = call
                    fast.pop(item.call, None)
                    call.items.append(item.response)
            for end in message.ends[:]:
                if (call := calls.pop(end.call, None)) is not None:
                    touched[end.call] = call
                    fast.pop(end.call, None)
                    call.end(_failure(end) if end.code else None)
        finally:
            self._touched |= touched
            if idle and (touched or pushed):
                self._deliver(self)

    def flush(self) -> None:
        """Hand on what came, one call after the other: what a step of the engine brings to all is one thing to do."""
        pushed, self._pushed = self._pushed, {}
        touched, self._touched = self._touched, {}
        for do in (*(path.send for path in pushed.values()), *(call.take for call in touched.values())):
            try:
                do()
            except (Exception, asyncio.CancelledError):  # of one reader: the others' tokens must come
                log.exception("a reader of %s failed", self._name)

    def _failed(self, end: StreamEnded) -> CallEnded:
        """Why the stream is gone. Errors of single calls come in their ends: this one is no request's fault."""
        code = end.code
        if code is grpc.StatusCode.OK:
            return CallEnded(UnavailableError("the stream broke"), grpc.StatusCode.UNAVAILABLE)
        if code in {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN}:
            # gRPC's core says so, now and then, where a connection breaks.
            return CallEnded(UnavailableError(f"the stream broke: {end.message}"), grpc.StatusCode.UNAVAILABLE)
        text = {  # about neither of which a caller can do anything
            grpc.StatusCode.UNAUTHENTICATED: f"{self._name} refuses this router's token",
            grpc.StatusCode.UNIMPLEMENTED: f"{self._name} does not know GenerateMany: it is of another version",
        }.get(code)
        return CallEnded(UnavailableError(text) if text else end.error, code)


def _failure(end: worker_pb2.CallEnd) -> CallEnded:
    code = _CODES.get(end.code, grpc.StatusCode.UNKNOWN)
    return CallEnded(from_status(code, end.message, end.details), code)
