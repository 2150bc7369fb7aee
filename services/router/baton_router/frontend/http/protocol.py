"""uvicorn's HTTP protocol with endpoints that are served without ASGI, their requests, and bounds on heads and bodies.

Request heads are checked after RFC 9110 and RFC 9112. uvicorn gets the protocol by its ``http=`` setting, and creates
one per connection.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
import urllib.parse
from abc import abstractmethod
from asyncio import Handle, TimerHandle
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import httptools
import orjson
from starlette.exceptions import HTTPException
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from baton.errors import INTERNAL_TEXT, InternalError, QueueFullError, UnavailableError
from baton_router.frontend.http.bodies import Body, BodyBudget
from baton_router.frontend.http.errors import error_object, http_error_code
from baton_router.frontend.http.middleware import (
    NO_ENDPOINT,
    Headers,
    HttpMetrics,
    HttpOptions,
    log_access,
    request_id,
)
from baton_router.types import Account

MAX_TARGET_BYTES = 16 * 1024
"""Longest path and query of a request line."""
_HOST = re.compile(rb"(?:\[[0-9A-Fa-f:.]+\]|(?:[A-Za-z0-9._~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*)(?::[0-9]*)?")
_OTHER_VERSION = frozenset({"Invalid HTTP version", "Pause on PRI/Upgrade", "Expected dot"})
"""The parser's errors for unknown versions; the second is that for HTTP/2's preface."""


def check_head(method: bytes, target: bytes, version: str, headers: Headers) -> HTTPException | None:
    """Return the error for a head that is refused; ``None`` if it is not.

    The parser has refused unreadable heads, and bodies with two lengths, before.

    Args:
        method: HTTP method.
        target: Path and query.
        version: HTTP version, such as ``1.1``.
        headers: Headers, with names in lower case.
    """
    if version not in ("1.0", "1.1"):
        return HTTPException(505, f"HTTP/{version} is not spoken here, but HTTP/1.1 and HTTP/1.0")
    if method == b"CONNECT":
        return HTTPException(400, "this is no proxy")
    if len(target) > MAX_TARGET_BYTES:
        return too_long_target()
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) > 1 or (not hosts and version == "1.1"):
        return HTTPException(400, f"a request has one Host header, this one has {len(hosts)}")
    if hosts and _HOST.fullmatch(hosts[0]) is None:
        return HTTPException(400, "the Host header is no host with a port or without")
    for name, value in headers:
        if name == b"transfer-encoding":
            if version == "1.0":
                return HTTPException(400, "HTTP/1.0 has no Transfer-Encoding")
            if value.strip().lower() != b"chunked":
                return HTTPException(501, "the only Transfer-Encoding that is understood here is chunked")
        elif name == b"expect" and version == "1.1" and value.strip().lower() != b"100-continue":
            return HTTPException(417, "the only Expect that can be met is 100-continue")
    return None


def unreadable(error: httptools.HttpParserError) -> HTTPException:
    """Return the error for a request that the parser cannot read."""
    reason = str(error)
    if reason in _OTHER_VERSION:
        return HTTPException(505, "the HTTP version is not spoken here, but HTTP/1.1 and HTTP/1.0")
    return HTTPException(400, f"this is no HTTP request: {reason[:1].lower()}{reason[1:]}")


def _find_refusal(error: httptools.HttpParserError) -> HTTPException:
    """Return what a callback refused the request with, or else an error that says what the parser found.

    The request keeps it. Its traceback, whose frames have the request and the bytes that were parsed, must go.
    """
    cause = error.__context__
    return cause.with_traceback(None) if isinstance(cause, HTTPException) else unreadable(error)


def too_long_target() -> HTTPException:
    """Return the error for a request line that is too long."""
    return HTTPException(414, f"path and query must be at most {MAX_TARGET_BYTES} bytes")


def refusal(error: HTTPException, default_headers: Headers) -> bytes:
    """Return the bytes of the answer to a refused head; the connection ends with it."""
    status = error.status_code
    body = orjson.dumps(error_object(status, error.detail, code=http_error_code(status)))
    headers = (
        *default_headers,
        (b"content-type", b"application/json"),
        (b"x-request-id", request_id([]).encode()),
        (b"content-length", b"%d" % len(body)),
        (b"connection", b"close"),
    )
    return b"%b%b\r\n%b" % (STATUS_LINE[status], b"".join([b"%b: %b\r\n" % header for header in headers]), body)


log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 64 * 1024
HEAD_TIMEOUT_S = 30.0
SILENCE_S = 0.5
_DRAIN_FACTOR = 4
DRAIN_S = 5.0
_DRAIN_PAUSE_S = 0.05
"""Bounds on the rest of a body that is dropped after the answer: in longest bodies, and in seconds."""
_SMALL_BYTES = 64 * 1024
"""Longest body that is read to its end to keep the connection of a request that is refused by its head."""
_UPGRADE_HEADERS = frozenset({b"upgrade", b"http2-settings"})
_FULL_BODY = json.dumps(
    error_object(503, "this router has all the connections it can take", code="overloaded")
).encode()
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\n"
    b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(_FULL_BODY), _FULL_BODY)
)
_FAILED_BODY = orjson.dumps(error_object(500, INTERNAL_TEXT, code="internal"))
_REFUSED_S = 1.0
"""Seconds that a refused client has to read the error."""
_WARNING_INTERVAL_S = 60.0
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_CLOSING = frozenset({408, 413})
"""Error statuses that end the connection."""
_MANY_PIECES = 4096
_LEAST_PIECE = 64
"""Number of pieces from which on a body's mean piece must have so many bytes."""
MAX_PIPELINED = 8
"""Requests of a connection that are parsed while an earlier one is answered."""
_HEAD_END = b"\r\n\r\n"
_LEAST_HEAD = len(b"GET / HTTP/1.0" + _HEAD_END)
"""Length of the shortest head, in bytes."""
_CLIENT_GONE = 499
"""Status in the metrics of requests whose client left before the answer."""


