"""The end of a drain: what still runs when its time is up ends with an error that says why."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import TypeVar

from baton.errors import UnavailableError

T = TypeVar("T")


class CutOff:
    """Ends waiting tasks at once, all of them. Lives in one event loop."""

    def __init__(self) -> None:
        self._closed = asyncio.Event()
        self._waiting: set[asyncio.Task[object]] = set()

    async def next(self, items: AsyncGenerator[T, None]) -> T | None:
        """Return the next item, or ``None`` at the end; a wait for it is one that :meth:`close` breaks off.

        Raises:
            UnavailableError: It was, or would be by now.
        """
        if self._closed.is_set():
            raise _cut_off()
        task = asyncio.current_task()
        assert task is not None
        self._waiting.add(task)
        try:
            return await anext(items, None)
        except asyncio.CancelledError:
            # Cancelled by somebody else as well: then that goes first.
            if self._closed.is_set() and task.uncancel() == 0:
                raise _cut_off() from None
            raise
        finally:
            self._waiting.discard(task)

    def close(self) -> None:
        """Break off every wait, and refuse those to come."""
        if not self._closed.is_set():
            self._closed.set()
            for task in self._waiting:
                task.cancel()


def _cut_off() -> UnavailableError:
    return UnavailableError("this router is shutting down: send the request again", retry_after_s=1.0)
