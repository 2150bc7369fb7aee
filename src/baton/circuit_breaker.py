"""A circuit breaker: after failures in a row, a peer is not called for a while, instead of being waited for again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class CircuitBreaker:
    """Closed (calls go through) until ``failures`` in a row, then open for ``cooldown_s`` seconds.

    After that one call goes through per cooldown, until one succeeds; the cooldown doubles with each that fails, up to
    ``longest_s``. Thread safe.

    Args:
        failures: Number of failures in a row that open the breaker, at least 1.
        cooldown_s: Seconds for which it stays open, and between two trial calls.
        clock: Monotonic clock in seconds.
        longest_s: Longest cooldown, in seconds; ``None``: it does not grow.

    Attributes:
        num_opened: Number of times the breaker opened.
    """

    def __init__(
        self,
        failures: int,
        cooldown_s: float,
        clock: Callable[[], float] = time.monotonic,
        *,
        longest_s: float | None = None,
    ) -> None:
        self._limit = failures
        self._cooldown_s = cooldown_s
        self._longest_s = cooldown_s if longest_s is None else max(cooldown_s, longest_s)
        self._num_trials = 0
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
            self._num_trials += 1
            self._closed_again_at = now + self._current_cooldown_s()
            return True

    def succeeded(self) -> bool:
        """Record a success; ``True``: the first one since the breaker tripped, worth a line in the log."""
        with self._lock:
            was_tripped = self._failures >= self._limit
            self._failures = self._num_trials = 0
            return was_tripped

    def failed(self, *, at_once: bool = False) -> bool:
        """Record a failure or a time-out; ``True``: this one tripped the breaker.

        Args:
            at_once: Trip the breaker, however few failures came before: for failures that cost a long wait.
        """
        with self._lock:
            was_tripped = self._failures >= self._limit
            self._failures = max(self._failures + 1, self._limit if at_once else 0)
            if self._failures >= self._limit:
                self._closed_again_at = self._clock() + self._current_cooldown_s()
            trips = self._failures >= self._limit and not was_tripped
            self.num_opened += trips
            return trips

    def _current_cooldown_s(self) -> float:
        return min(self._cooldown_s * 2.0 ** min(self._num_trials, 32), self._longest_s)
