"""Prometheus metrics of a KV store."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Iterable, Sequence
from typing import ClassVar, Final

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from baton_kvstore.memory.quotas import ShareUse
from baton_kvstore.memory.store import BlockStore
from baton_kvstore.tiers.chain import Chain
from baton_kvstore.tiers.disk.index import DiskCounters
from baton_kvstore.tiers.disk.tier import DiskTier
from baton_kvstore.tiers.tier import TierStats
from baton_kvstore.tiers.tiered_store import TieredStore

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

_LOOK_S = 1.0
"""How long a scrape waits for the event loop."""


class StoreMetrics(Collector):
    """Everything a store counts. ``registry`` is its own, so that several can live in one process.

    The store belongs to the event loop and scrapes come from another thread, so they have the loop take a snapshot. Of
    a loop that is busy for too long they see the one taken last.
    """

    _GAUGES: ClassVar = {
        "capacity_bytes": "Memory for blocks",
        "used_bytes": "Bytes of blocks held or being filled",
        "backed_bytes": "Memory taken, free slots that were not given back included",
        "num_blocks": "Blocks held or being filled",
        "num_pools": "PoolSet of KV held",
        "num_leases": "Live leases",
    }
    _COUNTERS: ClassVar = {
        "hits": "Blocks asked for by Get and found",
        "misses": "Blocks asked for by Get and not found",
        "evictions": "Blocks evicted",
        "stored": "Blocks stored by Put",
        "expired_leases": "Leases that ended by time",
        "expired_blocks": "Blocks forgotten because their time was up",
    }

    _TIER_COUNTERS: ClassVar = {
        "promotions": "Blocks brought from tiers behind to memory",
        "demotions": "Blocks written from memory to tiers behind",
        "refused": "Blocks that no tier behind could take",
    }
    _DISK_COUNTERS: ClassVar = {
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
    _DISK_GAUGES: ClassVar = {
        "num_blocks": "Blocks on disk",
        "used_bytes": "Bytes of files",
        "capacity_bytes": "Bytes that files may have",
        "num_segments": "Files",
        "queued_bytes": "Bytes of blocks that wait to be written",
    }

    def __init__(self, store: BlockStore, tiers: TieredStore, disk: DiskTier | None) -> None:
        self._store, self._tiers, self._disk = store, tiers, disk
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
        self._loop: asyncio.AbstractEventLoop | None = None
        self.refresh()
        self.registry.register(self)

    def start(self) -> None:
        """From now on the store changes in the running event loop."""
        self._loop = asyncio.get_running_loop()

    def stop(self) -> None:
        """The store does not change any more."""
        self._loop = None

    def refresh(self) -> None:
        """Take a new snapshot; called in the store's thread."""
        self._stats = self._store.stats()
        self._shares = self._store.quotas.largest(MAX_TENANTS)
        counts = self._tiers.counters
        self._tier_counts = dataclasses.replace(counts, hits=counts.hits.copy(), misses=counts.misses.copy())

    def collect(self) -> Iterable[Metric]:
        """Yield a snapshot (scrape thread)."""
        self._look()
        stats = self._stats
        for name, text in self._GAUGES.items():
            yield GaugeMetricFamily(f"baton_kvstore_{name.removeprefix('num_')}", text, value=getattr(stats, name))
        for name, text in self._COUNTERS.items():
            yield CounterMetricFamily(f"baton_kvstore_{name}", text, value=getattr(stats, name))
        yield from tenant_metrics(self._shares)
        yield from self._tiers_metrics()

    def _look(self) -> None:
        """Have the event loop take a snapshot, if it finds the time."""
        loop, taken = self._loop, threading.Event()

        def look() -> None:
            self.refresh()
            taken.set()

        if loop is not None:
            try:
                loop.call_soon_threadsafe(look)
            except RuntimeError:  # it was closed a moment ago
                return
            taken.wait(_LOOK_S)

    def _tiers_metrics(self) -> Iterable[Metric]:
        counts = self._tier_counts
        hits = CounterMetricFamily("baton_kvstore_tier_hits", "Blocks that Get found, by tier", labels=["tier"])
        misses = CounterMetricFamily("baton_kvstore_tier_misses", "Blocks that Get did not find there", labels=["tier"])
        for tier in tier_names(self._tiers.chain):
            hits.add_metric([tier], counts.hits[tier])
            misses.add_metric([tier], counts.misses[tier])
        yield hits
        yield misses
        yield from chain_metrics(self._tiers.chain)
        disk = DiskCounters() if self._disk is None else self._disk.counters
        stats = TierStats() if self._disk is None else self._disk.stats()
        for name, text in self._TIER_COUNTERS.items():
            yield CounterMetricFamily(f"baton_kvstore_{name}", text, value=getattr(counts, name))
        for name, text in self._DISK_COUNTERS.items():
            yield CounterMetricFamily(f"baton_kvstore_disk_{name}", text, value=getattr(disk, name))
        for name, text in self._DISK_GAUGES.items():
            yield GaugeMetricFamily(f"baton_kvstore_disk_{name.removeprefix('num_')}", text, value=getattr(stats, name))


