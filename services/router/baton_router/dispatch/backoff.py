"""Pauses between attempts."""

from __future__ import annotations

import random


class Backoff:
    """Pauses that double from ``first_s`` to ``max_s``, each jittered to 50 to 100 %."""

    def __init__(self, max_s: float, rng: random.Random, first_s: float = 0.05) -> None:
        self._max_s, self._first_s, self._rng = max_s, first_s, rng
        self._pause_s = first_s

    def reset(self) -> None:
        """Begin again with the shortest pause."""
        self._pause_s = self._first_s

    def next_s(self) -> float:
        """Return the next pause in seconds."""
        pause = self._pause_s
        self._pause_s = min(2 * pause, self._max_s)
        return pause * (0.5 + 0.5 * self._rng.random())
