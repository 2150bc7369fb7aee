"""What a policy sees and what it answers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.types import InstanceId

_SMOOTHING = 0.25
"""Share of a request's own work in the relative load. In simulations 0.1 to 0.5 gave the lowest time to first token:
1.0 balances too late, 0 gives up a tenth of the hits while the cluster is nearly idle."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One instance as a policy sees it.

    Attributes:
        instance_id: Its name.
        match_rate: Matched prompt tokens / prompt tokens, 0 to 1.
        load: Work in flight there, in tokens (see ``baton_router.load``).
        cost: Work that this request would add if nothing matched, in the same unit.
    """

    instance_id: InstanceId
    match_rate: float
    load: float
    cost: float


@dataclass(frozen=True, slots=True)
class Scored:
    """A candidate's place in a ranking: which one (its position in the policy's input), and what spoke for it."""

    position: int
    match_rate: float
    load: float
    """Relative to the mean of its role."""
    score: float


@dataclass(frozen=True, slots=True)
class Ranking:
    """Both roles in order of preference, best first."""

    prefill: list[Scored]
    decode: list[Scored]


class Policy(Protocol):
    """Ranks the instances for one request. Called for every request, on the event loop: must not block."""

    name: str

    def rank(self, prefill: Sequence[Candidate], decode: Sequence[Candidate]) -> Ranking:
        """Order the candidates of both roles, either of which may be empty; changes nothing."""

    def chosen(self, instances: Sequence[InstanceId]) -> None:
        """Tell which instances the request went to."""


def relative_loads(candidates: Sequence[Candidate]) -> list[float]:
    """Return each candidate's load relative to the mean of all, smoothed by a part of the request's own work.

    ``(load_i + s) / (mean(load) + s)`` with ``s = cost_i / 4``: 1.0 for all on an idle cluster and in perfect balance.
    The smoothing keeps the ratio tame while there is little in flight (without it the only busy one of eight instances
    stands at 8 times the mean after a single request) and vanishes beside the queues of a busy cluster.
    """
    if not candidates:
        return []
    mean = sum(c.load for c in candidates) / len(candidates)
    loads = []
    for c in candidates:
        smoothing = _SMOOTHING * c.cost
        loads.append((c.load + smoothing) / (mean + smoothing) if mean + smoothing > 0 else 1.0)
    return loads


def ordered(scored: list[Scored], rng: random.Random) -> list[Scored]:
    """Sort by score, best first, ties at random."""
    rng.shuffle(scored)
    scored.sort(key=lambda s: -s.score)
    return scored