class Handler(Protocol):
    """Serves the requests of some endpoints.

    Attributes:
        paths: Paths of its POST endpoints, from bytes to text.
        options: Limits.
        metrics: Metrics of the HTTP front.
        budget: Memory for bodies.
    """

    paths: Mapping[bytes, str]
    options: HttpOptions
    metrics: HttpMetrics
    budget: BodyBudget

    def max_body_bytes(self) -> int:
        """Return the longest body that is read now, in bytes."""

    def check_head(self, exchange: HttpExchange) -> Exception | None:
        """Check the head of a request; return the error if it is refused."""

    def serve(self, exchange: HttpExchange, body: bytearray) -> None:
        """Serve a request, now or later; must not raise. It frees the body with ``exchange.close_body()``."""

    def refuse(self, exchange: HttpExchange, error: Exception) -> None:
        """Respond to a request with an error; must not raise."""


class Exchange:
    """A request and its answer, as endpoints see them. Without a connection of its own it is answered in one piece.

    Attributes:
        path: Path of the endpoint.
        headers: Headers of the request, with names in lower case.
        request_id: Identifier of the request.
        account: Account of the API key; ``None`` without API keys.
        chunked: Whether a streamed answer is sent in HTTP chunks.
        status: Status of the answer, for the metrics; 0 before it has started.
        on_gone: Called once when the client has gone.
        on_flow: Called with ``True`` when the client reads too slowly, and with ``False`` when it has caught up.
    """

    __slots__ = ("account", "chunked", "headers", "on_flow", "on_gone", "path", "request_id", "status")

    path: str
    headers: Headers
    request_id: str
    account: Account | None
    chunked: bool
    status: int
    on_gone: Callable[[], object] | None
    on_flow: Callable[[bool], None] | None

    @property
    def tenant(self) -> str:
        """Name of the tenant whose share of memory and time the body takes."""
        return self.account.name if self.account is not None else ""

    @property
    def paused(self) -> bool:
        """Whether the client reads too slowly."""
        return False

    def close_body(self) -> None:
        """Free the memory of the body, if it is counted."""

    @abstractmethod
    def respond(self, status: int, headers: bytes, body: bytes) -> None:
        """Send a whole answer.

        Args:
            status: HTTP status.
            headers: Header lines, each with its line break.
            body: Body of the answer.
        """

    def start(self, status: int, headers: bytes) -> None:
        """Start an answer in pieces; its head is sent with the first piece, or by :meth:`send_head`."""
        raise InternalError("this request is answered in one piece")

    def send_head(self) -> None:
        """Send the head of an answer before its first piece."""

    def send(self, piece: bytes) -> None:
        """Send a piece, which must not be empty."""

    def send_chunks(self, chunks: bytes) -> None:
        """Send pieces that are encoded as HTTP chunks already, after the first piece; only if :attr:`chunked`."""

    def finish(self, piece: bytes) -> None:
        """Send the last piece, which must not be empty."""

    def fail(self) -> None:
        """End an answer that nothing else can end, with 500 if it has not begun."""
        self.respond(500, b"content-type: application/json\r\n", _FAILED_BODY)

    def abort(self) -> None:
        """Abort an answer that cannot be completed: its client does not read."""


