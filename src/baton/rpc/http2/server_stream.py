"""A gRPC call with one request and many answers, read by a task; see :mod:`baton.rpc.http2.message_stream`."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, Protocol, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from baton.rpc.http2.message_stream import MessageSink, MessageStream, StreamEnded

M = TypeVar("M", bound=Message)


class _Opens(Protocol):
    async def open(self, method: str, sink: MessageSink) -> MessageStream: ...


class ServerStream(Generic[M]):
    """A call, begun when its first answer is asked for: ``async for answer in stream``, by one task.

    The iteration ends with the call, or raises :class:`~baton.rpc.http2.message_stream.StreamEnded` if it ended badly.
    What has come is handed out without going back to the event loop, which reads no more until that is done.

    Args:
        dialer: Connects to the server.
        method: ``/package.Service/Method``.
        request: What is asked.
        answer: What answers are.
    """

    def __init__(self, dialer: _Opens, method: str, request: Message, answer: type[M]) -> None:
        self._dialer = dialer
        self._method = method
        self._request = request
        self._answer = answer
        self._stream: MessageStream | None = None
        self._messages: deque[bytes] = deque()
        self._end: StreamEnded | None = None
        self._news: asyncio.Future[None] | None = None

    def __aiter__(self) -> ServerStream[M]:
        return self

    async def __anext__(self) -> M:
        if self._stream is None and self._end is None:
            self._stream = await self._dialer.open(self._method, self)
            self._stream.send(self._request.SerializeToString(), last=True)
        while not self._messages:
            if self._end is not None:
                if self._end.code is grpc.StatusCode.OK:
                    raise StopAsyncIteration
                raise self._end
            self._news = asyncio.get_running_loop().create_future()
            await self._news
        try:
            return self._answer.FromString(self._messages.popleft())
        except DecodeError as error:
            raise StreamEnded(grpc.StatusCode.INTERNAL, f"an answer of {self._method} cannot be read") from error

    def cancel(self) -> None:
        """Give the call up; harmless if repeated."""
        if self._stream is not None:
            self._stream.close()
        if self._end is None:
            self.on_end(StreamEnded(grpc.StatusCode.CANCELLED, "the call was given up"))

    # --- what the connection calls ---

    def on_message(self, message: bytes) -> None:
        self._messages.append(message)
        self._wake()

    def on_end(self, end: StreamEnded) -> None:
        self._end = end
        self._wake()

    def on_writable(self) -> None:
        """There is nothing more to send."""

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)
