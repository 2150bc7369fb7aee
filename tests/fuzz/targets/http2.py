"""A connection of HTTP/2 and the calls on it: whatever the other end says, each call gets one end, and no more is kept
than a message may have."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
from tests.fuzz.choices import Choices
from tests.fuzz.event_loops import event_loop
from tests.support.http2_peer import OK, data, frame, headers, message, trailers

from baton.rpc.http2 import hpack
from baton.rpc.http2.connection import (
    ACK,
    CONTINUATION,
    FRAME,
    GOAWAY,
    HEADERS,
    PADDED,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    Http2Connection,
)
from baton.rpc.http2.message_stream import MessageStream, StreamEnded

_MOST_REST = FRAME.size + 16 * 1024


def http2(data: bytes) -> None:
    """Either bytes that are headers, or what a server says."""
    choices = Choices(data)
    if choices.number(0, 7) == 0:
        _headers(choices)
    else:
        event_loop(__name__).run_until_complete(_connection(choices))


def _headers(choices: Choices) -> None:
    items = [(choices.take(choices.number(0, 20)), choices.take(choices.number(0, 300))) for _ in range(3)]
    assert hpack.decode(hpack.encode(items)) == items
    try:
        found = hpack.decode(choices.mutated(hpack.encode(items)) + choices.rest())
    except hpack.HpackError:
        return
    assert sum(len(name) + len(value) + 32 for name, value in found) <= hpack.MAX_LIST_BYTES


class _Transport:
    """Takes what is written."""

    def __init__(self) -> None:
        self.written = bytearray()
        self.closed = False

    def get_extra_info(self, name: str) -> Any:
        return None

    def write(self, data: bytes) -> None:
        assert not self.closed
        self.written += data

    def close(self) -> None:
        self.closed = True

    abort = close


class _Sink:
    """A call, as its owner sees it."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.ends: list[StreamEnded] = []
        self.call: MessageStream | None = None
        self.left = False
        self.leave_at = -1

    def on_message(self, message: bytes) -> None:
        assert not self.ends
        assert not self.left
        self.messages.append(message)
        if len(self.messages) == self.leave_at and self.call is not None:
            self.left = True
            self.call.close()

    def on_end(self, end: StreamEnded) -> None:
        assert not self.ends
        assert not self.left
        self.ends.append(end)

    def on_writable(self) -> None:
        assert not self.ends


def _frame(choices: Choices) -> bytes:
    """Return what a server may say, and some of what it may not."""
    key = choices.pick([1, 1, 1, 3, 5, 0, 2, 7])
    piece = choices.take(choices.number(0, 40))
    kinds: list[Callable[[], bytes]] = [
        lambda: data(key, message(piece), choices.pick([0, 0, 0, 1])),
        lambda: data(key, piece, choices.pick([0, 0, PADDED])),
        lambda: headers(key, OK),
        lambda: trailers(key, choices.number(0, 20), (b"grpc-message", piece), (b"grpc-status-details-bin", piece)),
        lambda: frame(HEADERS, choices.number(0, 255), key, hpack.encode(OK) + piece),
        lambda: frame(CONTINUATION, choices.pick([0, 4]), key, piece),
        lambda: frame(SETTINGS, choices.pick([0, ACK]), 0, piece[: len(piece) // 6 * 6]),
        lambda: frame(SETTINGS, 0, 0, choices.number(1, 6).to_bytes(2) + choices.take(4).ljust(4, b"\0")),
        lambda: frame(WINDOW_UPDATE, 0, key, choices.take(4).ljust(4, b"\1")),
        lambda: frame(PING, choices.pick([0, ACK]), 0, bytes(8)),
        lambda: frame(RST_STREAM, 0, key, choices.number(0, 20).to_bytes(4)),
        lambda: frame(GOAWAY, 0, 0, choices.number(0, 7).to_bytes(4) + bytes(4) + piece),
        lambda: frame(choices.number(0, 255), choices.number(0, 255), key, piece),
        lambda: choices.mutated(data(key, message(piece))),
    ]
    return choices.pick(kinds)()


async def _connection(choices: Choices) -> None:
    transport, connection = _Transport(), Http2Connection("i")
    given: Any = transport
    connection.connection_made(given)
    sinks = [_Sink() for _ in range(choices.number(1, 3))]
    for sink in sinks:
        sink.leave_at = choices.pick([-1, -1, 1])
        sink.call = MessageStream(connection, [(b":path", b"/s/M")], sink, owns_connection=choices.flag())
    said = frame(SETTINGS) if choices.number(0, 15) else b""
    while choices.more():
        said += _frame(choices)
        if choices.number(0, 3) == 0:
            continue
        cut = choices.number(0, min(len(said), 60))
        for part in (said[:cut], said[cut:]):
            if part and not transport.closed:
                connection.data_received(part)
        said = b""
        assert len(connection._rest) <= _MOST_REST
        sent = choices.number(0, 7)
        call = sinks[choices.number(0, len(sinks) - 1)].call
        if sent == 0 and call is not None:
            call.send(choices.take(choices.number(0, 100)))
        elif sent == 1:
            connection.pause_writing()
        elif sent == 2:
            connection.resume_writing()
        elif sent == 3 and choices.number(0, 7) == 0:
            connection.close()
    connection.connection_lost(None)
    await asyncio.sleep(0)
    for sink in sinks:
        assert len(sink.ends) == (not sink.left)
        assert all(end.code in grpc.StatusCode for end in sink.ends)
        assert sum(map(len, sink.messages)) <= len(choices._data)
    _require_frames(bytes(transport.written))


def _require_frames(written: bytes) -> None:
    """What this end has said is HTTP/2."""
    assert written.startswith(PREFACE)
    at = len(PREFACE)
    while at < len(written):
        high, low, kind, _, key = FRAME.unpack_from(written, at)
        assert kind <= CONTINUATION
        assert key < 1 << 31
        at += FRAME.size + (high << 8 | low)
    assert at == len(written)