class HttpExchange(Exchange):
    """An exchange over a connection, without ASGI between the socket and the endpoint.

    The body is gathered within the bounds of the handler and its budget. Then the handler serves the request, once the
    answers to the earlier requests of the connection are complete. A request that is refused because of its head or
    length is answered at once; the connection drops the rest of its body.

    It replaces uvicorn's ``RequestResponseCycle``, and has the attributes that the protocol uses of it.

    Attributes:
        max_body_bytes: Longest body that is read, in bytes.
        common: Header lines that every answer to the request has.
        in_turn: Whether the answers to the earlier requests are complete.
        disconnected: Whether the client has gone.
        response_complete: Whether the answer is complete.
        keep_alive: Whether the connection stays open.
    """

    __slots__ = (
        "_begun",
        "_body",
        "_connection",
        "_counted",
        "_expects_continue",
        "_handler",
        "_head",
        "_num_pieces",
        "_received",
        "_refusal",
        "_timer",
        "_whole",
        "common",
        "disconnected",
        "in_turn",
        "keep_alive",
        "max_body_bytes",
        "response_complete",
    )

    def __init__(self, connection: HttpProtocol, handler: Handler, path: str, *, in_turn: bool) -> None:
        self._connection = connection
        self._handler = handler
        self._begun = time.perf_counter()
        self._head = b""
        self._body: Body | None = None
        self._received = self._num_pieces = 0
        self.max_body_bytes = handler.max_body_bytes()
        self._whole = self._counted = False
        self._timer: TimerHandle | None = None
        self.chunked = connection.parser.get_http_version() == "1.1"
        self._expects_continue = connection.expect_100_continue and self.chunked
        self.keep_alive = self.chunked and connection.parser.should_keep_alive()
        self.in_turn = in_turn
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
        if self._refusal is not None and not _has_small_body(self.headers):
            self.keep_alive = False

    # --- called by the connection ---

    def on_body(self, piece: bytes) -> None:
        """Add a piece of the body.

        Raises:
            HTTPException: The rest of the body is not to be parsed.
        """
        if self.response_complete:
            return
        self._received += len(piece)
        self._num_pieces += 1
        if self._refusal is not None:
            return
        limit = self.max_body_bytes
        if self._received > limit:
            self._refusal = too_long(limit)
        elif self._num_pieces > _MANY_PIECES and self._received < self._num_pieces * _LEAST_PIECE:
            # Each read of the socket has thousands of them: the rest is not even parsed.
            raise HTTPException(400, "the body comes in chunks that are too small")
        else:
            if self._body is None:
                self._body = self._handler.budget.open(self.tenant, self._connection.flow.resume_reading)
            if self._body.add(piece):
                if self._body.waits:
                    self._connection.flow.pause_reading()
                return
            self._refusal = QueueFullError("too many bodies of this tenant arrive at once", retry_after_s=1.0)
            self.keep_alive = False
        self.close_body()
        if self.in_turn:
            self._refuse()

    def close_body(self) -> None:
        """Free the memory of the body."""
        if self._body is not None:
            self._body.close()

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
        self.close_body()
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
    def tenant(self) -> str:
        """Name of the tenant whose share of memory and time the body takes; without API keys, the client's address."""
        return self.account.name if self.account is not None else self.peer

    @property
    def paused(self) -> bool:
        """Whether the client reads too slowly."""
        return bool(self._connection.flow.write_paused)

    def respond(self, status: int, headers: bytes, body: bytes) -> None:
        head = self._begin(status, headers + b"content-length: %d\r\n" % len(body))
        self._write(head + body)
        self._end()

    def start(self, status: int, headers: bytes) -> None:
        if not self.chunked:  # the end of the connection is the end of the answer
            self.keep_alive = False
        self._head = self._begin(status, headers + b"transfer-encoding: chunked\r\n" if self.chunked else headers)

    def send_head(self) -> None:
        head = self._head
        self._head = b""
        self._write(head)

    def send(self, piece: bytes) -> None:
        head = self._head
        self._head = b""
        self._write(b"%b%x\r\n%b\r\n" % (head, len(piece), piece) if self.chunked else head + piece)

    def send_chunks(self, chunks: bytes) -> None:
        if not self.disconnected:
            self._connection.transport.write(chunks)

    def finish(self, piece: bytes) -> None:
        head = self._head
        self._head = b""
        self._write(b"%b%x\r\n%b\r\n0\r\n\r\n" % (head, len(piece), piece) if self.chunked else head + piece)
        self._end()

    def fail(self) -> None:
        if self.response_complete:
            return
        if self.status:
            self.abort()
        else:
            self.respond(500, b"content-type: application/json\r\n", _FAILED_BODY)

    def abort(self) -> None:
        self.response_complete = True
        self._connection.transport.abort()
        self._count()

    # --- inside ---

    def _serve(self) -> None:
        self._stop_waiting()
        if self._refusal is not None:
            self._refuse()
            return
        self._handler.serve(self, self._body.data if self._body is not None else bytearray())

    def _refuse(self) -> None:
        """Respond with the error, whether the body is complete or not."""
        self._stop_waiting()
        refusal = self._refusal
        if refusal is None and self._body is not None and self._body.waits:
            refusal = UnavailableError("bodies of others take the memory for them", retry_after_s=1.0)
            self.keep_alive = False
        elif refusal is None:
            refusal = too_late(self._handler.options.body_timeout_s)
        self.close_body()
        if self._expects_continue or (isinstance(refusal, HTTPException) and refusal.status_code in _CLOSING):
            self.keep_alive = False
        self._handler.refuse(self, refusal)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _begin(self, status: int, headers: bytes) -> bytes:
        if not self.keep_alive:
            headers += b"connection: close\r\n"
        default = b"".join([b"%b: %b\r\n" % header for header in self._connection.server_state.default_headers])
        head = b"%b%b%b%b\r\n" % (STATUS_LINE[status], default, self.common, headers)
        self.status = status
        return head

    def _write(self, data: bytes) -> None:
        if not self.disconnected:
            self._connection.transport.write(data)

    def _end(self) -> None:
        self.response_complete = True
        self.close_body()
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


