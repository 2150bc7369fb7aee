"""What the controller counts and shows."""

from __future__ import annotations

from prometheus_client import Counter, Gauge

from baton.autoscale.policy import Action, Decision
from baton.autoscale.signals import ROLES, Observation
from baton.worker.process import ServiceMetrics


class AutoscaleMetrics:
    """Metrics of one controller.

    Attributes:
        registry: Where they are.
        failures: Looks that got no answer.
    """

    def __init__(self) -> None:
        self.registry = ServiceMetrics("autoscale")
        self._instances = Gauge(
            "baton_autoscale_instances", "Instances that take requests", ["role"], registry=self.registry
        )
        self._pressure = Gauge(
            "baton_autoscale_pressure", "Signals as shares of their targets", ["role", "signal"], registry=self.registry
        )
        self._resting = Gauge("baton_autoscale_holding", "1: nothing is to be changed now", registry=self.registry)
        self._changes = Counter(
            "baton_autoscale_changes", "Changes by what became of them", ["action", "role", "outcome"],
            registry=self.registry,
        )  # fmt: skip
        self.failures = Counter("baton_autoscale_failures", "What went wrong", ["what"], registry=self.registry)

    def saw(self, seen: Observation, decision: Decision) -> None:
        """Show a look and what follows from it."""
        for role in ROLES:
            self._instances.labels(role.value).set(seen.count(role))
        for role, pressure in decision.pressures.items():
            for signal, value in pressure.signals.items():
                self._pressure.labels(role.value, signal).set(value)
        self._resting.set(decision.action is Action.HOLD)

    def did(self, decision: Decision, outcome: str) -> None:
        """Count a change: ``done``, ``failed`` or ``dry_run``."""
        self._changes.labels(decision.action.value, decision.role or "", outcome).inc()
