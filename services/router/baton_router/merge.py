"""Several asynchronous streams as one, in order of arrival."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class _Item(Generic[T]):
    """An item on its way, and how to tell its stream that it was taken."""

    value: T
    taken: asyncio.Event


async def merge(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Yield what any of the streams yields; closing the merged one closes them all before it returns.

    Each stream runs in a task of its own and goes on when its last item was taken, so at most one item per stream is
    buffered, and items come out in exactly the order in which they were made. The first error of a stream is raised
    here and closes the others.
    """
    queue: asyncio.Queue[_Item[T] | asyncio.Task[None]] = asyncio.Queue()

    async def pump(stream: AsyncGenerator[T, None]) -> None:
        async with contextlib.aclosing(stream):
            async for value in stream:
                item = _Item(value, asyncio.Event())
                queue.put_nowait(item)
                await item.taken.wait()

    tasks = [asyncio.create_task(pump(stream)) for stream in streams]
    try:
        for task in tasks:
            task.add_done_callback(queue.put_nowait)
        left = len(tasks)
        while left:
            item = await queue.get()
            if isinstance(item, asyncio.Task):
                left -= 1
                item.result()
            else:
                yield item.value
                item.taken.set()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
