"""``GenerateMany``, client side: many ``Generate`` calls on one gRPC stream.

A call starts with a message instead of a stream of its own, and one message carries the tokens that an engine step
produced for all of its requests. When the stream breaks, every call on it fails with the same error.
:class:`CallStream` gathers what arrives in one turn of the event loop and delivers it to one :class:`Reader` per call.
``baton.rpc.multiplex_server`` is the server side.
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
from baton.background import create_task
from baton.errors import INTERNAL_TEXT, BatonError, InternalError, UnavailableError
from baton.rpc.errors import STATUS_CODES, from_status
from baton.rpc.http2.message_stream import CLOSED, Connector, MessageStream, StreamEnded

log = logging.getLogger(__name__)

ANY_TOKEN = 2**32
"""More than any token id on the wire."""
_MAX_BATCH_BYTES = 4 * 2**20
"""Prompt bytes after which a message takes no further starts; one message must stay below gRPC's limit."""
_MESSAGES_PER_TURN = 4
"""Messages that a call delivers in a turn of the event loop: one may have log probabilities of many sequences."""


class CallEnded(Exception):
    """A call that ended with an error.

    Attributes:
        error: The error as Baton's type.
        code: The gRPC status that the call ended with.
    """

    def __init__(self, error: BatonError, code: grpc.StatusCode) -> None:
        super().__init__(error.message)
        self.error = error
        self.code = code


class TokenWriter(Protocol):
    """Writes a call's plain tokens to its client without passing them through the reader.

    It is a shortcut for streams: the reader's layers touch many objects per token, which are no longer in the
    processor's caches when the next token arrives. Methods must not block or raise.
    """

    def push(self, token_id: int, now: float) -> bool:
        """Take a token.

        Args:
            token_id: The token.
            now: Time of its arrival, by ``time.perf_counter()``.

        Returns:
            Whether the token was taken. If not, it goes to the reader, like everything that follows in this turn.
        """

    def flush(self) -> None:
        """Send what the tokens of this turn made."""

    def close(self) -> None:
        """Send and count everything that was taken: the reader continues."""


class Reader(Protocol):
    """Receives what a call brings, in order.

    Methods are called from the event loop that reads the instance's stream: they must not block or raise.
    """

    def on_tokens(self, token_ids: list[int]) -> None:
        """Receive the tokens of sequence 0 that arrived in this turn without anything else.

        Args:
            token_ids: At least one token id; the list is the reader's to keep.
        """

    def on_message(self, response: worker_pb2.GenerateResponse) -> None:
        """Receive a response that has more than tokens of sequence 0."""

    def on_end(self, failure: CallEnded | None) -> None:
        """Receive the end of the call; nothing follows. ``None`` means that the call succeeded."""

    def token_writer(self) -> TokenWriter | None:
        """Return a writer for the tokens that follow, until something else arrives; ``None`` if there is none."""


class Call:
    """One running ``Generate`` call.

    Attributes:
        key: Number of the call on its stream.
        items: Tokens and responses that arrived and are not delivered yet.
        ended: Whether the end has arrived, or the reader has closed the call.
        writer: Takes plain tokens in place of the reader; ``None``: the reader gets them.
    """

    __slots__ = ("_failure", "_paused", "_reader", "_stream", "ended", "items", "key", "writer")

    def __init__(self, stream: CallStream, key: int, reader: Reader) -> None:
        self._stream = stream
        self.key = key
        self._reader: Reader | None = reader
        self.items: deque[int | worker_pb2.GenerateResponse] = deque()
        self._failure: CallEnded | None = None
        self._paused = False
        self.ended = False
        self.writer: TokenWriter | None = None

    def end(self, failure: CallEnded | None = None) -> None:
        """Record the end; what arrived before it is delivered first."""
        if not self.ended:
            self.ended = True
            self._failure = failure

    def deliver(self) -> None:
        """Deliver what arrived: consecutive tokens as one batch, then the end if it has arrived.

        Of many messages, as after a pause, the rest follows in the next turns of the event loop.
        """
        items = self.items
        if self.writer is not None and not items and not self.ended:
            self.writer.flush()
            return
        self._close_writer()
        num_messages = 0
        while items and self._reader is not None and not self._paused:
            if num_messages == _MESSAGES_PER_TURN:
                self._stream.deliver_later(self)
                return
            item = items.popleft()
            if not isinstance(item, int):
                num_messages += 1
                self._reader.on_message(item)
                continue
            token_ids = [item]
            while items and isinstance(token := items[0], int):
                token_ids.append(token)
                items.popleft()
            self._reader.on_tokens(token_ids)
        if self.ended and self._reader is not None and not self._paused:
            if self._failure is None:
                self._stream.schedule_end(self)
            else:
                self.deliver_end()

    def borrow_writer(self) -> None:
        """Ask the reader for a writer, if it has none.

        To be called by :meth:`CallStream.deliver` alone: what the reader got outside of it may be sent to the client
        after tokens that arrive in the same turn.
        """
        if self.writer is None and self._reader is not None and not (self._paused or self.items or self.ended):
            self.writer = self._reader.token_writer()

    def deliver_end(self) -> None:
        """Deliver the end, unless the reader has closed or paused the call."""
        if self._reader is not None and not self._paused:
            reader = self._reader
            self._reader = None
            reader.on_end(self._failure)

    def set_paused(self, paused: bool) -> None:
        """Keep what arrives from now on, or deliver it again; for readers whose own client reads slowly."""
        self._paused = paused
        if paused:
            self._close_writer()
        else:
            self.deliver()

    def fail(self, failure: CallEnded) -> None:
        """Abort the call; its reader gets ``failure`` after what has arrived."""
        if not self.ended:
            self._stream.cancel(self.key)
            self.end(failure)
            self._paused = False
            self.deliver()

    def abandon(self, failure: CallEnded) -> None:
        """Abort the call, whose reader failed: it gets ``failure``, and nothing else that has arrived."""
        reader = self._reader
        self.items.clear()
        self.writer = None
        self.close()
        if reader is not None:
            try:
                reader.on_end(failure)
            except Exception:
                log.exception("a reader that failed could not end")

    def close(self) -> None:
        """Abort the call, unless it has ended. Nothing is delivered any more."""
        self._reader = None
        self._close_writer()
        if not self.ended:
            self.ended = True
            self._stream.cancel(self.key)

    def _close_writer(self) -> None:
        if self.writer is not None:
            writer = self.writer
            self.writer = None
            writer.close()


