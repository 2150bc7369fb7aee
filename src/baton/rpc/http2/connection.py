"""A client's HTTP/2 connection (RFC 9113), read by the event loop itself, without a thread or task in between.

It implements what a gRPC client needs: streams begun by this end, flow control in both directions, pings. Every length
is checked before memory is allocated for it, and the window is extended only for data that was handed on: a slow
receiver makes the sender wait.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections import deque
from typing import Any, Protocol

from baton.rpc.addresses import connection_reason
from baton.rpc.http2.hpack import MAX_LIST_BYTES, Headers, HpackError, decode, encode

log = logging.getLogger(__name__)

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME = struct.Struct(">HBBBI")
"""A frame's header: length of the payload (16 bits, 8 bits), type, flags and stream."""
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM = ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
PRIORITIZED = 0x20
HEADER_TABLE_SIZE, ENABLE_PUSH, _, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE, MAX_HEADER_LIST_SIZE = range(1, 7)
NO_ERROR = 0x0
PROTOCOL_ERROR = 0x1
FLOW_CONTROL_ERROR = 0x3
FRAME_SIZE_ERROR = 0x6
REFUSED_STREAM = 0x7
CANCEL = 0x8
COMPRESSION_ERROR = 0x9
ENHANCE_YOUR_CALM = 0xB
INADEQUATE_SECURITY = 0xC

MAX_FRAME_BYTES = 16 * 1024
"""Longest payload: the size that the RFC has every end accept, and the least that it may ask for."""
WINDOW_BYTES = 1024 * 1024
"""Bytes that the peer may send ahead, the same as for gRPC's own connections (``CONNECTION_OPTIONS``)."""
_FIRST_WINDOW_BYTES = 65535
_MAX_WINDOW_BYTES = _MAX_ID = (1 << 31) - 1
TICK_S = 5.0
"""The peer is pinged after two of these without a byte; after a third it counts as gone."""
_USER_TIMEOUT_MS = 5000
_HELLO = b"".join(
    struct.pack(">HI", key, value)
    for key, value in (
        (HEADER_TABLE_SIZE, 0),
        (ENABLE_PUSH, 0),
        (INITIAL_WINDOW_SIZE, WINDOW_BYTES),
        (MAX_HEADER_LIST_SIZE, MAX_LIST_BYTES),
    )
)


class Http2Error(Exception):
    """The peer violates HTTP/2 or its bounds.

    Attributes:
        code: Error code sent to the peer (RFC 9113, 7).
    """

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class StreamOwner(Protocol):
    """Receives a stream's events while the event loop reads the connection: must not block or raise.

    After :meth:`on_close`, :meth:`on_reset` or :meth:`on_lost` nothing more is called.
    """

    def on_headers(self, headers: Headers) -> None:
        """Handle headers: the initial ones, or trailers."""

    def on_data(self, data: bytes) -> None:
        """Handle a piece of the data."""

    def on_close(self) -> None:
        """Handle that the peer ended the stream."""

    def on_reset(self, code: int) -> None:
        """Handle that the peer reset the stream, with an error code of RFC 9113, 7."""

    def on_lost(self, why: str) -> None:
        """Handle the loss of the connection."""

    def on_writable(self) -> None:
        """Handle that everything sent has left."""


class Http2Stream:
    """A stream; made by :meth:`Http2Connection.open`.

    Attributes:
        key: Number of the stream.
        owner: Receiver of its events.
        credit: Bytes that flow control lets this end send.
        received: Bytes received since the stream's window was extended last.
        outgoing: Pieces of data that could not be sent yet, and whether each is the last.
    """

    __slots__ = ("_connection", "credit", "key", "outgoing", "owner", "received")

    def __init__(self, connection: Http2Connection, key: int, owner: StreamOwner, credit: int) -> None:
        self._connection = connection
        self.key = key
        self.owner = owner
        self.credit = credit
        self.received = 0
        self.outgoing: deque[tuple[memoryview, bool]] = deque()

    @property
    def writable(self) -> bool:
        """Whether everything sent has left."""
        return not self.outgoing and self._connection.writable

    def send(self, data: bytes, *, last: bool = False) -> None:
        """Send data as soon as flow control allows; ``last``: it ends this end's side of the stream."""
        self.outgoing.append((memoryview(data), last))
        self._connection.pump(self)

    def cancel(self) -> None:
        """Reset the stream; its owner is not called any more. No effect on one that has ended."""
        self._connection.cancel(self)


