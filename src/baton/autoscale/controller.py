"""The controller: observes the router, decides by the policy, and changes the fleet."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from prometheus_client import Counter, Gauge

from baton.autoscale.policy import Action, Decision, Policy
from baton.autoscale.signals import ROLES, Observation, observe
from baton.client import Instance, Stats
from baton.config.autoscale import AutoscaleConfig
from baton.errors import BatonError
from baton.types import Role
from baton.worker.process import ServiceMetrics


class AutoscaleMetrics:
    """Metrics of one controller.

    Attributes:
        registry: Registry of the metrics.
        given_up: Gauge of what did not get ready in time.
        failures: Counter of failures: observations, and what did not get ready.
    """

    def __init__(self) -> None:
        self.registry = ServiceMetrics("autoscale")
        self._instances = Gauge(
            "baton_autoscale_instances", "Instances that take requests", ["role"], registry=self.registry
        )
        self._pressure = Gauge(
            "baton_autoscale_pressure", "Signals as shares of their targets", ["role", "signal"], registry=self.registry
        )
        self._holding = Gauge("baton_autoscale_holding", "1: nothing is to be changed now", registry=self.registry)
        self._changes = Counter(
            "baton_autoscale_changes", "Changes by what became of them", ["action", "role", "outcome"],
            registry=self.registry,
        )  # fmt: skip
        self.given_up = Gauge(
            "baton_autoscale_given_up", "What did not get ready in time and is not waited for", registry=self.registry
        )
        self.failures = Counter("baton_autoscale_failures", "What went wrong", ["what"], registry=self.registry)
        for what in ("look", "start"):
            self.failures.labels(what)  # zero from the start, so that Prometheus sees the first rise

    def export(self, observation: Observation, decision: Decision) -> None:
        """Export an observation and the decision that follows from it."""
        for role in ROLES:
            self._instances.labels(role.value).set(observation.count(role))
        for role, pressure in decision.pressures.items():
            for signal, value in pressure.signals.items():
                self._pressure.labels(role.value, signal).set(value)
        self._holding.set(decision.action is Action.HOLD)

    def count_change(self, decision: Decision, outcome: str) -> None:
        """Count a change: ``done``, ``failed`` or ``dry_run``."""
        self._changes.labels(decision.action.value, decision.role or "", outcome).inc()


class Router(Protocol):
    """The part of a router's client that the controller uses."""

    async def list_instances(self) -> list[Instance]:
        """Return every instance that the router knows."""

    async def stats(self, *, window: float = ...) -> Stats:
        """Return statistics of the requests in the last ``window`` seconds."""


class Fleet(Protocol):
    """Changes the number of instances of each role."""

    async def switch(self, role: Role) -> str:
        """Turn an instance of the other role into one of ``role``; returns a description of the change."""

    async def add(self, role: Role) -> str:
        """Start an instance of a role; returns a description of the change."""

    async def remove(self, role: Role) -> str:
        """Drain and end an instance of a role; returns a description of the change."""

    async def pending(self) -> str:
        """Describe earlier changes that are not complete yet; empty: none."""

    async def take_back(self, least: Mapping[Role, int]) -> str:
        """Give up changes that do not complete; returns a description of what was taken back, empty: nothing.

        Args:
            least: Number of instances of each role that stay in any case.
        """


