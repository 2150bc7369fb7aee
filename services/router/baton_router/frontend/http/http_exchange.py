"""A request that came whole, and its answer, without ASGI between the socket and the endpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from uvicorn.protocols.http.httptools_impl import STATUS_LINE


class Connection(Protocol):
    """The connection of an exchange, as the exchange knows it."""

    transport: Any
    flow: Any
    parser: Any
    headers: list[tuple[bytes, bytes]]

    def default_lines(self) -> bytes:
        """Return the headers that every answer has."""
        ...

    def on_response_complete(self) -> None:
        """An answer is complete."""


class Exchange:
    """A request that came whole, and its answer: for endpoints that need no ASGI between the socket and themselves.

    It stands where uvicorn's cycle of a request stands, and has what the protocol looks at there.

    Attributes:
        path: Its path, one of the endpoints'.
        scope: ``headers`` and ``state``, as in an ASGI scope.
        body: Its body.
        on_gone: Called when the client has gone, once.
        on_flow: Called with ``True`` when the client doesn't keep up with what is written, with ``False`` when it does.
        disconnected: Whether the client has gone.
        response_complete: Whether the answer is.
        keep_alive: Whether the connection stays.
        message_event: What uvicorn sets when something comes.
    """

    __slots__ = (
        "_head",
        "_protocol",
        "body",
        "disconnected",
        "keep_alive",
        "message_event",
        "on_flow",
        "on_gone",
        "path",
        "response_complete",
        "scope",
    )

    def __init__(self, protocol: Connection, path: str, body: bytes) -> None:
        self._protocol = protocol
        self._head = b""
        self.path, self.body = path, body
        self.scope = {"headers": protocol.headers, "state": {}}
        self.on_gone: Callable[[], None] | None = None
        self.on_flow: Callable[[bool], None] | None = None
        self.disconnected = self.response_complete = False
        self.keep_alive = protocol.parser.should_keep_alive()
        self.message_event = _NO_EVENT

    @property
    def paused(self) -> bool:
        """Whether the client doesn't keep up."""
        return bool(self._protocol.flow.write_paused)

    def respond(self, status: int, headers: bytes, body: bytes) -> None:
        """Answer.

        Args:
            status: The status.
            headers: Header lines, each with its line break.
            body: The body.
        """
        head = self._begin(status, headers + b"content-length: %d\r\n" % len(body))
        self._write(head + body)
        self._end()

    def start(self, status: int, headers: bytes) -> None:
        """Begin an answer in pieces; its head leaves with the first one, or with :meth:`send_head`."""
        self._head = self._begin(status, headers + b"transfer-encoding: chunked\r\n")

    def send_head(self) -> None:
        """Send the head of an answer whose first piece is not there yet."""
        head, self._head = self._head, b""
        self._write(head)

    def send(self, piece: bytes) -> None:
        """Send a piece, which is not empty."""
        head, self._head = self._head, b""
        self._write(b"%b%x\r\n%b\r\n" % (head, len(piece), piece))

    def finish(self, piece: bytes) -> None:
        """Send the last piece, which is not empty."""
        head, self._head = self._head, b""
        self._write(b"%b%x\r\n%b\r\n0\r\n\r\n" % (head, len(piece), piece))
        self._end()

    def abort(self) -> None:
        """Break the connection under an answer that cannot be completed: what was not taken would never be."""
        self.response_complete = True
        self._protocol.transport.abort()

    def lost(self) -> None:
        """The client has gone."""
        callback, self.on_gone = self.on_gone, None
        if callback is not None:
            callback()

    def _begin(self, status: int, headers: bytes) -> bytes:
        if not self.keep_alive:
            headers += b"connection: close\r\n"
        return STATUS_LINE[status] + self._protocol.default_lines() + headers + b"\r\n"

    def _write(self, data: bytes) -> None:
        if not self.disconnected:
            self._protocol.transport.write(data)

    def _end(self) -> None:
        self.response_complete = True
        self.on_gone = self.on_flow = None
        if not self.keep_alive:
            self._protocol.transport.close()
        self._protocol.on_response_complete()


class Direct(Protocol):
    """What serves exchanges."""

    paths: Mapping[bytes, str]
    """Paths of its POST endpoints, as requests have them and as text."""
    max_body_bytes: int

    def serve(self, exchange: Exchange) -> bool:
        """Serve a request, now or later; ``False``: by ASGI instead, nothing was done. Must not raise."""
        ...


class _NoEvent:
    """Stands for the event by which uvicorn wakes an ASGI application: there is none to wake."""

    def set(self) -> None:
        """Do nothing."""


_NO_EVENT = _NoEvent()
