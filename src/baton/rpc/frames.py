"""Messages as frames on a TCP connection of their own, beside gRPC.

What gRPC does around a small message costs more than the rest of its way: a task and a thread's wake-up on either side.
So services offer what is called often on a second port too, which they name in an answer that comes over gRPC. A
connection there begins with::

    client:  "batoncalls1" and a line feed, frame(epoch of the instance, 16 bytes, and the shared token)
    server:  frame(empty: welcome; else why not)
    then     client: frame(message) ...     server: frame(message) ...

A frame is its length, four bytes little-endian, and so many bytes. What one turn of the event loop has to say is one
frame. What the messages are is the service's: ``baton.rpc.call_stream``, ``baton.rpc.unary``. gRPC stays for whoever
cannot reach the port, and where services show each other certificates: there is no TLS here.
"""

from __future__ import annotations

import asyncio
import socket

MAGIC = b"batoncalls1\n"
EPOCH_BYTES = 16
_PREFIX = 4


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


def quicken(transport: asyncio.BaseTransport, *, silence_s: float = 0.0) -> None:
    """Send small messages at once, and notice a host that vanished.

    Args:
        transport: Of a connection.
        silence_s: Break it when the other host has not confirmed for so long what was sent; 0: as the system does,
            after a quarter of an hour.
    """
    sock = transport.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if silence_s and hasattr(socket, "TCP_USER_TIMEOUT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * silence_s))
