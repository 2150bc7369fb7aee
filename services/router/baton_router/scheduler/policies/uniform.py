"""``random``: any instance, all alike."""

from __future__ import annotations

from baton_router.scheduler.policies.registry import BuiltInPolicy
from baton_router.scheduler.policy import Ratings, Request, Scores, Side


class Uniform(BuiltInPolicy):
    """Choose uniformly at random: the baseline that others must beat. All instances tie, and ties are random."""

    name = "random"

    def score(self, request: Request, prefill: Side, decode: Side) -> Ratings:
        return Ratings(Scores.of(none=[0.0] * len(prefill)), Scores.of(none=[0.0] * len(decode)))
