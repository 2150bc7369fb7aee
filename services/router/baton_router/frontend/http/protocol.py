"""uvicorn's HTTP protocol with endpoints that are served without ASGI, and with bounds on heads.

Request heads are checked after RFC 9110 and RFC 9112. uvicorn gets the protocol by its ``http=`` setting, and creates
one per connection.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import urllib.parse
from collections import Counter, deque
from typing import Any

import httptools
import orjson
from starlette.exceptions import HTTPException
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from baton_router.frontend.http.errors import error_object, http_error_code
from baton_router.frontend.http.http_exchange import Handler, HttpExchange
from baton_router.frontend.http.middleware import NO_ENDPOINT, Headers, request_id

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
"""Bounds on the rest of a body that is dropped after the answer: in longest bodies, and in seconds."""
_UPGRADE_HEADERS = frozenset({b"upgrade", b"http2-settings"})
_FULL_BODY = json.dumps(
    error_object(503, "this router has all the connections it can take", code="overloaded")
).encode()
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\n"
    b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(_FULL_BODY), _FULL_BODY)
)
_REFUSED_S = 1.0
"""Seconds that a refused client has to read the error."""
_WARNING_INTERVAL_S = 60.0


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
        self._send_timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._refused = False
        """Whether all further input is dropped."""
        self._refusal = b""
        """The last answer, which waits for earlier ones."""
        self._idle_since: float | None = None
        """End of the last request and its answer, by the loop's clock; ``None`` once another request has begun."""
        self._in_body = False
        self._drain_timer: asyncio.TimerHandle | None = None
        self._drained = 0

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
        return None if self.transport.is_closing() else self._idle_since

    # --- the connection ---

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time-out of the first head."""
        super().connection_made(transport)
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
        self._head_bytes += len(data)
        try:
            self._parse(data)
        except httptools.HttpParserError as error:
            cause = error.__context__
            self._refuse(cause if isinstance(cause, HTTPException) else unreadable(error))
            return
        if self._in_head and self._head_timer is None:  # the rest of a head is still to come
            self._head_timer = self.loop.call_later(self.head_timeout_s, self.transport.close)
        if self._head_bytes > self.max_head_bytes and not self.transport.is_closing():
            if self._in_head and not self.headers and len(self.url) > MAX_TARGET_BYTES:
                self._refuse(too_long_target())
            else:
                self._refuse(HTTPException(431, "the request head is too large"))
        elif isinstance(self._serving, HttpExchange):
            self._serving.await_body()

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
            exchange = HttpExchange(self, self.handler, path)
            exchange.in_turn = in_turn
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
            self._drained += len(body)
            if self._drained > _DRAIN_FACTOR * self.handler.options.max_body_bytes:
                self.transport.close()
        elif isinstance(self.cycle, HttpExchange):
            self.cycle.on_body(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """End a request, unless it is parsed again without its upgrade offer."""
        if self.parser.should_upgrade():
            return
        self._in_body = False
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
        if self.transport.is_closing():
            return  # behind the last request that is answered
        if not self._in_body:
            self._end_head()
            self._refusal = refusal(error, self.server_state.default_headers)
            self.handler.metrics.begin(NO_ENDPOINT)
            self.handler.metrics.end(NO_ENDPOINT, error.status_code, 0.0)
            if self._serving is None:
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
            self._watch_closing()
            return
        self.flow.resume_reading()
        if self.pipeline:
            item, app = self.pipeline.pop()
            self._serving = item
            if isinstance(item, HttpExchange):
                self.loop.call_soon(item.start_turn)
            else:
                self._start_asgi_task(item, app)
            return
        if self._refused:
            self._linger()
        elif self._in_body:
            self._drained = 0
            self._drain_timer = self.loop.call_later(self.drain_s, self.transport.close)
            if not self.cycle.keep_alive and self.transport.can_write_eof():
                self.transport.write_eof()  # clients that read to the end need not wait
        else:
            self._wait_idle()

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

    def _watch_closing(self) -> None:
        if self.transport.is_closing():
            self._watch_writes()

    def _watch_writes(self) -> None:
        """Cut the client off if it takes nothing of what waits for it."""
        if self._send_timer is None:
            self._untaken = self.transport.get_write_buffer_size()
            if self._untaken:
                limit = self.handler.options.send_timeout_s
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
