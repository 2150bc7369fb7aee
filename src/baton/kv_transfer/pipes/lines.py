"""Pipes whose bytes go their own way beside two TCP connections: one line per direction.

A line carries its direction's small messages whole, the heads of big ones, and what the way of the big ones needs
to be said (doorbells one way, credit the other). Nothing but lines tells of the peer's end, and whoever waits for
a message waits on a line: so a waiting end has nothing under way that could not be called off.

::

    per line, after the handshake: client -> HELLO  kind, call, line     (the call joins the two lines)
    then, on line 0:               client -> HELLO, server -> WELCOME    what the kind needs to know of the other end
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.errors import BatonError, PipeClosedError
from baton.kv_transfer.pipes.base import MAX_MESSAGE_BYTES, Pipe, PipeListener
from baton.kv_transfer.pipes.stream import ByteChannel
from baton.kv_transfer.pipes.tcp import HANDSHAKE_S, accept_stream, close_listener, greet
from baton.kv_transfer.protocol.addresses import bind_tcp, join_address
from baton.kv_transfer.protocol.deadline import Flag, Wait
from baton.kv_transfer.protocol.frames import BadFrameError, FrameKind, recv_control, send_control, send_error
from baton.kv_transfer.protocol.handshake import PURPOSE_MESSAGES, greet_as_client
from baton.kv_transfer.protocol.sockets import Buffer, Stream, connect_tcp

log = logging.getLogger(__name__)
EAGER_BYTES = 64 << 10
"""From this many bytes of tensors on, a message's data goes the pipe's own way; both ends must agree."""
MAX_CALLS = 64
"""Calls of which one line has come and the other not yet; the oldest is dropped for the next."""
_CALL = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Lines:
    """A call's two connections: ``outgoing`` carries what this end sends."""

    outgoing: Stream
    incoming: Stream
    is_client: bool

    def exchange(self, fields: Mapping[str, Any], wait: Wait) -> dict[str, Any]:
        """Tell the peer's end something and hear the same of it; a client speaks first.

        Raises:
            BatonError: The peer's reason to refuse.
        """
        line = self.outgoing if self.is_client else self.incoming
        if self.is_client:
            send_control(line, FrameKind.HELLO, fields, wait)
            return recv_control(line, FrameKind.WELCOME, wait)
        said = recv_control(line, FrameKind.HELLO, wait)
        send_control(line, FrameKind.WELCOME, fields, wait)
        return said

    def refuse(self, error: BatonError) -> None:
        """Tell a client why it gets no pipe, and hang up."""
        try:
            send_error(self.incoming, error, Wait(time.monotonic() + 1.0))
        except BatonError as failed:  # it may not even listen
            log.debug("%s did not hear why it was refused: %s", self.incoming.peer, failed)
        self.close()

    def close(self) -> None:
        """Hang up."""
        self.outgoing.close()
        self.incoming.close()


def call_lines(kind: str, address: str, token: str | None, wait: Wait) -> Lines:
    """Connect both lines to a listener.

    Raises:
        PipeClosedError: Nobody there.
        UnauthenticatedError: The tokens differ.
        DeadlineError: It took too long.
    """
    call = secrets.token_hex(16)
    lines: list[Stream] = []
    try:
        for index in range(2):
            stream = connect_tcp(address, wait)
            lines.append(stream)
            greet_as_client(stream, token, wait, purpose=PURPOSE_MESSAGES, facts=None)
            send_control(stream, FrameKind.HELLO, {"kind": kind, "call": call, "line": index}, wait)
    except BaseException:
        for stream in lines:
            stream.close()
        raise
    return Lines(lines[0], lines[1], is_client=True)


