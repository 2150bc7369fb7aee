"""The router's stream to an instance over a wire whose answers a test writes."""

from __future__ import annotations

import functools
from typing import Any

import grpc

from baton.api.v1 import worker_pb2
from baton.rpc.http2.message_stream import MessageSink, StreamEnded
from baton.rpc.multiplex import Call, CallStream
from baton_router.dispatch.event_loop import END, RECEIVE, TurnBatcher


class Wire:
    """A connection on which a test says what an instance says, and sees what it is told.

    Attributes:
        sent: What the instance was told.
        writable: Whether it takes anything now.
    """

    def __init__(self) -> None:
        self.sent: list[worker_pb2.GenerateManyRequest] = []
        self.writable = True
        self._sink: MessageSink | None = None

    async def open(self, method: str, sink: MessageSink) -> Any:
        self._sink = sink
        return self

    def send(self, message: bytes) -> None:
        self.sent.append(worker_pb2.GenerateManyRequest.FromString(message))

    def close(self) -> None:
        self._sink = None

    def say(self, message: worker_pb2.GenerateManyResponse | bytes) -> None:
        """Bring a message, if the connection still stands."""
        data = message if isinstance(message, bytes) else message.SerializeToString()
        if self._sink is not None:
            self._sink.on_message(data)

    def end(self, code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE, text: str = "gone") -> None:
        """End the stream."""
        sink, self._sink = self._sink, None
        if sink is not None:
            sink.on_end(StreamEnded(code, text))

    def drain(self) -> None:
        """Take what is sent again."""
        self.writable = True
        if self._sink is not None:
            self._sink.on_writable()


def open_call_stream() -> tuple[CallStream, Wire, TurnBatcher]:
    """Return a stream, its wire, and what ends the turns of its loop; it is open after one turn."""
    steps, wire = TurnBatcher(), Wire()
    deliver, end = (
        functools.partial(steps.schedule, RECEIVE, CallStream.deliver),
        functools.partial(steps.schedule, END, Call.deliver_end),
    )
    return CallStream(wire, "d0", deliver, end), wire, steps