def _has_small_body(headers: Headers) -> bool:
    length = next((value for name, value in headers if name == b"content-length"), b"")
    return length.isdigit() and int(length) <= _SMALL_BYTES


def too_long(limit: int) -> HTTPException:
    """Return the error for a body that is too long."""
    return HTTPException(413, f"the body must be at most {limit} bytes", headers={"connection": "close"})


def too_late(limit_s: float) -> HTTPException:
    """Return the error for a body that arrives too slowly."""
    return HTTPException(408, f"the body did not arrive within {limit_s:g} s")


class Crowd:
    """Bounds the connections of one server, because file descriptors are limited.

    Connections that have not sent a complete head may be half of all. For one more, the oldest such connection of the
    client with the most of them is closed, so that silent clients keep no others out. When all connections are taken,
    such a connection is closed, or the one that has been idle for longest; else the new one is refused with 503.
    """

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._silent: dict[HttpProtocol, float] = {}
        self._refused: set[HttpProtocol] = set()
        self._warned_at = -_WARNING_INTERVAL_S

    def admit(self, connection: HttpProtocol) -> bool:
        """Return whether a new connection is accepted."""
        most = self._handler.options.max_connections
        self._silent[connection] = connection.loop.time()
        room = len(connection.connections) - len(self._refused) <= most
        if not room or len(self._silent) > max(1, most // 2):
            oldest = self._longest_silent()
            if oldest is not connection and oldest.loop.time() - self._silent[oldest] >= oldest.silence_s:
                self._close(oldest, "slow")
                return True
        if room:
            return True
        others = (each for each in connection.connections if isinstance(each, HttpProtocol))
        idle = [(each.idle_since, each) for each in others if each.idle_since is not None]
        if idle:
            self._close(min(idle, key=lambda item: item[0])[1], "idle")
            return True
        del self._silent[connection]
        self._count("full", connection)
        return False

    def refuse(self, connection: HttpProtocol) -> float:
        """Return the seconds that a refused connection may stay open; 0 if too many do."""
        self._refused.add(connection)
        return _REFUSED_S if len(self._refused) <= max(8, self._handler.options.max_connections // 6) else 0.0

    def on_head(self, connection: HttpProtocol) -> None:
        """Record that a connection has sent a complete head."""
        self._silent.pop(connection, None)

    def forget(self, connection: HttpProtocol) -> None:
        """Record that a connection has closed."""
        self.on_head(connection)
        self._refused.discard(connection)

    def _longest_silent(self) -> HttpProtocol:
        ((busiest, _),) = Counter(each.host for each in self._silent).most_common(1)
        return next(each for each in self._silent if each.host == busiest)

    def _close(self, connection: HttpProtocol, reason: str) -> None:
        self.on_head(connection)
        self._count(reason, connection)
        connection.transport.abort()

    def _count(self, reason: str, connection: HttpProtocol) -> None:
        self._handler.metrics.count_turned_away(reason)
        now = connection.loop.time()
        if now >= self._warned_at + _WARNING_INTERVAL_S:
            self._warned_at = now
            log.warning(
                "%d connections are open, of at most %d: some are closed or refused (%s, from %s)",
                len(connection.connections),
                self._handler.options.max_connections,
                reason,
                connection.host,
            )


class _ReadFlow(FlowControl):
    """Flow control of a connection that reads nothing more while it has requests that are not parsed yet."""

    stopped = False

    def stop_reading(self) -> None:
        """Pause reading until :meth:`allow_reading`, even if something else resumes it."""
        self.stopped = True
        self.pause_reading()

    def allow_reading(self) -> None:
        """Resume reading, if it was stopped."""
        if self.stopped:
            self.stopped = False
            self.resume_reading()

    def resume_reading(self) -> None:
        """Resume reading, unless it is stopped."""
        if not self.stopped:
            super().resume_reading()


class HttpProtocol(HttpToolsProtocol):
    """One connection. Create a server's class with :meth:`serving`.

    POST requests to the handler's paths become an :class:`HttpExchange`; all others go to uvicorn's ASGI application.

    Connections are closed if their request line and headers are too long or too late. The bounds of bodies are checked
    where they are read; uvicorn bounds idle connections between two requests. A connection whose client does not read
    is aborted: closing it would wait for the client, and keep the socket and unsent data until then.

    An ``Upgrade`` is ignored, as RFC 9110 allows: clients that offer HTTP/2 this way (Java's do on every request) get
    their answer over HTTP/1.1. The parser reads no body of such a request, so it is parsed again without the offer.

    If a body continues after its request's answer, the rest is read and dropped, within bounds. Closing the connection
    at once might lose the answer; waiting without bounds would keep it forever.

    A malformed request is answered after the earlier requests, and ends its connection.

    Few pipelined requests are parsed ahead, at most one in a turn of the event loop, and none while the client does not
    read its answers. What has arrived behind them waits as bytes, and nothing more is read.

    Attributes:
        handler: Serves the endpoints that need no ASGI.
        crowd: Bounds the connections of the server.
        max_head_bytes: Most bytes of a head, not counting the read that it begins in.
        silence_s: Seconds without a complete head after which a connection may be closed in favour of others.
        head_timeout_s: Seconds from the connection, or from a head's first byte, to its end.
        drain_s: Seconds from an answer to the end of its request's body.
    """

    handler: Handler
    crowd: Crowd
    flow: _ReadFlow
    cycle: Any
    pipeline: deque[tuple[Any, Any]]
    max_head_bytes = MAX_HEAD_BYTES
    head_timeout_s = HEAD_TIMEOUT_S
    silence_s = SILENCE_S
    drain_s = DRAIN_S

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Create a connection with uvicorn's arguments."""
        super().__init__(*args, **kwargs)
        self._in_head = True
        self._serving: Any = None
        """The request that is answered now, a cycle of uvicorn or an exchange. Later ones wait in :attr:`pipeline`;
        :attr:`cycle` is the last of them."""
        self._untaken = 0
        self._send_timer: TimerHandle | None = None
        self._head_bytes = 0
        self._head_timer: TimerHandle | None = None
        self._refused = False
        """Whether all further input is dropped."""
        self._refusal = b""
        """The last answer, which waits for earlier ones."""
        self._idle_since: float | None = None
        """End of the last request and its answer, by the loop's clock; ``None`` once another request has begun."""
        self._in_body = False
        self._drain_timer: TimerHandle | None = None
        self._drained = 0
        self._unparsed = b""
        """Data with requests that wait to be parsed, of which :attr:`_parsed_to` bytes are."""
        self._parsed_to = 0
        self._num_parsed = 0
        self._turn: Handle | None = None
        """Parses the next request in the next turn of the loop."""

    @classmethod
    def serving(cls, handler: Handler) -> type[HttpProtocol]:
        """Return the class of a server's connections, for uvicorn's ``http=`` setting."""
        return type(cls.__name__, (cls,), {"handler": handler, "crowd": Crowd(handler)})

    @property
    def host(self) -> str:
        """Address of the client."""
        return self.client[0] if self.client else ""

    @property
    def idle_since(self) -> float | None:
        """End of the last answer, by the loop's clock; ``None`` if data has arrived since."""
        return None if self.transport.is_closing() or self._unparsed else self._idle_since

    # --- the connection ---

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time-out of the first head."""
        super().connection_made(transport)
        self.flow = _ReadFlow(transport)
        if self.crowd.admit(self):
            self._head_timer = self.loop.call_later(self.head_timeout_s, self.transport.close)
            return
        # Not closed at once: data that arrives meanwhile would reset the connection before the answer is read.
        self._refused = True
        self.transport.write(_FULL)
        self._head_timer = self.loop.call_later(self.crowd.refuse(self), self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        """End all requests of the connection."""
        self.crowd.forget(self)
        self._end_head()
        self._end_watch()
        self._end_drain()
        self._unparsed = b""
        if self._turn is not None:
            self._turn.cancel()
        self._unset_keepalive_if_required()
        for item in (self._serving, *(cycle for cycle, _ in self.pipeline)):
            if isinstance(item, HttpExchange):
                item.on_connection_lost()
            elif item is not None and not item.response_complete:
                item.disconnected = True
                item.message_event.set()
        self._serving = self.cycle = None
        self.pipeline.clear()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Close after the requests that have begun."""
        super().shutdown()
        self._watch_closing()

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection; wait again if a request has arrived meanwhile."""
        self.timeout_keep_alive_task = None
        if self._idle_since is None:
            return  # the next answer's end begins to wait again
        left = self._idle_since + self.timeout_keep_alive - self.loop.time()
        if self._unparsed:
            left = self.timeout_keep_alive  # the next request waits until the client reads the answers
        if left > 0:
            self.timeout_keep_alive_task = self.loop.call_later(left, self.timeout_keep_alive_handler)
            return
        super().timeout_keep_alive_handler()
        self._watch_closing()

    # --- input ---

    def data_received(self, data: bytes) -> None:
        """Count the bytes of a head, and parse."""
        if self._refused:
            return
        if self._drain_timer is not None:
            # What is dropped must cost less than what is served: a few reads a second, and no parsing if nothing
            # behind it will be answered.
            self.flow.pause_reading()
            self.loop.call_later(_DRAIN_PAUSE_S, self.flow.resume_reading)
            if not self.cycle.keep_alive:
                self._drop(data)
                return
        if self._unparsed:
            self._unparsed = self._unparsed[self._parsed_to :] + data
            self._parsed_to = 0
            return
        self._unparsed = data
        self._parsed_to = 0
        self._parse_unparsed()

    def _parse_unparsed(self) -> None:
        """Parse the requests that have arrived: one if there are several, none if enough wait for their answers."""
        self._turn = None
        num_parsed = self._num_parsed
        while self._unparsed:
            if self._num_parsed != num_parsed or self._has_enough():
                self.flow.stop_reading()
                break
            piece = self._next_piece()
            self._head_bytes += len(piece)
            try:
                self._parse(piece)
            except httptools.HttpParserError as error:
                self._refuse(_find_refusal(error))
                return
        else:
            self.flow.allow_reading()
        self._continue()
        if self._in_head and self._head_timer is None:  # the rest of a head is still to come
            self._head_timer = self.loop.call_later(self.head_timeout_s, self.transport.close)
        if self._head_bytes > self.max_head_bytes and not self.transport.is_closing():
            if self._in_head and not self.headers and len(self.url) > MAX_TARGET_BYTES:
                self._refuse(too_long_target())
            else:
                self._refuse(HTTPException(431, "the request head is too large"))
        elif isinstance(self._serving, HttpExchange):
            self._serving.await_body()

    def _has_enough(self) -> bool:
        """Return whether parsing waits until requests are answered, and their answers written."""
        if self.flow.write_paused:
            return bool(self.pipeline) or (self._serving is None and not self._in_body)
        return len(self.pipeline) >= MAX_PIPELINED

    def _continue(self) -> None:
        """Parse the next request in the next turn of the loop, if there is one and room for it."""
        if self._unparsed and self._turn is None and not self._has_enough():
            self._turn = self.loop.call_soon(self._parse_unparsed)

    def _next_piece(self) -> bytes:
        """Return the data that are parsed next: up to the end of a head, or all if there is at most one.

        Bodies can have such ends too. So that many of them cost little, a piece that begins in a body is longer: it can
        end three heads.
        """
        data, start = self._unparsed, self._parsed_to
        least = _LEAST_PIECE if self._in_body else _LEAST_HEAD
        end = data.find(_HEAD_END, start + least - len(_HEAD_END)) + len(_HEAD_END)
        # Almost all requests come alone, most of them with a body of JSON in one line: one byte is found faster.
        if end < len(_HEAD_END) or data.find(b"\r", end) < 0 or data.find(_HEAD_END, end) < 0:
            self._unparsed = b""
            return data[start:] if start else data
        self._parsed_to = end
        return data[start:end]

    def _parse(self, data: bytes) -> None:
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = self._head_without_upgrade() + data[upgrade.args[0] :]
                self.parser = httptools.HttpRequestParser(self)

    def _head_without_upgrade(self) -> bytes:
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s\r\n" % (self.parser.get_method(), self.url, version)]
        lines += [b"%s: %s\r\n" % (name, value) for name, value in self.headers if name not in _UPGRADE_HEADERS]
        return b"".join(lines) + b"\r\n"

    def on_message_begin(self) -> None:
        """Start a request's head; the first head starts with the connection."""
        super().on_message_begin()
        self._idle_since = None  # the one before may have been answered while it was parsed
        if not self._in_head:
            self._in_head = True
            self._head_bytes = 0

    def on_headers_complete(self) -> None:
        """End a request's head.

        Raises:
            HTTPException: The head is refused.
        """
        if self.transport.is_closing():
            raise HTTPException(400, "the connection ends with the request before")
        method = self.parser.get_method()
        version = self.parser.get_http_version()
        refused = check_head(method, self.url, version, self.headers)
        if refused is not None:
            raise refused
        if self.parser.should_upgrade():
            return
        if version == "1.0":
            self.expect_100_continue = False
        self._end_head()
        self._in_body = True
        in_turn = self.cycle is None or self.cycle.response_complete
        path = None
        if method == b"POST":
            path = self.handler.paths.get(self.url) or self.handler.paths.get(self._path())
        if path is None:
            super().on_headers_complete()
        else:
            exchange = HttpExchange(self, self.handler, path, in_turn=in_turn)
            self.cycle = exchange
            if not in_turn:
                self.flow.pause_reading()
                self.pipeline.appendleft((exchange, None))
        if in_turn:
            self._serving = self.cycle
        # Trailers after the body are not the request's headers: a proxy that checks heads has not seen them.
        self.headers = []

    def _path(self) -> bytes:
        path: bytes = httptools.parse_url(self.url).path
        return urllib.parse.unquote_to_bytes(path) if b"%" in path else path

    def on_body(self, body: bytes) -> None:
        """Pass a piece of a body to its request."""
        self._head_bytes = 0
        if self._drain_timer is not None:
            self._drop(body)
        elif isinstance(self.cycle, HttpExchange):
            self.cycle.on_body(body)
        else:
            super().on_body(body)

    def _drop(self, data: bytes) -> None:
        """Count a piece of a body that is not read any more."""
        self._drained += len(data)
        if self._drained > _DRAIN_FACTOR * self.handler.max_body_bytes():
            self.transport.close()

    def on_message_complete(self) -> None:
        """End a request, unless it is parsed again without its upgrade offer."""
        if self.parser.should_upgrade():
            return
        self._in_body = False
        self._num_parsed += 1
        if self._drain_timer is not None:
            self._end_drain()
            if self.cycle is None or self.cycle.keep_alive:
                self._wait_idle()
            else:
                self.transport.close()
        elif isinstance(self.cycle, HttpExchange):
            self.cycle.on_body_complete()
        else:
            super().on_message_complete()

    def _refuse(self, error: HTTPException) -> None:
        """Drop all further input, and answer the malformed request in turn."""
        self._refused = True
        self._unparsed = b""
        self.flow.allow_reading()
        if self.transport.is_closing():
            return  # behind the last request that is answered
        if not self._in_body:
            self._end_head()
            self._refusal = refusal(error, self.server_state.default_headers)
            self.handler.metrics.begin(NO_ENDPOINT)
            self.handler.metrics.end(NO_ENDPOINT, error.status_code, 0.0)
            if self._serving is None and not self.pipeline:
                self._linger()
        elif self._drain_timer is not None:  # its request has been answered
            self.transport.close()
        elif isinstance(self.cycle, HttpExchange):
            self.cycle.refuse(error)
        else:
            self.cycle.keep_alive = False

    def _linger(self) -> None:
        """Send the refusal, and close when the client can have read it."""
        # Not closed at once: data that arrives meanwhile would reset the connection before the answer is read.
        self.transport.write(self._refusal)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._head_timer = self.loop.call_later(_REFUSED_S, self.transport.close)

    # --- output ---

    def on_response_complete(self) -> None:
        """Start the next waiting request, if there is one."""
        self._serving = None
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            self._unparsed = b""
            self._watch_closing()
            return
        self.flow.resume_reading()
        if self.pipeline:
            if not self.flow.write_paused:
                self._serve_next()
        elif self._refused:
            self._linger()
        elif self._in_body:
            self._drained = 0
            self._drain_timer = self.loop.call_later(self.drain_s, self.transport.close)
            if not self.cycle.keep_alive and self.transport.can_write_eof():
                self.transport.write_eof()  # clients that read to the end need not wait
        else:
            self._wait_idle()
        self._continue()

    def _serve_next(self) -> None:
        """Serve the oldest request that waits."""
        item, app = self.pipeline.pop()
        self._serving = item
        if isinstance(item, HttpExchange):
            self.loop.call_soon(item.start_turn)
        else:
            self._start_asgi_task(item, app)

    def _wait_idle(self) -> None:
        """Wait for the next request."""
        # One timer goes on through many requests: a new one for each costs more than a look at the clock.
        self._idle_since = self.loop.time()
        if self.timeout_keep_alive_task is None:
            limit = self.timeout_keep_alive
            self.timeout_keep_alive_task = self.loop.call_later(limit, self.timeout_keep_alive_handler)

    def pause_writing(self) -> None:
        """The client does not keep up."""
        super().pause_writing()
        self._watch_writes()
        self._tell_flow(paused=True)

    def resume_writing(self) -> None:
        """The client has caught up."""
        super().resume_writing()
        self._end_watch()
        self._watch_closing()
        self._tell_flow(paused=False)
        if self._serving is None and self.pipeline and not self.transport.is_closing():
            self._serve_next()
        self._continue()

    def _watch_closing(self) -> None:
        if self.transport.is_closing():
            self._watch_writes()

    def _watch_writes(self) -> None:
        """Cut the client off if it takes nothing of what waits for it: soon, if sequences wait for it as well."""
        if self._send_timer is None:
            self._untaken = self.transport.get_write_buffer_size()
            if self._untaken:
                options = self.handler.options
                streams = isinstance(self._serving, HttpExchange) and self._serving.on_flow is not None
                limit = options.stream_timeout_s if streams else options.send_timeout_s
                self._send_timer = self.loop.call_later(limit, self._check_writes)

    def _check_writes(self) -> None:
        self._send_timer = None
        if self.transport.get_write_buffer_size() < self._untaken:  # slow, but it reads
            self._watch_writes()
        else:
            self.transport.abort()

    def _end_watch(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def _tell_flow(self, *, paused: bool) -> None:
        if isinstance(self._serving, HttpExchange) and self._serving.on_flow is not None:
            self._serving.on_flow(paused)

    def _end_drain(self) -> None:
        if self._drain_timer is not None:
            self._drain_timer.cancel()
            self._drain_timer = None

    def _end_head(self) -> None:
        self._in_head = False
        self._head_bytes = 0
        self.crowd.on_head(self)
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
