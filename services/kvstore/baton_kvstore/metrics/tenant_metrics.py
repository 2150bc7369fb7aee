"""Metrics of the tenants that have most in a store."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from baton_kvstore.memory.quotas import ShareUse

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
