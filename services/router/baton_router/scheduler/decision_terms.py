"""Histograms of what spoke for the winners: each role's match rate and relative load, and every term of their score.

Which terms a score has is the policy's affair: they are taken from the decision by name. Counted by hand, since a
decision has half a dozen values and the client library's histogram takes a microsecond for each.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.types import Role
from baton_router.scheduler.decision import Decision

NAME = "baton_router_decision_term"
_FINE = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
_WIDE = (1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 100.0, 300.0, 1e3, 3e3, 1e4, 1e5)
_BOUNDS = (*(-x for x in reversed(_WIDE)), -1.0, -0.5, -0.2, *_FINE, *_WIDE)
"""Rates are between 0 and 1, relative loads around 1, costs in milliseconds or tokens anywhere."""
_MAX_TERMS = 32
_MAX_PER_S = 200
"""Decisions counted in a second, 10 us each: a router that makes thousands has better use for its time, and a sample
tells as much."""
_OTHER = "other"
_PAIR = "pair"


class _Buckets:
    """One histogram."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(_BOUNDS) + 1)
        self.total = 0.0


class DecisionTerms(Collector):
    """Counts, for role ``prefill`` and ``decode``, ``match`` and ``load``; for the ``pair`` its score and its terms."""

    def __init__(self, *, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._second = 0
        self._left = 0
        self._buckets: dict[tuple[str, str], _Buckets] = {}
        self._names: set[str] = set()

    def observe(self, decision: Decision) -> None:
        """Count a decision, unless enough were in this second."""
        second = int(self._now())
        if second != self._second:
            self._second, self._left = second, _MAX_PER_S
        if not self._left:
            return
        self._left -= 1
        at = decision.choice.decode
        self._add(Role.DECODE.value, "match", decision.decode.match_rates[at])
        self._add(Role.DECODE.value, "load", decision.loads(Role.DECODE)[at])
        if decision.prefill_instance:
            at = decision.prefill_order[0]
            self._add(Role.PREFILL.value, "match", decision.prefill.match_rates[at])
            self._add(Role.PREFILL.value, "load", decision.loads(Role.PREFILL)[at])
        self._add(_PAIR, "score", decision.score)
        for name, value in decision.terms:
            self._add(_PAIR, self._label(name), value)

    def _label(self, name: str) -> str:
        """Policies can be anybody's, so the number of names is bounded."""
        if name not in self._names:
            if len(self._names) >= _MAX_TERMS:
                return _OTHER
            self._names.add(name)
        return name

    def _add(self, role: str, term: str, value: float) -> None:
        if not math.isfinite(value):
            return
        buckets = self._buckets.get((role, term))
        if buckets is None:
            buckets = self._buckets[role, term] = _Buckets()
        buckets.counts[bisect_left(_BOUNDS, value)] += 1
        buckets.total += value

    def describe(self) -> Iterator[Metric]:
        """Return the family without values."""
        yield self._family()

    def collect(self) -> Iterator[Metric]:
        """Yield the histogram of every role and term."""
        family = self._family()
        for (role, term), buckets in list(self._buckets.items()):
            labels, so_far = {"role": role, "term": term}, 0
            for bound, count in zip((*_BOUNDS, math.inf), buckets.counts, strict=True):
                so_far += count
                le = "+Inf" if math.isinf(bound) else str(bound)
                family.add_sample(f"{NAME}_bucket", {**labels, "le": le}, float(so_far))
            # By hand: the library leaves these two out where there are buckets below zero.
            family.add_sample(f"{NAME}_count", labels, float(so_far))
            family.add_sample(f"{NAME}_sum", labels, buckets.total)
        yield family

    @staticmethod
    def _family() -> HistogramMetricFamily:
        return HistogramMetricFamily(NAME, "What spoke for the chosen instances", labels=["role", "term"])
