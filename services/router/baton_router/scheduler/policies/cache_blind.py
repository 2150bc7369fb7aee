"""Policies that ignore caches: ``least_loaded``, ``power_of_two``, ``round_robin`` and ``random``."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Self

from baton.types import InstanceId
from baton_router.scheduler.policies.registry import BuiltInPolicy, PolicyContext
from baton_router.scheduler.policy import Ratings, Request, Scores, Side, relative_loads


class LeastLoaded(BuiltInPolicy):
    """Balance work, ignore caches: score = -relative load.

    Risk: shared prefixes are computed once per instance.
    """

    name = "least_loaded"

    def score(self, request: Request, prefill: Side, decode: Side) -> Ratings:
        return Ratings(Scores.of(load=-relative_loads(prefill)), Scores.of(load=-relative_loads(decode)))


_NOT_DRAWN = -1000.0
"""Below any load of the drawn instances, but still in order: these are asked if the drawn ones fail."""


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
        return cls(context.rng)

    def score(self, request: Request, prefill: Side, decode: Side) -> Ratings:
        return Ratings(self._score(prefill), self._score(decode))

    def _score(self, side: Side) -> Scores:
        drawn = [_NOT_DRAWN] * len(side)
        for at in self._rng.sample(range(len(side)), min(2, len(side))):
            drawn[at] = 0.0
        return Scores.of(drawn=drawn, load=-relative_loads(side))


_MAX_REMEMBERED = 4096


class RoundRobin(BuiltInPolicy):
    """Choose the instance that was chosen longest ago, by name among those never chosen.

    Remembering *when* each was chosen, instead of a counter, keeps turns fair while instances are added and removed.
    Risk: ignores caches, and that one long prompt is more work than ten short ones.
    """

    name = "round_robin"

    def __init__(self) -> None:
        self._turn = 0
        self._chosen: dict[InstanceId, int] = {}

    def score(self, request: Request, prefill: Side, decode: Side) -> Ratings:
        return Ratings(self._score(prefill), self._score(decode))

    def chosen(self, request: Request, instances: Sequence[InstanceId]) -> None:
        """Record their turn; the number of remembered names is bounded, the oldest are dropped first."""
        self._turn += 1
        for name in instances:
            self._chosen.pop(name, None)
            self._chosen[name] = self._turn
        while len(self._chosen) > _MAX_REMEMBERED:
            del self._chosen[next(iter(self._chosen))]

    def _score(self, side: Side) -> Scores:
        turns = sorted((self._chosen.get(name, 0), name, at) for at, name in enumerate(side.ids))
        before = [0.0] * len(turns)
        for place, (_, _, at) in enumerate(turns):
            before[at] = -float(place)
        return Scores.of(turn=before)


class Uniform(BuiltInPolicy):
    """Choose uniformly at random: the baseline that others must beat. All instances tie, and ties are random."""

    name = "random"

    def score(self, request: Request, prefill: Side, decode: Side) -> Ratings:
        return Ratings(Scores.of(none=[0.0] * len(prefill)), Scores.of(none=[0.0] * len(decode)))
