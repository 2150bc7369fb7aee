"""The controller: looks, decides, and has it done."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from baton.autoscale.metrics import AutoscaleMetrics
from baton.autoscale.policy import Action, Decision, Policy
from baton.autoscale.signals import Observation, look
from baton.client import Instance, Stats
from baton.config.autoscale import AutoscaleConfig
from baton.errors import BatonError
from baton.types import Role


class Router(Protocol):
    """What is asked of a client."""

    async def list_instances(self) -> list[Instance]:
        """Return every instance that the router knows."""

    async def stats(self, *, window: float = ...) -> Stats:
        """Return how requests fared."""


class Fleet(Protocol):
    """What can change how many instances there are of each role."""

    async def switch(self, role: Role) -> str:
        """Make an instance of the other role one of ``role``; returns what was done, in words."""

    async def add(self, role: Role) -> str:
        """Start an instance."""

    async def remove(self, role: Role) -> str:
        """End an instance, once its requests have ended or gone on elsewhere."""

    async def pending(self) -> str:
        """Say what is still under way of earlier changes; empty: nothing."""


class Controller:
    """Runs until it is cancelled.

    Args:
        config: Targets and bounds.
        router: Is asked.
        fleet: Does what is decided.
        tell: Gets a line for every change, and for what keeps it from one.
        metrics: What it counts.
        on_look: Gets each look with what followed from it.
        now: Monotonic clock, in seconds.
    """

    def __init__(
        self,
        config: AutoscaleConfig,
        router: Router,
        fleet: Fleet,
        tell: Callable[[str], None],
        *,
        metrics: AutoscaleMetrics | None = None,
        on_look: Callable[[Observation, Decision], None] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._router, self._fleet, self._tell, self._now = config, router, fleet, tell, now
        self._policy = Policy(config)
        self._metrics = metrics or AutoscaleMetrics()
        self._on_look = on_look
        self._said = ""

    async def run(self) -> None:
        """Look again and again; what fails is told and tried again at the next look."""
        while True:
            begun = self._now()
            await self.step()
            await asyncio.sleep(max(0.0, self._config.scale_interval_s - (self._now() - begun)))

    async def step(self) -> Decision | None:
        """Look once, and do what follows from it; returns that, or ``None`` where the router does not answer."""
        try:
            instances = await self._router.list_instances()
            stats = await self._router.stats(window=self._config.scale_window_s)
            pending = await self._fleet.pending()
        except BatonError as error:
            self._metrics.failures.labels("look").inc()
            self._say(f"cannot look: {error.message}", key="cannot look")
            return None
        seen = look(instances, stats, self._now())
        if pending:
            seen = Observation(seen.at, seen.loads, seen.stats, (*seen.unsettled, pending))
        decision = self._policy.decide(seen)
        self._metrics.saw(seen, decision)
        if self._on_look is not None:
            self._on_look(seen, decision)
        if decision.action is Action.HOLD:
            key = decision.why if not decision.pressures else "hold" if "but" not in decision.why else "cannot"
            self._say(str(decision), key=key)
        else:
            await self._do(decision)
        return decision

    async def _do(self, decision: Decision) -> None:
        role = decision.role
        assert role is not None
        if self._config.scale_dry_run:
            self._tell(f"would be done: {decision}")
            self._metrics.did(decision, "dry_run")
            self._policy.acted(self._now())
            return
        self._tell(str(decision))
        actions = {Action.SWITCH: self._fleet.switch, Action.ADD: self._fleet.add, Action.REMOVE: self._fleet.remove}
        try:
            done = await actions[decision.action](role)
        except BatonError as error:
            self._tell(f"not done: {error.message}")
            self._metrics.did(decision, "failed")
        else:
            self._tell(f"done: {done}")
            self._metrics.did(decision, "done")
        self._policy.acted(self._now())
        self._said = ""

    def _say(self, line: str, *, key: str) -> None:
        """Tell what holds it, once for as long as it is the same."""
        if key != self._said:
            self._said = key
            self._tell(line)