class Http2Connection(asyncio.Protocol):
    """A connection; used in one event loop, and not used again once it has ended.

    Args:
        name: Name of the peer in the log.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._transport: Any = None
        self._rest = b""
        self._block: tuple[int, int, bytearray] | None = None
        """Stream, flags and bytes of headers whose continuation is still to come."""
        self._greeted = False
        self._paused = False
        self._closed = False
        self._why = "the connection was closed"
        self._streams: dict[int, Http2Stream] = {}
        self._next = 1
        self._last = _MAX_ID
        self._credit = self._first_credit = _FIRST_WINDOW_BYTES
        self._frame_bytes = MAX_FRAME_BYTES
        self._received = self._silent = 0
        self._timer: asyncio.TimerHandle | None = None

    # --- this end ---

    @property
    def writable(self) -> bool:
        """Whether the transport accepts more data."""
        return not (self._paused or self._closed)

    def open(self, headers: Headers, owner: StreamOwner) -> Http2Stream:
        """Begin a stream.

        Args:
            headers: Headers of the request.
            owner: Receiver of the stream's events; if the connection is lost already, its ``on_lost`` is called soon.
        """
        stream = Http2Stream(self, self._next, owner, self._first_credit)
        self._next += 2
        if self._closed or stream.key > self._last:
            asyncio.get_running_loop().call_soon(owner.on_lost, self._why)
        else:
            self._streams[stream.key] = stream
            self._write(HEADERS, END_HEADERS, stream.key, encode(headers))
        return stream

    def close(self) -> None:
        """End the connection and its streams."""
        self._end("the connection was closed", NO_ERROR)

    def cancel(self, stream: Http2Stream) -> None:
        if self._streams.pop(stream.key, None) is not None:
            self._write(RST_STREAM, 0, stream.key, CANCEL.to_bytes(4))

    def pump(self, stream: Http2Stream) -> None:
        """Send a stream's pending data, as far as flow control allows."""
        outgoing = stream.outgoing
        pieces = list[bytes]()
        while outgoing and self.writable and stream.key in self._streams:
            data, last = outgoing[0]
            size = max(0, min(len(data), stream.credit, self._credit, self._frame_bytes))
            if not size and data:
                break
            is_all = size == len(data)
            pieces += (_frame_header(DATA, END_STREAM if last and is_all else 0, stream.key, size), bytes(data[:size]))
            stream.credit -= size
            self._credit -= size
            if is_all:
                outgoing.popleft()
            else:
                outgoing[0] = data[size:], last
        if pieces:
            self._transport.write(b"".join(pieces))

    # --- asyncio.Protocol ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        if self._closed:  # before it was made
            self._transport.abort()
            return
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_MS)
        self._transport.write(PREFACE)
        self._write(SETTINGS, 0, 0, _HELLO)
        self._write(WINDOW_UPDATE, 0, 0, (WINDOW_BYTES - _FIRST_WINDOW_BYTES).to_bytes(4))
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def data_received(self, data: bytes) -> None:
        self._silent = 0
        if self._rest:
            data = self._rest + data
        try:
            at = 0
            size = len(data)
            while size - at >= FRAME.size and not self._closed:
                high, low, kind, flags, key = FRAME.unpack_from(data, at)
                length = high << 8 | low
                if length > MAX_FRAME_BYTES:
                    raise Http2Error(FRAME_SIZE_ERROR, f"a frame has {length} bytes")
                begin = at + FRAME.size
                if begin + length > size:
                    break
                at = begin + length
                if kind == DATA and self._greeted and self._block is None:
                    self._on_data(flags, key & _MAX_ID, data[begin:at])
                else:
                    self._on_frame(kind, flags, key & _MAX_ID, data[begin:at])
            self._rest = b"" if self._closed else data[at:]
        except Http2Error as error:
            self._end(f"{self._name} does not speak HTTP/2 as it should: {error}", error.code)
        except HpackError as error:
            self._end(f"{self._name} does not speak HTTP/2 as it should: {error}", COMPRESSION_ERROR)
        except Exception:
            log.exception("what %s sent could not be taken", self._name)
            self._end("what it sent could not be taken", PROTOCOL_ERROR)

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None and not self._closed:
            log.debug("the connection to %s broke: %s", self._name, exc)
        self._why = self._why if self._closed else f"the connection broke: {connection_reason(exc)}"
        self._lose()

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._pump_all()

    # --- frames ---

    def _on_data(self, flags: int, key: int, data: bytes) -> None:
        size = len(data)
        stream = self._streams.get(key)
        if stream is None:
            if not key or key >= self._next:
                raise Http2Error(PROTOCOL_ERROR, f"data of stream {key}, which was not begun")
            self._extend_window(size)  # for a stream that was cancelled meanwhile
            return
        if flags & PADDED:
            if not data or data[0] >= size:
                raise Http2Error(PROTOCOL_ERROR, "a frame is nothing but padding")
            data = data[1 : size - data[0]]
        if data:
            stream.owner.on_data(data)
        self._extend_window(size)
        stream.received += size
        if flags & END_STREAM:
            self._close_stream(stream)
        elif stream.received >= WINDOW_BYTES // 2:
            self._write(WINDOW_UPDATE, 0, key, stream.received.to_bytes(4))
            stream.received = 0

    def _extend_window(self, size: int) -> None:
        """Count received bytes; extend the connection's window when half of it is used."""
        self._received += size
        if self._received >= WINDOW_BYTES // 2:
            self._write(WINDOW_UPDATE, 0, 0, self._received.to_bytes(4))
            self._received = 0

    def _on_frame(self, kind: int, flags: int, key: int, data: bytes) -> None:
        if not self._greeted and kind != SETTINGS:
            raise Http2Error(PROTOCOL_ERROR, "it does not begin with its settings")
        if self._block is not None and kind != CONTINUATION:
            raise Http2Error(PROTOCOL_ERROR, "headers are broken off")
        if kind == HEADERS:
            self._on_headers(flags, key, data)
        elif kind == CONTINUATION:
            self._on_continuation(flags, key, data)
        elif kind == SETTINGS:
            self._on_settings(flags, key, data)
        elif kind == PING:
            _require(key == 0 and len(data) == 8, "a ping")
            if not flags & ACK:
                self._answer(PING, data)
        elif kind == WINDOW_UPDATE:
            self._on_window(key, data)
        elif kind == RST_STREAM:
            _require(key != 0 and len(data) == 4, "the end of a stream")
            stream = self._streams.pop(key, None)
            if stream is not None:
                stream.owner.on_reset(int.from_bytes(data))
        elif kind == GOAWAY:
            _require(key == 0 and len(data) >= 8, "a farewell")
            self._on_goaway(int.from_bytes(data[:4]) & _MAX_ID, int.from_bytes(data[4:8]), data[8:])
        elif kind == PUSH_PROMISE:
            raise Http2Error(PROTOCOL_ERROR, "it pushes")
        # Unknown types are ignored (RFC 9113, 4.1).

    def _on_headers(self, flags: int, key: int, data: bytes) -> None:
        if not key % 2 or key >= self._next:
            raise Http2Error(PROTOCOL_ERROR, f"headers of stream {key}, which was not begun")
        if flags & PADDED:
            _require(len(data) > data[0] if data else False, "padding")
            data = data[1 : len(data) - data[0]]
        if flags & PRIORITIZED:
            data = data[5:]
        self._block = key, flags, bytearray()
        self._on_continuation(flags, key, data)

    def _on_continuation(self, flags: int, key: int, data: bytes) -> None:
        if self._block is None or self._block[0] != key:
            raise Http2Error(PROTOCOL_ERROR, "headers go on that did not begin")
        _, first_flags, block = self._block
        block += data
        if len(block) > MAX_LIST_BYTES:
            raise Http2Error(COMPRESSION_ERROR, f"headers have more than {MAX_LIST_BYTES} bytes")
        if not flags & END_HEADERS:
            return
        self._block = None
        headers = decode(bytes(block))
        stream = self._streams.get(key)
        if stream is not None:
            stream.owner.on_headers(headers)
            if first_flags & END_STREAM:
                self._close_stream(stream)

    def _on_settings(self, flags: int, key: int, data: bytes) -> None:
        _require(key == 0 and len(data) % 6 == 0 and not (flags & ACK and data), "settings")
        self._greeted = True
        if flags & ACK:
            return
        for setting, value in struct.iter_unpack(">HI", data):
            if setting == INITIAL_WINDOW_SIZE:
                if value > _MAX_WINDOW_BYTES:
                    raise Http2Error(FLOW_CONTROL_ERROR, "a window is too large")
                for stream in self._streams.values():
                    stream.credit += value - self._first_credit
                self._first_credit = value
            elif setting == MAX_FRAME_SIZE:
                _require(MAX_FRAME_BYTES <= value < 1 << 24, "the size of frames")
                self._frame_bytes = min(value, _MAX_SENT_FRAME_BYTES)
        self._answer(SETTINGS, b"")
        self._pump_all()

    def _answer(self, kind: int, data: bytes) -> None:
        if self._paused:
            raise Http2Error(ENHANCE_YOUR_CALM, "it asks on and on, and reads no answer")
        self._write(kind, ACK, 0, data)

    def _on_window(self, key: int, data: bytes) -> None:
        more = int.from_bytes(data) & _MAX_ID
        _require(len(data) == 4 and more != 0, "a window")
        stream = self._streams.get(key)
        if key == 0:
            self._credit += more
        elif stream is not None:
            stream.credit += more
        if max(self._credit, stream.credit if stream is not None else 0) > _MAX_WINDOW_BYTES:
            raise Http2Error(FLOW_CONTROL_ERROR, "a window is too large")
        self._pump_all()

    def _on_goaway(self, last: int, code: int, text: bytes) -> None:
        """Begin no more streams; those that the peer has not processed are lost."""
        self._last = min(self._last, last)
        self._why = f"{self._name} says farewell: {text[:200].decode(errors='replace') or f'code {code}'}"
        for stream in [each for key, each in self._streams.items() if key > last]:
            del self._streams[stream.key]
            stream.owner.on_lost(self._why)

    # --- inside ---

    def _write(self, kind: int, flags: int, key: int, data: bytes) -> None:
        if not self._closed:
            self._transport.write(_frame_header(kind, flags, key, len(data)) + data)

    def _pump_all(self) -> None:
        for stream in list(self._streams.values()):
            waited = bool(stream.outgoing)
            self.pump(stream)
            if not self._closed and (not waited or not stream.outgoing) and self.writable:
                stream.owner.on_writable()

    def _close_stream(self, stream: Http2Stream) -> None:
        if self._streams.pop(stream.key, None) is not None:
            stream.owner.on_close()

    def _tick(self) -> None:
        # Counted in ticks, not by the clock: if this process itself was stopped, the bytes that arrived meanwhile are
        # read between two ticks.
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)
        self._silent += 1
        if self._silent == 2:
            self._write(PING, 0, 0, bytes(8))
        elif self._silent > 2:
            self._paused = True  # do not wait for pending writes
            self._end(f"{self._name} gave no sign of life for {self._silent * TICK_S:g} s", NO_ERROR)

    def _end(self, why: str, code: int) -> None:
        if self._closed:
            return
        if code != NO_ERROR:
            self._write(GOAWAY, 0, 0, bytes(4) + code.to_bytes(4))
            log.warning("%s", why)
        if self._transport is not None:
            if self._paused:
                self._transport.abort()
            else:
                self._transport.close()
        self._why = why
        self._lose()

    def _lose(self) -> None:
        self._closed = True
        self._rest = b""
        self._block = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        streams = self._streams
        self._streams = {}
        for stream in streams.values():
            stream.outgoing.clear()
            stream.owner.on_lost(self._why)


_MAX_SENT_FRAME_BYTES = 256 * 1024
"""Larger frames would let one stream delay all others, and pings."""


def _frame_header(kind: int, flags: int, key: int, size: int) -> bytes:
    return FRAME.pack(size >> 8, size & 0xFF, kind, flags, key)


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise Http2Error(PROTOCOL_ERROR, f"{what} that makes no sense")
