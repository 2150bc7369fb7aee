"""The end of a drain: what still runs when its time is up ends with an error that says why."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from baton.errors import UnavailableError


class CutOff:
    """Ends waiting tasks at once, all of them. Lives in one event loop."""

    def __init__(self) -> None:
        self._closed = asyncio.Event()
        self._waiting: set[asyncio.Task[object]] = set()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Surround a wait of the current task that :meth:`close` shall break off.

        Raises:
            UnavailableError: It was, or would be by now.
        """
        error = UnavailableError("this router is shutting down: send the request again", retry_after_s=1.0)
        if self._closed.is_set():
            raise error
        task = asyncio.current_task()
        assert task is not None
        self._waiting.add(task)
        try:
            yield
        except asyncio.CancelledError:
            # Cancelled by somebody else as well: then that goes first.
            if self._closed.is_set() and task.uncancel() == 0:
                raise error from None
            raise
        finally:
            self._waiting.discard(task)

    def close(self) -> None:
        """Break off every wait, and refuse those to come."""
        if not self._closed.is_set():
            self._closed.set()
            for task in self._waiting:
                task.cancel()
