"""``GenerateMany`` without gRPC: its messages as frames on a TCP connection of their own.

What a router and a decode instance say to each other per request and per step is one small message, and what gRPC does
around a message costs more than the rest of its way: a task and a thread's wake-up on either side. So instances offer
the same stream on a port beside the gRPC one (``GetInfoResponse.calls_port``), as::

    client:  "batoncalls1" and a line feed, frame(epoch of the instance, 16 bytes, and the shared token)
    server:  frame(empty: welcome; else why not)
    then     client: frame(GenerateManyRequest) ...     server: frame(GenerateManyResponse) ...

A frame is its length, four bytes little-endian, and so many bytes. What one turn of the event loop has to say is one
frame. The meaning of messages is the same as on the gRPC stream, which stays for whoever cannot reach the port, and
where services show each other certificates: there is no TLS here.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import socket
from collections.abc import Callable
from typing import Any, Protocol

from baton.api.v1 import worker_pb2
from baton.rpc.many import Outbox
from baton.rpc.server import MAX_MESSAGE_BYTES

log = logging.getLogger(__name__)

MAGIC = b"batoncalls1\n"
_PREFIX = 4
_EPOCH_BYTES = 16
_MAX_HELLO = 8192
_HELLO_S = 10.0
"""How long a client may take to say who it is."""


class FrameError(Exception):
    """The other side sent what is no frame."""


def frame(payload: bytes) -> bytes:
    """Return a frame."""
    return len(payload).to_bytes(_PREFIX, "little") + payload


def hello(epoch: bytes, token: str | None) -> bytes:
    """Return what a client says first."""
    return MAGIC + frame(epoch + (token or "").encode())


class Frames:
    """Cuts what a connection brings into frames.

    Attributes:
        limit: Longest frame, in bytes.
    """

    __slots__ = ("_missing", "_pieces", "limit")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._pieces: list[bytes] = []
        self._missing = 0

    def feed(self, data: bytes) -> list[bytes]:
        """Take bytes and return the frames that are whole with them.

        Raises:
            FrameError: A frame is longer than it may be.
        """
        if self._pieces:
            self._pieces.append(data)
            self._missing -= len(data)
            if self._missing > 0:
                return []
            data = b"".join(self._pieces)
            self._pieces.clear()
        at, size, out = 0, len(data), []
        while True:
            begin = at + _PREFIX
            end = begin + int.from_bytes(data[at:begin], "little") if begin <= size else begin
            if end - begin > self.limit:
                raise FrameError(f"a frame of {end - begin} bytes; {self.limit} are the most")
            if end > size:
                break
            out.append(data[begin:end])
            at = end
        if at < size:
            self._pieces.append(data[at:])
            self._missing = end - size
        return out


class Handler(Protocol):
    """Serves the calls of one connection; ``baton.rpc.many.Calls`` is one."""

    outbox: Outbox

    def take(self, message: worker_pb2.GenerateManyRequest) -> None:
        """Start and cancel calls."""

    def close(self) -> None:
        """Cancel what still runs: the connection is gone."""


class CallServer:
    """The port.

    Args:
        handler: Makes what serves a connection.
        epoch: Returns the instance's epoch; a client that looks for another one has come to the wrong place.
        token: Shared token that clients must show; ``None``: none.
    """

    def __init__(self, handler: Callable[[], Handler], epoch: Callable[[], bytes], token: str | None) -> None:
        self._handler, self._epoch = handler, epoch
        self._token = (token or "").encode()
        self._server: asyncio.Server | None = None
        self.connections: set[_ServerConnection] = set()

    async def start(self, host: str) -> int:
        """Listen on a free port and return it."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _ServerConnection(self), host.strip("[]"), 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def stop(self) -> None:
        """Close the port and every connection; calls that run are aborted."""
        if self._server is not None:
            self._server.close()
        for connection in list(self.connections):
            connection.abort()

    def refuses(self, greeting: bytes) -> str | None:
        """Return why a client is not served; ``None``: it is."""
        epoch, token = greeting[:_EPOCH_BYTES], greeting[_EPOCH_BYTES:]
        if not hmac.compare_digest(token, self._token):
            return "token"
        return None if epoch == self._epoch() else "epoch"

    def make_handler(self) -> Handler:
        """Return what serves a new connection."""
        return self._handler()


class _ServerConnection(asyncio.Protocol):
    """One router's connection."""

    def __init__(self, server: CallServer) -> None:
        self._server = server
        self._frames = Frames(_MAX_HELLO)
        self._start = b""
        self._handler: Handler | None = None
        self._flushing = self._paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport
        self._server.connections.add(self)
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(_HELLO_S, self.abort)
        quicken(transport)

    def data_received(self, data: bytes) -> None:
        try:
            if self._handler is None:
                data = self._greet(data)
            for payload in self._frames.feed(data) if data else ():
                if self._handler is None:
                    self._enter(payload)
                else:
                    self._handler.take(worker_pb2.GenerateManyRequest.FromString(payload))
        except Exception as error:  # whatever it is, it is no message of a router
            log.warning("a connection of calls is closed: %s: %s", type(error).__name__, error)
            self.abort()

    def _greet(self, data: bytes) -> bytes:
        """Take the first bytes; returns those behind them."""
        missing = len(MAGIC) - len(self._start)
        if missing <= 0:
            return data
        self._start += data[:missing]
        if not MAGIC.startswith(self._start):
            raise FrameError("it does not begin as one does")
        return data[missing:]

    def _enter(self, greeting: bytes) -> None:
        reason = self._server.refuses(greeting)
        if reason is not None:
            self._transport.write(frame(reason.encode()))
            self._transport.close()
            raise FrameError(f"refused: {reason}")
        self._timer.cancel()
        self._frames.limit = MAX_MESSAGE_BYTES
        handler = self._handler = self._server.make_handler()
        handler.outbox.on_filled = self._filled
        self._transport.write(frame(b""))

    def _filled(self) -> None:
        if not (self._flushing or self._paused):
            self._flushing = True
            self._loop.call_soon(self._flush)  # behind all others that the same step has woken

    def _flush(self) -> None:
        self._flushing = False
        if self._handler is None or self._paused or self._transport.is_closing():
            return
        message = self._handler.outbox.take()
        if message is not None:
            self._transport.write(frame(message.SerializeToString()))

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._filled()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self._server.connections.discard(self)
        if self._handler is not None:
            self._handler.close()

    def abort(self) -> None:
        """Close the connection at once."""
        self._transport.abort()


def quicken(transport: asyncio.BaseTransport) -> None:
    """Send small messages at once, and notice a host that vanished."""
    sock = transport.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
