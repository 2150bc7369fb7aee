"""``least_loaded``: the instance with the least work in flight, ties at random."""

from __future__ import annotations

from baton_router.scheduler.policies.registry import BuiltInPolicy
from baton_router.scheduler.policy import Ratings, Request, Scores, Side, relative_loads


class LeastLoaded(BuiltInPolicy):
    """Balance work, ignore caches: score = -relative load.

    Risk: shared prefixes are computed once per instance.
    """

    name = "least_loaded"

    def score(self, request: Request, prefill: Side, decode: Side) -> Ratings:
        """Score both roles by load."""
        return Ratings(_score(prefill), _score(decode))


def _score(side: Side) -> Scores:
    return Scores.of(load=-relative_loads(side))
