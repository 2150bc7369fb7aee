"""What a policy sees and what it answers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.types import InstanceId


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
    """Return each candidate's load relative to the mean of all, with the request itself counted everywhere.

    ``(load_i + cost) / (mean(load) + cost)``: 1.0 for all on an idle cluster and in perfect balance. Counting the
    request keeps the ratio tame while there is little in flight: without it the only busy one of eight instances
    would stand at 8 times the mean after a single request.
    """
    if not candidates:
        return []
    mean = sum(c.load for c in candidates) / len(candidates)
    return [(c.load + c.cost) / (mean + c.cost) if mean + c.cost > 0 else 1.0 for c in candidates]


def ordered(scored: list[Scored], rng: random.Random) -> list[Scored]:
    """Sort by score, best first, ties at random."""
    rng.shuffle(scored)
    scored.sort(key=lambda s: -s.score)
    return scored
