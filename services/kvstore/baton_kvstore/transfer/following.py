"""Puts of blocks that are still being computed: they hold a thread and memory for as long as that takes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

MAX_FOLLOWED = 8
"""Computations that are followed at once, each by a thread of its own: other Puts never wait for them."""
_SHARE = 0.25
"""Of the memory, for blocks that are being computed."""


class Following:
    """Lets a few such Puts in. Used in one event loop.

    Args:
        capacity_bytes: Of the store.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._limit = int(_SHARE * capacity_bytes)
        self._count = self._bytes = 0

    @asynccontextmanager
    async def turn(self, num_bytes: int) -> AsyncIterator[bool]:
        """Say whether a Put of so much may follow its source, which it does until the end of the context."""
        if self._count >= MAX_FOLLOWED or self._bytes + num_bytes > self._limit:
            yield False
            return
        self._count += 1
        self._bytes += num_bytes
        try:
            yield True
        finally:
            self._count -= 1
            self._bytes -= num_bytes
