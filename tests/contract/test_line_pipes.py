"""Pipes over lines (nixl, gloo) against peers that lie, stop in the middle, or are killed."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tests.support.child_env import child_env
from tests.support.transport_faults import Hook
from tests.support.transport_rig import Media, in_thread, lets_go, nixl_agents, open_fds, soon

from baton.errors import BatonError, CancelledError, DeadlineError, PipeClosedError, TransferError
from baton.kv_transfer.pipes.base import Pipe, WireTensor
from baton.kv_transfer.pipes.gloo_group import Group
from baton.kv_transfer.pipes.lines import EAGER_BYTES, call_lines
from baton.kv_transfer.pipes.nixl import RegisteredRing
from baton.kv_transfer.pipes.nixl_about import describe_agent
from baton.kv_transfer.pipes.stream import describe
from baton.kv_transfer.protocol.deadline import Wait
from baton.kv_transfer.protocol.frames import BadFrameError, FrameKind, pack_header, recv_control, send_control
from baton.kv_transfer.protocol.handshake import PURPOSE_MESSAGES, greet_as_client
from baton.kv_transfer.protocol.sockets import connect_tcp

KINDS = ["nixl", "gloo"]
BIG = 24 << 20


@pytest.fixture(params=KINDS)
def media(request: pytest.FixtureRequest) -> Media:
    return Media(request.param)


def message(size: int) -> list[WireTensor]:
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    return [WireTensor("uint8", (size,), data.data)]


def is_message(got: list[WireTensor] | None, size: int) -> bool:
    return got is not None and bytes(got[0].data) == bytes(message(size)[0].data)


def receive_all(end: Pipe, cancelled: Any = None) -> None:
    while True:
        end.recv(deadline=soon(), cancelled=cancelled)


def send_all(end: Pipe, seconds: float) -> None:
    while True:
        end.send(message(BIG), deadline=soon(seconds))


class RawPeer:
    """A client that speaks the lines' words by hand, and the pipe that the listener made of it."""

    def __init__(self, media: Media, *, change: Callable[[dict[str, Any]], None] = lambda fields: None) -> None:
        self.kind = media.kind
        self._held: list[Any] = []
        with media.listen() as listener:
            accepted = in_thread(lambda: listener.accept(deadline=soon(), cancelled=None))
            self.lines = call_lines(media.kind, listener.address, None, Wait(soon()))
            if media.kind == "gloo":
                self._held.append(Group(self.lines, Wait(soon())))
            else:
                self._introduce(change)
            self.pipe: Pipe = accepted.result(30)

    def _introduce(self, change: Callable[[dict[str, Any]], None]) -> None:
        agent = nixl_agents()[1]
        ring = RegisteredRing(agent, 64 << 10)
        self._held.append(ring)
        about = describe_agent(agent.name, ring.region.metadata)
        about |= {"address": ring.region.address, "bytes": ring.size}
        change(about)
        self.lines.exchange(about, Wait(soon()))

    def say(self, data: bytes) -> None:
        self.lines.outgoing.send_all([data], Wait(soon()), "talking raw")

    def close(self) -> None:
        self.lines.close()
        self.pipe.close()
        for held in self._held:
            if isinstance(held, RegisteredRing):
                held.release()


@pytest.fixture
def peer(media: Media) -> Iterator[RawPeer]:
    raw = RawPeer(media)
    yield raw
    raw.close()


def on_the_line(size: int) -> bytes:
    """The bytes of a message of one tensor, as far as they go over the line."""
    head = describe(message(size))
    return pack_header(FrameKind.TENSORS, len(head) + size) + head + (b"x" * size if size < EAGER_BYTES else b"")


def test_big_messages_of_many_sizes_arrive_in_order_with_small_ones_between(media: Media) -> None:
    sizes = [65535, 65536, 65537, 1, 1 << 20, (1 << 20) + 1, 3_333_333, 0, 4 << 20]
    a, b = media.pair()
    with a, b:
        sending = in_thread(lambda: [a.send(message(size), deadline=soon()) for size in sizes])
        for size in sizes:
            assert is_message(b.recv(deadline=soon()), size)
        sending.result(30)


def test_many_tensors_of_odd_sizes_make_one_big_message(media: Media) -> None:
    a, b = media.pair()
    sizes = [1 + 997 * i % 5000 for i in range(300)]
    tensors = [WireTensor("uint8", (size,), memoryview(bytes([i % 251]) * size)) for i, size in enumerate(sizes)]
    with a, b:
        receiving = in_thread(lambda: b.recv(deadline=soon()))
        a.send(tensors, deadline=soon())
        got = receiving.result(30)
    assert [bytes(t.data) for t in got] == [bytes(t.data) for t in tensors]


def test_peer_gone_at_many_bytes_of_a_small_message(media: Media) -> None:
    whole = on_the_line(100)
    for cut in range(0, len(whole), 7):
        raw = RawPeer(media)
        raw.say(whole[:cut])
        raw.lines.close()
        with pytest.raises(PipeClosedError):
            raw.pipe.recv(deadline=soon())
        raw.close()


