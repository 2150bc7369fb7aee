"""How fast the queue drains: what Retry-After and the prediction of a wait are worked out from."""

from __future__ import annotations

import math

_FADE_S = 20.0
"""What left so long ago counts 1/e."""
_PRIOR_S = 1.0
"""Seconds of draining from which more is believed of what was seen than of what requests in flight suggest."""
_KEEP = 0.95


class DrainRate:
    """Tokens per second that leave the queue while there is one.

    Before that was seen for a while, Little's law stands in: what is in flight, over the time that requests take.
    """

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0
        self._since: float | None = None
        self._served_cost = self._served_time = 0.0

    def began(self, now: float) -> None:
        """The queue has something in it."""
        if self._since is None:
            self._since = now

    def ended(self, now: float) -> None:
        """The queue is empty."""
        self._advance(now)
        self._since = None

    def left(self, cost: float, now: float) -> None:
        """Count a request that left the queue to be served."""
        self._advance(now)
        self._tokens += cost

    def served(self, cost: float, seconds: float) -> None:
        """Count a request that was served, however it came in."""
        self._served_cost = _KEEP * self._served_cost + cost
        self._served_time = _KEEP * self._served_time + cost * seconds

    def rate(self, in_flight: float, now: float) -> float:
        """Return tokens per second; 0: nothing was served yet, or nothing is in flight, so nothing can be said.

        Args:
            in_flight: Cost of what is being served.
            now: The time.
        """
        self._advance(now)
        guess = 0.0
        if self._served_cost:
            guess = in_flight / max(self._served_time / self._served_cost, 1e-3)
        elif not self._tokens:
            return 0.0
        return (self._tokens + _PRIOR_S * guess) / (self._seconds + _PRIOR_S)

    def _advance(self, now: float) -> None:
        if self._since is None:
            return
        passed = max(0.0, now - self._since)
        self._since = now
        fade = math.exp(-passed / _FADE_S)
        self._tokens *= fade
        self._seconds = self._seconds * fade + passed
