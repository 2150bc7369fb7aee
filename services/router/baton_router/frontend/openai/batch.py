"""Several generations as one stream of chunks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from baton_router.processor.input_processor import InputProcessor
from baton_router.processor.text_request import PreparedRequest, TextChunk

_QUEUED_CHUNKS = 64


async def run_all(
    pipeline: InputProcessor, prepared: Sequence[PreparedRequest]
) -> AsyncGenerator[tuple[int, TextChunk], None]:
    """Run all requests at the same time; the first error ends them all.

    Args:
        pipeline: Runs them.
        prepared: The requests.

    Yields:
        A request's place and its next chunk.
    """
    if len(prepared) == 1:  # the usual case needs no tasks and no queue
        async with aclosing(pipeline.stream(prepared[0])) as chunks:
            async for chunk in chunks:
                yield 0, chunk
        return
    queue: asyncio.Queue[tuple[int, TextChunk | Exception | None]] = asyncio.Queue(_QUEUED_CHUNKS)
    tasks = [asyncio.create_task(_pump(pipeline, item, at, queue)) for at, item in enumerate(prepared)]
    try:
        left = len(tasks)
        while left:
            at, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                left -= 1
            else:
                yield at, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    pipeline: InputProcessor,
    prepared: PreparedRequest,
    at: int,
    queue: asyncio.Queue[tuple[int, TextChunk | Exception | None]],
) -> None:
    """Put a request's chunks into the queue, then ``None`` or the error that ended it."""
    try:
        async with aclosing(pipeline.stream(prepared)) as chunks:
            async for chunk in chunks:
                await queue.put((at, chunk))
    except Exception as error:
        await queue.put((at, error))
    else:
        await queue.put((at, None))
