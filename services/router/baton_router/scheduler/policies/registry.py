"""Policies by name: Baton's own, and those that other packages register.

A package registers a factory in the entry point group ``baton.router_policies``::

    [project.entry-points."baton.router_policies"]
    nearest = "my_package:make_policy"

and a router started with ``--policy nearest`` calls it once with a :class:`PolicyContext`. docs/router/routing.md
writes one.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from baton.config.router import RouterConfig
from baton.errors import ConfigError
from baton.plugins import PluginGroup
from baton_router.scheduler.policy import Policy
from baton_router.scheduler.speeds import Speeds

_POLICIES = "baton_router.scheduler.policies"
_BUILT_IN = {
    "match_minus_load": f"{_POLICIES}.match_minus_load:MatchMinusLoad.make",
    "cost_ms": f"{_POLICIES}.cost_ms:CostMs.make",
    "round_robin": f"{_POLICIES}.cache_blind:RoundRobin.make",
    "random": f"{_POLICIES}.cache_blind:Uniform.make",
    "least_loaded": f"{_POLICIES}.cache_blind:LeastLoaded.make",
    "power_of_two": f"{_POLICIES}.cache_blind:PowerOfTwo.make",
    "session": f"{_POLICIES}.session:Session.make",
}
"""Factories by name."""
_PLUGINS = PluginGroup("policy", "baton.router_policies", _BUILT_IN)
POLICIES = tuple(_BUILT_IN)
"""Names of Baton's own policies."""


@dataclass(frozen=True)
class PolicyContext:
    """Configuration and state that a policy is built with.

    Attributes:
        beta: Weight of load against match, 0 to 100.
        temperature: Temperature of the softmax over scores, 0 to 100; 0: the best wins.
        session_overload: Relative load, above 1, from which a session leaves its home.
        rng: Source of random choices.
        speeds: Speeds learnt from served requests.
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
        """Build the policy; by default without arguments."""
        return cls()


def make_policy(name: str, context: PolicyContext | None = None) -> Policy:
    """Build a policy by its name.

    Raises:
        ConfigError: There is none of that name, it cannot be imported, or an option is out of range.
    """
    context = context or PolicyContext()
    if name in _BUILT_IN and context.options:
        raise ConfigError(f"the policy {name} takes no options", field="policy_options")
    policy: Policy = _PLUGINS.create(name, context)
    if not (callable(getattr(policy, "score", None)) and callable(getattr(policy, "chosen", None))):
        raise ConfigError(f"policy {name!r} made a {type(policy).__name__}, which scores nothing", field="policy")
    return policy


def configured_policy(config: RouterConfig, speeds: Speeds) -> Policy:
    """Build the policy that a configuration names.

    Raises:
        ConfigError: See :func:`make_policy`; or ``policy_options`` cannot be read.
    """
    context = PolicyContext(
        beta=config.beta,
        temperature=config.temperature,
        session_overload=config.session_overload,
        rng=random.Random(config.policy_seed),
        speeds=speeds,
        options=parse_options(config.policy_options),
    )
    return make_policy(config.policy, context)


def parse_options(options: Sequence[str]) -> dict[str, str]:
    """Parse ``key=value`` pairs.

    Raises:
        ConfigError: Malformed; names ``policy_options``.
    """
    parsed = {}
    for option in options:
        key, equals, value = option.partition("=")
        if not (key and equals):
            raise ConfigError(f"{option!r} is not key=value", field="policy_options")
        parsed[key] = value
    return parsed
