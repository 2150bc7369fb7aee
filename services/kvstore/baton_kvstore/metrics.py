"""Prometheus metrics of a KV store."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Iterable, Mapping
from typing import Final

from prometheus_client import Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.worker.process import ServiceMetrics
from baton_kvstore.memory.store import BlockStore
from baton_kvstore.tiers.disk.index import DiskCounters
from baton_kvstore.tiers.disk.tier import DiskTier
from baton_kvstore.tiers.tier import TierStats
from baton_kvstore.tiers.tiered_store import TieredStore

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_SNAPSHOT_WAIT_S = 1.0
"""Longest time that a scrape waits for the event loop, in seconds."""
MAX_TENANTS = 50
"""Number of tenants with metrics of their own: those with the most bytes."""
TIERS: Final = ("memory", "disk", "redis", "object")
"""Tiers that always have metrics, even if the store does not use them."""

# Help texts by attribute of :class:`StoreStats`, :class:`Share`, :class:`TierStats` and the counters.
_STORE_GAUGES: Final = {
    "capacity_bytes": "Memory for blocks",
    "used_bytes": "Bytes of blocks held or being filled",
    "backed_bytes": "Memory taken, free slots that were not given back included",
    "num_blocks": "Blocks held or being filled",
    "num_pools": "KV formats (fingerprints) held",
    "num_leases": "Live leases",
}
_STORE_COUNTERS: Final = {
    "hits": "Blocks asked for by Get and found",
    "misses": "Blocks asked for by Get and not found",
    "evictions": "Blocks evicted",
    "stored": "Blocks stored by Put",
    "expired_leases": "Leases that ended by time",
    "expired_blocks": "Blocks forgotten because their time was up",
}
_TENANT_GAUGES: Final = {
    "used_bytes": "Memory of a tenant's blocks",
    "quota_bytes": "Memory that it may have; 0: any",
    "pinned_bytes": "Memory pinned for it",
    "disk_bytes": "Its blocks on disk, as far as known",
}
_TENANT_COUNTERS: Final = {
    "evictions": "Blocks that it lost to its own quota",
    "disk_evictions": "Blocks that it lost on disk to its own quota",
}
_TIER_GAUGES: Final = {
    "num_blocks": "Blocks that this store knows of",
    "used_bytes": "Bytes of them; on disk: of files",
    "queued_bytes": "Bytes of blocks that wait to be written",
    "resting": "Whether the tier is left alone after failures, or its disk is full",
}
_TIER_COUNTERS: Final = {
    "read_bytes": "Bytes of blocks read",
    "written_bytes": "Bytes of blocks written",
    "errors": "Calls that failed",
    "damaged": "Blocks that were damaged",
    "evictions": "Blocks dropped by this store to make room",
}
_MOVE_COUNTERS: Final = {
    "promotions": "Blocks brought from tiers behind to memory",
    "demotions": "Blocks written from memory to tiers behind",
    "refused": "Blocks that no tier behind could take",
}
_CHAIN_COUNTERS: Final = {
    "handed_over": "Blocks that one tier dropped and the next one was given",
    "dropped": "Blocks that one tier dropped and no other took",
    "raised": "Blocks given back to the first tier because they were read again",
    "skipped_lookups": "Questions to shared tiers that were not asked or not answered in time",
}
_DISK_GAUGES: Final = {
    "num_blocks": "Blocks on disk",
    "used_bytes": "Bytes of files",
    "capacity_bytes": "Bytes that files may have",
    "num_segments": "Files",
    "queued_bytes": "Bytes of blocks that wait to be written",
}
_DISK_COUNTERS: Final = {
    "read_bytes": "Bytes of blocks read from disk",
    "written_bytes": "Bytes of records written to disk",
    "checksum_failures": "Blocks that were damaged on disk",
    "read_errors": "Reads that failed",
    "write_errors": "Writes and syncs that failed",
    "evictions": "Blocks dropped from disk to make room",
    "moved": "Blocks copied to the end of the log before their segment went",
    "compactions": "Segments of mostly garbage that were emptied",
    "syncs": "Files synced",
    "cut_bytes": "Torn ends cut at the start",
}


class StoreMetrics(Collector):
    """Metrics of one store, in a registry of its own so that several stores can run in one process.

    Scrapes run in another thread than the store, so they ask the event loop for a snapshot. If the loop is busy for too
    long, they use the last snapshot.
    """

    def __init__(self, store: BlockStore, tiers: TieredStore, disk: DiskTier | None) -> None:
        self._store = store
        self._tiers = tiers
        self._disk = disk
        self.registry = ServiceMetrics("kvstore")
        to = self.registry
        self.calls = Counter("baton_kvstore_calls", "Calls by method and outcome", ["method", "code"], registry=to)
        self.seconds = Histogram(
            "baton_kvstore_call_seconds", "Time per call", ["method"], buckets=_SECONDS, registry=to
        )
        self.pulled_bytes = Counter("baton_kvstore_pulled_bytes", "Bytes fetched by Put", ["pipe"], registry=to)
        self.refused_blocks = Counter(
            "baton_kvstore_stale_blocks", "Blocks that changed while they were fetched", registry=to
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self.refresh()
        self.registry.register(self)

    def start(self) -> None:
        """Take snapshots in the running event loop from now on."""
        self._loop = asyncio.get_running_loop()

    def stop(self) -> None:
        """Take no more snapshots; the last one stays."""
        self._loop = None

    def refresh(self) -> None:
        """Take a snapshot; call in the store's thread."""
        self._stats = self._store.stats()
        self._shares = self._store.quotas.largest(MAX_TENANTS)
        counts = self._tiers.counters
        self._moves = dataclasses.replace(counts, hits=counts.hits.copy(), misses=counts.misses.copy())

    def collect(self) -> Iterable[Metric]:
        """Yield all metrics; called in the scrape thread."""
        self._refresh_in_loop()
        chain = self._tiers.chain
        disk = self._disk
        behind = {name: TierStats() for name in TIERS[1:]} | {tier.name: tier.stats() for tier in chain.tiers}
        tenants = {use.name or "default": use for use in self._shares}
        on_disk, disk_counts = (TierStats(), DiskCounters()) if disk is None else (disk.stats(), disk.counters)
        gauge = GaugeMetricFamily
        counter = CounterMetricFamily
        yield from _families(gauge, "", _STORE_GAUGES, {"": self._stats})
        yield from _families(counter, "", _STORE_COUNTERS, {"": self._stats})
        yield from _families(gauge, "tenant_", _TENANT_GAUGES, tenants, "tenant")
        yield from _families(counter, "tenant_", _TENANT_COUNTERS, tenants, "tenant")
        hits = counter("baton_kvstore_tier_hits", "Blocks that Get found, by tier", labels=["tier"])
        misses = counter("baton_kvstore_tier_misses", "Blocks that Get did not find there", labels=["tier"])
        for tier in ("memory", *behind):
            hits.add_metric([tier], self._moves.hits[tier])
            misses.add_metric([tier], self._moves.misses[tier])
        yield from (hits, misses)
        yield from _families(gauge, "tier_", _TIER_GAUGES, behind, "tier")
        yield from _families(counter, "tier_", _TIER_COUNTERS, behind, "tier")
        yield from _families(counter, "", _MOVE_COUNTERS, {"": self._moves})
        yield from _families(counter, "", _CHAIN_COUNTERS, {"": chain.counters})
        yield from _families(gauge, "disk_", _DISK_GAUGES, {"": on_disk})
        yield from _families(counter, "disk_", _DISK_COUNTERS, {"": disk_counts})

    def _refresh_in_loop(self) -> None:
        """Have the event loop take a snapshot, and wait for it for a limited time."""
        loop = self._loop
        taken = threading.Event()

        def refresh() -> None:
            self.refresh()
            taken.set()

        if loop is not None:
            try:
                loop.call_soon_threadsafe(refresh)
            except RuntimeError:  # it was closed a moment ago
                return
            taken.wait(_SNAPSHOT_WAIT_S)


def _families(
    family_type: type[GaugeMetricFamily | CounterMetricFamily],
    prefix: str,
    texts: Mapping[str, str],
    rows: Mapping[str, object],
    label: str = "",
) -> Iterable[Metric]:
    """Yield one metric family per attribute.

    Args:
        family_type: Type of the families.
        prefix: Prefix of the metric names, after ``baton_kvstore_``.
        texts: Help text by attribute name.
        rows: Objects with the attributes, by label value; without a label a single row with the key ``""``.
        label: Label name; empty: no label.
    """
    for name, text in texts.items():
        family = family_type(
            f"baton_kvstore_{prefix}{name.removeprefix('num_')}", text, labels=[label] if label else []
        )
        for key, row in rows.items():
            family.add_metric([key] if label else [], float(getattr(row, name)))
        yield family
