"""The steps of one turn: their order, and what hinders nobody."""

from __future__ import annotations

import asyncio

import pytest

from baton_router.dispatch.event_loop import END, PLACE, PREPARE, RECEIVE, SEND, TurnBatcher


async def test_all_requests_are_at_a_step_before_one_is_at_the_next() -> None:
    steps, done = TurnBatcher(), list[str]()

    def place(name: str) -> None:
        done.append(f"place {name}")
        steps.schedule(SEND, done.append, f"send {name}")

    for name in "ab":
        steps.schedule(PLACE, place, name)
        steps.schedule(PREPARE, done.append, f"prepare {name}")
    assert not done
    await asyncio.sleep(0)
    assert done == ["prepare a", "prepare b", "place a", "place b", "send a", "send b"]


async def test_what_a_turn_is_beyond_is_done_in_the_next() -> None:
    steps, done = TurnBatcher(), list[str]()

    def again(name: str) -> None:
        steps.schedule(RECEIVE, done.append, name)
        steps.schedule(END, done.append, "same step, later")

    steps.schedule(END, again, "earlier step")
    await asyncio.sleep(0)
    assert not done
    await asyncio.sleep(0)
    assert done == ["earlier step", "same step, later"]


@pytest.mark.parametrize("error", [ValueError, asyncio.CancelledError])
async def test_a_step_that_fails_hinders_nobody(error: type[BaseException], caplog: pytest.LogCaptureFixture) -> None:
    steps, done = TurnBatcher(), list[str]()

    def fail(what: str) -> None:
        raise error(what)

    steps.schedule(PLACE, fail, "no place")
    steps.schedule(PLACE, done.append, "other")
    await asyncio.sleep(0)
    steps.schedule(RECEIVE, done.append, "next turn")
    await asyncio.sleep(0)
    assert done == ["other", "next turn"]
    assert "a request's step failed" in caplog.text


def test_steps_are_done_in_whatever_loop_they_are_put_in() -> None:
    steps, done = TurnBatcher(), list[int]()

    async def one(number: int) -> None:
        steps.schedule(PLACE, done.append, number)
        await asyncio.sleep(0)

    asyncio.run(one(1))
    asyncio.run(one(2))
    assert done == [1, 2]
