"""Prometheus metrics of a KV store."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from baton_kvstore.store import BlockStore

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class StoreMetrics(Collector):
    """Everything a store counts. ``registry`` is its own, so that several can live in one process.

    The store belongs to the event loop and scrapes come from another thread, so they see the snapshot taken last.
    """

    _GAUGES: ClassVar = {
        "capacity_bytes": "Memory for blocks",
        "used_bytes": "Bytes of blocks held or being filled",
        "backed_bytes": "Memory taken, free slots that were not given back included",
        "num_blocks": "Blocks held or being filled",
        "num_pools": "Kinds of KV held",
        "num_leases": "Live leases",
    }
    _COUNTERS: ClassVar = {
        "hits": "Blocks asked for by Get and found",
        "misses": "Blocks asked for by Get and not found",
        "evictions": "Blocks evicted",
        "stored": "Blocks stored by Put",
        "expired_leases": "Leases that nobody gave back",
    }

    def __init__(self, store: BlockStore) -> None:
        self._store = store
        self.registry = CollectorRegistry()
        to = self.registry
        self.calls = Counter("baton_kvstore_calls", "Calls by method and outcome", ["method", "code"], registry=to)
        self.seconds = Histogram(
            "baton_kvstore_call_seconds", "Time per call", ["method"], buckets=_SECONDS, registry=to
        )
        self.pulled_bytes = Counter("baton_kvstore_pulled_bytes", "Bytes fetched by Put", ["pipe"], registry=to)
        self.refused_blocks = Counter(
            "baton_kvstore_stale_blocks", "Blocks that changed while they were fetched", registry=to
        )
        self.refresh()
        self.registry.register(self)

    def refresh(self) -> None:
        """Take a new snapshot; called in the store's thread."""
        self._stats = self._store.stats()

    def collect(self) -> Iterable[Metric]:
        """Yield the snapshot (scrape thread)."""
        stats = self._stats
        for name, text in self._GAUGES.items():
            yield GaugeMetricFamily(f"baton_kvstore_{name.removeprefix('num_')}", text, value=getattr(stats, name))
        for name, text in self._COUNTERS.items():
            yield CounterMetricFamily(f"baton_kvstore_{name}", text, value=getattr(stats, name))
