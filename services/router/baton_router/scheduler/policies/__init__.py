"""Placement policies, chosen by name: one file each, listed in ``registry``."""

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
