"""One HTTP request of an endpoint that is served by callbacks, the bounds of its body, and its answer."""

from __future__ import annotations

import time
from asyncio import AbstractEventLoop, TimerHandle
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import orjson
from starlette.exceptions import HTTPException
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from baton.errors import InvalidRequestError
from baton_router.frontend.http.middleware import Headers, HttpMetrics, HttpOptions, log_access
from baton_router.types import Account

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_CLOSING = frozenset({408, 413})
"""Error statuses that end the connection."""
_CLIENT_GONE = 499
"""Status in the metrics of requests whose client left before the answer."""


class Connection(Protocol):
    """What an exchange needs of its connection."""

    transport: Any
    flow: Any
    parser: Any
    headers: Headers
    expect_100_continue: bool
    loop: AbstractEventLoop
    server_state: Any

    @property
    def host(self) -> str:
        """Address of the client."""

    def on_response_complete(self) -> None:
        """Continue with the next request: an answer is complete."""


class Handler(Protocol):
    """Serves the requests of some endpoints.

    Attributes:
        paths: Paths of its POST endpoints, from bytes to text.
        options: Limits.
        metrics: Metrics of the HTTP front.
    """

    paths: Mapping[bytes, str]
    options: HttpOptions
    metrics: HttpMetrics

    def check_head(self, exchange: HttpExchange) -> Exception | None:
        """Check the head of a request; return the error if it is refused."""

    def serve(self, exchange: HttpExchange, body: bytes) -> None:
        """Serve a request, now or later; must not raise."""

    def refuse(self, exchange: HttpExchange, error: Exception) -> None:
        """Respond to a request with an error."""


