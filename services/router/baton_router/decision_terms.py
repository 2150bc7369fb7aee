"""A histogram of every term that spoke for the instances that were chosen.

Which terms there are is the policy's affair: they are taken from the decision by name. Counted by hand, since a
decision has a dozen values and the client library's histogram takes a microsecond for each.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.api.v1 import common_pb2
from baton.types import Role
from baton_router.decision import Decision, DecisionCandidate

NAME = "baton_router_decision_term"
_FINE = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
_WIDE = (1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 100.0, 300.0, 1e3, 3e3, 1e4, 1e5)
_BOUNDS = (*(-x for x in reversed(_WIDE)), -1.0, -0.5, -0.2, *_FINE, *_WIDE)
"""Rates are between 0 and 1, relative loads around 1, costs in milliseconds or tokens anywhere."""
_MAX_TERMS = 32
_OTHER = "other"


def terms_of(candidate: DecisionCandidate) -> dict[str, float]:
    """Return what spoke for a candidate beyond match rate, load and score, by the policy's own names."""
    return {term.name: term.value for term in getattr(candidate, "terms", ())}


class _Buckets:
    """One histogram."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(_BOUNDS) + 1)
        self.total = 0.0


class DecisionTerms(Collector):
    """Counts the winners' terms; ``match``, ``load``, ``score``, ``margin`` (to the next best) and the policy's own."""

    def __init__(self) -> None:
        self._buckets: dict[tuple[str, str], _Buckets] = {}
        self._names: set[str] = set()

    def observe(self, decision: Decision) -> None:
        """Count a decision."""
        winners = {
            common_pb2.ROLE_PREFILL: (Role.PREFILL.value, decision.prefill_instance),
            common_pb2.ROLE_DECODE: (Role.DECODE.value, decision.decode_instance),
        }
        found: dict[str, DecisionCandidate] = {}
        next_best: dict[str, float] = {}
        for candidate in decision.candidates:
            role, winner = winners.get(candidate.role, ("", ""))
            if not winner:
                continue
            if candidate.instance_id == winner and role not in found:
                found[role] = candidate
            else:
                next_best[role] = max(next_best.get(role, -math.inf), candidate.score)
        for role, candidate in found.items():
            self._add(role, "match", candidate.match_rate)
            self._add(role, "load", candidate.load)
            self._add(role, "score", candidate.score)
            if role in next_best:
                self._add(role, "margin", candidate.score - next_best[role])
            for name, value in terms_of(candidate).items():
                self._add(role, self._label(name), value)

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
            pairs, sum_so_far = [], 0
            for bound, count in zip((*_BOUNDS, math.inf), buckets.counts, strict=True):
                sum_so_far += count
                pairs.append(("+Inf" if math.isinf(bound) else str(bound), float(sum_so_far)))
            family.add_metric([role, term], pairs, buckets.total)
        yield family

    @staticmethod
    def _family() -> HistogramMetricFamily:
        return HistogramMetricFamily(NAME, "Terms of the chosen instances' scores", labels=["role", "term"])
