"""Metrics of placement: how many, how fast, and the scores of the chosen instances."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.rpc.convert import role_to_pb
from baton.types import Role
from baton_router.metrics import Counter, Histogram
from baton_router.registry.instance import Instance
from baton_router.scheduler.decision import Decision

_NAME = "baton_router_"
_RATES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
_DECISION_S = (2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 5e-2)
_WIDE = (1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 100.0, 300.0, 1e3, 3e3, 1e4, 1e5)
_TERMS = (*(-x for x in reversed(_WIDE)), -1.0, -0.5, -0.2, *_RATES, *_WIDE)
"""Buckets for rates from 0 to 1, relative loads around 1, and costs in milliseconds or tokens of any size."""
_MAX_TERMS = 32
_MAX_TERMS_PER_S = 200
"""Decisions per second whose terms are counted: each costs 10 us, and a sample is as informative as thousands."""
_OTHER = "other"
_PAIR = "pair"


class SchedulerMetrics(Collector):
    """Counts placements.

    ``baton_router_decision_term`` has, for the roles ``prefill`` and ``decode``, the winner's terms ``match`` and
    ``load``, and for ``pair`` its score and every term of it by the policy's own names.
    ``baton_router_instance_score`` has the latest score of each instance that is ready.

    Args:
        registry: Registry to add the metrics to.
        ready: Returns the ready instances of a role; ``None``: no scores of instances are shown.
        now: Monotonic clock, in seconds.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        ready: Callable[[Role], Sequence[Instance]] | None = None,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ready = ready
        self._now = now
        self.decision_time = Histogram(
            _NAME + "decision_seconds", "Hashing, look-up and choice", [], registry, buckets=_DECISION_S
        )
        self._decisions = Counter(_NAME + "decisions", "Placements, by policy", ["policy"], registry)
        rates = Histogram(
            _NAME + "match_rate", "KV match rate of the chosen instance", ["role"], registry, buckets=_RATES
        )
        self._prefill_rate = rates.labels(Role.PREFILL)
        self._decode_rate = rates.labels(Role.DECODE)
        self._index_use = Counter(
            _NAME + "index_use", "Placements by the state of the chosen instances' index", ["state"], registry
        )
        self._terms = Histogram(
            _NAME + "decision_term",
            "What spoke for the chosen instances",
            ["role", "term"],
            registry,
            buckets=_TERMS,
        )
        self._term_names: set[str] = set()
        self._second = self._left = 0
        self._latest: dict[Role, Decision] = {}
        registry.register(self)

    def observe(self, decision: Decision) -> None:
        self._decisions.labels(decision.policy).inc()
        self._index_use.labels(decision.index_state).inc()
        self._decode_rate.observe(float(decision.decode.match_rates[decision.choice.decode]))
        if decision.prefill_instance:
            self._prefill_rate.observe(float(decision.prefill.match_rates[decision.prefill_order[0]]))
        for side in (decision.prefill, decision.decode):
            if side.ids:
                self._latest[side.role] = decision

    def observe_terms(self, decision: Decision) -> None:
        """Count the terms of a placement, unless enough were counted in this second."""
        second = int(self._now())
        if second != self._second:
            self._second = second
            self._left = _MAX_TERMS_PER_S
        if self._left:
            self._left -= 1
            self._add_terms(decision)

    def _add_terms(self, decision: Decision) -> None:
        at = decision.choice.decode
        self._add_term(Role.DECODE, "match", float(decision.decode.match_rates[at]))
        self._add_term(Role.DECODE, "load", float(decision.loads(Role.DECODE)[at]))
        if decision.prefill_instance:
            at = decision.prefill_order[0]
            self._add_term(Role.PREFILL, "match", float(decision.prefill.match_rates[at]))
            self._add_term(Role.PREFILL, "load", float(decision.loads(Role.PREFILL)[at]))
        self._add_term(_PAIR, "score", decision.score)
        for name, value in decision.terms:
            self._add_term(_PAIR, self._term_label(name), value)

    def _add_term(self, role: str, term: str, value: float) -> None:
        if math.isfinite(value):
            self._terms.labels(role, term).observe(value)

    def _term_label(self, name: str) -> str:
        """Return a term's name as a label; other packages' policies choose the names, so their number is bounded."""
        if name not in self._term_names:
            if len(self._term_names) >= _MAX_TERMS:
                return _OTHER
            self._term_names.add(name)
        return name

    def collect(self) -> Iterator[Metric]:
        """Yield the terms of each ready instance's latest score."""
        family = GaugeMetricFamily(
            _NAME + "instance_score", "Terms of the latest score", labels=["instance", "role", "term"]
        )
        for role, decision in self._latest.items():
            ready = {x.instance_id for x in self._ready(role)} if self._ready is not None else set()
            for x in decision.candidates:
                if x.role == role_to_pb(role) and x.instance_id in ready:
                    terms = {**dict(x.terms), "match": x.match_rate, "load": x.load, "score": x.score}
                    for term, value in terms.items():
                        family.add_metric([x.instance_id, role.value, term], value)
        yield family
