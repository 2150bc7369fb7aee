"""Room that reads share: never more than there is, in turn, and nobody waits for ever."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from baton.errors import QueueFullError
from baton.kv_transfer.pipes import read_server
from baton.kv_transfer.pipes.read_server import ReadRoom


def test_no_more_is_taken_than_there_is() -> None:
    room, most, seen = ReadRoom(100, "spans"), 0, threading.Lock()

    def work(seed: int) -> None:
        nonlocal most
        draw = random.Random(seed)
        for _ in range(50):
            with room.reserve(draw.randrange(101)), seen:
                most = max(most, room.taken)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert 0 < most <= 100
    assert room.taken == 0


def test_one_alone_may_take_more() -> None:
    room = ReadRoom(10, "spans")
    with room.reserve(50):
        assert room.taken == 50
    with room.reserve(10):
        assert room.taken == 10


def test_who_waits_too_long_or_has_left_is_refused_and_leaves_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    room = ReadRoom(10, "spans")
    with room.reserve(8):
        with pytest.raises(QueueFullError, match="too many spans") as refused, room.reserve(5, lambda: True):
            raise AssertionError("there is no room")
        assert refused.value.retry_after_s == 1.0
        monkeypatch.setattr(read_server, "ROOM_WAIT_S", 0.05)
        with pytest.raises(QueueFullError), room.reserve(5):
            raise AssertionError("there is no room")
        with room.reserve(2):
            assert room.taken == 10
    assert room.taken == 0


def test_a_large_read_is_not_overtaken_for_ever() -> None:
    room, order, waiting = ReadRoom(10, "spans"), list[str](), threading.Event()

    def hung_up() -> bool:
        waiting.set()
        return False

    def take(name: str, units: int) -> None:
        with room.reserve(units, hung_up):
            order.append(name)

    with ThreadPoolExecutor(2) as pool:
        with room.reserve(5):
            large = pool.submit(take, "large", 10)
            assert waiting.wait(240)
            waiting.clear()
            small = pool.submit(take, "small", 1)  # there would be room for it
            assert waiting.wait(240)
        large.result(240)
        small.result(240)
    assert order == ["large", "small"]
