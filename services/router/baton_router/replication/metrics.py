"""Metrics of the exchange with other routers."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from baton_router.metrics.fast_metrics import Counter


class ReplicaMetrics:
    """Counts entries of the stream.

    Args:
        registry: Takes the metrics.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        entries = Counter("baton_router_replica_entries", "Entries of the stream of replicas", ["direction"], registry)
        self.published, self.received = entries.labels("published"), entries.labels("received")
        self.refused = entries.labels("refused")
        self.told = Counter(
            "baton_router_replica_expectations_told", "Chains of blocks told to the other routers", [], registry
        )
        self.losses = Counter("baton_router_redis_losses", "Times that Redis went away", [], registry)