class Controller:
    """Controls the ratio of prefill to decode instances.

    Args:
        config: Targets and bounds.
        router: Client of the router.
        fleet: Carries out the changes.
        report: Called with a line for every change, and for reasons not to make one.
        metrics: Metrics of the controller; ``None``: unregistered ones.
        on_observation: Called with each observation and the decision that follows from it.
        now: Monotonic clock, in seconds.
    """

    def __init__(
        self,
        config: AutoscaleConfig,
        router: Router,
        fleet: Fleet,
        report: Callable[[str], None],
        *,
        metrics: AutoscaleMetrics | None = None,
        on_observation: Callable[[Observation, Decision], None] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._router = router
        self._fleet = fleet
        self._report = report
        self._now = now
        self._policy = Policy(config)
        self._metrics = metrics or AutoscaleMetrics()
        self._on_observation = on_observation
        self._last_reason = ""
        self._unsettled_since: dict[str, float] = {}
        self._given_up: set[str] = set()

    async def run(self) -> None:
        """Observe and act until cancelled; failures are reported, and retried with the next observation."""
        while True:
            started = self._now()
            await self.step()
            await asyncio.sleep(max(0.0, self._config.scale_interval_s - (self._now() - started)))

    async def step(self) -> Decision | None:
        """Observe once and act; returns the decision, or ``None`` if the router or the fleet does not answer."""
        try:
            instances = await self._router.list_instances()
            stats = await self._router.stats(window=self._config.scale_window_s)
            pending = await self._fleet.pending()
        except BatonError as error:
            self._metrics.failures.labels("look").inc()
            self._report_once(f"cannot look: {error.message}", key="cannot look")
            return None
        observation = observe(instances, stats, self._now())
        if pending:
            observation = dataclasses.replace(observation, unsettled=(*observation.unsettled, pending))
        observation = await self._give_up_late(observation)
        decision = self._policy.decide(observation)
        self._metrics.export(observation, decision)
        if self._on_observation is not None:
            self._on_observation(observation, decision)
        if decision.action is Action.HOLD:
            key = decision.why if not decision.pressures else "hold" if "but" not in decision.why else "cannot"
            self._report_once(str(decision), key=key)
        else:
            await self._act(decision)
        return decision

    async def _give_up_late(self, observation: Observation) -> Observation:
        """Wait no longer for what has not changed for ``scale_start_s``: one bad instance must not end all scaling.

        Returns:
            The observation without what was given up; that is waited for again when it has changed or was well between.
        """
        unsettled = observation.unsettled
        now = observation.at
        self._unsettled_since = {name: self._unsettled_since.get(name, now) for name in unsettled}
        late = {name for name, since in self._unsettled_since.items() if now - since >= self._config.scale_start_s}
        new = late - self._given_up
        self._given_up = late
        self._metrics.given_up.set(len(late))
        if new:
            self._metrics.failures.labels("start").inc(len(new))
            self._report(f"given up after {self._config.scale_start_s:g} s: {', '.join(sorted(new))}")
            await self._take_back()
        return dataclasses.replace(observation, unsettled=tuple(name for name in unsettled if name not in late))

    async def _take_back(self) -> None:
        if self._config.scale_dry_run:
            return
        least = {Role.PREFILL: self._config.scale_min_prefill, Role.DECODE: self._config.scale_min_decode}
        try:
            done = await self._fleet.take_back(least)
        except BatonError as error:
            self._report(f"not taken back: {error.message}")
            return
        if done:
            self._report(f"taken back: {done}")
            self._policy.start_cooldown(self._now())

    async def _act(self, decision: Decision) -> None:
        role = decision.role
        assert role is not None
        if self._config.scale_dry_run:
            self._report(f"would be done: {decision}")
            self._metrics.count_change(decision, "dry_run")
            self._policy.start_cooldown(self._now())
            return
        self._report(str(decision))
        actions = {Action.SWITCH: self._fleet.switch, Action.ADD: self._fleet.add, Action.REMOVE: self._fleet.remove}
        try:
            done = await actions[decision.action](role)
        except BatonError as error:
            self._report(f"not done: {error.message}")
            self._metrics.count_change(decision, "failed")
        else:
            self._report(f"done: {done}")
            self._metrics.count_change(decision, "done")
        self._policy.start_cooldown(self._now())
        self._last_reason = ""

    def _report_once(self, line: str, *, key: str) -> None:
        """Report a reason to hold, once for as long as ``key`` stays the same."""
        if key != self._last_reason:
            self._last_reason = key
            self._report(line)
