"""uvicorn's HTTP protocol with bounds on what comes before a request's body, and deaf to offers of other protocols."""

from __future__ import annotations

import asyncio
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from baton_router.frontend.http.cycle import JoiningCycle
from baton_router.frontend.http.http_exchange import Direct, Exchange

MAX_HEAD_BYTES = 64 * 1024
HEAD_TIMEOUT_S = 30.0
SEND_TIMEOUT_S = 60.0
_EARLY_BYTES = 2**20
_BODY_WAIT_S = 0.1
"""Bodies up to this length are gathered for so long, for requests that are served without ASGI once they are whole."""
DISCONNECT = "baton.disconnect"
"""Extension of the ASGI scope: ``call`` takes a function to be called when the client has gone. Cheaper than a task."""
_UPGRADE_HEADERS = frozenset({b"upgrade", b"http2-settings"})
_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"content-type: text/plain; charset=utf-8\r\ncontent-length: 29\r\nconnection: close\r\n\r\n"
    b"The request head is too large"
)


_JSON = frozenset({b"application/json", b"application/json; charset=utf-8"})
_TELLING = frozenset({b"expect", b"content-type", b"content-encoding"})
"""Headers that decide how a request is served."""


class BoundedProtocol(HttpToolsProtocol):
    """Ends connections whose request line and headers are too long, or don't come.

    Bodies have bounds of their own where they are read, and idle connections between two requests have uvicorn's.
    A connection whose client takes nothing of what was written is broken, whoever wrote it: closing it would wait for
    the client, and its socket and what it was not sent would stay for as long as that likes.

    An ``Upgrade`` is ignored, as a server may: clients that offer HTTP/2 so (Java's do with every request) get their
    answer over HTTP/1.1. The parser gives such a request no body, so it is parsed again without the offer.

    Attributes:
        max_head_bytes: Bytes of a head, but for the read it begins in, and of what else is no body.
        head_timeout_s: Seconds from the connection, or from a head's first byte, to its end.
        send_timeout_s: Seconds that a client may take nothing while something waits for it.
    """

    max_head_bytes = MAX_HEAD_BYTES
    head_timeout_s = HEAD_TIMEOUT_S
    send_timeout_s = SEND_TIMEOUT_S
    _default_lines: tuple[Any, bytes] = (None, b"")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take what uvicorn gives its protocols."""
        super().__init__(*args, **kwargs)
        self._in_head = True
        self._serving: Any = None
        """What is answered now: requests that came behind it wait in line, and :attr:`cycle` is the last of them."""
        self._direct: Direct | None = getattr(self.app, "direct", None)
        self.send_timeout_s = getattr(self.app, "send_timeout_s", self.send_timeout_s)
        self._untaken = 0
        self._send_timer: asyncio.TimerHandle | None = None
        self._early: list[bytes] | None = None
        self._early_bytes = 0
        self._early_timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._idle_since: float | None = None
        """When the last answer was complete, by the loop's clock; ``None``: something has come since."""
        self._may_be_json = True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a head."""
        super().connection_made(transport)
        self._head_timer = self.loop.call_later(self.head_timeout_s, self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._end_head()
        self._end_watch()
        self._unset_keepalive_if_required()
        if self._early is not None:  # a request that was cut short is one, too
            self._begin_cycle()
        super().connection_lost(exc)
        serving = self._serving
        if serving is not None and not serving.response_complete:
            serving.disconnected = True
            serving.message_event.set()
            serving.lost()

    def shutdown(self) -> None:
        """Let what has begun be served, and close then."""
        if self._early is not None:
            self._begin_cycle()
        super().shutdown()
        self._watch_closing()

    def timeout_keep_alive_handler(self) -> None:
        """End a connection on which no request comes; where one came meanwhile, wait on."""
        self.timeout_keep_alive_task = None
        if self._idle_since is None:
            return  # the next answer's end begins to wait again
        left = self._idle_since + self.timeout_keep_alive - self.loop.time()
        if left > 0:
            self.timeout_keep_alive_task = self.loop.call_later(left, self.timeout_keep_alive_handler)
            return
        super().timeout_keep_alive_handler()
        self._watch_closing()

    def data_received(self, data: bytes) -> None:
        """Count the bytes of a head, and parse."""
        self._head_bytes += len(data)
        self._idle_since = None
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
            return
        if self._early is not None and self._early_timer is None:  # the rest of the body is still to come
            self._early_timer = self.loop.call_later(_BODY_WAIT_S, self._begin_cycle)
        if self._in_head and self._head_timer is None:  # and so is the rest of a head
            self._head_timer = self.loop.call_later(self.head_timeout_s, self.transport.close)
        if self._head_bytes > self.max_head_bytes and not self.transport.is_closing():
            self.transport.write(_TOO_LARGE)
            self.transport.close()

    def _parse(self, data: bytes) -> None:
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = self._head_without_upgrade() + data[upgrade.args[0] :]
                self.parser = httptools.HttpRequestParser(self)

    def _head_without_upgrade(self) -> bytes:
        lines = [b"%s %s HTTP/1.1\r\n" % (self.parser.get_method(), self.url)]
        for name, value in self.headers:
            if name == b"connection":
                tokens = [token.strip().lower() for token in value.split(b",")]
                value = b", ".join(token for token in tokens if token not in _UPGRADE_HEADERS)
            if value and name not in _UPGRADE_HEADERS:
                lines.append(b"%s: %s\r\n" % (name, value))
        return b"".join(lines) + b"\r\n"

    def on_message_begin(self) -> None:
        """Begin a request's head; the first one's began with the connection."""
        self.url, self.headers, self.expect_100_continue = b"", [], False  # no scope, which ASGI alone wants
        self._may_be_json = True
        self._idle_since = None  # the one before may have been answered while it was parsed
        if not self._in_head:
            self._begin_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; those behind a body are none: whoever looks at a head before us has not seen them there."""
        if self._in_head:
            name = name.lower()
            if name in _TELLING:
                self._note(name, value.lower())
            self.headers.append((name, value))

    def _note(self, name: bytes, value: bytes) -> None:
        if name == b"expect":
            self.expect_100_continue = self.expect_100_continue or value == b"100-continue"
        elif name == b"content-encoding" or value not in _JSON:
            self._may_be_json = False

    def on_headers_complete(self) -> None:
        """End a request's head.

        Raises:
            ValueError: It is for a proxy.
        """
        method = self.parser.get_method()
        if method == b"CONNECT":
            raise ValueError("this is no proxy")
        if not self._offers_upgrade():
            self._end_head()
            if method == b"POST" and self._may_be_direct():
                self._early = []
            else:
                self._begin_cycle()

    def on_body(self, body: bytes) -> None:
        """Take a piece of a body."""
        self._head_bytes = 0
        if self._early is None:
            super().on_body(body)
            return
        self._early.append(body)
        self._early_bytes += len(body)
        if self._early_bytes > _EARLY_BYTES:
            self._begin_cycle()

    def on_message_complete(self) -> None:
        """End a request, but for one that comes again without its offer."""
        if self._early is not None:
            assert self._direct is not None
            body = b"".join(self._early)
            self._end_early()
            if len(body) <= self._direct.max_body_bytes:
                before: Any = self.cycle
                exchange = Exchange(self, self._direct.paths[self.url], body)
                cycle: Any = exchange
                self.cycle = self._serving = cycle
                if self._direct.serve(exchange):
                    return
                self.cycle, self._serving = before, None
            self._early = [body]
            self._begin_cycle()
        if not self._offers_upgrade():
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """Go on with the request that waits, if there is one."""
        if self.pipeline or self.transport.is_closing():
            self._serving = self.pipeline[-1][0] if self.pipeline else None
            super().on_response_complete()
            self._watch_closing()
            return
        self._serving = None
        self.server_state.total_requests += 1
        self.flow.resume_reading()
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

    def default_lines(self) -> bytes:
        """Return the headers that every answer has, which uvicorn makes anew once a second."""
        headers = self.server_state.default_headers
        known, lines = BoundedProtocol._default_lines
        if known is not headers:
            lines = b"".join(b"%b: %b\r\n" % header for header in headers)
            BoundedProtocol._default_lines = headers, lines
        return lines

    def _watch_closing(self) -> None:
        if self.transport.is_closing():
            self._watch_writes()

    def _watch_writes(self) -> None:
        """See to it that the client takes what waits for it, or is cut off."""
        if self._send_timer is None:
            self._untaken = self.transport.get_write_buffer_size()
            if self._untaken:
                self._send_timer = self.loop.call_later(self.send_timeout_s, self._check_writes)

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
        callback = getattr(self._serving, "on_flow", None)
        if callback is not None:
            callback(paused)

    def _may_be_direct(self) -> bool:
        """Whether a POST request that has begun can be served without ASGI, if its body comes with its head."""
        direct = self._direct
        if direct is None or self.url not in direct.paths or self.expect_100_continue:
            return False
        if self.cycle is not None and not self.cycle.response_complete:  # requests wait in line
            return False
        return self._may_be_json and bool(self.parser.get_http_version() == "1.1")

    def _begin_cycle(self) -> None:
        """Let uvicorn serve the request, as far as it has come."""
        url, headers, expects = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()  # makes the scope
        self.url, self.expect_100_continue = url, expects
        self.headers.extend(headers)
        super().on_headers_complete()
        cycle: Any = self.cycle  # made just now by uvicorn, which lets nobody choose the class
        cycle.__class__ = JoiningCycle
        if not self.pipeline or self.pipeline[0][0] is not cycle:
            self._serving = cycle
        self.scope["extensions"] = {DISCONNECT: {"call": cycle.on_disconnect}}
        early = self._early or ()
        self._end_early()
        for piece in early:
            super().on_body(piece)

    def _end_early(self) -> None:
        self._early, self._early_bytes = None, 0
        if self._early_timer is not None:
            self._early_timer.cancel()
            self._early_timer = None

    def _offers_upgrade(self) -> bool:
        return bool(self.parser.should_upgrade())

    def _begin_head(self) -> None:
        self._in_head, self._head_bytes = True, 0

    def _end_head(self) -> None:
        self._in_head, self._head_bytes = False, 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
