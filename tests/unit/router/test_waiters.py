"""Who gives up waiting in the very moment in which somebody is woken."""

from __future__ import annotations

import asyncio

import pytest

from baton_router.registry.load import Waiters


async def waiters(room: Waiters, count: int) -> list[asyncio.Task[None]]:
    tasks = [asyncio.create_task(room.wait(60)) for _ in range(count)]
    while len(room) < count:
        await asyncio.sleep(0)
    return tasks


async def test_one_that_was_cancelled_before_it_is_woken_ends_as_cancelled_and_the_next_one_is_woken() -> None:
    room = Waiters()
    first, second = await waiters(room, 2)
    first.cancel()
    room.wake()  # before the first one has run again
    with pytest.raises(asyncio.CancelledError):
        await first
    await second
    assert len(room) == 0


async def test_one_that_was_woken_before_it_is_cancelled_passes_its_turn_on() -> None:
    room = Waiters()
    first, second = await waiters(room, 2)
    room.wake()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    await second
    assert len(room) == 0


async def test_time_that_is_up_while_everybody_is_woken_is_no_error() -> None:
    room = Waiters()
    loop = asyncio.get_running_loop()
    waiting = asyncio.create_task(room.wait(0.01))
    await asyncio.sleep(0)
    # In one turn of the loop: first the wait's own timer, which is older, then this one.
    loop.call_at(loop.time() + 0.01, room.wake_all)
    await waiting
    assert len(room) == 0


async def test_without_a_wake_the_time_ends_the_wait_and_nobody_is_left() -> None:
    room = Waiters()
    await room.wait(0.0)
    assert len(room) == 0
