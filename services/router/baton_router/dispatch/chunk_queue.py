"""From callbacks to an asynchronous iterator, for those who would rather wait than be called."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Generic, TypeVar

from baton_router.dispatch.interface import Running

T = TypeVar("T")

_HELD_FROM = 8
"""Chunks that may wait here; what comes after them waits where it came from."""


class ChunkQueue(Generic[T]):
    """A sink whose chunks are read by one task."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._running: Running | None = None
        self._filled = asyncio.Event()
        self._held = self._ended = False
        self._error: Exception | None = None

    def on_chunk(self, chunk: T) -> None:
        """Take a chunk."""
        self._items.append(chunk)
        self._filled.set()
        if len(self._items) >= _HELD_FROM and self._running is not None and not self._held:
            self._held = True
            self._running.hold(True)

    def on_end(self, error: Exception | None) -> None:
        """Take the end."""
        self._ended, self._error = True, error
        self._filled.set()

    @asynccontextmanager
    async def of(self, running: Running) -> AsyncIterator[AsyncGenerator[T, None]]:
        """Yield the chunks of a request that was begun with this sink; it is cancelled when the block is left."""
        self._running = running
        try:
            async with aclosing(self._read()) as items:
                yield items
        finally:
            running.cancel()

    async def _read(self) -> AsyncGenerator[T, None]:
        while True:
            while self._items:
                yield self._items.popleft()
            if self._held and self._running is not None:
                self._held = False
                self._running.hold(False)
                continue
            if self._ended:
                if self._error is not None:
                    raise self._error
                return
            self._filled.clear()
            await self._filled.wait()
