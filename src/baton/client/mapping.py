"""Many prompts, a bounded number of them at a time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from typing import Any, TypeVar

from baton.errors import BatonError, InvalidRequestError

P = TypeVar("P")
R = TypeVar("R")
_AHEAD = 2
"""Answers that may be ready or under way, beyond the one that is handed out next, per request at a time."""


async def map_bounded(
    ask: Callable[[P], Coroutine[Any, Any, R]], prompts: Iterable[P], concurrency: int, *, keep_errors: bool
) -> AsyncGenerator[R | BatonError, None]:
    """Yield the answers in the order of the prompts, which are taken as they are needed.

    Args:
        ask: Answers one.
        prompts: May be endless.
        concurrency: Requests at a time.
        keep_errors: Yield an error of Baton in the place of an answer instead of raising it.

    Raises:
        InvalidRequestError: ``concurrency`` is below 1.
        BatonError: A request failed; those that run are cancelled.
    """
    if concurrency < 1:
        raise InvalidRequestError(f"concurrency must be at least 1, got {concurrency}", field="concurrency")
    room = asyncio.Semaphore(concurrency)

    async def bounded(prompt: P) -> R:
        async with room:
            return await ask(prompt)

    waiting: deque[asyncio.Task[R]] = deque()
    left = iter(prompts)
    done = False
    try:
        while True:
            while not done and len(waiting) < _AHEAD * concurrency:
                try:
                    waiting.append(asyncio.create_task(bounded(next(left))))
                except StopIteration:
                    done = True
            if not waiting:
                return
            try:
                answer: R | BatonError = await waiting[0]
            except BatonError as error:
                if not keep_errors:
                    raise
                answer = error
            waiting.popleft()
            yield answer
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
