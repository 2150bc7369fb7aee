"""The session to one decode instance: a stream that carries the calls of all requests that run there.

A call begins with a message instead of a stream of its own, and the tokens that a step of the engine brings to all of
its requests come in one message. When the stream breaks, every call on it fails with what broke it. The stream is one
of gRPC or of frames: see ``baton_router.dispatch.worker_stream``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable
from typing import Protocol

import grpc

from baton.api.v1 import worker_pb2
from baton.errors import BatonError, UnavailableError
from baton.rpc.errors import from_status
from baton.token_ids import varint
from baton_router.dispatch.turn_batching import END, TAKE, Steps

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


class Reader(Protocol):
    """Takes what a call brings, in order, while the event loop reads the instance's stream: must not block or raise."""

    def on_tokens(self, token_ids: list[int]) -> None:
        """Take tokens of sequence 0 that came with nothing else."""

    def on_message(self, response: worker_pb2.GenerateResponse) -> None:
        """Take a message."""

    def on_end(self, failure: CallEnded | None) -> None:
        """Take the end, the last thing there is; ``None``: the call ended well."""


class Call:
    """One running ``Generate``. What came in one turn of the event loop is handed on together."""

    __slots__ = ("_failure", "_held", "_items", "_reader", "_session", "ended", "key")

    def __init__(self, session: CallStream, key: int, reader: Reader) -> None:
        self._session = session
        self.key = key
        self._reader: Reader | None = reader
        self._items: list[int | worker_pb2.GenerateResponse] = []
        self._failure: CallEnded | None = None
        self._held = False
        self.ended = False
        """Whether the end has come, or nobody waits for it any more."""

    def put(self, item: int | worker_pb2.GenerateResponse) -> None:
        """Take what came; :meth:`flush` hands it on."""
        self._items.append(item)

    def end(self, failure: CallEnded | None = None) -> None:
        """Take the end; what came before it is handed on first."""
        if not self.ended:
            self.ended, self._failure = True, failure

    def flush(self) -> None:
        """Hand on what came."""
        if self._held:
            return
        while self._items and self._reader is not None and not self._held:
            items, self._items = self._items, []
            count = 0
            while count < len(items) and type(items[count]) is int:
                count += 1
            if count:
                self._items = items[count:]
                self._reader.on_tokens(items[:count])  # type: ignore[arg-type]
            else:
                self._items = items[1:]
                self._reader.on_message(items[0])  # type: ignore[arg-type]
        if self.ended and self._reader is not None:
            if self._failure is None:
                self._session.steps.later(END, Call._tell_end, self)
            else:
                self._tell_end()

    def _tell_end(self) -> None:
        if self._reader is not None and not self._held:
            reader, self._reader = self._reader, None
            reader.on_end(self._failure)

    def hold(self, held: bool) -> None:
        """Keep what comes from now on, or go on handing it on: for a reader whose own reader is slow."""
        self._held = held
        if not held:
            self.flush()

    def fail(self, failure: CallEnded) -> None:
        """Abort the call; its reader gets ``failure`` behind what came."""
        if not self.ended:
            self._session.cancel(self.key)
            self.end(failure)
            self._held = False
            self.flush()

    def close(self) -> None:
        """Abort the call, unless it has ended. Nothing is handed on any more."""
        self._reader = None
        if not self.ended:
            self.ended = True
            self._session.cancel(self.key)


class CallStream(ABC):
    """A stream to one instance; ends when it breaks, and is not used again.

    Args:
        name: Of the instance, for the log.
        steps: Of this router's requests.

    Attributes:
        broken: Whether it has ended.
    """

    def __init__(self, name: str, steps: Steps) -> None:
        self.steps = steps
        self.name = name  # not the instance: sessions must not keep it alive
        self.broken = self._retired = False
        self._calls: dict[int, Call] = {}
        self._next = 0
        self._cancels: list[int] = []
        self._later: deque[tuple[int, bytes]] = deque()

    def start(self, request: bytes, reader: Reader) -> Call:
        """Begin a call.

        Args:
            request: A ``GenerateRequest``, serialized.
            reader: Takes what comes, from the next turn of the event loop on.
        """
        self._next += 1
        call = self._calls[self._next] = Call(self, self._next, reader)
        self._later.append((self._next, request))
        self._wake()
        return call

    def cancel(self, key: int) -> None:
        """Abort a call; the instance is told at once."""
        if self._calls.pop(key, None) is not None:
            self._cancels.append(key)
            self._wake()
            self._check_retired()

    def retire(self) -> None:
        """Let what runs go to its end, and close then: new calls go another way."""
        self._retired = True
        self._check_retired()

    @abstractmethod
    def close(self) -> None:
        """End the stream; its calls fail."""

    @abstractmethod
    def _wake(self) -> None:
        """There is something to :meth:`_gather`."""

    def _check_retired(self) -> None:
        if self._retired and not self._calls and not self.broken:
            self.close()

    def _gather(self) -> bytes:
        """Return starts and cancellations, as many as one message may have; empty: there are none."""
        parts: list[bytes] = []
        size = 0
        while self._later and size < _MAX_BATCH_BYTES:
            key, request = self._later.popleft()
            if key in self._calls:  # not cancelled meanwhile
                parts += (_start(key, len(request)), request)
                size += len(request)
        if self._cancels:
            cancels, self._cancels = self._cancels, []
            parts.append(worker_pb2.GenerateManyRequest(cancels=cancels).SerializeToString())
        return b"".join(parts)

    def _take(self, messages: Iterable[worker_pb2.GenerateManyResponse]) -> None:
        """Keep what messages bring that came together, to hand it on with what others bring."""
        touched: dict[int, Call] = {}
        try:
            for message in messages:
                self._sort(message, touched)
        finally:  # also where one cannot be read: ends that came before it are known to nobody else
            for call in touched.values():
                self.steps.later(TAKE, Call.flush, call)
        if self._retired:
            self._check_retired()

    def _sort(self, message: worker_pb2.GenerateManyResponse, touched: dict[int, Call]) -> None:
        calls = self._calls
        # Lists of what repeated fields hold are quicker to walk than the fields.
        for key, token_id in zip(message.token_calls[:], message.token_ids[:], strict=True):
            call = calls.get(key)
            if call is not None:
                touched[key] = call
                call.put(token_id)
        for item in message.messages[:]:
            call = calls.get(item.call)
            if call is not None:
                touched[item.call] = call
                call.put(item.response)
        for end in message.ends[:]:
            call = calls.pop(end.call, None)
            if call is not None:
                touched[end.call] = call
                call.end(_failure(end) if end.code else None)

    def _break(self, failure: CallEnded) -> None:
        """The stream has ended: fail what still runs."""
        if not self.broken:
            self.broken = True
            calls, self._calls = self._calls, {}
            for call in calls.values():
                call.end(CallEnded(failure.error, failure.code))
                call.flush()


def _start(key: int, size: int) -> bytes:
    """Return what goes before a request of so many bytes.

    With it, it is a ``GenerateManyRequest`` with one start; the bytes of several, joined, are one with all of them.
    """
    call = b"\x08" + varint(key) + b"\x12" + varint(size)
    return b"\x0a" + varint(len(call) + size) + call


def _failure(end: worker_pb2.CallEnd) -> CallEnded:
    code = _CODES.get(end.code, grpc.StatusCode.UNKNOWN)
    return CallEnded(from_status(code, end.message, end.details), code)


def closed() -> CallEnded:
    """Return the end of calls whose stream was closed from this side."""
    return CallEnded(UnavailableError("the connection was closed"), grpc.StatusCode.CANCELLED)
