"""What a decision counts, with every label looked up once: the client library takes a microsecond for each look-up."""

from __future__ import annotations

from baton.types import Role
from baton_router.indexer.event_applier import IndexState
from baton_router.metrics.router_metrics import RouterMetrics
from baton_router.scheduler.decision import Decision


class PlacementMetrics:
    """The series of one placer.

    Args:
        metrics: Whose families they belong to.
        policy: Name of the policy.
    """

    def __init__(self, metrics: RouterMetrics, policy: str) -> None:
        self.decision_time = metrics.decision_time.labels()
        self._decisions = metrics.decisions.labels(policy=policy)
        self._prefill_rate = metrics.match_rate.labels(role=Role.PREFILL)
        self._decode_rate = metrics.match_rate.labels(role=Role.DECODE)
        self._index_use = {str(state): metrics.index_use.labels(state=state.value) for state in IndexState}

    def observe(self, decision: Decision, prefill_rate: float | None) -> None:
        """Count a decision; ``prefill_rate``: the match rate of the prefill instance, if one is used."""
        self._decisions.inc()
        self._decode_rate.observe(decision.decode.match_rates[decision.choice.decode])
        if prefill_rate is not None:
            self._prefill_rate.observe(prefill_rate)
        self._index_use[decision.index_state].inc()
