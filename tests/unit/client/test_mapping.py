"""``map``: order, how many at a time, errors, prompts that are taken as they are needed."""

from __future__ import annotations

import asyncio
import itertools
import random
from contextlib import aclosing

import pytest

import baton
from baton.client.async_client import map_bounded
from baton.errors import BatonError, InvalidRequestError, QueueFullError
from baton.testing import Asked, FakeRouter


async def test_answers_come_in_order_and_a_bounded_number_at_a_time():
    running, most, taken = 0, 0, 0
    rng = random.Random(5)

    def prompts():
        nonlocal taken
        for number in range(60):
            taken += 1
            yield number

    async def ask(number: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(rng.randrange(5)):
            await asyncio.sleep(0)
        running -= 1
        return number * number

    found = []
    async with aclosing(map_bounded(ask, prompts(), 4, keep_errors=False)) as answers:
        async for answer in answers:
            found.append(answer)
            assert taken <= len(found) + 2 * 4
    assert found == [number * number for number in range(60)]
    assert most == 4


async def test_an_error_ends_it_and_cancels_the_rest():
    cancelled = []

    async def ask(number: int) -> int:
        if number == 1:
            raise QueueFullError("full")
        if number > 1:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(number)
                raise
        return number

    with pytest.raises(QueueFullError):
        async for _ in map_bounded(ask, itertools.count(), 3, keep_errors=False):
            pass
    assert cancelled
    with pytest.raises(InvalidRequestError):
        async for _ in map_bounded(ask, [1], 0, keep_errors=False):
            pass


def test_both_clients_map_over_an_endless_iterator():
    def reply(asked: Asked) -> str | BatonError:
        return QueueFullError("full") if asked.prompt == "p3" else f"{asked.prompt}!"

    with FakeRouter(reply) as router, baton.Client(router.address) as client:
        answers = client.map((f"p{i}" for i in itertools.count()), concurrency=2, keep_errors=True, max_tokens=3)
        found = [each if isinstance(each, BatonError) else each.text for each in itertools.islice(answers, 6)]
        answers.close()
        assert found[:3] == ["p0!", "p1!", "p2!"]
        assert isinstance(found[3], QueueFullError)
        assert found[4:] == ["p4!", "p5!"]
        assert len(router.requests) < 20
        answer = client.chat([{"role": "user", "content": "hi"}])
        assert answer.message["role"] == "assistant"
        with pytest.raises(InvalidRequestError, match="messages"):
            client.chat("hi")  # type: ignore[arg-type]