class LinesListener(PipeListener):
    """Listens for calls and makes a pipe of each.

    Args:
        host: Address to bind.
        port: 0: any free one.
        token: Shared token.
        max_message_bytes: Bound on the messages of its pipes.

    Raises:
        ConfigError: No token off loopback, or the address cannot be bound.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        token: str | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        self._token, self._max = token, max_message_bytes
        self._half: dict[str, Stream] = {}
        self._socket = bind_tcp(host, port, token)
        self.address = join_address(host, self._socket.getsockname()[1])
        self._socket.listen()

    @abstractmethod
    def make_pipe(self, lines: Lines, wait: Wait) -> Pipe:
        """Make this end's pipe; the lines are the pipe's from now on, and closed if it cannot be made.

        Raises:
            BatonError: Why not; the peer is told.
        """

    def accept(self, *, deadline: float, cancelled: Flag | None = None) -> Pipe:
        """Return the next pipe; see :meth:`PipeListener.accept`."""
        while True:
            stream = accept_stream(self._socket, Wait(deadline, cancelled), f"{self.kind} peer")
            wait = Wait(min(deadline, time.monotonic() + HANDSHAKE_S), cancelled)
            lines = self._join(stream, wait) if greet(stream, self._token, wait) else None
            if lines is None:
                continue
            try:
                return self.make_pipe(lines, wait)
            except BatonError as error:
                log.warning("%s was sent away: %s", stream.peer, str(error))
                lines.refuse(error)
                Wait(deadline, cancelled).check("waiting for a pipe")  # ours is over; else the peer's was

    def close(self) -> None:
        """Stop listening."""
        close_listener(self._socket)
        while self._half:
            self._half.popitem()[1].close()

    def _join(self, stream: Stream, wait: Wait) -> Lines | None:
        """Return the call's lines if this is the second one."""
        try:
            call, index = _parse_call(recv_control(stream, FrameKind.HELLO, wait), self.kind)
            if index == 1:
                first = self._half.pop(call, None)
                if first is None:
                    raise BadFrameError("the second line of a call came without the first")
                return Lines(outgoing=stream, incoming=first, is_client=False)
            if call in self._half:
                raise BadFrameError("the first line of a call came twice")
        except BatonError as error:
            log.warning("%s was sent away: %s", stream.peer, str(error))
            Lines(stream, stream, is_client=False).refuse(error)
            return None
        if len(self._half) >= MAX_CALLS:
            self._half.pop(next(iter(self._half))).close()
        self._half[call] = stream
        return None


class LineSender(ByteChannel):
    """The sending end of a line; subclasses know how big data travels."""

    def __init__(self, line: Stream) -> None:
        self.line = line

    @abstractmethod
    def move(self, data: Sequence[Buffer], wait: Wait) -> None:
        """Send at least ``EAGER_BYTES`` of data; nobody reads the caller's memory afterwards, whatever happened."""

    def send_message(self, head: Sequence[Buffer], data: Sequence[Buffer], wait: Wait) -> None:
        """Send small messages as they are, and big ones' data the other way."""
        if total_bytes(data) < EAGER_BYTES:
            self.send([*head, *data], wait)
            return
        self.send(head, wait)
        self.move(data, wait)

    def send(self, buffers: Sequence[Buffer], wait: Wait) -> None:
        """Send over the line."""
        self.line.send_all(buffers, wait, "sending a message")

    def recv(self, views: Sequence[memoryview], wait: Wait) -> None:
        """Never: the other direction has a channel of its own."""
        raise PipeClosedError("this end of the line only sends")

    def wait_readable(self, wait: Wait) -> None:
        """Never: the other direction has a channel of its own."""
        raise PipeClosedError("this end of the line only sends")

    def wait_writable(self, wait: Wait) -> None:
        """Block until the line takes bytes."""
        self.line.wait_writable(wait, "waiting to send")

    def close(self) -> None:
        """Hang up."""
        self.line.close()


class LineReceiver(ByteChannel):
    """The receiving end of a line."""

    def __init__(self, line: Stream) -> None:
        self.line = line

    @abstractmethod
    def move(self, views: Sequence[memoryview], wait: Wait) -> None:
        """Receive at least ``EAGER_BYTES`` of data; nobody writes into the views afterwards, whatever happened."""

    def recv_data(self, views: Sequence[memoryview], wait: Wait) -> None:
        """Receive a message's data the way that its size says."""
        (self.recv if total_bytes(views) < EAGER_BYTES else self.move)(views, wait)

    def recv(self, views: Sequence[memoryview], wait: Wait) -> None:
        """Receive from the line."""
        self.line.recv_into(views, wait, "receiving a message")

    def send(self, buffers: Sequence[Buffer], wait: Wait) -> None:
        """Never: the other direction has a channel of its own."""
        raise PipeClosedError("this end of the line only receives")

    def wait_readable(self, wait: Wait) -> None:
        """Block until a message begins, or the peer is gone."""
        self.line.wait_readable(wait, "waiting for a message")

    def wait_writable(self, wait: Wait) -> None:
        """Never: the other direction has a channel of its own."""
        raise PipeClosedError("this end of the line only receives")

    def close(self) -> None:
        """Hang up."""
        self.line.close()


def total_bytes(buffers: Sequence[Buffer]) -> int:
    """Bytes of buffers together."""
    return sum(memoryview(buffer).nbytes for buffer in buffers)


def _parse_call(fields: Mapping[str, Any], kind: str) -> tuple[str, int]:
    """Read a line's introduction.

    Raises:
        BadFrameError: A field is malformed, or the line is for another kind of pipe.
    """
    call, index = fields.get("call"), fields.get("line")
    if fields.get("kind") != kind:
        raise BadFrameError(f"this endpoint serves {kind} pipes", field="kind")
    if not isinstance(call, str) or not _CALL.fullmatch(call) or index not in (0, 1):
        raise BadFrameError("a line's introduction is malformed", field="call")
    return call, int(index)
