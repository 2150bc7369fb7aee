"""uvicorn's HTTP protocol with bounds on what comes before a request's body, and deaf to offers of other protocols."""

from __future__ import annotations

import asyncio
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024
HEAD_TIMEOUT_S = 30.0
_UPGRADE_HEADERS = frozenset({b"upgrade", b"http2-settings"})
_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"content-type: text/plain; charset=utf-8\r\ncontent-length: 29\r\nconnection: close\r\n\r\n"
    b"The request head is too large"
)


class BoundedProtocol(HttpToolsProtocol):
    """Ends connections whose request line and headers are too long, or don't come.

    Bodies have bounds of their own where they are read, and idle connections between two requests have uvicorn's.

    An ``Upgrade`` is ignored, as a server may: clients that offer HTTP/2 so (Java's do with every request) get their
    answer over HTTP/1.1. The parser gives such a request no body, so it is parsed again without the offer.

    Attributes:
        max_head_bytes: Bytes of a head, but for the read it begins in.
        head_timeout_s: Seconds from the connection, or from a head's first byte, to its end.
    """

    max_head_bytes = MAX_HEAD_BYTES
    head_timeout_s = HEAD_TIMEOUT_S

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take what uvicorn gives its protocols."""
        super().__init__(*args, **kwargs)
        self._in_head = True
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a head."""
        super().connection_made(transport)
        self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._end_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Count the bytes of a head, and parse."""
        if self._in_head:
            self._head_bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
            return
        if self._in_head and self._head_bytes > self.max_head_bytes and not self.transport.is_closing():
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
        super().on_message_begin()
        if not self._in_head:
            self._begin_head()

    def on_headers_complete(self) -> None:
        """End a request's head."""
        if not self._offers_upgrade():
            self._end_head()
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        """End a request, but for one that comes again without its offer."""
        if not self._offers_upgrade():
            super().on_message_complete()

    def _offers_upgrade(self) -> bool:
        return bool(self.parser.should_upgrade()) and self.parser.get_method() != b"CONNECT"

    def _begin_head(self) -> None:
        self._in_head, self._head_bytes = True, 0
        self._head_timer = self.loop.call_later(self.head_timeout_s, self.transport.close)

    def _end_head(self) -> None:
        self._in_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
