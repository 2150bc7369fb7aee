"""``round_robin``: each instance in turn."""

from __future__ import annotations

from collections.abc import Sequence

from baton.types import InstanceId
from baton_router.scheduler.policies.registry import BuiltInPolicy
from baton_router.scheduler.policy import Ratings, Request, Scores, Side

_MAX_REMEMBERED = 4096


class RoundRobin(BuiltInPolicy):
    """Take the instance that was chosen longest ago, by name among those never chosen.

    Remembering *when* each was chosen, instead of a counter, keeps the turn fair while instances come and go.
    Risk: knows neither caches nor that one long prompt is more work than ten short ones.
    """

    name = "round_robin"

    def __init__(self) -> None:
        self._turn = 0
        self._chosen: dict[InstanceId, int] = {}

    def score(self, request: Request, prefill: Side, decode: Side) -> Ratings:
        """Score both roles by how many stand before each in the queue of turns."""
        return Ratings(self._score(prefill), self._score(decode))

    def chosen(self, request: Request, instances: Sequence[InstanceId]) -> None:
        """Their turn is over; the names remembered are bounded, the oldest are forgotten first."""
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
