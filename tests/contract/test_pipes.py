"""What every kind of pipe promises: message pipes first, then block transfer. A new kind joins by an entry in MEDIA."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from baton.errors import (
    BatonError,
    CancelledError,
    ConfigError,
    DeadlineError,
    FingerprintMismatchError,
    InvalidRequestError,
    PipeClosedError,
    QueueFullError,
    StaleBlockError,
    TransferError,
    UnauthenticatedError,
)
from baton.kv.arena import KVArena
from baton.kv.fingerprint import Fingerprint
from baton.kv.layout import KVLayout, LayerShape
from baton.transport.blocks import BlockFetcher, BlockReads, BlockServer, BlockSource, Endpoint, ServerOptions
from baton.transport.handshake import PURPOSE_READ, Facts, greet_as_client
from baton.transport.pipe.base import DTYPE_SIZES, MAX_TENSORS, Pipe, PipeListener, WireTensor
from baton.transport.pipe.memory import MemoryNetwork
from baton.transport.pipe.shm import ShmPipe, ShmPipeListener
from baton.transport.pipe.tcp import TcpPipe, TcpPipeListener
from baton.transport.pipe.tcp_read import ServeLimits, request_blocks
from baton.transport.sockets import Stream, connect_tcp, connect_unix
from baton.transport.tensors import from_wire, to_wire
from baton.transport.waiting import Wait
from baton.transport.wire import HEADER, FrameKind, pack_header, recv_control
from baton.types import Epoch, InstanceId

LIMIT = 4 << 20
"""Bound on messages in these tests, in bytes."""


class Media:
    """Makes pipes of one kind."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.network = MemoryNetwork()

    def listen(self, *, limit: int = LIMIT, token: str | None = None) -> PipeListener:
        if self.kind == "memory":
            return self.network.listen(max_message_bytes=limit)
        if self.kind == "shm":
            return ShmPipeListener(max_message_bytes=limit, token=token)
        return TcpPipeListener(max_message_bytes=limit, token=token)

    def connect(self, address: str, *, limit: int = LIMIT, token: str | None = None) -> Pipe:
        if self.kind == "memory":
            return self.network.connect(address)
        if self.kind == "shm":
            return ShmPipe.connect(address, deadline=soon(), max_message_bytes=limit, token=token, ring_bytes=64 << 10)
        return TcpPipe.connect(address, deadline=soon(), max_message_bytes=limit, token=token)

    def pair(self, *, limit: int = LIMIT) -> tuple[Pipe, Pipe]:
        with self.listen(limit=limit) as listener:
            accepted = in_thread(lambda: listener.accept(deadline=soon()))
            mine = self.connect(listener.address, limit=limit)
            return mine, accepted.result(10)


MEDIA = ["memory", "shm", "tcp"]


