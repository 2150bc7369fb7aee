"""uvicorn's cycle of one request through ASGI, with fewer writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle


class JoiningCycle(RequestResponseCycle):
    """uvicorn's cycle of one request, except that an answer's head leaves with the first piece of its body.

    Two writes are two system calls and wake the client twice, which costs more than writing the answer.
    """

    _head = b""
    _gone: Callable[[], None] | None = None

    def on_disconnect(self, callback: Callable[[], None] | None) -> None:
        """Say what to call when the client has gone, once; ``None``: nothing any more. It may have gone already."""
        self._gone = callback
        if self.disconnected:
            self.lost()

    def lost(self) -> None:
        """The client has gone."""
        callback, self._gone = self._gone, None
        if callback is not None:
            callback()

    async def send(self, message: Any) -> None:
        """Send an ASGI message.

        Raises:
            RuntimeError: Messages out of order, or a header that would end before its time.
        """
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
        if message["type"] == "http.response.start" and not self.response_started:
            self._head = self._begin(message)
        elif message["type"] == "http.response.body" and self.response_started and not self.response_complete:
            self._send_body(message.get("body", b""), more=message.get("more_body", False))
        else:
            raise RuntimeError(f"unexpected ASGI message {message['type']!r}")

    def _begin(self, message: Any) -> bytes:
        self.response_started = True
        self.waiting_for_100_continue = False
        status = message["status"]
        lines = [STATUS_LINE[status][:-2]]
        for name, value in (*self.default_headers, *message.get("headers", ())):
            name = name.lower()
            if name == b"content-length":
                self.expected_content_length, self.chunked_encoding = int(value), False
            elif name == b"transfer-encoding" and value.lower() == b"chunked":
                self.expected_content_length, self.chunked_encoding = 0, True
            elif name == b"connection" and b"close" in value.lower():
                self.keep_alive = False
                continue
            lines.append(name + b": " + value)
        if not self.keep_alive:
            lines.append(b"connection: close")
        if self.chunked_encoding is None and self.scope["method"] != "HEAD" and status not in (204, 304):
            self.chunked_encoding = True
            lines.append(b"transfer-encoding: chunked")
        head = b"\r\n".join(lines)
        if head.count(b"\n") != len(lines) - 1 or head.count(b"\r") != len(lines) - 1:
            raise RuntimeError("a header has a line break")
        return head + b"\r\n\r\n"

    def _send_body(self, body: bytes, *, more: bool) -> None:
        data, self._head = self._head, b""
        if self.scope["method"] == "HEAD":
            self.expected_content_length = 0
        elif self.chunked_encoding:
            if body:
                data += b"%x\r\n%b\r\n" % (len(body), body)
            if not more:
                data += b"0\r\n\r\n"
        else:
            self.expected_content_length -= len(body)
            if self.expected_content_length < 0 or (self.expected_content_length and not more):
                raise RuntimeError("the body has another length than content-length says")
            data += body
        if data:
            self.transport.write(data)
        if not more:
            self.response_complete = True
            self.message_event.set()
            if not self.keep_alive:
                self.transport.close()
            self.on_response()
