"""``least_loaded``: the instance with the least work in flight, ties at random."""

from __future__ import annotations

from collections.abc import Sequence

from baton.types import InstanceId
from baton_router.scheduler.policies.base import Ratings, Request, Scores, Side, relative_loads, scaled


class LeastLoaded:
    """Balance work, ignore caches: score = -relative load.

    Risk: shared prefixes are computed once per instance.
    """

    name = "least_loaded"

    def score(self, request: Request, prefill: Side, decode: Side) -> Ratings:
        """Score both roles by load."""
        return Ratings(_score(prefill), _score(decode))

    def chosen(self, request: Request, instances: Sequence[InstanceId]) -> None:
        """Nothing to remember."""


def _score(side: Side) -> Scores:
    return Scores.of(load=scaled(relative_loads(side), -1.0))
