"""A connection of HTTP/2 and a gRPC call on it, against a peer that says what a test wants, frame by frame."""

from __future__ import annotations

import asyncio
import base64
import errno
import os
import random
from collections.abc import Callable

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.http2_peer import OK, Peer, Sink, connected, data, frame, headers, message, trailers

from baton.errors import QueueFullError
from baton.rpc.addresses import connection_reason
from baton.rpc.errors import status_details
from baton.rpc.http2 import connection as http2
from baton.rpc.http2 import hpack, message_stream
from baton.rpc.http2.connection import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    MAX_FRAME_BYTES,
    PADDED,
    PING,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    Http2Connection,
)
from baton.rpc.http2.message_stream import Dialer, MessageStream, StreamEnded
from baton.rpc.service_token import Token


def setting(key: int, value: int) -> bytes:
    return frame(SETTINGS, data=key.to_bytes(2) + value.to_bytes(4))


# --- headers ---


def test_headers_of_the_rfcs_examples() -> None:
    huffman = "828684418cf1e3c2e5f23a6ba0ab90f4ff"  # RFC 7541, C.4.1
    plain = "828684410f7777772e6578616d706c652e636f6d"  # C.3.1
    expected = [(b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/"), (b":authority", b"www.example.com")]
    assert hpack.decode(bytes.fromhex(huffman)) == hpack.decode(bytes.fromhex(plain)) == expected
    dated = "6196d07abe941054d444a8200595040b8166e082a62d1bff"  # C.6.1
    assert hpack.decode(bytes.fromhex(dated)) == [(b"date", b"Mon, 21 Oct 2013 20:13:21 GMT")]


def test_the_huffman_code_is_whole() -> None:
    assert sum(2.0**-bits for bits in hpack._CODE_LENGTHS) == 1.0


@given(st.lists(st.tuples(st.binary(max_size=300), st.binary(max_size=300)), max_size=8))
def test_headers_are_read_as_they_were_written(items: list[tuple[bytes, bytes]]) -> None:
    assert hpack.decode(hpack.encode(items)) == items


@given(st.binary(max_size=200))
def test_any_bytes_are_headers_or_refused(block: bytes) -> None:
    try:
        found = hpack.decode(block)
    except hpack.HpackError:
        return
    assert sum(len(name) + len(value) + 32 for name, value in found) <= hpack.MAX_LIST_BYTES


@pytest.mark.parametrize(
    "block",
    [
        b"\x80",  # header 0
        b"\xbe",  # of the table that is not kept
        b"\x3f\xe1\x1f",  # which shall hold 4096 bytes
        b"\x00\x05ab",
        b"\x00\x81\x00\x00",  # a code that is broken off
        b"\x00\x84\xff\xff\xff\xff\x00",  # the code of the end
        b"\xff\xff\xff\xff\xff\x7f",
        b"\xff" + b"\x80" * 20 + b"\x01",
        b"\x82" * 500,
    ],
    ids=lambda block: block[:6].hex(),
)
def test_headers_that_are_refused(block: bytes) -> None:
    with pytest.raises(hpack.HpackError):
        hpack.decode(block)


# --- what comes ---


@settings(max_examples=15, deadline=None)
@given(st.randoms(use_true_random=False), st.lists(st.integers(0, 400), min_size=1, max_size=6))
async def test_messages_come_whole_however_they_are_cut(draw: random.Random, sizes: list[int]) -> None:
    messages = [bytes([at]) * size for at, size in enumerate(sizes)]
    stream = b"".join(map(message, messages))
    async with connected() as (peer, _, _, sink):
        frames = b""
        while stream:
            size = draw.choice([1, 5, 6, draw.randrange(1, 600)])
            piece, stream = stream[:size], stream[size:]
            if draw.randrange(3) == 0:
                padding = draw.randrange(20)
                frames += data(1, bytes([padding]) + piece + bytes(padding), PADDED)
            else:
                frames += data(1, piece)
            if draw.randrange(5) == 0:
                frames += frame(99, 3, 7, b"of another kind") + data(1, b"")
        frames += trailers(1, 0)
        while frames:
            size = draw.choice([1, 9, 10, draw.randrange(1, 2000)])
            peer.say(frames[:size])
            frames = frames[size:]
            await peer.writer.drain()
            await asyncio.sleep(0)
        assert (await sink.end()).code is grpc.StatusCode.OK
        assert sink.messages == messages


async def test_a_status_has_its_message_and_details() -> None:
    error = QueueFullError("no room: 100 % ä", retry_after_s=3.0)
    details = base64.b64encode(status_details(error)).rstrip(b"=")
    async with connected() as (peer, _, _, sink):
        peer.say(trailers(1, 8, (b"grpc-message", b"no room%3A 100 %25"), (b"grpc-status-details-bin", details)))
        end = await sink.end()
    assert (end.code, end.message) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "no room: 100 %")
    assert isinstance(end.error, QueueFullError)
    assert (end.error.message, end.error.retry_after_s) == (error.message, 3.0)


Says = Callable[[Peer], None]
ENDS: dict[str, tuple[Says, grpc.StatusCode, str]] = {
    "no status": (lambda p: p.say(data(1, b"", END_STREAM)), grpc.StatusCode.INTERNAL, "without its status"),
    "reset": (lambda p: p.say(frame(RST_STREAM, 0, 1, bytes(4))), grpc.StatusCode.INTERNAL, "gave the stream up"),
    "refused": (lambda p: p.say(frame(RST_STREAM, 0, 1, bytes([0, 0, 0, 7]))), grpc.StatusCode.UNAVAILABLE, "code 7"),
    "cancelled": (lambda p: p.say(frame(RST_STREAM, 0, 1, bytes([0, 0, 0, 8]))), grpc.StatusCode.CANCELLED, "code 8"),
    "hung up": (lambda p: p.writer.close(), grpc.StatusCode.UNAVAILABLE, "broke"),
    "cut": (lambda p: p.writer.transport.abort(), grpc.StatusCode.UNAVAILABLE, "broke"),
    "odd status": (
        lambda p: p.say(headers(1, [(b"grpc-status", b"x")], last=True)),
        grpc.StatusCode.UNKNOWN,
        "",
    ),
    "farewell": (
        lambda p: p.say(frame(GOAWAY, 0, 0, bytes(4) + bytes([0, 0, 0, 11]) + b"too many pings")),
        grpc.StatusCode.UNAVAILABLE,
        "too many pings",
    ),
}


@pytest.mark.parametrize("how", ENDS)
async def test_how_a_call_ends(how: str) -> None:
    says, code, text = ENDS[how]
    async with connected() as (peer, _, _, sink):
        peer.say(data(1, message(b"first")))
        says(peer)
        end = await sink.end()
        assert sink.messages == [b"first"]
    assert end.code is code
    assert text in end.message


BAD: dict[str, bytes] = {
    "a frame of 16 MB": frame(DATA, 0, 1, length=0xFFFFFF),
    "a frame that is a byte too long": frame(PING, 0, 0, length=MAX_FRAME_BYTES + 1),
    "another protocol": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "data of no stream": data(3, b"x"),
    "data of stream 0": data(0, b"x"),
    "headers of no stream": headers(3, OK),
    "headers of an even stream": headers(2, OK),
    "nothing but padding": data(1, b"\x05abc", PADDED),
    "headers without end": frame(HEADERS, 0, 1, b"\x88") + frame(CONTINUATION, 0, 1, bytes(MAX_FRAME_BYTES)) * 2,
    "headers that are broken off": frame(HEADERS, 0, 1, b"\x88") + data(1, message(b"x")),
    "headers that did not begin": frame(CONTINUATION, END_HEADERS, 1, b"\x88"),
    "headers that cannot be read": frame(HEADERS, END_HEADERS, 1, b"\xbe"),
    "a push": frame(PUSH_PROMISE, 0, 1, bytes(4)),
    "a short ping": frame(PING, 0, 0, b"x"),
    "odd settings": frame(SETTINGS, 0, 0, b"x"),
    "a window without end": frame(WINDOW_UPDATE, 0, 0, (2**31 - 1).to_bytes(4)),
    "a stream's window without end": frame(WINDOW_UPDATE, 0, 1, (2**31 - 1).to_bytes(4)),
    "a window of nothing": frame(WINDOW_UPDATE, 0, 1, bytes(4)),
    "a first window without end": setting(INITIAL_WINDOW_SIZE, 2**31),
    "a short farewell": frame(GOAWAY, 0, 0, b"x"),
    "a short reset": frame(RST_STREAM, 0, 1, b"x"),
}


@pytest.mark.parametrize("what", BAD)
async def test_who_does_not_speak_it_is_hung_up_on(what: str) -> None:
    async with connected() as (peer, connection, _, sink):
        peer.say(data(1, message(b"first")), BAD[what])
        end = await sink.end()
        assert sink.messages == [b"first"]
        assert end.code is grpc.StatusCode.UNAVAILABLE
        assert "does not speak HTTP/2" in end.message
        assert not connection.writable
        assert (await peer.until_closed())[-17:][3] == GOAWAY


async def test_who_does_not_begin_with_settings_is_hung_up_on() -> None:
    async with Peer().listening() as peer:
        connection, sink = Http2Connection("the peer"), Sink()
        await asyncio.get_running_loop().create_connection(lambda: connection, "127.0.0.1", peer.port)
        await peer.accept()
        MessageStream(connection, [(b":method", b"POST")], sink)
        peer.say(headers(1, OK))
        assert "does not begin with its settings" in (await sink.end()).message


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        (b"\0" + (message_stream.MAX_MESSAGE_BYTES + 1).to_bytes(4), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (b"\0\xff\xff\xff\xff" + bytes(100), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (b"\1" + bytes(3) + b"\5hello", grpc.StatusCode.INTERNAL),
    ],
    ids=["too long", "far too long", "compressed"],
)
async def test_a_message_that_may_not_be_ends_the_call_before_it_has_come(bad: bytes, code: grpc.StatusCode) -> None:
    async with connected() as (peer, _, call, sink):
        peer.say(data(1, message(b"first") + bad))
        assert (await sink.end()).code is code
        assert sink.messages == [b"first"]
        assert not call._rest
        await peer.until_closed()


async def test_what_answers_without_grpc_says_what_it_is() -> None:
    async with Peer().listening() as peer:
        connection, sink = Http2Connection("the peer"), Sink()
        await asyncio.get_running_loop().create_connection(lambda: connection, "127.0.0.1", peer.port)
        await peer.accept()
        MessageStream(connection, [(b":method", b"POST")], sink)
        peer.say(frame(SETTINGS), headers(1, [(b":status", b"503"), (b"content-type", b"text/html")]))
        end = await sink.end()
        connection.close()
    assert end.code is grpc.StatusCode.UNAVAILABLE
    assert "503" in end.message


# --- flow control ---


async def test_what_is_sent_waits_for_the_others_windows() -> None:
    async with connected() as (peer, _, call, sink):
        peer.say(setting(INITIAL_WINDOW_SIZE, 10))
        await peer.next(SETTINGS)
        call.send(bytes(range(40)))
        assert not call.writable
        assert (await peer.next(DATA)).data == message(bytes(range(40)))[:10]
        for more, expected in ((1, 1), (20, 20)):
            peer.say(frame(WINDOW_UPDATE, 0, 1, more.to_bytes(4)))
            assert len((await peer.next(DATA)).data) == expected
        peer.say(setting(INITIAL_WINDOW_SIZE, 13))  # 3 more than before, for streams that are open too
        assert len((await peer.next(DATA)).data) == 3
        peer.say(setting(INITIAL_WINDOW_SIZE, 0), frame(WINDOW_UPDATE, 0, 1, (13).to_bytes(4)))
        peer.say(frame(PING, 0, 0, b"12345678"))
        assert (await peer.next(PING)).data == b"12345678"  # and no data before it
        assert not call.writable
        peer.say(frame(WINDOW_UPDATE, 0, 1, (100).to_bytes(4)))
        assert len((await peer.next(DATA)).data) == 45 - 34
        await sink.until(lambda: call.writable and sink.writable)


async def test_large_messages_leave_in_frames_within_the_connections_window() -> None:
    async with connected() as (peer, _, call, _):
        peer.say(setting(INITIAL_WINDOW_SIZE, 1 << 20))
        await peer.next(SETTINGS)
        call.send(bytes(100_000))
        got = 0
        while got < 65535:
            size = len((await peer.next(DATA)).data)
            assert size <= MAX_FRAME_BYTES
            got += size
        assert (got, call.writable) == (65535, False)
        peer.say(frame(WINDOW_UPDATE, 0, 0, (1 << 20).to_bytes(4)))
        while got < 100_005:
            got += len((await peer.next(DATA)).data)
        assert (got, call.writable) == (100_005, True)


async def test_more_is_asked_for_when_half_of_the_window_has_come() -> None:
    async with connected() as (peer, _, _, sink):
        whole = message(bytes(http2.WINDOW_BYTES // 2))
        peer.say(*(data(1, whole[at : at + MAX_FRAME_BYTES]) for at in range(0, len(whole), MAX_FRAME_BYTES)))
        await sink.until(lambda: bool(sink.messages))
        found = [await peer.next(WINDOW_UPDATE) for _ in range(2)]
        assert sorted(item.key for item in found) == [0, 1]
        assert all(http2.WINDOW_BYTES // 2 <= int.from_bytes(item.data) <= len(whole) for item in found)


async def test_who_asks_on_and_on_and_reads_nothing_is_hung_up_on() -> None:
    async with connected() as (peer, connection, _, sink):
        connection.pause_writing()
        peer.say(frame(PING, 0, 0, bytes(8)))
        assert "reads no answer" in (await sink.end()).message


async def test_pings_are_answered_and_their_answers_are_not() -> None:
    async with connected() as (peer, _, _, _):
        peer.say(frame(PING, ACK, 0, b"answered"), frame(PING, 0, 0, b"question"))
        assert (await peer.next(PING)).data == b"question"


async def test_who_gives_no_sign_of_life_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http2, "TICK_S", 3600.0)
    async with connected() as (peer, connection, _, sink):

        def tick() -> None:
            assert connection._timer is not None
            connection._timer.cancel()
            connection._tick()

        for _ in range(3):
            tick()
            tick()
            asked = await peer.next(PING)
            peer.say(frame(PING, ACK, 0, asked.data))
            async with asyncio.timeout(240):
                while connection._silent:
                    await asyncio.sleep(0)
        tick()
        tick()
        assert sink.ends == []
        tick()  # that one was not answered
        assert "no sign of life" in (await sink.end()).message


async def test_a_farewell_leaves_the_streams_that_it_names() -> None:
    async with connected() as (peer, connection, _, sink):
        peer.say(frame(GOAWAY, 0, 0, (1).to_bytes(4) + bytes(4)), data(1, message(b"more")))
        await sink.until(lambda: bool(sink.messages))
        late = Sink()
        MessageStream(connection, [(b":method", b"POST")], late)
        assert (await late.end()).code is grpc.StatusCode.UNAVAILABLE
        peer.say(data(1, message(b"last")), trailers(1, 0))
        assert (await sink.end()).code is grpc.StatusCode.OK
        assert sink.messages == [b"more", b"last"]


async def test_a_call_that_is_given_up_is_cancelled_and_its_connection_ends() -> None:
    async with connected() as (peer, _, call, sink):
        call.close()
        peer.say(data(1, message(b"too late")))
        assert int.from_bytes((await peer.next(RST_STREAM)).data) == http2.CANCEL
        await peer.until_closed()
        assert (sink.messages, sink.ends) == ([], [])


# --- dialing ---


async def refused(dialer: Dialer) -> StreamEnded:
    with pytest.raises(StreamEnded) as ended:
        await dialer.open("/s/M", Sink())
    return ended.value


async def test_nobody_there_and_no_such_address() -> None:
    async with Peer().listening() as peer:
        port = peer.port
    for address, why in (
        (f"127.0.0.1:{port}", f"failed to connect to 127.0.0.1:{port}: nothing listens there"),
        ("127.0.0.1:http", "failed"),
        ("", "failed"),
    ):
        end = await refused(Dialer(address))
        assert end.code is grpc.StatusCode.UNAVAILABLE
        assert why in end.message


def test_reasons_are_our_own_words() -> None:
    for number in (errno.ECONNRESET, errno.EPIPE, errno.EHOSTUNREACH, errno.ECONNREFUSED, errno.ETIMEDOUT):
        error = OSError(number, os.strerror(number), "/run/x")
        assert os.strerror(number) not in connection_reason(error)
        assert "/run/x" not in connection_reason(error)
    assert connection_reason(None) == "it was closed"


async def test_who_proves_nothing_in_time_gets_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_stream, "HANDSHAKE_S", 1.0)
    async with Peer().listening() as peer:
        end = await refused(Dialer(f"127.0.0.1:{peer.port}", token=Token("a-token-0123456789")))
        assert "did not prove the shared token" in end.message
        await peer.accept()
        key, asked = await peer.request()
        assert (key, asked[b":path"]) == (1, b"/baton.api.v1.AuthService/Challenge")
        assert b"GenerateMany" not in await peer.until_closed()


async def test_a_dialer_that_is_closed_ends_what_it_has_and_begins_nothing() -> None:
    async with Peer().listening() as peer:
        dialer, sink = Dialer(f"127.0.0.1:{peer.port}"), Sink()
        await dialer.open("/s/M", sink)
        await peer.accept()
        waiting = Dialer(f"127.0.0.1:{peer.port}", token=Token("a-token-0123456789"))
        opening = asyncio.create_task(waiting.open("/s/M", Sink()))
        while not peer._streams.qsize():
            await asyncio.sleep(0.01)
        dialer.close()
        waiting.close()
        assert (await sink.end()).message == message_stream.CLOSED
        with pytest.raises(asyncio.CancelledError):
            await opening
        assert (await refused(dialer)).code is grpc.StatusCode.CANCELLED
        await peer.until_closed()
        await peer.accept()
        await peer.until_closed()
