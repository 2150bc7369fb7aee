"""The other end of a connection of HTTP/2, frame by frame, as a test says."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

from baton.rpc.http2.connection import (
    DATA,
    END_HEADERS,
    END_STREAM,
    FRAME,
    HEADERS,
    PREFACE,
    SETTINGS,
    Http2Connection,
)
from baton.rpc.http2.hpack import Headers, decode, encode
from baton.rpc.http2.message_stream import MessageStream, StreamEnded

OK: Headers = [(b":status", b"200"), (b"content-type", b"application/grpc")]


class Frame(NamedTuple):
    """A frame that came."""

    kind: int
    flags: int
    key: int
    data: bytes


def frame(kind: int, flags: int = 0, key: int = 0, data: bytes = b"", *, length: int | None = None) -> bytes:
    """Return a frame; ``length``: what it says of its own."""
    size = len(data) if length is None else length
    return FRAME.pack(size >> 8, size & 0xFF, kind, flags, key) + data


def headers(key: int, items: Headers, *, last: bool = False) -> bytes:
    return frame(HEADERS, END_HEADERS | (END_STREAM if last else 0), key, encode(items))


def trailers(key: int, code: int, *more: tuple[bytes, bytes]) -> bytes:
    return headers(key, [(b"grpc-status", b"%d" % code), *more], last=True)


def message(data: bytes) -> bytes:
    """Return a message as gRPC writes it."""
    return b"\0" + len(data).to_bytes(4) + data


def data(key: int, piece: bytes, flags: int = 0) -> bytes:
    return frame(DATA, flags, key, piece)


class Peer:
    """A server with one connection.

    Attributes:
        port: Where it listens.
    """

    def __init__(self) -> None:
        self.port = 0
        self.reader: asyncio.StreamReader
        self.writer: asyncio.StreamWriter
        self._streams: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[Peer]:
        writers: list[asyncio.StreamWriter] = []

        async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writers.append(writer)
            self._streams.put_nowait((reader, writer))

        server = await asyncio.start_server(take, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for writer in writers:
                writer.close()
                with contextlib.suppress(OSError):  # it was broken
                    await writer.wait_closed()

    async def accept(self) -> None:
        """Take the connection's first bytes."""
        self.reader, self.writer = await self._streams.get()
        assert await self.reader.readexactly(len(PREFACE)) == PREFACE
        assert (await self.frame()).kind == SETTINGS

    async def frame(self) -> Frame:
        """Return the next frame."""
        async with asyncio.timeout(240):
            high, low, kind, flags, key = FRAME.unpack(await self.reader.readexactly(FRAME.size))
            return Frame(kind, flags, key, await self.reader.readexactly(high << 8 | low))

    async def next(self, kind: int) -> Frame:
        """Return the next frame of a kind."""
        while (found := await self.frame()).kind != kind:
            pass
        return found

    async def request(self) -> tuple[int, dict[bytes, bytes]]:
        """Return the stream and the headers of the next request."""
        found = await self.next(HEADERS)
        return found.key, dict(decode(found.data))

    async def until_closed(self) -> bytes:
        """Read to the end, however it comes."""
        found = bytearray()
        with contextlib.suppress(ConnectionResetError):
            async with asyncio.timeout(240):
                while piece := await self.reader.read(1 << 16):
                    found += piece
        return bytes(found)

    def say(self, *frames: bytes) -> None:
        self.writer.write(b"".join(frames))


class Sink:
    """Keeps what a call brings."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.ends: list[StreamEnded] = []
        self.writable = 0
        self._changed = asyncio.Event()

    def on_message(self, message: bytes) -> None:
        assert not self.ends
        self.messages.append(message)
        self._changed.set()

    def on_end(self, end: StreamEnded) -> None:
        assert not self.ends
        self.ends.append(end)
        self._changed.set()

    def on_writable(self) -> None:
        self.writable += 1
        self._changed.set()

    async def end(self) -> StreamEnded:
        """Wait for the end."""
        await self.until(lambda: bool(self.ends))
        return self.ends[0]

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait until something has come true."""
        async with asyncio.timeout(240):
            while not condition():
                self._changed.clear()
                await self._changed.wait()


@contextlib.asynccontextmanager
async def connected() -> AsyncIterator[tuple[Peer, Http2Connection, MessageStream, Sink]]:
    """Yield a peer, the connection to it, and a call that the peer has answered with its headers; its stream is 1."""
    async with Peer().listening() as peer:
        connection = Http2Connection("the peer")
        await asyncio.get_running_loop().create_connection(lambda: connection, "127.0.0.1", peer.port)
        await peer.accept()
        sink = Sink()
        call = MessageStream(connection, [(b":method", b"POST"), (b":path", b"/s/M")], sink, owns_connection=True)
        key, _ = await peer.request()
        assert key == 1
        peer.say(frame(SETTINGS), headers(1, OK))
        try:
            yield peer, connection, call, sink
        finally:
            connection.close()
