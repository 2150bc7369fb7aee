"""Placement policies, chosen by name: ``registry`` lists them.

Two of them are computed in C; their definitions are ``MatchMinusLoad.plain_score`` and ``CostMs.plain_score``.
"""

from baton_router.scheduler.policies.registry import POLICIES, PolicyContext, make_policy
from baton_router.scheduler.policy import Pairs, Policy, Ratings, Request, Scores, Side, relative_loads

__all__ = [
    "POLICIES",
    "Pairs",
    "Policy",
    "PolicyContext",
    "Ratings",
    "Request",
    "Scores",
    "Side",
    "make_policy",
    "relative_loads",
]
