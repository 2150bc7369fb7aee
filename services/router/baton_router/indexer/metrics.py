"""Metrics of the prefix index."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from baton_router.metrics.fast_metrics import Counter


class IndexMetrics:
    """Counts what event streams bring, per instance or KV store.

    Args:
        registry: Takes the metrics.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.events = Counter("baton_router_index_events", "KV events applied", ["instance"], registry)
        self.gaps = Counter("baton_router_index_sequence_gaps", "Gaps in KV events", ["instance"], registry)

    def remove(self, instance: str) -> None:
        """Remove the series of an instance that left."""
        for counter in (self.events, self.gaps):
            counter.remove(instance)
