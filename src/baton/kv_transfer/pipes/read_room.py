"""What answers to reads may take of a process's memory at once, over all of its connections.

A read names blocks and segments; its answer takes a span of memory, and of work, for each of both together. One read is
bounded (``MAX_SPANS_PER_READ``); here the sum is. Who finds no room waits in turn, and is refused when that takes too
long, so that a reader goes elsewhere or computes.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

from baton.errors import QueueFullError
from baton.kv_transfer.protocol.deadline import TICK_S

WAIT_S = 10.0
"""How long a read waits for room."""


class ReadRoom:
    """Room for so many units; for any thread.

    Args:
        most: Units that may be taken at once. One taker alone may take more: else it would wait for ever.
        what: Of what there is too much, for errors.
    """

    def __init__(self, most: int, what: str) -> None:
        self._most, self._what = most, what
        self._taken = 0
        self._waiting: deque[object] = deque()
        self._changed = threading.Condition()

    @property
    def taken(self) -> int:
        """Units that are taken now."""
        return self._taken

    @contextlib.contextmanager
    def take(self, units: int, hung_up: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Hold room while the block runs.

        Args:
            units: How much.
            hung_up: Whether nobody waits any more: asked now and then, and the room is given up.

        Raises:
            QueueFullError: There was none within ``WAIT_S``, or nobody waits any more.
        """
        self._enter(units, hung_up)
        try:
            yield
        finally:
            with self._changed:
                self._taken -= units
                self._changed.notify_all()

    def _enter(self, units: int, hung_up: Callable[[], bool]) -> None:
        turn, deadline = object(), time.monotonic() + WAIT_S
        with self._changed:
            self._waiting.append(turn)
            try:
                while self._waiting[0] is not turn or (self._taken and self._taken + units > self._most):
                    if time.monotonic() >= deadline or hung_up():
                        raise QueueFullError(f"too many {self._what} are read at once", retry_after_s=1.0)
                    self._changed.wait(TICK_S)
                self._taken += units
            finally:
                self._waiting.remove(turn)
                self._changed.notify_all()