class CallStream:
    """A stream of calls to one instance. It ends when the stream or its connection breaks, and is not opened again.

    Args:
        connector: Opens the stream.
        name: Name of the instance, for errors.
        schedule_delivery: Has :meth:`deliver` called later in this turn of the event loop; called with this stream when
            the first item of a turn arrives.
        schedule_end: Has :meth:`Call.deliver_end` called later in this turn; called with a call that succeeded.
        vocab_size: Number of tokens in the instance's vocabulary; a message with others cannot be read.

    Attributes:
        broken: Whether the stream has ended.
        schedule_end: The argument of that name.
    """

    METHOD = f"/{worker_pb2.DESCRIPTOR.services_by_name['WorkerService'].full_name}/GenerateMany"

    def __init__(
        self,
        connector: Connector,
        name: str,
        schedule_delivery: Callable[[CallStream], None],
        schedule_end: Callable[[Call], None],
        *,
        vocab_size: int = ANY_TOKEN,
    ) -> None:
        self._name = name
        self._vocab_size = vocab_size
        self._schedule_delivery = schedule_delivery
        self.schedule_end = schedule_end
        self.broken = False
        self._calls: dict[int, Call] = {}
        self._ready: dict[int, Call] = {}
        """Calls with undelivered items or an undelivered end."""
        self._last_key = 0
        self._cancels: list[int] = []
        self._silent: Collection[str] | None = None
        self._unsent: deque[tuple[int, worker_pb2.GenerateRequest]] = deque()
        self._loop = asyncio.get_running_loop()
        self._sending = False
        self._stream: MessageStream | None = None
        self._opening = create_task(self._open(connector), "calls of", detail=name, on_failure=self._on_open_failure)

    def start(self, request: worker_pb2.GenerateRequest, reader: Reader) -> Call:
        """Start a call.

        Args:
            request: The request to send.
            reader: Receives what the call brings, from the next turn of the event loop on.
        """
        self._last_key += 1
        call = Call(self, self._last_key, reader)
        self._calls[call.key] = call
        self._unsent.append((call.key, request))
        self._schedule_send()
        return call

    def cancel(self, key: int) -> None:
        """Abort a call on the instance."""
        if self._calls.pop(key, None) is not None:
            self._cancels.append(key)
            self._schedule_send()

    def send_silent(self, addresses: Collection[str]) -> None:
        """Send the instance the addresses of the prefill instances that do not answer; replaces the earlier list."""
        self._silent = addresses
        self._schedule_send()

    # --- the connection ---

    async def _open(self, connector: Connector) -> None:
        try:
            self._stream = await connector.open(self.METHOD, self)
        except StreamEnded as end:
            self.on_end(end)
        except asyncio.CancelledError:  # the connector was closed
            self.on_end(StreamEnded(grpc.StatusCode.CANCELLED, CLOSED))
        else:
            self._schedule_send()

    def _on_open_failure(self, error: BaseException) -> None:
        self.on_end(StreamEnded(grpc.StatusCode.INTERNAL, f"the stream could not be opened: {error}"))

    def on_message(self, message: bytes) -> None:
        """Read a message of the instance; one that cannot be read breaks the stream."""
        try:
            self._read_message(worker_pb2.GenerateManyResponse.FromString(message))
        except (ValueError, DecodeError) as error:
            text = f"{self._name}: a message of GenerateMany cannot be read: {error}"
            self._break(CallEnded(InternalError(text), grpc.StatusCode.INTERNAL))

    def on_end(self, end: StreamEnded) -> None:
        """Fail all calls: the stream has ended."""
        self._break(self._stream_failure(end))

    def on_writable(self) -> None:
        """Send what had to wait."""
        self._schedule_send()

    def _break(self, failure: CallEnded) -> None:
        """End the stream and fail the calls that still run."""
        self.broken = True
        if self._stream is not None:
            self._stream.close()
        calls = self._calls
        self._calls = {}
        self._unsent.clear()
        if calls and not self._ready:
            self._schedule_delivery(self)
        self._ready |= calls
        for call in calls.values():
            call.end(failure)

    def _schedule_send(self) -> None:
        """Send at the end of this turn of the event loop, in as few messages as possible."""
        if not self._sending:
            self._sending = True
            self._loop.call_soon(self._send)

    def _send(self) -> None:
        self._sending = False
        stream = self._stream
        try:
            while stream is not None and stream.writable and (message := self._next_message()) is not None:
                stream.send(message.SerializeToString())
        except Exception:
            log.exception("nothing can be sent to %s any more", self._name)
            self._break(CallEnded(UnavailableError("the stream broke"), grpc.StatusCode.UNAVAILABLE))

    def _next_message(self) -> worker_pb2.GenerateManyRequest | None:
        """Return as much of what is unsent as one message may hold; ``None`` if there is nothing."""
        message = worker_pb2.GenerateManyRequest()
        num_bytes = 0
        while self._unsent and num_bytes < _MAX_BATCH_BYTES:
            key, request = self._unsent.popleft()
            if key in self._calls:  # not cancelled meanwhile
                message.starts.add(call=key, request=request)
                num_bytes += len(request.prompt_token_ids)
        if self._cancels:
            message.cancels.extend(self._cancels)
            self._cancels.clear()
        if self._silent is not None:
            message.silent.addresses.extend(sorted(self._silent))
            message.silent.SetInParent()
            self._silent = None
        return message if message.starts or message.cancels or message.HasField("silent") else None

    def _read_message(self, message: worker_pb2.GenerateManyResponse) -> None:
        """Add what a message brings to its calls, to be delivered with the rest of this turn.

        Raises:
            ValueError: The message is malformed.
        """
        # Iterating over lists is faster than over repeated fields.
        keys = message.token_calls[:]
        token_ids = message.token_ids[:]
        if token_ids and max(token_ids) >= self._vocab_size:
            raise ValueError(f"token {max(token_ids)} is not in the vocabulary")
        calls = self._calls
        now = time.perf_counter()
        ready: dict[int, Call] = {}
        try:
            for key, token_id in zip(keys, token_ids, strict=True):
                if (call := calls.get(key)) is not None:
                    ready[key] = call
                    if call.items or call.writer is None or not call.writer.push(token_id, now):
                        call.items.append(token_id)
            for item in message.messages[:]:
                if (call := calls.get(item.call)) is not None:
                    ready[item.call] = call
                    call.items.append(item.response)
            for end in message.ends[:]:
                if (call := calls.pop(end.call, None)) is not None:
                    ready[end.call] = call
                    call.end(_call_failure(end) if end.code else None)
        finally:
            if ready and not self._ready:
                self._schedule_delivery(self)
            self._ready |= ready

    def deliver(self) -> None:
        """Deliver what arrived in this turn, one call after the other."""
        ready = self._ready
        self._ready = {}
        for call in ready.values():
            try:
                call.deliver()
                call.borrow_writer()
            except (Exception, asyncio.CancelledError):  # one reader's failure must not affect the others
                log.exception("a reader of %s failed", self._name)
                call.abandon(CallEnded(InternalError(INTERNAL_TEXT), grpc.StatusCode.INTERNAL))

    def deliver_later(self, call: Call) -> None:
        """Deliver what a call still has in the next turn of the event loop."""
        if not self._ready:
            self._schedule_delivery(self)
        self._ready[call.key] = call

    def _stream_failure(self, end: StreamEnded) -> CallEnded:
        """Return the failure of all calls. No request is at fault: errors of single calls arrive as their ends."""
        code = end.code
        if code is grpc.StatusCode.OK:
            return CallEnded(UnavailableError("the stream broke"), grpc.StatusCode.UNAVAILABLE)
        if code in {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN}:
            # gRPC's core reports these, now and then, when a connection breaks.
            return CallEnded(UnavailableError(f"the stream broke: {end.message}"), grpc.StatusCode.UNAVAILABLE)
        text = {  # a caller can do nothing about either
            grpc.StatusCode.UNAUTHENTICATED: f"{self._name} refuses this router's token",
            grpc.StatusCode.UNIMPLEMENTED: f"{self._name} does not know GenerateMany: it is of another version",
        }.get(code)
        return CallEnded(UnavailableError(text) if text else end.error, code)


def _call_failure(end: worker_pb2.CallEnd) -> CallEnded:
    code = STATUS_CODES.get(end.code, grpc.StatusCode.UNKNOWN)
    return CallEnded(from_status(code, end.message, end.details), code)
