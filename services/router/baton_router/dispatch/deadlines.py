"""Ends of time for many, all of the same length: one timer for all of them instead of one for each."""

from __future__ import annotations

import asyncio
from typing import Protocol


class Expiring(Protocol):
    """Something whose time can be over."""

    def expire(self) -> None:
        """Its time is over."""


class Deadlines:
    """Calls :meth:`Expiring.expire` of what was added so many seconds ago and not taken out again. For one event loop.

    Args:
        seconds: How long everybody has.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._due: dict[Expiring, float] = {}  # in order: everybody has the same time
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        """How many wait for their end."""
        return len(self._due)

    def add(self, item: Expiring) -> None:
        """Begin an item's time."""
        loop = asyncio.get_running_loop()
        self._due[item] = loop.time() + self._seconds
        if self._timer is None:
            self._timer = loop.call_later(self._seconds, self._look)

    def discard(self, item: Expiring) -> None:
        """Forget an item; one that was not added is no error."""
        self._due.pop(item, None)

    def _look(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        while self._due:
            item, due = next(iter(self._due.items()))
            left = due - loop.time()
            if left > 0:
                self._timer = loop.call_later(left, self._look)
                return
            del self._due[item]
            item.expire()
