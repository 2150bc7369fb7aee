"""What message pipes promise, inside one process and over TCP."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from tests.support.transport.transport_rig import LIMIT, MEDIA, Media, connect_raw, in_thread, lets_go, open_fds, soon

from baton.errors import (
    CancelledError,
    DeadlineError,
    InvalidRequestError,
    PipeClosedError,
    TransferError,
    UnauthenticatedError,
)
from baton.kv_transfer.pipes.messages import (
    DTYPE_SIZES,
    MAX_TENSORS,
    MessageListener,
    MessagePipe,
    TcpMessagePipe,
    WireTensor,
)
from baton.kv_transfer.protocol.deadline import Wait
from baton.kv_transfer.protocol.frames import HEADER, FrameKind, pack_header, recv_control
from baton.kv_transfer.protocol.sockets import Stream
from baton.rpc.service_token import Token


@pytest.fixture(params=MEDIA)
def media(request: pytest.FixtureRequest) -> Media:
    return Media(request.param)


@pytest.fixture
def pipes(media: Media) -> Iterator[tuple[MessagePipe, MessagePipe]]:
    a, b = media.pair()
    yield a, b
    a.close()
    b.close()


def bytes_tensor(data: bytes) -> WireTensor:
    return WireTensor("uint8", (len(data),), memoryview(bytearray(data)))


def number(i: int) -> list[WireTensor]:
    return [bytes_tensor(struct.pack("<Q", i))]


def as_number(message: list[WireTensor] | None) -> int:
    assert message is not None
    return int(struct.unpack("<Q", message[0].data)[0])


@pytest.mark.parametrize("dtype", list(DTYPE_SIZES))
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (2, 3, 5)])
def test_every_dtype_and_shape_arrives_bit_for_bit(
    pipes: tuple[MessagePipe, MessagePipe], dtype: str, shape: tuple[int, ...]
) -> None:
    count = int(np.prod(shape)) * DTYPE_SIZES[dtype]
    data = np.random.default_rng(0).integers(0, 256, count, dtype=np.uint8).tobytes()
    pipes[0].send([WireTensor(dtype, shape, memoryview(data))] * 2, deadline=soon())
    got = pipes[1].recv(deadline=soon()) or []
    assert [(item.dtype, item.shape, bytes(item.data)) for item in got] == [(dtype, shape, data)] * 2


def test_none_empty_and_order(pipes: tuple[MessagePipe, MessagePipe]) -> None:
    a, b = pipes
    a.send(None, deadline=soon())
    a.send([], deadline=soon())
    for i in range(50):
        a.send(number(i), deadline=soon())
    assert b.recv(deadline=soon()) is None
    assert b.recv(deadline=soon()) == []
    assert [as_number(b.recv(deadline=soon())) for _ in range(50)] == list(range(50))


def test_what_was_sent_can_be_overwritten(pipes: tuple[MessagePipe, MessagePipe]) -> None:
    data = bytearray(b"before")
    pipes[0].send([WireTensor("uint8", (6,), memoryview(data))], deadline=soon())
    data[:] = b"after!"
    message = pipes[1].recv(deadline=soon())
    assert message is not None
    assert bytes(message[0].data) == b"before"


def test_a_huge_message_goes_through_both_ways_at_once(media: Media) -> None:
    size = 24 << 20
    a, b = media.pair(limit=size)
    data = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
    message = [WireTensor("uint8", (size,), data.data)]
    with a, b:
        sends = [in_thread(lambda end=end: end.send(message, deadline=soon(240))) for end in (a, b)]
        receives = [in_thread(lambda end=end: end.recv(deadline=soon(240))) for end in (a, b)]
        for call in sends:
            call.result(240)
        for call in receives:
            assert np.array_equal(np.frombuffer(call.result(240)[0].data, np.uint8), data)


def test_the_largest_message_fits_and_one_byte_more_is_refused(pipes: tuple[MessagePipe, MessagePipe]) -> None:
    a, b = pipes
    most = WireTensor("uint8", (LIMIT,), memoryview(bytearray(LIMIT)))
    receiver = in_thread(lambda: b.recv(deadline=soon()))
    a.send([most], deadline=soon())
    assert receiver.result(240)[0].data.nbytes == LIMIT
    with pytest.raises(InvalidRequestError) as caught:
        a.send([most, bytes_tensor(b"x")], deadline=soon())
    assert caught.value.field == "tensors"
    with pytest.raises(InvalidRequestError):
        a.send([bytes_tensor(b"")] * (MAX_TENSORS + 1), deadline=soon())
    a.send(number(1), deadline=soon())  # still in step
    assert as_number(b.recv(deadline=soon())) == 1


@pytest.mark.parametrize(
    ("dtype", "shape", "size"),
    [("complex64", (1,), 8), ("uint8", (2,), 1), ("uint8", (-1,), 1), ("uint8", (1,) * 17, 1)],
)
def test_malformed_tensors_are_refused(dtype: str, shape: tuple[int, ...], size: int) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        WireTensor(dtype, shape, memoryview(bytes(size)))
    assert caught.value.field == "tensors"


def test_many_threads_send_and_receive_without_mixing(pipes: tuple[MessagePipe, MessagePipe]) -> None:
    a, b = pipes
    senders, each = 6, 60

    def send(who: int) -> None:
        for i in range(each):
            body = bytes([who]) * (1 + 997 * (i % 13))
            a.send([*number(who * 1000 + i), bytes_tensor(body)], deadline=soon(240))

    def receive() -> list[int]:
        got = []
        for _ in range(senders * each // 3):
            message = b.recv(deadline=soon(240))
            value = as_number(message)
            assert message is not None
            assert bytes(message[1].data) == bytes([value // 1000]) * (1 + 997 * (value % 1000 % 13))
            got.append(value)
        return got

    with ThreadPoolExecutor(senders + 3) as pool:
        sends = [pool.submit(send, who) for who in range(senders)]
        receives = [pool.submit(receive) for _ in range(3)]
        for call in sends:
            call.result(240)
        got = sorted(value for call in receives for value in call.result(240))
    assert got == sorted(who * 1000 + i for who in range(senders) for i in range(each))


def test_a_sender_waits_for_its_receiver_and_then_gives_up(media: Media) -> None:
    a, b = media.pair(limit=200 << 20)
    message = [WireTensor("uint8", (48 << 20,), memoryview(bytearray(48 << 20)))]

    def send_all() -> None:
        for _ in range(4):
            a.send(message, deadline=soon(0.3))

    with a, b, pytest.raises(DeadlineError):
        send_all()


def test_deadlines_before_a_message_leave_the_pipe_usable(pipes: tuple[MessagePipe, MessagePipe]) -> None:
    a, b = pipes
    start = time.monotonic()
    with pytest.raises(DeadlineError):
        b.recv(deadline=soon(0.05))
    assert time.monotonic() - start > 0.04
    with pytest.raises(DeadlineError):
        a.send(number(1), deadline=time.monotonic() - 1)
    a.send(number(2), deadline=soon())
    assert as_number(b.recv(deadline=soon())) == 2


def test_a_receive_can_be_cancelled(pipes: tuple[MessagePipe, MessagePipe]) -> None:
    a, b = pipes
    flag = threading.Event()
    call = in_thread(lambda: b.recv(deadline=soon(), cancelled=flag))
    flag.set()
    with pytest.raises(CancelledError):
        call.result(240)
    a.send(number(3), deadline=soon())
    assert as_number(b.recv(deadline=soon())) == 3


@pytest.mark.parametrize("who", ["own", "peer"])
def test_close_wakes_whoever_is_blocked(media: Media, who: str) -> None:
    a, b = media.pair()
    call = in_thread(lambda: b.recv(deadline=soon()))
    (b if who == "own" else a).close()
    with pytest.raises(PipeClosedError):
        call.result(240)
    a.close()
    b.close()
    for end in (a, b):
        with pytest.raises(PipeClosedError):
            end.recv(deadline=soon())
        with pytest.raises(PipeClosedError):
            end.send(number(1), deadline=soon())


def test_close_wakes_a_blocked_sender(media: Media) -> None:
    a, b = media.pair(limit=200 << 20)
    message = [WireTensor("uint8", (48 << 20,), memoryview(bytearray(48 << 20)))]

    def send_for_ever() -> None:
        while True:
            a.send(message, deadline=soon())

    call = in_thread(send_for_ever)
    assert b.recv(deadline=soon()) is not None
    a.close()
    with pytest.raises(PipeClosedError):
        call.result(240)
    b.close()


def test_messages_sent_before_a_close_still_arrive(media: Media) -> None:
    a, b = media.pair()
    for i in range(3):
        a.send(number(i), deadline=soon())
    a.close()
    assert [as_number(b.recv(deadline=soon())) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(PipeClosedError):
        b.recv(deadline=soon())
    b.close()


def connect(address: str, token: Token | None = None) -> TcpMessagePipe:
    return TcpMessagePipe.connect(address, deadline=soon(), max_message_bytes=LIMIT, token=token)


def test_reconnect_after_a_close_and_no_descriptors_left() -> None:
    before = open_fds()
    with MessageListener(max_message_bytes=LIMIT) as listener:
        for i in range(5):
            accepted = in_thread(lambda: listener.accept(deadline=soon()))
            with connect(listener.address) as a, accepted.result(240) as b:
                a.send(number(i), deadline=soon())
                assert as_number(b.recv(deadline=soon())) == i
        with pytest.raises(DeadlineError):
            listener.accept(deadline=soon(0.02))
        waiting = in_thread(lambda: listener.accept(deadline=soon()))
        listener.close()
        with pytest.raises(PipeClosedError):
            waiting.result(240)
    with pytest.raises(PipeClosedError):
        connect(listener.address)
    assert lets_go(before)


@pytest.mark.parametrize(
    ("ours", "theirs"), [(Token("right"), Token("wrong")), (Token("right"), None), (None, Token("wrong"))]
)
def test_tokens_must_be_equal(ours: Token | None, theirs: Token | None) -> None:
    with MessageListener(max_message_bytes=LIMIT, token=ours) as listener:
        flag = threading.Event()
        accepted = in_thread(lambda: listener.accept(deadline=soon(), cancelled=flag))
        with pytest.raises(UnauthenticatedError) as caught:
            connect(listener.address, theirs)
        assert caught.value.field == "token"
        with connect(listener.address, ours) as pipe:  # the listener lives on
            pipe.send(number(4), deadline=soon())
            with accepted.result(240) as end:
                assert as_number(end.recv(deadline=soon())) == 4


def raw_tcp_pair() -> tuple[socket.socket, TcpMessagePipe]:
    """A connected TcpMessagePipe and the bare socket at its other end."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    return ours, TcpMessagePipe(Stream(theirs, peer="raw"), max_message_bytes=LIMIT)


