"""The counter that one process raises and others wait for: all are woken in time, and none without need."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.transport.transport_rig import in_thread

from baton.kv_cache.arena import Progress

FOREVER_S = 240.0
"""Longer than any test waits, and short enough for the threads of one that failed to end."""


def counter() -> Progress:
    return Progress(np.zeros(1, np.uint64))


@pytest.mark.parametrize("seed", range(5))
def test_all_who_wait_are_woken_however_far_the_counter_jumps(seed: int) -> None:
    rng, progress = random.Random(seed), counter()
    jobs = [(value, in_thread(lambda value=value: progress.wait(value, FOREVER_S))) for value in range(1, 120, 7)]
    while progress.value < 120:
        progress.advance(progress.value + rng.choice([1, 1, 1, 2, 5, 31, 32, 33, 70]))
    assert all(job.result(240) >= value for value, job in jobs)


def test_a_wait_for_what_is_there_or_for_too_long_returns_the_counter() -> None:
    progress = counter()
    progress.advance(7)
    progress.advance(3)  # never back
    assert progress.wait(5, FOREVER_S) == 7
    assert progress.wait(8, 0.01) == 7


def test_steps_on_the_way_wake_no_one(monkeypatch: pytest.MonkeyPatch) -> None:
    progress, real, woken, waiter = counter(), counter()._futex, list[int](), list[int]()
    assert real is not None
    advancing = threading.get_ident()

    def futex(*args: Any) -> int:
        result = int(real(*args))
        if threading.get_ident() == advancing:
            woken.append(result)
        return result

    def wait() -> int:
        waiter.append(threading.get_native_id())
        return progress.wait(9, FOREVER_S)

    monkeypatch.setattr(progress, "_futex", futex)
    job = in_thread(wait)
    deadline = time.monotonic() + 240
    while not waiter or Path(f"/proc/self/task/{waiter[0]}/stat").read_text(encoding="ascii").rsplit(")")[1][1] != "S":
        assert time.monotonic() < deadline
    for value in range(1, 9):
        progress.advance(value)
    assert sum(woken) == 0
    progress.advance(9)
    assert job.result(240) == 9
