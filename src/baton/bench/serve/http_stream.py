"""HTTP for the load: answers that are event streams, with the time at which each event came out of the socket.

General clients spend more on an event than a fast service does, so that under load their own queue is measured. Here an
event costs a parser's callback and two searches, and its time is taken before either.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

import httptools

OnEvent = Callable[[bytes, float], None]
"""Gets the data of each event and when it came, in seconds of ``time.perf_counter``."""


class BrokenStreamError(Exception):
    """The connection ended before the answer did."""


@dataclass(slots=True)
class Answer:
    """Status and headers of an answer, and its body where that is no event stream."""

    status: int = 0
    content_type: str = ""
    body: bytearray = field(default_factory=bytearray)

    @property
    def is_stream(self) -> bool:
        """Whether its body are events."""
        return self.status == 200 and self.content_type.startswith("text/event-stream")


class _Connection(asyncio.Protocol):
    """One connection with one request at a time."""

    def __init__(self) -> None:
        self.open = False
        self.reused = False
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[None] | None = None
        self._reset(None)

    def _reset(self, on_event: OnEvent | None) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._on_event = on_event
        self.answer = Answer()
        self._rest = b""
        self._data: list[bytes] = []
        self._now = 0.0
        self.started = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self.open = cast(asyncio.Transport, transport), True  # uvloop's is none by name

    def connection_lost(self, exc: Exception | None) -> None:
        self.open = False
        if self._done is not None and not self._done.done():
            self._done.set_exception(BrokenStreamError(str(exc) if exc else "the service closed the connection"))

    def data_received(self, data: bytes) -> None:
        self._now, self.started = time.perf_counter(), True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"no HTTP: {error}")

    def _fail(self, why: str) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(BrokenStreamError(why))
        self.close()

    # --- the parser's calls ---

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-type":
            self.answer.content_type = value.decode("latin-1").lower()

    def on_headers_complete(self) -> None:
        self.answer.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if not self.answer.is_stream:
            self.answer.body += body
            return
        *lines, self._rest = (self._rest + body).split(b"\n")
        for line in lines:
            line = line.rstrip(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].strip())
            elif not line and self._data:
                data, self._data = b"\n".join(self._data), []
                if self._on_event is not None:
                    self._on_event(data, self._now)

    def on_message_complete(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(None)
        if not self._parser.should_keep_alive():
            self.close()

    async def exchange(self, request: bytes, on_event: OnEvent) -> Answer:
        """Send a request and read its answer.

        Raises:
            BrokenStreamError: The connection ended first.
        """
        if self._transport is None:
            raise BrokenStreamError("not connected")
        self._reset(on_event)
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        await self._done
        return self.answer

    def close(self) -> None:
        """End the connection."""
        self.open = False
        if self._transport is not None:
            self._transport.close()


class HttpClient:
    """Connections to one service, kept for further requests.

    Args:
        url: Of the service, e.g. ``http://127.0.0.1:8000``; its path comes before that of requests.
        headers: Sent with every request.
        context: For ``https``.
    """

    def __init__(self, url: str, headers: dict[str, str], context: ssl.SSLContext | None = None) -> None:
        parts = urlsplit(url)
        secure = parts.scheme == "https"
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if secure else 80)
        self._path = parts.path.rstrip("/")
        self._context = (context or ssl.create_default_context()) if secure else None
        self._idle: list[_Connection] = []
        self._head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self._netloc = parts.netloc.rpartition("@")[2]

    async def send(self, method: str, path: str, body: bytes, on_event: OnEvent) -> Answer:
        """Send a request, and read its answer to the end.

        Raises:
            OSError: The service cannot be reached.
            BrokenStreamError: The connection ended before the answer.
        """
        head = (
            f"{method} {self._path}{path} HTTP/1.1\r\nHost: {self._netloc}\r\n{self._head}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        request = head.encode("latin-1") + body
        while True:
            connection = await self._connection()
            try:
                answer = await connection.exchange(request, on_event)
            except BrokenStreamError:
                if connection.reused and not connection.started:
                    continue  # the service had closed it while it was idle
                raise
            except BaseException:
                connection.close()
                raise
            if connection.open:
                self._idle.append(connection)
            return answer

    async def _connection(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.open:
                connection.reused = True
                return connection
        loop = asyncio.get_running_loop()
        _, made = await loop.create_connection(_Connection, self._host, self._port, ssl=self._context)
        return made

    def close(self) -> None:
        """End idle connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()