def captured_message() -> bytes:
    raw, pipe = raw_tcp_pair()
    with raw, pipe:
        pipe.send([bytes_tensor(b"abc"), WireTensor("float32", (2, 2), memoryview(bytes(16)))], deadline=soon())
        size = HEADER.size + parse_length(raw.recv(HEADER.size, socket.MSG_PEEK))
        return raw.recv(size, socket.MSG_WAITALL)


def parse_length(header: bytes) -> int:
    return int(HEADER.unpack(header)[-1])


def test_peer_death_at_every_byte_of_a_message() -> None:
    message = captured_message()
    for cut in range(len(message)):
        raw, pipe = raw_tcp_pair()
        with pipe:
            raw.sendall(message[:cut])
            raw.close()
            with pytest.raises(PipeClosedError):
                pipe.recv(deadline=soon())


def test_a_stall_in_mid_message_ends_at_the_deadline_and_closes_the_pipe() -> None:
    message = captured_message()
    raw, pipe = raw_tcp_pair()
    with raw, pipe:
        raw.sendall(message[:-1])
        with pytest.raises(DeadlineError):
            pipe.recv(deadline=soon(0.05))
        with pytest.raises(PipeClosedError):
            pipe.recv(deadline=soon())


def corrupted() -> list[bytes]:
    good = captured_message()
    head, body = good[: HEADER.size], good[HEADER.size :]
    huge = pack_header(FrameKind.TENSORS, 1 << 62)
    return [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\0" * 64,
        b"XXXX" + good[4:],
        head[:4] + b"\xff" + good[5:],  # version
        head[:5] + b"\xff" + good[6:],  # kind
        pack_header(FrameKind.READ, 8) + b"\0" * 8,
        huge + body,
        pack_header(FrameKind.TENSORS, 2) + b"\0\0",
        head + struct.pack("<IBI", 1 << 31, 0, 0) + body,  # tensors
        head + struct.pack("<IBI", 2, 0, 1 << 31) + body,  # descriptions
        head + struct.pack("<IBI", 2, 1, 0) + body,  # none, with tensors
        head + body[:9] + b"\xff" + body[10:],  # dtype code
        head + body[:10] + b"\xff" + body[11:],  # dimensions
        head + body[:11] + b"\xff" * 8 + body[19:],  # a size that does not fit the length
        pack_header(FrameKind.TENSORS, len(body) - 1) + body,
    ]


@pytest.mark.parametrize("which", range(15))
def test_garbage_and_oversized_frames_close_the_pipe_without_memory(which: int) -> None:
    data = corrupted()[which]
    raw, pipe = raw_tcp_pair()
    with raw, pipe:
        raw.sendall(data.ljust(64, b"\0"))
        with pytest.raises(TransferError):
            pipe.recv(deadline=soon())
        with pytest.raises(PipeClosedError):
            pipe.recv(deadline=soon())


def test_listeners_survive_garbage_and_silence() -> None:
    with MessageListener(max_message_bytes=LIMIT) as listener:
        accepted = in_thread(lambda: listener.accept(deadline=soon()))
        stream = connect_raw("tcp", listener.address)
        stream.send_all([os.urandom(1000)], Wait(soon()), "garbage")
        recv_control(stream, FrameKind.CHALLENGE, Wait(soon()))
        with pytest.raises(TransferError):
            recv_control(stream, FrameKind.WELCOME, Wait(soon()))
        stream.close()
        with connect(listener.address) as a, accepted.result(240) as b:
            a.send(None, deadline=soon())
            assert b.recv(deadline=soon()) is None
