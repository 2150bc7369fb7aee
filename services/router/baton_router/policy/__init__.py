"""Placement policies, chosen by name; one file each."""

from __future__ import annotations

import random

from baton.errors import ConfigError
from baton_router.policy.base import Candidate, Policy, Ranking, Scored, relative_loads
from baton_router.policy.least_loaded import LeastLoaded
from baton_router.policy.match_minus_load import MatchMinusLoad
from baton_router.policy.round_robin import RoundRobin
from baton_router.policy.uniform import Uniform

__all__ = ["POLICIES", "Candidate", "Policy", "Ranking", "Scored", "make_policy", "relative_loads"]

POLICIES = (MatchMinusLoad.name, RoundRobin.name, Uniform.name, LeastLoaded.name)


def make_policy(name: str, *, beta: float = 0.3, seed: int | None = None) -> Policy:
    """Build a policy by its name.

    Args:
        name: One of ``POLICIES``.
        beta: Weight of load against match, for ``match_minus_load``.
        seed: Of the random choices; ``None``: from the operating system.

    Raises:
        ConfigError: No such policy, or ``beta`` out of range.
    """
    rng = random.Random(seed)
    if name == MatchMinusLoad.name:
        return MatchMinusLoad(beta, rng)
    if name == RoundRobin.name:
        return RoundRobin()
    if name == Uniform.name:
        return Uniform(rng)
    if name == LeastLoaded.name:
        return LeastLoaded(rng)
    raise ConfigError(f"policy must be one of {', '.join(POLICIES)}, got {name!r}", field="policy")
