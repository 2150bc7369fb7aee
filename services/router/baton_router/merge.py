"""Several asynchronous streams as one, in order of arrival."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import TypeVar

T = TypeVar("T")


async def merge(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Yield what any of the streams yields; closing the merged one closes them all before it returns.

    Each stream runs in a task of its own and waits until its last item was taken, so at most one item per stream is
    buffered. The first error of a stream is raised here and closes the others.
    """
    queue: asyncio.Queue[T | asyncio.Task[None]] = asyncio.Queue(maxsize=1)

    async def pump(stream: AsyncGenerator[T, None]) -> None:
        async with contextlib.aclosing(stream):
            async for item in stream:
                await queue.put(item)

    tasks: list[asyncio.Task[None]] = []
    waiters: list[asyncio.Task[None]] = []

    async def report(task: asyncio.Task[None]) -> None:
        await asyncio.wait([task])
        await queue.put(task)

    try:
        tasks = [asyncio.create_task(pump(stream)) for stream in streams]
        waiters = [asyncio.create_task(report(task)) for task in tasks]
        left = len(tasks)
        while left:
            item = await queue.get()
            if isinstance(item, asyncio.Task):
                left -= 1
                item.result()
            else:
                yield item
    finally:
        for task in (*tasks, *waiters):
            task.cancel()
        await asyncio.gather(*tasks, *waiters, return_exceptions=True)
