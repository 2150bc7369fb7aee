"""Placement policies, chosen by name; one file each. What they see and answer is in ``base``."""

from baton_router.scheduler.policies.base import Pairs, Policy, Ratings, Request, Scores, Side, relative_loads
from baton_router.scheduler.policies.registry import POLICIES, PolicyContext, make_policy

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