def soon(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


def in_thread(call: Callable[[], Any]) -> Future[Any]:
    pool = ThreadPoolExecutor(1)
    try:
        return pool.submit(call)
    finally:
        pool.shutdown(wait=False)


def open_fds() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(params=MEDIA)
def media(request: pytest.FixtureRequest) -> Media:
    return Media(request.param)


@pytest.fixture(params=["shm", "tcp"])
def socket_media(request: pytest.FixtureRequest) -> Media:
    """Kinds whose other end may be anybody."""
    return Media(request.param)


@pytest.fixture
def pipes(media: Media) -> Iterator[tuple[Pipe, Pipe]]:
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


# ---------------------------------------------------------------------------------------------- messages


@pytest.mark.parametrize("dtype", list(DTYPE_SIZES))
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (2, 3, 5)])
def test_every_dtype_and_shape_arrives_bit_for_bit(
    pipes: tuple[Pipe, Pipe], dtype: str, shape: tuple[int, ...]
) -> None:
    count = int(np.prod(shape)) * DTYPE_SIZES[dtype]
    raw = torch.from_numpy(np.random.default_rng(0).integers(0, 2, count, dtype=np.uint8))
    tensor = (raw if raw.numel() else torch.empty(0, dtype=torch.uint8)).view(getattr(torch, dtype)).reshape(shape)
    pipes[0].send(to_wire([tensor, tensor]), deadline=soon())
    got = from_wire(pipes[1].recv(deadline=soon()) or [])
    assert len(got) == 2
    for item in got:
        assert (item.dtype, item.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(item.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_none_empty_and_order(pipes: tuple[Pipe, Pipe]) -> None:
    a, b = pipes
    a.send(None, deadline=soon())
    a.send([], deadline=soon())
    for i in range(50):
        a.send(number(i), deadline=soon())
    assert b.recv(deadline=soon()) is None
    assert b.recv(deadline=soon()) == []
    assert [as_number(b.recv(deadline=soon())) for _ in range(50)] == list(range(50))


def test_strided_and_transposed_tensors_arrive_dense(pipes: tuple[Pipe, Pipe]) -> None:
    tensor = torch.arange(60, dtype=torch.bfloat16).reshape(3, 4, 5).transpose(0, 2)[1:, ::2]
    pipes[0].send(to_wire([tensor]), deadline=soon())
    (got,) = from_wire(pipes[1].recv(deadline=soon()) or [])
    assert torch.equal(got, tensor)


def test_what_was_sent_can_be_overwritten(pipes: tuple[Pipe, Pipe]) -> None:
    data = bytearray(b"before")
    pipes[0].send([WireTensor("uint8", (6,), memoryview(data))], deadline=soon())
    data[:] = b"after!"
    message = pipes[1].recv(deadline=soon())
    assert message is not None
    assert bytes(message[0].data) == b"before"


def test_a_huge_message_goes_through_both_ways_at_once(media: Media) -> None:
    size = 96 << 20
    a, b = media.pair(limit=size)
    data = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
    message = [WireTensor("uint8", (size,), data.data)]
    with a, b:
        sends = [in_thread(lambda end=end: end.send(message, deadline=soon(60))) for end in (a, b)]
        receives = [in_thread(lambda end=end: end.recv(deadline=soon(60))) for end in (a, b)]
        for call in sends:
            call.result(60)
        for call in receives:
            assert np.array_equal(np.frombuffer(call.result(60)[0].data, np.uint8), data)


def test_the_largest_message_fits_and_one_byte_more_is_refused(pipes: tuple[Pipe, Pipe]) -> None:
    a, b = pipes
    most = WireTensor("uint8", (LIMIT,), memoryview(bytearray(LIMIT)))
    receiver = in_thread(lambda: b.recv(deadline=soon()))
    a.send([most], deadline=soon())
    assert receiver.result(10)[0].data.nbytes == LIMIT
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


def test_tensors_that_pipes_dont_carry_are_refused() -> None:
    for tensor in (torch.zeros(2, dtype=torch.complex64), torch.eye(2).to_sparse()):
        with pytest.raises(InvalidRequestError):
            to_wire([tensor])


def test_many_threads_send_and_receive_without_mixing(pipes: tuple[Pipe, Pipe]) -> None:
    a, b = pipes
    senders, each = 6, 60

    def send(who: int) -> None:
        for i in range(each):
            body = bytes([who]) * (1 + 997 * (i % 13))
            a.send([*number(who * 1000 + i), bytes_tensor(body)], deadline=soon(60))

    def receive() -> list[int]:
        got = []
        for _ in range(senders * each // 3):
            message = b.recv(deadline=soon(60))
            value = as_number(message)
            assert message is not None
            assert bytes(message[1].data) == bytes([value // 1000]) * (1 + 997 * (value % 1000 % 13))
            got.append(value)
        return got

    with ThreadPoolExecutor(senders + 3) as pool:
        sends = [pool.submit(send, who) for who in range(senders)]
        receives = [pool.submit(receive) for _ in range(3)]
        for call in sends:
            call.result(60)
        got = sorted(value for call in receives for value in call.result(60))
    assert got == sorted(who * 1000 + i for who in range(senders) for i in range(each))


def test_a_sender_waits_for_its_receiver_and_then_gives_up(media: Media) -> None:
    a, b = media.pair(limit=200 << 20)
    message = [WireTensor("uint8", (48 << 20,), memoryview(bytearray(48 << 20)))]

    def send_all() -> None:
        for _ in range(4):
            a.send(message, deadline=soon(0.3))

    with a, b, pytest.raises(DeadlineError):
        send_all()


def test_deadlines_before_a_message_leave_the_pipe_usable(pipes: tuple[Pipe, Pipe]) -> None:
    a, b = pipes
    start = time.monotonic()
    with pytest.raises(DeadlineError):
        b.recv(deadline=soon(0.05))
    assert 0.04 < time.monotonic() - start < 2.0
    with pytest.raises(DeadlineError):
        a.send(number(1), deadline=time.monotonic() - 1)
    a.send(number(2), deadline=soon())
    assert as_number(b.recv(deadline=soon())) == 2


def test_a_receive_can_be_cancelled(pipes: tuple[Pipe, Pipe]) -> None:
    a, b = pipes
    flag = threading.Event()
    call = in_thread(lambda: b.recv(deadline=soon(), cancelled=flag))
    flag.set()
    with pytest.raises(CancelledError):
        call.result(5)
    a.send(number(3), deadline=soon())
    assert as_number(b.recv(deadline=soon())) == 3


@pytest.mark.parametrize("who", ["own", "peer"])
def test_close_wakes_whoever_is_blocked(media: Media, who: str) -> None:
    a, b = media.pair()
    call = in_thread(lambda: b.recv(deadline=soon()))
    (b if who == "own" else a).close()
    with pytest.raises(PipeClosedError):
        call.result(5)
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
        call.result(10)
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


def test_reconnect_after_a_close_and_no_descriptors_left(media: Media) -> None:
    before = open_fds()
    with media.listen() as listener:
        for i in range(5):
            accepted = in_thread(lambda: listener.accept(deadline=soon()))
            with media.connect(listener.address) as a, accepted.result(10) as b:
                a.send(number(i), deadline=soon())
                assert as_number(b.recv(deadline=soon())) == i
        with pytest.raises(DeadlineError):
            listener.accept(deadline=soon(0.02))
        waiting = in_thread(lambda: listener.accept(deadline=soon()))
        listener.close()
        with pytest.raises(PipeClosedError):
            waiting.result(5)
    with pytest.raises(PipeClosedError):
        media.connect(listener.address)
    assert open_fds() == before


@pytest.mark.parametrize(("ours", "theirs"), [("right", "wrong"), ("right", None), (None, "wrong")])
def test_tokens_must_be_equal(socket_media: Media, ours: str | None, theirs: str | None) -> None:
    with socket_media.listen(token=ours) as listener:
        flag = threading.Event()
        accepted = in_thread(lambda: listener.accept(deadline=soon(), cancelled=flag))
        with pytest.raises(UnauthenticatedError) as caught:
            socket_media.connect(listener.address, token=theirs)
        assert caught.value.field == "token"
        with socket_media.connect(listener.address, token=ours) as pipe:  # the listener lives on
            pipe.send(number(4), deadline=soon())
            with accepted.result(10) as end:
                assert as_number(end.recv(deadline=soon())) == 4


def raw_tcp_pair() -> tuple[socket.socket, TcpPipe]:
    """A connected TcpPipe and the bare socket at its other end."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    return ours, TcpPipe(Stream(theirs, peer="raw"), max_message_bytes=LIMIT)


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
            pipe.recv(deadline=soon(5))
        with pytest.raises(PipeClosedError):
            pipe.recv(deadline=soon())


def test_listeners_survive_garbage_and_silence(socket_media: Media) -> None:
    with socket_media.listen() as listener:
        accepted = in_thread(lambda: listener.accept(deadline=soon()))
        stream = connect_raw(socket_media.kind, listener.address)
        stream.send_all([os.urandom(1000)], Wait(soon()), "garbage")
        recv_control(stream, FrameKind.CHALLENGE, Wait(soon()))
        with pytest.raises(TransferError):
            recv_control(stream, FrameKind.WELCOME, Wait(soon()))
        stream.close()
        with socket_media.connect(listener.address) as a, accepted.result(10) as b:
            a.send(None, deadline=soon())
            assert b.recv(deadline=soon()) is None


def connect_raw(kind: str, address: str) -> Any:
    if kind == "shm":
        return connect_unix(address.rsplit("/", 1)[1], Wait(soon()))
    return connect_tcp(address, Wait(soon()))


def test_a_shared_memory_peer_that_lies_about_its_ring_is_sent_away() -> None:
    media = Media("shm")
    a, b = media.pair()
    doorbell = a._out._doorbell  # type: ignore[attr-defined]
    with a, b:
        doorbell.send_all([struct.pack("<Q", 1 << 40)], Wait(soon()), "lying")
        with pytest.raises(TransferError):
            b.recv(deadline=soon())
        with pytest.raises(PipeClosedError):
            b.recv(deadline=soon())


# ---------------------------------------------------------------------------------------------- block transfer

LAYOUT = KVLayout((LayerShape(2, 16, 16), LayerShape(2, 16, 8)), 16, "float32")
PRINT = Fingerprint.of(model="tiny", model_digest="d" * 64, rope="r", layout=LAYOUT)
KINDS: list[Any] = [("memory", 1), ("shm", 1), ("tcp", 1), ("tcp", 3)]


class Rig:
    """A source arena full of random bytes behind a server, and a target arena with a fetcher."""

    def __init__(self, kind: str, streams: int = 1, num_blocks: int = 200, layout: KVLayout = LAYOUT) -> None:
        self.kind = kind
        self.sockets: list[socket.socket] = []
        self.network = MemoryNetwork()
        self.source_arena = KVArena(num_blocks, layout.block_bytes)
        self.target = KVArena(num_blocks + 17, layout.block_bytes)
        rng = np.random.default_rng(7)
        self.source_arena.blocks[:] = rng.integers(0, 256, self.source_arena.blocks.shape, dtype=np.uint8)
        self.source_arena.generations[:] = rng.integers(0, 1 << 63, num_blocks, dtype=np.uint64)
        self.print = Fingerprint.of(model="tiny", model_digest="d" * 64, rope="r", layout=layout)
        self.server = self.serve()
        self.fetcher = BlockFetcher(self.target, self.print, kinds=(kind,), streams=streams, memory=self.network)

    def serve(self, **options: Any) -> BlockServer:
        return BlockServer(
            self.source_arena,
            self.print,
            InstanceId("p0"),
            kinds=(self.kind,),
            options=ServerOptions(memory=self.network, **options),
        )

    def fetch(self, remote: Any, local: Any, *, generations: Any = None, **options: Any) -> Any:
        if generations is None:
            generations = self.source_arena.generations[np.asarray(remote, dtype=np.int64)]
        arguments = {"deadline": soon()} | options
        return self.fetcher.fetch(self.server.source, remote, generations, local, **arguments)

    def same(self, remote: Any, local: Any) -> bool:
        return bool((self.target.blocks[np.asarray(local)] == self.source_arena.blocks[np.asarray(remote)]).all())

    def close(self) -> None:
        self.fetcher.close()
        self.server.close()
        for sock in self.sockets:
            sock.close()
        self.source_arena.close()
        self.target.close()


@pytest.fixture(params=KINDS, ids=lambda p: f"{p[0]}-{p[1]}")
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    rig = Rig(*request.param)
    yield rig
    rig.close()


@pytest.fixture
def tcp_rig() -> Iterator[Rig]:
    rig = Rig("tcp")
    yield rig
    rig.close()


@pytest.mark.parametrize("pattern", ["one", "contiguous", "scattered", "backwards", "interleaved", "all"])
def test_blocks_arrive_where_they_should_and_nowhere_else(rig: Rig, pattern: str) -> None:
    rng = np.random.default_rng(3)
    remote, local = {
        "one": (np.array([5]), np.array([9])),
        "contiguous": (np.arange(20, 120), np.arange(33, 133)),
        "scattered": (rng.permutation(200)[:77], rng.permutation(217)[:77]),
        "backwards": (np.arange(100)[::-1], np.arange(50, 150)[::-1]),
        "interleaved": (np.arange(0, 200, 2), np.arange(100)),
        "all": (np.arange(200), np.arange(17, 217)),
    }[pattern]
    rig.target.blocks[:] = 0xEE
    result = rig.fetch(remote, local)
    assert result.valid.all()
    assert len(result.valid) == len(remote)
    assert result.num_bytes == len(remote) * LAYOUT.block_bytes
    assert (result.pipe_kind, result.fallback_reason) == (rig.kind, "")
    assert result.seconds > 0
    assert rig.same(remote, local)
    others = np.setdiff1d(np.arange(217), local)
    assert (rig.target.blocks[others] == 0xEE).all()


def test_the_same_block_to_many_places(rig: Rig) -> None:
    assert rig.fetch([3, 3, 4], [1, 2, 3]).valid.all()
    assert rig.same([3, 3, 4], [1, 2, 3])


def test_nothing_asked_nothing_moved(rig: Rig) -> None:
    result = rig.fetch([], [])
    assert (len(result.valid), result.num_bytes) == (0, 0)


def test_a_block_with_another_generation_is_not_valid_and_the_rest_is(rig: Rig) -> None:
    remote = np.array([4, 5, 6, 50])
    generations = rig.source_arena.generations[remote].copy()
    rig.source_arena.generations[5] += 1
    result = rig.fetch(remote, [0, 1, 2, 3], generations=generations)
    assert result.valid.tolist() == [True, False, True, True]
    assert result.num_bytes == 3 * LAYOUT.block_bytes
    assert rig.same([4, 6, 50], [0, 2, 3])


def test_no_block_of_a_mixed_generation_is_ever_called_valid(rig: Rig) -> None:
    """An owner who recycles blocks all the time: whatever is called valid is whole and of the generation asked for."""
    arena, stop = rig.source_arena, threading.Event()
    arena.generations[:] = 0
    arena.blocks[:] = 0

    def recycle() -> None:
        turn = 0
        while not stop.is_set():
            block = turn * 7 % 64
            arena.generations[block] += 1  # first the fence, then the content
            arena.blocks[block] = arena.generations[block] % 251
            turn += 1

    owner = in_thread(recycle)
    seen = 0
    try:
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            generations = arena.generations[:64].copy()
            settled = arena.blocks[np.arange(64), -1] == generations % 251  # offered only when complete
            ids = np.flatnonzero(settled)
            result = rig.fetch(ids, np.arange(len(ids)), generations=generations[ids])
            for at in np.flatnonzero(result.valid):
                assert (rig.target.blocks[at] == generations[ids[at]] % 251).all()
                seen += 1
    finally:
        stop.set()
        owner.result(10)
    assert seen > 0


def test_many_fetches_at_once(rig: Rig) -> None:
    def fetch(who: int) -> None:
        for i in range(12):
            local = np.arange(who * 25, who * 25 + 25)
            remote = np.random.default_rng(who * 100 + i).permutation(200)[:25]
            assert rig.fetch(remote, local).valid.all()
            assert rig.same(remote, local)

    with ThreadPoolExecutor(8) as pool:
        for call in [pool.submit(fetch, who) for who in range(8)]:
            call.result(60)
    assert len(rig.fetcher._links) == 1


@pytest.mark.parametrize(
    ("remote", "local", "generations", "field"),
    [
        ([200], [0], [0], "remote_ids"),
        ([-1], [0], [0], "remote_ids"),
        ([0], [217], [0], "local_ids"),
        ([0], [-1], [0], "local_ids"),
        ([0, 1], [3, 3], [0, 0], "local_ids"),
        ([0, 1], [3], [0, 0], "local_ids"),
        ([0, 1], [3, 4], [0], "generations"),
        ([0.5], [3], [0], "remote_ids"),
    ],
)
def test_bad_ids_are_refused_by_name_before_anything_moves(
    rig: Rig, remote: Any, local: Any, generations: Any, field: str
) -> None:
    rig.target.blocks[:] = 0xEE
    with pytest.raises(InvalidRequestError) as caught:
        rig.fetch(remote, local, generations=generations)
    assert caught.value.field == field
    assert (rig.target.blocks == 0xEE).all()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_digest", "e" * 64),
        ("kv_dtype", "bfloat16"),
        ("block_size", 32),
        ("layer_shapes", (LayerShape(2, 16, 16), LayerShape(2, 16, 16))),
        ("rope", "other"),
        ("adapter", "lora"),
        ("kv_scales", "s"),
        ("layout", "v2"),
        ("tp_size", 2),
        ("tp_rank", 1),
        ("pp_size", 2),
        ("pp_rank", 1),
        ("hash_scheme", "x"),
    ],
)
@pytest.mark.parametrize("lies", [False, True], ids=["known", "found-in-handshake"])
def test_another_fingerprint_is_refused_by_field(rig: Rig, field: str, value: Any, lies: bool) -> None:
    mine = dataclasses.replace(PRINT, **{field: value})
    source = rig.server.source
    if lies:  # the source's description says what the reader wants to hear; the server does not
        source = dataclasses.replace(source, fingerprint=mine)
    fetcher = BlockFetcher(rig.target, mine, kinds=(rig.kind,), memory=rig.network)
    rig.target.blocks[:] = 0xEE
    with pytest.raises(FingerprintMismatchError) as caught:
        fetcher.fetch(source, [0], [0], [0], deadline=soon())
    fetcher.close()
    assert caught.value.field == field
    assert (rig.target.blocks == 0xEE).all()


def test_the_model_label_does_not_matter(rig: Rig) -> None:
    fetcher = BlockFetcher(rig.target, dataclasses.replace(PRINT, model="alias"), kinds=(rig.kind,), memory=rig.network)
    generations = rig.source_arena.generations[:3]
    assert fetcher.fetch(rig.server.source, [0, 1, 2], generations, [0, 1, 2], deadline=soon()).valid.all()
    fetcher.close()


def test_another_number_of_blocks_is_refused_also_on_an_open_connection(rig: Rig) -> None:
    bigger = dataclasses.replace(rig.server.source, num_blocks=100_000)
    for _ in range(2):
        with pytest.raises(FingerprintMismatchError) as caught:
            rig.fetcher.fetch(bigger, [99_999], [0], [0], deadline=soon())
        assert caught.value.field == "num_blocks"
        rig.fetch([0], [0])


def test_another_epoch_is_stale(rig: Rig) -> None:
    old = dataclasses.replace(rig.server.source, epoch=Epoch(b"\1" * 16))
    with pytest.raises(StaleBlockError):
        rig.fetcher.fetch(old, [0], [0], [0], deadline=soon())


def test_a_restarted_source_is_stale_for_old_offers_and_serves_new_ones(rig: Rig) -> None:
    rig.fetch([0], [0])
    old = rig.server.source
    rig.server.close()
    first = rig.source_arena
    rig.source_arena = KVArena(200, LAYOUT.block_bytes)
    rig.server = rig.serve()
    moved = BlockSource(old.instance_id, old.epoch, rig.server.source.endpoints, old.fingerprint, old.num_blocks)
    with pytest.raises((StaleBlockError, PipeClosedError)):
        rig.fetcher.fetch(moved, [0], [0], [0], deadline=soon())
    assert rig.fetch([1, 2], [1, 2]).valid.all()
    first.close()


def test_a_closed_server_is_gone_and_a_new_one_on_the_same_arena_is_found(rig: Rig) -> None:
    rig.fetch([0], [0])
    rig.server.close()
    with pytest.raises(PipeClosedError):
        rig.fetch([0], [0])
    rig.server = rig.serve()
    assert rig.fetch([0], [0]).valid.all()


def test_deadline_and_cancellation_before_the_start(rig: Rig) -> None:
    with pytest.raises(DeadlineError):
        rig.fetch([0], [0], deadline=time.monotonic() - 1)
    flag = threading.Event()
    flag.set()
    with pytest.raises(CancelledError):
        rig.fetch([0], [0], cancelled=flag)
    rig.fetch([0], [0])


def test_closing_the_fetcher_ends_it(rig: Rig) -> None:
    rig.fetch([0], [0])
    rig.fetcher.close()
    with pytest.raises(PipeClosedError):
        rig.fetch([0], [0])
    rig.fetcher.close()


async def test_fetch_async(rig: Rig) -> None:
    generations = rig.source_arena.generations[:50]
    result = await rig.fetcher.fetch_async(
        rig.server.source, np.arange(50), generations, np.arange(50), deadline=soon()
    )
    assert result.valid.all()
    assert rig.same(np.arange(50), np.arange(50))


async def test_fetch_async_is_bounded(tcp_rig: Rig) -> None:
    fetcher = BlockFetcher(tcp_rig.target, PRINT, kinds=("tcp",), max_threads=1)
    source = silent_source(tcp_rig)
    flag = threading.Event()
    calls = [
        asyncio.create_task(fetcher.fetch_async(source, [0], [0], [0], deadline=soon(), cancelled=flag))
        for _ in range(65)
    ]
    done, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
    assert [type(task.exception()) for task in done] == [QueueFullError]
    flag.set()
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert sum(isinstance(r, CancelledError) for r in results) == 64
    fetcher.close()


async def test_a_cancelled_task_returns_only_when_nobody_writes_any_more(tcp_rig: Rig) -> None:
    fetcher = BlockFetcher(tcp_rig.target, PRINT, kinds=("tcp",))
    task = asyncio.create_task(fetcher.fetch_async(silent_source(tcp_rig), [0], [0], [0], deadline=soon()))
    await asyncio.sleep(0.05)
    task.cancel()
    start = time.monotonic()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert time.monotonic() - start < 5
    assert len(fetcher._links._connecting) == 0
    fetcher.close()


def silent_source(rig: Rig) -> BlockSource:
    """A source whose TCP endpoint accepts (the kernel does) and never says a word."""
    listener = socket.create_server(("127.0.0.1", 0))
    rig.sockets.append(listener)
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    source = rig.server.source
    return BlockSource(
        source.instance_id, source.epoch, (Endpoint("tcp", address),), source.fingerprint, source.num_blocks
    )


def test_a_source_that_says_nothing_costs_no_more_than_the_deadline(tcp_rig: Rig) -> None:
    start = time.monotonic()
    with pytest.raises(DeadlineError):
        tcp_rig.fetcher.fetch(silent_source(tcp_rig), [0], [0], [0], deadline=soon(0.1))
    assert time.monotonic() - start < 2
    flag = threading.Event()
    call = in_thread(
        lambda: tcp_rig.fetcher.fetch(silent_source(tcp_rig), [0], [0], [0], deadline=soon(), cancelled=flag)
    )
    flag.set()
    with pytest.raises(CancelledError):
        call.result(5)


def test_auto_prefers_shared_memory_and_tells_of_a_fallback(caplog: pytest.LogCaptureFixture) -> None:
    arena, target = KVArena(8, LAYOUT.block_bytes), KVArena(8, LAYOUT.block_bytes)
    with_both = BlockServer(arena, PRINT, InstanceId("p0"))
    assert [e.kind for e in with_both.endpoints] == ["shm", "tcp"]
    source = with_both.source
    fetcher = BlockFetcher(target, PRINT)
    generations = arena.generations[:1]
    assert fetcher.fetch(source, [0], generations, [0], deadline=soon()).pipe_kind == "shm"
    fetcher.close()

    boot, user, name = source.endpoints[0].address.split("/")
    for address, reason in (
        (f"another-boot/{user}/{name}", "another host"),
        (f"{boot}/{user}/baton-kv-nobody", "cannot connect"),
        ("nonsense", "not a shared-memory address"),
    ):
        elsewhere = BlockSource(
            source.instance_id, source.epoch, (Endpoint("shm", address), source.endpoints[1]), PRINT, 8
        )
        fetcher = BlockFetcher(target, PRINT)
        result = fetcher.fetch(elsewhere, [0], generations, [0], deadline=soon())
        assert result.pipe_kind == "tcp"
        assert result.fallback_reason.startswith("shm: ")
        assert reason in result.fallback_reason
        assert reason in caplog.text
        fetcher.close()
    only_shm = BlockFetcher(target, PRINT, kinds=("shm",))
    with pytest.raises(PipeClosedError, match="no pipe reaches p0"):
        only_shm.fetch(elsewhere, [0], generations, [0], deadline=soon())
    only_shm.close()
    with_both.close()


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_block_servers_want_the_token(kind: str) -> None:
    arena, target = KVArena(8, LAYOUT.block_bytes), KVArena(8, LAYOUT.block_bytes)
    server = BlockServer(arena, PRINT, InstanceId("p0"), kinds=(kind,), token="secret")
    for token in (None, "other"):
        fetcher = BlockFetcher(target, PRINT, token=token)
        with pytest.raises(UnauthenticatedError):
            fetcher.fetch(server.source, [0], [0], [0], deadline=soon())
        fetcher.close()
    fetcher = BlockFetcher(target, PRINT, token="secret")
    assert fetcher.fetch(server.source, [0], [0], [0], deadline=soon()).valid.all()
    fetcher.close()
    server.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "example.org"])
def test_off_loopback_needs_a_token(host: str) -> None:
    arena = KVArena(1, LAYOUT.block_bytes)
    with pytest.raises(ConfigError) as caught:
        BlockServer(arena, PRINT, InstanceId("p0"), host=host)
    assert caught.value.field == "token"
    with pytest.raises(ConfigError):
        TcpPipeListener(host)


def test_wrong_configuration_is_refused() -> None:
    arena = KVArena(1, LAYOUT.block_bytes)
    taken = socket.create_server(("127.0.0.1", 0))
    port = taken.getsockname()[1]
    cases: list[tuple[str, dict[str, Any]]] = [
        ("pipes", {"kinds": ("pigeon",)}),
        ("pipes", {"kinds": ()}),
        ("pipes", {"kinds": ("tcp", "tcp")}),
        ("pipes", {"kinds": ("memory",)}),
        ("port", {"kinds": ("shm", "tcp"), "options": ServerOptions(port=port)}),
    ]
    before = open_fds()
    for field, options in cases:
        with pytest.raises(ConfigError) as caught:
            BlockServer(arena, PRINT, InstanceId("p0"), **options)
        assert caught.value.field == field
        del caught
    assert open_fds() == before
    taken.close()
    with pytest.raises(ConfigError):
        BlockServer(KVArena(1, 64), PRINT, InstanceId("p0"))
    for options in ({"kinds": "pigeon"}, {"kinds": ()}, {"max_threads": 0}, {"streams": 0}):
        with pytest.raises(ConfigError):
            BlockFetcher(arena, PRINT, **options)


def test_idle_connections_are_closed_and_made_again(tcp_rig: Rig) -> None:
    fetcher = BlockFetcher(tcp_rig.target, PRINT, kinds=("tcp",), idle_s=0.05)
    source, generations = tcp_rig.server.source, tcp_rig.source_arena.generations[:1]
    fetcher.fetch(source, [0], generations, [0], deadline=soon())
    end = soon(5)
    while len(fetcher._links) or tcp_rig.server.num_connections():
        assert time.monotonic() < end
        threading.Event().wait(0.005)
    assert fetcher.fetch(source, [0], generations, [0], deadline=soon()).valid.all()
    fetcher.close()


def test_the_server_drops_idle_and_silent_peers_and_bounds_their_number() -> None:
    rig = Rig("tcp")
    limits = ServeLimits(frame_s=0.2, idle_s=0.1)
    server = rig.serve(max_connections=3, handshake_s=0.2, limits=limits)
    address = server.endpoints[0].address
    slow = [connect_raw("tcp", address) for _ in range(3)]  # slowloris: connected, and not a word
    for stream in slow:
        recv_control(stream, FrameKind.CHALLENGE, Wait(soon()))
    extra = connect_raw("tcp", address)
    with pytest.raises(QueueFullError):
        recv_control(extra, FrameKind.CHALLENGE, Wait(soon()))
    for stream in slow:
        with pytest.raises(BatonError):
            recv_control(stream, FrameKind.WELCOME, Wait(soon()))
        stream.close()
    extra.close()
    end = soon(5)
    while server.num_connections():
        assert time.monotonic() < end
        threading.Event().wait(0.005)
    source, generations = server.source, rig.source_arena.generations[:1]
    for _ in range(2):  # the second time on a connection that the server may have dropped
        assert rig.fetcher.fetch(source, [0], generations, [0], deadline=soon()).valid.all()
        while server.num_connections():
            threading.Event().wait(0.005)
    server.close()
    rig.close()


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_block_servers_survive_garbage(kind: str) -> None:
    rig = Rig(kind)
    for data in (b"", b"\0", os.urandom(100), pack_header(FrameKind.HELLO, 1 << 40), pack_header(FrameKind.HELLO, 2)):
        stream = connect_raw(kind, rig.server.endpoints[0].address)
        stream.send_all([data], Wait(soon()), "garbage")
        stream.close()
    for payload in (b"[]", b"{", b"\xff\xff", b"{}", b'{"nonce": 5}', b'{"nonce": "00"}', b"[" * 200_000):
        stream = connect_raw(kind, rig.server.endpoints[0].address)
        stream.send_all([pack_header(FrameKind.HELLO, len(payload)), payload], Wait(soon()), "garbage")
        recv_control(stream, FrameKind.CHALLENGE, Wait(soon()))
        with pytest.raises(BatonError):
            recv_control(stream, FrameKind.WELCOME, Wait(soon()))
        stream.close()
    assert rig.fetch([0], [0]).valid.all()
    rig.close()


def test_a_server_checks_what_readers_ask_for(tcp_rig: Rig) -> None:
    tcp_rig.fetch([0], [0])
    pipe = next(iter(tcp_rig.fetcher._links._links.values())).pipe
    stream = next(iter(pipe._open))  # type: ignore[attr-defined]
    beyond = BlockReads(np.array([200]), np.zeros(1, np.uint64), np.array([0]))
    with pytest.raises(InvalidRequestError) as caught:
        request_blocks(stream, beyond, tcp_rig.target.blocks, Wait(soon()))
    assert caught.value.field == "remote_ids"
    assert tcp_rig.fetch([1], [1]).valid.all()  # the connection is still in step
    for payload in (b"", struct.pack("<I", 5), struct.pack("<I", 1) + b"\0" * 13):
        bad = BadRequest(tcp_rig)
        bad.stream.send_all([pack_header(FrameKind.READ, len(payload)), payload], Wait(soon()), "bad")
        with pytest.raises(TransferError):
            recv_control(bad.stream, FrameKind.WELCOME, Wait(soon()))
        bad.stream.close()
    bad = BadRequest(tcp_rig)
    bad.stream.send_all([pack_header(FrameKind.READ, 1 << 33)], Wait(soon()), "too many")
    with pytest.raises(TransferError, match="longer than"):
        recv_control(bad.stream, FrameKind.WELCOME, Wait(soon()))
    bad.stream.close()
    assert tcp_rig.fetch([2], [2]).valid.all()


class BadRequest:
    """An authenticated connection whose next frame is up to the test."""

    def __init__(self, rig: Rig) -> None:
        source = rig.server.source
        self.stream = connect_raw("tcp", rig.server.endpoints[0].address)
        facts = Facts(source.epoch, source.fingerprint, source.num_blocks, LAYOUT.block_bytes)
        greet_as_client(self.stream, None, Wait(soon()), purpose=PURPOSE_READ, facts=facts)


def test_readers_cannot_write_into_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig("shm")
    rig.fetch([0], [0])
    pipe = next(iter(rig.fetcher._links._links.values())).pipe
    arena = pipe._arena  # type: ignore[attr-defined]
    assert not arena.blocks.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        arena.generations[0] = 1
    del arena, pipe
    rig.close()


def test_no_descriptors_threads_or_shared_memory_are_left(rig: Rig) -> None:
    segments = set(os.listdir("/dev/shm"))
    rig.fetch(np.arange(50), np.arange(50))
    fds, threads = open_fds(), threading.active_count()
    for _ in range(5):
        extra = Rig(rig.kind, 2, num_blocks=20)
        extra.fetch(np.arange(20), np.arange(20))
        extra.close()
        del extra
    assert open_fds() == fds
    assert threading.active_count() == threads
    assert set(os.listdir("/dev/shm")) == segments
