"""``round_robin``: each instance in turn."""

from __future__ import annotations

from collections.abc import Sequence

from baton.types import InstanceId
from baton_router.policy.base import Candidate, Ranking, Scored, relative_loads

_MAX_REMEMBERED = 4096


class RoundRobin:
    """Take the instance that was chosen longest ago, by name among those never chosen.

    Remembering *when* each was chosen, instead of a counter, keeps the turn fair while instances come and go.
    Risk: knows neither caches nor that one long prompt is more work than ten short ones.
    """

    name = "round_robin"

    def __init__(self) -> None:
        self._turn = 0
        self._chosen: dict[InstanceId, int] = {}

    def rank(self, prefill: Sequence[Candidate], decode: Sequence[Candidate]) -> Ranking:
        """Order both roles by their turn."""
        return Ranking(prefill=self._order(prefill), decode=self._order(decode))

    def chosen(self, instances: Sequence[InstanceId]) -> None:
        """Their turn is over; the names remembered are bounded, the oldest are forgotten first."""
        self._turn += 1
        for name in instances:
            self._chosen.pop(name, None)
            self._chosen[name] = self._turn
        while len(self._chosen) > _MAX_REMEMBERED:
            del self._chosen[next(iter(self._chosen))]

    def _order(self, candidates: Sequence[Candidate]) -> list[Scored]:
        loads = relative_loads(candidates)
        turns = [(self._chosen.get(c.instance_id, 0), c.instance_id, at) for at, c in enumerate(candidates)]
        order = [at for _, _, at in sorted(turns)]
        return [Scored(at, candidates[at].match_rate, loads[at], -float(i)) for i, at in enumerate(order)]