class HttpExchange:
    """A request and its answer, without ASGI between the socket and the endpoint.

    The body is gathered within the bounds of ``Handler.options``. Then the handler serves the request, once the answers
    to the earlier requests of the connection are complete. A request that is refused because of its head or length is
    answered at once; the connection drops the rest of its body.

    It replaces uvicorn's ``RequestResponseCycle``, and has the attributes that the protocol uses of it.

    Attributes:
        path: Path of the endpoint.
        headers: Headers of the request, with names in lower case.
        request_id: Identifier of the request.
        account: Account of the API key; ``None`` without API keys.
        common: Header lines that every answer to the request has.
        chunked: Whether a streamed answer is sent in HTTP chunks.
        in_turn: Whether the answers to the earlier requests are complete.
        status: Status of the answer, for the metrics; 0 before it has started.
        on_gone: Called once when the client has gone.
        on_flow: Called with ``True`` when the client reads too slowly, and with ``False`` when it has caught up.
        disconnected: Whether the client has gone.
        response_complete: Whether the answer is complete.
        keep_alive: Whether the connection stays open.
    """

    __slots__ = (
        "_begun",
        "_connection",
        "_counted",
        "_expects_continue",
        "_handler",
        "_head",
        "_pieces",
        "_received",
        "_refusal",
        "_timer",
        "_whole",
        "account",
        "chunked",
        "common",
        "disconnected",
        "headers",
        "in_turn",
        "keep_alive",
        "on_flow",
        "on_gone",
        "path",
        "request_id",
        "response_complete",
        "status",
    )

    def __init__(self, connection: Connection, handler: Handler, path: str) -> None:
        self._connection = connection
        self._handler = handler
        self._begun = time.perf_counter()
        self._head = b""
        self._pieces: list[bytes] = []
        self._received = 0
        self._whole = self._counted = False
        self._timer: TimerHandle | None = None
        self.chunked = connection.parser.get_http_version() == "1.1"
        self._expects_continue = connection.expect_100_continue and self.chunked
        self.keep_alive = self.chunked and connection.parser.should_keep_alive()
        self.in_turn = False
        self.path = path
        self.headers = connection.headers
        self.request_id = ""
        self.account: Account | None = None
        self.common = b""
        self.status = 0
        self.on_gone: Callable[[], object] | None = None
        self.on_flow: Callable[[bool], None] | None = None
        self.disconnected = self.response_complete = False
        handler.metrics.begin(path)
        self._refusal = handler.check_head(self)

    # --- called by the connection ---

    def on_body(self, piece: bytes) -> None:
        """Add a piece of the body."""
        if self.response_complete:
            return
        self._received += len(piece)
        limit = self._handler.options.max_body_bytes
        if self._refusal is None:
            if self._received <= limit:
                self._pieces.append(piece)
                return
            self._refusal = too_long(limit)
            self._pieces.clear()
            if self.in_turn:
                self._refuse()

    def on_body_complete(self) -> None:
        """Serve the request, if it is in turn."""
        self._whole = True
        if self.in_turn and not self.response_complete:
            self._serve()

    def start_turn(self) -> None:
        """Serve the request, or wait for its body: the answers to the earlier requests are complete."""
        if self.disconnected:
            return
        self.in_turn = True
        if self._whole:
            self._serve()
        else:
            self.await_body()

    def await_body(self) -> None:
        """Wait for the rest of the body, for a limited time."""
        if self._whole or self.response_complete or self._timer is not None or not self.in_turn:
            return
        if self._refusal is not None:
            self._refuse()
            return
        if self._expects_continue:
            self._expects_continue = False
            self._connection.transport.write(_CONTINUE)
        self._timer = self._connection.loop.call_later(self._handler.options.body_timeout_s, self._refuse)

    def refuse(self, error: HTTPException) -> None:
        """Respond with an error, in turn: the rest of the body cannot be read."""
        self._refusal = self._refusal or error
        self.keep_alive = False
        if self.in_turn and not self.response_complete:
            self._refuse()

    def on_connection_lost(self) -> None:
        """Stop serving: the client has gone."""
        if self.disconnected or self.response_complete:
            return
        self.disconnected = True
        self._stop_waiting()
        callback = self.on_gone
        self.on_gone = None
        if callback is not None:
            callback()
        self._count()

    # --- the answer ---

    @property
    def peer(self) -> str:
        """Address of the client."""
        return self._connection.host

    @property
    def paused(self) -> bool:
        """Whether the client reads too slowly."""
        return bool(self._connection.flow.write_paused)

    def respond(self, status: int, headers: bytes, body: bytes) -> None:
        """Send a whole answer.

        Args:
            status: HTTP status.
            headers: Header lines, each with its line break.
            body: Body of the answer.
        """
        head = self._begin(status, headers + b"content-length: %d\r\n" % len(body))
        self._write(head + body)
        self._end()

    def start(self, status: int, headers: bytes) -> None:
        """Start an answer in pieces; its head is sent with the first piece, or by :meth:`send_head`."""
        if not self.chunked:  # the end of the connection is the end of the answer
            self.keep_alive = False
        self._head = self._begin(status, headers + b"transfer-encoding: chunked\r\n" if self.chunked else headers)

    def send_head(self) -> None:
        """Send the head of an answer before its first piece."""
        head = self._head
        self._head = b""
        self._write(head)

    def send(self, piece: bytes) -> None:
        """Send a piece, which must not be empty."""
        head = self._head
        self._head = b""
        self._write(b"%b%x\r\n%b\r\n" % (head, len(piece), piece) if self.chunked else head + piece)

    def send_chunks(self, chunks: bytes) -> None:
        """Send pieces that are encoded as HTTP chunks already, after the first piece; only if :attr:`chunked`."""
        if not self.disconnected:
            self._connection.transport.write(chunks)

    def finish(self, piece: bytes) -> None:
        """Send the last piece, which must not be empty."""
        head = self._head
        self._head = b""
        self._write(b"%b%x\r\n%b\r\n0\r\n\r\n" % (head, len(piece), piece) if self.chunked else head + piece)
        self._end()

    def abort(self) -> None:
        """Abort the connection of an answer that cannot be completed: its client does not read."""
        self.response_complete = True
        self._count()
        self._connection.transport.abort()

    # --- inside ---

    def _serve(self) -> None:
        self._stop_waiting()
        if self._refusal is not None:
            self._refuse()
            return
        body = b"".join(self._pieces)
        self._pieces.clear()
        self._handler.serve(self, body)

    def _refuse(self) -> None:
        """Respond with the error, whether the body is complete or not."""
        self._stop_waiting()
        refusal = self._refusal or too_late(self._handler.options.body_timeout_s)
        if self._expects_continue or (isinstance(refusal, HTTPException) and refusal.status_code in _CLOSING):
            self.keep_alive = False
        self._handler.refuse(self, refusal)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _begin(self, status: int, headers: bytes) -> bytes:
        self.status = status
        if not self.keep_alive:
            headers += b"connection: close\r\n"
        default = b"".join([b"%b: %b\r\n" % header for header in self._connection.server_state.default_headers])
        return b"%b%b%b%b\r\n" % (STATUS_LINE[status], default, self.common, headers)

    def _write(self, data: bytes) -> None:
        if not self.disconnected:
            self._connection.transport.write(data)

    def _end(self) -> None:
        self.response_complete = True
        self.on_gone = self.on_flow = None
        self._count()
        if not self.keep_alive and (self._whole or self._expects_continue):  # else the connection drops the rest first
            self._connection.transport.close()
        self._connection.on_response_complete()

    def _count(self) -> None:
        if not self._counted:
            self._counted = True
            seconds = time.perf_counter() - self._begun
            status = self.status or _CLIENT_GONE
            self._handler.metrics.end(self.path, status, seconds)
            if self._handler.options.access_log:
                log_access(
                    peer=self.peer,
                    method="POST",
                    path=self.path,
                    status=status,
                    seconds=seconds,
                    request_id=self.request_id,
                    account=self.account,
                )


