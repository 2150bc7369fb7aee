"""What is to be done: a window that has to be full, hysteresis, a pause after each change, bounds.

An instance goes to a role only where that is above a target while the role that gives it would stay well below its own
(``scale_relaxed``), so the next look cannot want it back. Neither clock nor wire is here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from baton.autoscale.signals import ROLES, Observation, Pressure, pressures, running_per_decode
from baton.autoscale.step_time import StepTime
from baton.config.autoscale import AutoscaleConfig
from baton.types import Role

_LEAST_LOOKS = 3


class Action(StrEnum):
    """What is done."""

    HOLD = "hold"
    SWITCH = "switch"
    ADD = "add"
    REMOVE = "remove"


@dataclass(frozen=True, slots=True)
class Decision:
    """What is to be done, and why.

    Attributes:
        action: What.
        role: That gets an instance (switch, add) or loses one (remove); ``None``: hold.
        why: In words.
        pressures: What it follows from; empty: nothing was looked at.
    """

    action: Action
    role: Role | None
    why: str
    pressures: Mapping[Role, Pressure]

    def __str__(self) -> str:
        other = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}
        if self.role is None:
            return self.why
        done = {
            Action.SWITCH: f"one {other[self.role]} instance becomes {self.role}",
            Action.ADD: f"one {self.role} instance more",
            Action.REMOVE: f"one {self.role} instance fewer",
        }
        return f"{done[self.action]}: {self.why}"


class Policy:
    """Decides from look to look.

    Args:
        config: Targets and bounds.
    """

    def __init__(self, config: AutoscaleConfig) -> None:
        self._config = config
        self._window: deque[Observation] = deque()
        self._step_time = StepTime()
        self._rests_until = float("-inf")

    def decide(self, seen: Observation) -> Decision:
        """Take a look, and return what follows from it and those before."""
        config, window = self._config, self._window
        if seen.unsettled:
            window.clear()
            return self._hold(f"not all is settled: {', '.join(seen.unsettled)}")
        counts = {role: seen.count(role) for role in ROLES}
        if window and any(window[-1].count(role) != counts[role] for role in ROLES):
            window.clear()  # what was seen of another ratio says nothing of this one
        window.append(seen)
        while len(window) > 1 and window[1].at <= seen.at - config.scale_window_s:
            window.popleft()  # the one before the window's begin stays: so it is full from some time on, and for ever
        if not counts[Role.DECODE]:
            return self._hold("there is no decode instance")
        if len(window) < _LEAST_LOOKS or seen.at - window[0].at < config.scale_window_s:
            return self._hold("watching")
        growth, itl = 1.0, seen.stats.itl_ms
        if itl is not None:
            batch = running_per_decode(window)
            self._step_time.see(batch, itl.p90)
            growth = self._step_time.growing_share(batch, itl.p90)
        found = pressures(window, config, growth)
        if seen.at < self._rests_until:
            return self._hold("resting after the last change", found)
        return self._decide(found, counts)

    def acted(self, now: float) -> None:
        """Note that something was changed, or tried in vain."""
        self._window.clear()
        self._rests_until = now + self._config.scale_cooldown_s

    def _decide(self, found: dict[Role, Pressure], counts: dict[Role, int]) -> Decision:
        config = self._config
        most, least = sorted(ROLES, key=lambda role: -found[role].value)
        total, more = sum(counts.values()), config.scale_max_instances
        if found[most].value > 1:
            spare, fact = found[least].without_one(counts[least]), found[least].facts[found[least].name]
            gives = counts[least] > self._min(least)
            if gives and spare <= config.scale_relaxed:
                why = f"{found[most]}; {least} would be at {spare:.2f} without one ({fact})"
                return Decision(Action.SWITCH, most, why, found)
            if total < more:
                return Decision(Action.ADD, most, f"{found[most]}; {total} of {more} instances run", found)
            rest = f"would be at {spare:.2f} without one ({fact})" if gives else "has none to give"
            return self._hold(f"{found[most]}, but {least} {rest}", found)
        if more and total > self._min(Role.PREFILL) + self._min(Role.DECODE):
            left = {role: found[role].without_one(counts[role]) for role in ROLES if counts[role] > self._min(role)}
            role = min(left, key=lambda role: left[role])
            if left[role] <= config.scale_idle:
                return Decision(Action.REMOVE, role, f"{found[role]}; {left[role]:.2f} without one", found)
        return self._hold(f"{found[Role.PREFILL]}, {found[Role.DECODE]}", found)

    def _min(self, role: Role) -> int:
        return self._config.scale_min_prefill if role is Role.PREFILL else self._config.scale_min_decode

    def _hold(self, why: str, found: Mapping[Role, Pressure] | None = None) -> Decision:
        return Decision(Action.HOLD, None, why, found or {})