def test_peer_gone_in_the_middle_of_a_big_message(media: Media) -> None:
    whole = on_the_line(BIG // 8)
    for cut in (len(whole) - 1, len(whole)):
        raw = RawPeer(media)
        receiving = in_thread(lambda raw=raw: raw.pipe.recv(deadline=soon()))
        raw.say(whole[:cut])
        if cut == len(whole) and media.kind == "gloo":
            assert bytes(raw.lines.outgoing.recv_exact(1, Wait(soon()), "credit")) == b"+"  # it has posted a receive
        raw.lines.close()
        with pytest.raises(PipeClosedError):
            receiving.result(30)
        raw.close()


def test_garbage_on_the_line_closes_the_pipe(media: Media) -> None:
    for garbage in (b"\0" * 64, b"GET / HTTP/1.1\r\n\r\n".ljust(64), b"BTNP" + b"\xff" * 60):
        raw = RawPeer(media)
        raw.say(garbage)
        with pytest.raises(TransferError):
            raw.pipe.recv(deadline=soon())
        with pytest.raises(PipeClosedError):
            raw.pipe.recv(deadline=soon())
        raw.close()


@pytest.mark.parametrize("count", [0, (64 << 10) + 1, 1 << 40])
def test_a_doorbell_that_lies_closes_the_pipe(count: int) -> None:
    raw = RawPeer(Media("nixl"))
    raw.say(on_the_line(BIG // 8) + struct.pack("<Q", count))
    with pytest.raises(BadFrameError):
        raw.pipe.recv(deadline=soon())
    raw.close()


def test_credit_that_was_never_owed_closes_the_pipe(media: Media) -> None:
    raw = RawPeer(media)
    sending = in_thread(lambda: raw.pipe.send(message(BIG // 8), deadline=soon()))
    raw.lines.incoming.send_all([struct.pack("<Q", 1 << 40)], Wait(soon()), "lying")
    with pytest.raises(BadFrameError):
        sending.result(30)
    raw.close()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("agent", ""),
        ("agent", "x" * 65),
        ("agent", "somebody-else"),
        ("agent", 7),
        ("address", 0),
        ("address", -1),
        ("address", 1 << 64),
        ("address", "1"),
        ("bytes", 1),
        ("bytes", 1 << 60),
        ("bytes", True),
        ("metadata", ""),
        ("metadata", "zz"),
        ("metadata", "00" * 70_000),
        ("metadata", b"nonsense".hex()),
        ("metadata", None),
        ("digest", "0" * 64),
        ("digest", None),
    ],
)
def test_a_malformed_description_is_refused_by_its_field(name: str, value: object) -> None:
    media = Media("nixl")
    with media.listen() as listener:
        flag = threading.Event()
        accepted = in_thread(lambda: listener.accept(deadline=soon(), cancelled=flag))
        lines = call_lines("nixl", listener.address, None, Wait(soon()))
        agent = nixl_agents()[1]
        ring = RegisteredRing(agent, 4096)
        about = describe_agent(agent.name, ring.region.metadata)
        about |= {"address": ring.region.address, "bytes": 4096}
        lines.exchange(about | {name: value}, Wait(soon()))
        with pytest.raises(BadFrameError) as caught:  # after the server's own words comes its refusal
            recv_control(lines.outgoing, FrameKind.WELCOME, Wait(soon()))
        assert caught.value.field in {name, "metadata", "agent"}
        lines.close()
        ring.release()
        with media.connect(listener.address) as a, accepted.result(30) as b:  # the listener lives on
            a.send(None, deadline=soon())
            assert b.recv(deadline=soon()) is None


def test_a_memory_address_that_the_peer_does_not_own_cannot_be_read() -> None:
    raw = RawPeer(Media("nixl"), change=lambda about: about.update(address=4096))
    raw.say(on_the_line(BIG // 8) + struct.pack("<Q", 1000))
    with pytest.raises(PipeClosedError, match="cannot be read"):
        raw.pipe.recv(deadline=soon())
    raw.close()


@pytest.mark.parametrize(
    "hello",
    [
        {"kind": "tcp", "call": "0" * 32, "line": 0},
        {"kind": "KIND", "call": "0" * 31, "line": 0},
        {"kind": "KIND", "call": 5, "line": 0},
        {"kind": "KIND", "call": "0" * 32, "line": 2},
        {"kind": "KIND", "call": "0" * 32, "line": 1},
        {},
    ],
)
def test_lines_that_introduce_themselves_badly_are_sent_away(media: Media, hello: dict[str, Any]) -> None:
    fields = {key: media.kind if value == "KIND" else value for key, value in hello.items()}
    with media.listen() as listener:
        accepted = in_thread(lambda: listener.accept(deadline=soon()))
        line = connect_tcp(listener.address, Wait(soon()))
        greet_as_client(line, None, Wait(soon()), purpose=PURPOSE_MESSAGES, facts=None)
        send_control(line, FrameKind.HELLO, fields, Wait(soon()))
        with pytest.raises(BadFrameError):
            recv_control(line, FrameKind.WELCOME, Wait(soon()))
        line.close()
        with media.connect(listener.address) as a, accepted.result(30) as b:
            a.send(None, deadline=soon())
            assert b.recv(deadline=soon()) is None


def test_a_call_whose_second_line_never_comes_costs_no_pipe_and_no_descriptor(media: Media) -> None:
    for end in media.pair():  # whatever is made once per process
        end.close()
    before = open_fds()
    with media.listen() as listener:
        accepted = in_thread(lambda: listener.accept(deadline=soon()))
        halves = []
        for i in range(70):
            line = connect_tcp(listener.address, Wait(soon()))
            greet_as_client(line, None, Wait(soon()), purpose=PURPOSE_MESSAGES, facts=None)
            send_control(line, FrameKind.HELLO, {"kind": media.kind, "call": f"{i:032x}", "line": 0}, Wait(soon()))
            halves.append(line)
        with media.connect(listener.address), accepted.result(30):
            pass
        deadline = soon()
        while not halves[0].peer_gone():  # the oldest were dropped, the youngest not
            assert time.monotonic() < deadline
            threading.Event().wait(0.01)
        assert not halves[-1].peer_gone()
        for line in halves:
            line.close()
    assert lets_go(before)


@pytest.mark.parametrize("look", [1, 2, 5])
def test_cancelled_anywhere_in_a_big_receive_ends_soon_and_closes(media: Media, look: int) -> None:
    a, b = media.pair(limit=BIG)
    flag = threading.Event()
    hook = Hook(look, flag.set)

    class Either:
        def is_set(self) -> bool:
            return hook.is_set() or flag.is_set()

    with a, b:
        sending = in_thread(lambda: send_all(a, 20))
        with pytest.raises((CancelledError, PipeClosedError)):
            receive_all(b, Either())
        b.close()
        with pytest.raises(PipeClosedError):
            sending.result(30)


CHILD = """
import json, signal, sys, threading
import numpy as np
from baton.kv_transfer.pipes.base import WireTensor
from tests.support.transport_rig import Media, soon

kind, addresses = sys.argv[1], sys.argv[2:]
media, BIG = Media(kind), 24 << 20
frozen = threading.Semaphore(0)

class Freeze:
    def __init__(self, at): self.left = at
    def is_set(self):
        self.left -= 1
        if self.left == 0:
            frozen.release()
            threading.Event().wait()
        return False

def use(address, i):
    pipe = media.connect(address, limit=BIG)
    if i % 2:
        freeze = Freeze(2 + i)
        while True:
            pipe.send([WireTensor("uint8", (BIG,), memoryview(bytearray(BIG)))], deadline=soon(60), cancelled=freeze)
    else:
        freeze = Freeze(2 + 3 * i)
        while True:
            pipe.recv(deadline=soon(60), cancelled=freeze)

for i, address in enumerate(addresses):
    threading.Thread(target=use, args=(address, i), daemon=True).start()
for _ in addresses:
    frozen.acquire()
print("frozen", flush=True)
signal.pause()
"""


def test_a_killed_process_ends_every_pipe_at_whatever_point(media: Media) -> None:
    before_shm = set(os.listdir("/dev/shm"))
    count = 6
    listeners = [media.listen(limit=BIG) for _ in range(count)]
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, media.kind, *(listener.address for listener in listeners)],
        stdout=subprocess.PIPE,
        text=True,
        env=child_env(),
    )
    assert child.stdout is not None
    ends = []

    def use(i: int, end: Pipe) -> str:
        try:
            while True:
                if i % 2:
                    end.recv(deadline=soon(60))
                else:
                    end.send(message(BIG), deadline=soon(60))
        except BatonError as error:
            return error.code

    try:
        ends = [listener.accept(deadline=soon(60)) for listener in listeners]
        calls = [in_thread(lambda i=i, end=end: use(i, end)) for i, end in enumerate(ends)]
        assert child.stdout.readline() == "frozen\n"
        child.kill()
        assert [call.result(30) for call in calls] == [PipeClosedError.code] * count  # and not the deadline
    finally:
        child.kill()
        child.wait(60)
        child.stdout.close()
        for item in (*listeners, *ends):
            item.close()
    assert set(os.listdir("/dev/shm")) <= before_shm


def test_a_stopped_peer_ends_at_the_deadline(media: Media) -> None:
    with media.listen(limit=BIG) as listener:
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, media.kind, listener.address],
            stdout=subprocess.PIPE,
            text=True,
            env=child_env(),
        )
        assert child.stdout is not None
        try:
            with listener.accept(deadline=soon(60)) as end:
                child.send_signal(signal.SIGSTOP)
                with pytest.raises(DeadlineError):
                    send_all(end, 0.5)
        finally:
            child.kill()
            child.wait(60)
            child.stdout.close()
