"""``least_loaded``: the instance with the least work in flight, ties at random."""

from __future__ import annotations

import random
from collections.abc import Sequence

from baton.types import InstanceId
from baton_router.policy.base import Candidate, Ranking, Scored, ordered, relative_loads


class LeastLoaded:
    """Balance work, ignore caches: score = -relative load.

    Risk: shared prefixes are computed once per instance.
    """

    name = "least_loaded"

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def rank(self, prefill: Sequence[Candidate], decode: Sequence[Candidate]) -> Ranking:
        """Order both roles by load, least first."""
        return Ranking(prefill=self._order(prefill), decode=self._order(decode))

    def chosen(self, instances: Sequence[InstanceId]) -> None:
        """Nothing to remember."""

    def _order(self, candidates: Sequence[Candidate]) -> list[Scored]:
        loads = relative_loads(candidates)
        return ordered([Scored(at, c.match_rate, loads[at], -loads[at]) for at, c in enumerate(candidates)], self._rng)
