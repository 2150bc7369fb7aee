"""A circuit breaker: after failures in a row, leave a peer alone for a while instead of waiting for it each time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class CircuitBreaker:
    """Closed (asks go through) until ``failures`` in a row, then open for ``cooldown_s`` seconds.

    After that one ask goes through per cooldown, until one succeeds. Thread safe.
    """

    def __init__(self, failures: int, cooldown_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._cooldown_s, self._clock = failures, cooldown_s, clock
        self._lock = threading.Lock()
        self._failures = 0
        self._closed_again_at = 0.0
        self.num_opened = 0

    @property
    def open(self) -> bool:
        """Whether asks are refused now; unlike :meth:`allows` this takes no turn."""
        return self._failures >= self._limit and self._clock() < self._closed_again_at

    @property
    def tripped(self) -> bool:
        """Whether the last ``failures`` asks failed, however long ago: nothing has succeeded since."""
        return self._failures >= self._limit

    def allows(self) -> bool:
        """Whether an ask may go out now; where the breaker was open, this takes the cooldown's one turn."""
        with self._lock:
            if self._failures < self._limit:
                return True
            now = self._clock()
            if now < self._closed_again_at:
                return False
            self._closed_again_at = now + self._cooldown_s
            return True

    def succeeded(self) -> bool:
        """Tell that an ask was answered; ``True``: the first one since the breaker tripped, worth a line in the log."""
        with self._lock:
            tripped, self._failures = self._failures >= self._limit, 0
            return tripped

    def failed(self) -> bool:
        """Tell that an ask was not answered, or not in time; ``True``: the breaker tripped by this one."""
        with self._lock:
            self._failures += 1
            if self._failures >= self._limit:
                self._closed_again_at = self._clock() + self._cooldown_s
            trips = self._failures == self._limit
            self.num_opened += trips
            return trips
