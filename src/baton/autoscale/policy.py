"""The autoscaling policy: a full window of observations, hysteresis, a cooldown after each change, bounds.

An instance moves to a role only if that role is above a target while the other one would stay well below its own
targets without it (``scale_relaxed``), so that the next observation cannot reverse the change. The policy knows neither
clock nor network.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from baton.autoscale.signals import ROLES, Observation, Pressure, pressures, running_per_decode
from baton.config.autoscale import AutoscaleConfig
from baton.types import Role

_MAX_SAMPLES = 900
_MIN_SAMPLES = 20
_MIN_SPREAD = 1.0
"""Standard deviation of the batch sizes, in sequences, below which a slope would be noise."""


class StepTime:
    """Time of a decode step by its batch size: a line fitted to observations by least squares.

    A step reads the weights once, whatever the batch size, and the KV of each sequence: ``a + b * batch``. With one
    instance fewer the other instances' batches grow, and the second part with them.
    """

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=_MAX_SAMPLES)

    def add_sample(self, batch: float, itl_ms: float) -> None:
        """Add an observation: sequences per instance, and milliseconds between tokens."""
        self._samples.append((batch, itl_ms))

    def growing_share(self, batch: float, itl_ms: float) -> float:
        """Return the share of a step's time that grows with its batch, from 0 to 1.

        Args:
            batch: Current number of sequences per instance.
            itl_ms: Current time between tokens, in milliseconds.

        Returns:
            ``b * batch / itl_ms``; 1, the most cautious value, while there are too few samples, or too similar ones.
        """
        count = len(self._samples)
        if count < _MIN_SAMPLES or itl_ms <= 0:
            return 1.0
        mean_batch = sum(x for x, _ in self._samples) / count
        mean_itl = sum(y for _, y in self._samples) / count
        spread = sum((x - mean_batch) ** 2 for x, _ in self._samples) / count
        if spread < _MIN_SPREAD**2:
            return 1.0
        slope = sum((x - mean_batch) * (y - mean_itl) for x, y in self._samples) / count / spread
        return min(1.0, max(0.0, slope * batch / itl_ms))


_MIN_OBSERVATIONS = 3


class Action(StrEnum):
    """What the controller does."""

    HOLD = "hold"
    SWITCH = "switch"
    ADD = "add"
    REMOVE = "remove"


@dataclass(frozen=True, slots=True)
class Decision:
    """An action and its reason.

    Attributes:
        action: Action to take.
        role: Role that gets an instance (switch, add) or loses one (remove); ``None``: hold.
        why: Reason, in words.
        pressures: Pressure of each role that the decision is based on; empty: not evaluated.
    """

    action: Action
    role: Role | None
    why: str
    pressures: Mapping[Role, Pressure]

    def __str__(self) -> str:
        other = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}
        if self.role is None:
            return self.why
        actions = {
            Action.SWITCH: f"one {other[self.role]} instance becomes {self.role}",
            Action.ADD: f"one {self.role} instance more",
            Action.REMOVE: f"one {self.role} instance fewer",
        }
        return f"{actions[self.action]}: {self.why}"


class Policy:
    """Decides after each observation.

    Args:
        config: Targets and bounds.
    """

    def __init__(self, config: AutoscaleConfig) -> None:
        self._config = config
        self._window: deque[Observation] = deque()
        self._step_time = StepTime()
        self._cooldown_until = float("-inf")

    def decide(self, observation: Observation) -> Decision:
        """Add an observation, and return the decision that follows from the window."""
        config = self._config
        window = self._window
        if observation.unsettled:
            window.clear()
            return self._keep_ratio(f"not all is settled: {', '.join(observation.unsettled)}")
        counts = {role: observation.count(role) for role in ROLES}
        if window and any(window[-1].count(role) != counts[role] for role in ROLES):
            window.clear()  # observations of another ratio do not apply to this one
        window.append(observation)
        while len(window) > 1 and window[1].at <= observation.at - config.scale_window_s:
            window.popleft()  # the last one before the window's begin stays, so that the window remains full
        if not counts[Role.DECODE]:
            return self._keep_ratio("there is no decode instance")
        if len(window) < _MIN_OBSERVATIONS or observation.at - window[0].at < config.scale_window_s:
            return self._keep_ratio("watching")
        growth = 1.0
        itl = observation.stats.itl_ms
        if itl is not None:
            batch = running_per_decode(window)
            self._step_time.add_sample(batch, itl.p90)
            growth = self._step_time.growing_share(batch, itl.p90)
        by_role = pressures(window, config, growth)
        if observation.at < self._cooldown_until:
            return self._keep_ratio("resting after the last change", by_role)
        return self._decide(by_role, counts)

    def start_cooldown(self, now: float) -> None:
        """Start the cooldown after a change, or an attempt; ``now``: monotonic seconds."""
        self._window.clear()
        self._cooldown_until = now + self._config.scale_cooldown_s

    def _decide(self, by_role: dict[Role, Pressure], counts: dict[Role, int]) -> Decision:
        config = self._config
        most, least = sorted(ROLES, key=lambda role: -by_role[role].value)
        total = sum(counts.values())
        max_instances = config.scale_max_instances
        if by_role[most].value > 1:
            spare = by_role[least].without_one(counts[least])
            fact = by_role[least].facts[by_role[least].name]
            gives = counts[least] > self._min(least)
            if gives and spare <= config.scale_relaxed:
                why = f"{by_role[most]}; {least} would be at {spare:.2f} without one ({fact})"
                return Decision(Action.SWITCH, most, why, by_role)
            if total < max_instances:
                return Decision(Action.ADD, most, f"{by_role[most]}; {total} of {max_instances} instances run", by_role)
            rest = f"would be at {spare:.2f} without one ({fact})" if gives else "has none to give"
            return self._keep_ratio(f"{by_role[most]}, but {least} {rest}", by_role)
        if max_instances and total > self._min(Role.PREFILL) + self._min(Role.DECODE):
            left = {role: by_role[role].without_one(counts[role]) for role in ROLES if counts[role] > self._min(role)}
            role = min(left, key=lambda role: left[role])
            if left[role] <= config.scale_idle:
                return Decision(Action.REMOVE, role, f"{by_role[role]}; {left[role]:.2f} without one", by_role)
        return self._keep_ratio(f"{by_role[Role.PREFILL]}, {by_role[Role.DECODE]}", by_role)

    def _min(self, role: Role) -> int:
        return self._config.scale_min_prefill if role is Role.PREFILL else self._config.scale_min_decode

    def _keep_ratio(self, why: str, by_role: Mapping[Role, Pressure] | None = None) -> Decision:
        return Decision(Action.HOLD, None, why, by_role or {})
