"""What a policy is built from, and the base of Baton's own."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from baton_router.scheduler.policy import Policy
from baton_router.scheduler.speeds import Speeds


@dataclass(frozen=True)
class PolicyContext:
    """What a policy is given.

    Attributes:
        beta: Weight of load against match.
        temperature: Of the softmax over scores; 0: the best wins.
        session_overload: Relative load from which a session leaves its home.
        rng: For random choices.
        speeds: What served requests have taught.
        options: ``--policy-options``: ``key=value`` pairs, for policies of other packages.
    """

    beta: float = 0.5
    temperature: float = 0.0
    session_overload: float = 3.0
    rng: random.Random = field(default_factory=random.Random)
    speeds: Speeds = field(default_factory=Speeds)
    options: Mapping[str, str] = field(default_factory=dict)


class BuiltInPolicy(Policy):
    """A policy of Baton's own, which the registry builds by its class."""

    @classmethod
    def make(cls, context: PolicyContext) -> Self:
        """Build it for a router; by default it needs nothing."""
        return cls()