def check_media(headers: Headers, limit: int) -> HTTPException | None:
    """Return the error for a body whose headers are refused: wrong type or encoding (415), too long (413).

    The type is required because web pages can make browsers send bodies of some other types, or without one, to any
    host.
    """
    typed = False
    for name, value in headers:
        if name == b"content-type":
            typed = True
            if value != b"application/json":
                kind = value.decode("latin-1").partition(";")[0].strip().lower()
                if kind != "application/json" and not kind.endswith("+json"):
                    return HTTPException(415, f"the body must be application/json, not {kind!r:.80}")
        elif name == b"content-encoding":
            encoding = value.decode("latin-1").strip().lower()
            if encoding != "identity":
                return HTTPException(415, f"the body must come as it is, not with content-encoding {encoding!r:.80}")
        elif name == b"content-length" and value.isdigit() and int(value) > limit:
            return too_long(limit)
    return None if typed else HTTPException(415, "the body needs Content-Type: application/json")


def too_long(limit: int) -> HTTPException:
    """Return the error for a body that is too long."""
    return HTTPException(413, f"the body must be at most {limit} bytes", headers={"connection": "close"})


def too_late(limit_s: float) -> HTTPException:
    """Return the error for a body that arrives too slowly."""
    return HTTPException(408, f"the body did not arrive within {limit_s:g} s")


MAX_DEPTH = 200
"""Deepest nesting of a body; the rest of what orjson can write is for the objects around it."""
_ORJSON_DEPTH = 254


def decode_json(data: bytes) -> Any:
    """Decode a JSON body.

    Raises:
        InvalidRequestError: The body is not JSON, or nested too deep to be written again.
    """
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from error
    if data.count(b"{") + data.count(b"[") > MAX_DEPTH:
        around = value
        for _ in range(_ORJSON_DEPTH - MAX_DEPTH):
            around = [around]
        try:
            orjson.dumps(around)
        except TypeError as error:
            raise InvalidRequestError(f"the body is nested deeper than {MAX_DEPTH}") from error
    return value
