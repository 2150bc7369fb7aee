"""A circuit breaker: after failures in a row, a peer is not called for a while, instead of being waited for again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class CircuitBreaker:
    """Closed (calls go through) until ``failures`` in a row, then open for ``cooldown_s`` seconds.

    After that one call goes through per cooldown, until one succeeds. Thread safe.

    Args:
        failures: Number of failures in a row that open the breaker, at least 1.
        cooldown_s: Seconds for which it stays open, and between two trial calls.
        clock: Monotonic clock in seconds.

    Attributes:
        num_opened: Number of times the breaker opened.
    """

    def __init__(self, failures: int, cooldown_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = failures
        self._cooldown_s = cooldown_s
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._closed_again_at = 0.0
        self.num_opened = 0

    @property
    def open(self) -> bool:
        """Whether calls are refused now; unlike :meth:`allows` this does not use up the cooldown's trial call."""
        return self._failures >= self._limit and self._clock() < self._closed_again_at

    @property
    def tripped(self) -> bool:
        """Whether the last ``failures`` calls failed, however long ago: nothing has succeeded since."""
        return self._failures >= self._limit

    def allows(self) -> bool:
        """Return whether a call may be made now; if the breaker had tripped, this uses up the cooldown's trial call."""
        with self._lock:
            if self._failures < self._limit:
                return True
            now = self._clock()
            if now < self._closed_again_at:
                return False
            self._closed_again_at = now + self._cooldown_s
            return True

    def succeeded(self) -> bool:
        """Record a success; ``True``: the first one since the breaker tripped, worth a line in the log."""
        with self._lock:
            was_tripped = self._failures >= self._limit
            self._failures = 0
            return was_tripped

    def failed(self) -> bool:
        """Record a failure or a time-out; ``True``: this one tripped the breaker."""
        with self._lock:
            self._failures += 1
            if self._failures >= self._limit:
                self._closed_again_at = self._clock() + self._cooldown_s
            trips = self._failures == self._limit
            self.num_opened += trips
            return trips