MAX_TENANTS = 50
"""That have metrics of their own: those with most bytes."""


def tenant_metrics(uses: Sequence[ShareUse]) -> Iterable[Metric]:
    """Yield what tenants have."""
    used = GaugeMetricFamily("baton_kvstore_tenant_used_bytes", "Memory of a tenant's blocks", labels=["tenant"])
    quota = GaugeMetricFamily("baton_kvstore_tenant_quota_bytes", "Memory that it may have; 0: any", labels=["tenant"])
    pinned = GaugeMetricFamily("baton_kvstore_tenant_pinned_bytes", "Memory pinned for it", labels=["tenant"])
    lost = CounterMetricFamily(
        "baton_kvstore_tenant_evictions", "Blocks that it lost to its own quota", labels=["tenant"]
    )
    disk = GaugeMetricFamily(
        "baton_kvstore_tenant_disk_bytes", "Its blocks on disk, as far as known", labels=["tenant"]
    )
    disk_lost = CounterMetricFamily(
        "baton_kvstore_tenant_disk_evictions", "Blocks that it lost on disk to its own quota", labels=["tenant"]
    )
    for use in uses:
        label = [use.name or "default"]
        used.add_metric(label, use.used_bytes)
        quota.add_metric(label, use.quota)
        pinned.add_metric(label, use.held_bytes)
        lost.add_metric(label, use.evictions)
        disk.add_metric(label, use.disk_bytes)
        disk_lost.add_metric(label, use.disk_evictions)
    yield from (used, quota, pinned, lost, disk, disk_lost)


TIERS: Final = ("memory", "disk", "redis", "object")

_GAUGES: Final = {
    "num_blocks": "Blocks that this store knows of",
    "used_bytes": "Bytes of them; on disk: of files",
    "queued_bytes": "Bytes of blocks that wait to be written",
    "resting": "Whether the tier is left alone after failures",
}
_COUNTERS: Final = {
    "read_bytes": "Bytes of blocks read",
    "written_bytes": "Bytes of blocks written",
    "errors": "Calls that failed",
    "damaged": "Blocks that were damaged",
    "evictions": "Blocks dropped by this store to make room",
}
_CHAIN: Final = {
    "handed_over": "Blocks that one tier dropped and the next one was given",
    "dropped": "Blocks that one tier dropped and no other took",
    "raised": "Blocks given back to the first tier because they were read again",
    "skipped_lookups": "Questions to shared tiers that were not asked or not answered in time",
}


def tier_names(chain: Chain) -> list[str]:
    """Return every tier that metrics name: Baton's own, also those that this store does not have, and others' tiers."""
    return list(dict.fromkeys([*TIERS, *(tier.name for tier in chain.tiers)]))


def chain_metrics(chain: Chain) -> Iterable[Metric]:
    """Yield what every tier tells, by tier, and what moves between them (any thread)."""
    stats = {tier.name: tier.stats() for tier in chain.tiers}
    names = tier_names(chain)[1:]
    for field, text in _GAUGES.items():
        gauge = GaugeMetricFamily(f"baton_kvstore_tier_{field.removeprefix('num_')}", text, labels=["tier"])
        for name in names:
            gauge.add_metric([name], float(getattr(stats.get(name, TierStats()), field)))
        yield gauge
    for field, text in _COUNTERS.items():
        counter = CounterMetricFamily(f"baton_kvstore_tier_{field}", text, labels=["tier"])
        for name in names:
            counter.add_metric([name], getattr(stats.get(name, TierStats()), field))
        yield counter
    counts = dataclasses.asdict(chain.counters)
    for field, text in _CHAIN.items():
        yield CounterMetricFamily(f"baton_kvstore_{field}", text, value=counts[field])
