"""``power_of_two``: draw two instances, take the one with less work in flight."""

from __future__ import annotations

import random
from typing import Self

from baton_router.scheduler.policies.registry import BuiltInPolicy, PolicyContext
from baton_router.scheduler.policy import Ratings, Request, Scores, Side, relative_loads

_NOT_DRAWN = -1000.0
"""Below any load of those that were drawn, but still in order: they are who is asked if the drawn ones fail."""


class PowerOfTwo(BuiltInPolicy):
    """Two random choices of each role, the less loaded one wins: score = -relative load among the two.

    The longest queue grows with log log n instead of log n / log log n (Mitzenmacher 2001), and, unlike with
    ``least_loaded``, routers that see the same old loads don't all run to the same instance.

    Risk: ignores caches, like ``least_loaded``.
    """

    name = "power_of_two"

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    @classmethod
    def make(cls, context: PolicyContext) -> Self:
        """Build it with the configured random numbers."""
        return cls(context.rng)

    def score(self, request: Request, prefill: Side, decode: Side) -> Ratings:
        """Draw two of each role and score them by load."""
        return Ratings(self._score(prefill), self._score(decode))

    def _score(self, side: Side) -> Scores:
        drawn = [_NOT_DRAWN] * len(side)
        for at in self._rng.sample(range(len(side)), min(2, len(side))):
            drawn[at] = 0.0
        return Scores.of(drawn=drawn, load=-relative_loads(side))
