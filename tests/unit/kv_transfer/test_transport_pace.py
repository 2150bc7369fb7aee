"""When a pipe's reader waits awake: after a message that came soon, and less and less often where it is in vain."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from typing import Any

import pytest

from baton.errors import DeadlineError, PipeClosedError
from baton.kv_transfer.pipes.pace import MAX_REST, SOON_S, Pace
from baton.kv_transfer.protocol.deadline import Wait
from baton.kv_transfer.protocol.sockets import Stream


class Line:
    """A stream whose messages come after so many seconds of a clock of its own; ``comes`` while one waits awake."""

    def __init__(self) -> None:
        self.now = 0.0
        self.after = 0.0
        self.comes = True
        self.said: list[str] = []

    def spin_readable(self, seconds: float) -> bool:
        self.said.append("awake")
        return self.comes

    def wait_readable(self, wait: Wait, what: str) -> None:
        self.said.append("asleep")
        self.now += self.after


def waits(line: Line, count: int, cores: int = 2) -> list[str]:
    stream: Any = line
    pace = Pace(clock=lambda: line.now, cores=cores)
    for _ in range(count):
        pace.wait(stream, Wait())
    return line.said


def test_awake_while_messages_come_soon() -> None:
    assert waits(Line(), 5) == ["asleep", "awake", "awake", "awake", "awake"]


def test_asleep_while_they_come_late() -> None:
    line = Line()
    line.after = 2 * SOON_S
    assert waits(line, 5) == ["asleep"] * 5


def test_asleep_with_one_core() -> None:
    assert waits(Line(), 5, cores=1) == ["asleep"] * 5


def test_less_and_less_often_where_it_is_in_vain() -> None:
    line = Line()
    line.comes = False
    said = waits(line, 3000)
    tries = [at for at, each in enumerate(said) if each == "awake"]
    rests = [later - earlier - 2 for earlier, later in itertools.pairwise(tries)]
    assert rests[:4] == [4, 16, 64, 256]
    assert set(rests[4:]) == {MAX_REST}


def test_an_idle_pipe_sleeps() -> None:
    line = Line()
    stream: Any = line
    pace = Pace(clock=lambda: line.now, cores=2)
    pace.wait(stream, Wait())
    line.comes, line.after = False, 60.0
    for _ in range(4):
        pace.wait(stream, Wait())
    assert line.said == ["asleep", "awake", "asleep", "asleep", "asleep", "asleep"]


def test_a_message_or_the_end_is_seen_awake_and_nothing_is_waited_for_long() -> None:
    mine, theirs = socket.socketpair()
    stream = Stream(mine, peer="peer")
    assert not stream.spin_readable(0.001)
    theirs.send(b"x")
    assert stream.spin_readable(10)
    assert stream.recv_exact(1, Wait(time.monotonic() + 10), "reading") == b"x"
    theirs.close()
    assert stream.spin_readable(10)
    stream.close()
    with pytest.raises(PipeClosedError):
        stream.spin_readable(10)


def test_words_that_come_and_go_in_pieces() -> None:
    mine, theirs = socket.socketpair()
    stream = Stream(mine, peer="peer")
    theirs.send(b"abc")
    rest = threading.Timer(0.05, theirs.send, [b"defgh"])  # later than the kernel's own time-out
    rest.start()
    assert stream.recv_exact(8, Wait(time.monotonic() + 10), "reading") == b"abcdefgh"
    with pytest.raises(DeadlineError):
        stream.recv_exact(8, Wait(time.monotonic() + 0.05), "reading")
    mine.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    for _ in range(100):
        try:
            stream.send_all([b"w" * 4096], Wait(time.monotonic() + 0.05), "sending")
        except DeadlineError:
            break
    else:
        pytest.fail("nobody reads, and yet everything is sent")
    rest.join()
    theirs.close()
    with pytest.raises(PipeClosedError):
        stream.recv_exact(8, Wait(time.monotonic() + 10), "reading")
    with pytest.raises(PipeClosedError):
        stream.send_all([b"w"], Wait(time.monotonic() + 10), "sending")
    stream.close()
