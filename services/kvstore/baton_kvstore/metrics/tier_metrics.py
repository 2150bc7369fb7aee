"""Prometheus metrics of the tiers behind memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from baton_kvstore.tiers.chain import Chain
from baton_kvstore.tiers.moves import ChainCounters
from baton_kvstore.tiers.tier import BackStats

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


def chain_metrics(chain: Chain | None) -> Iterable[Metric]:
    """Yield what every tier tells, by tier, and what moves between them (any thread)."""
    stats = {tier.name: tier.back_stats() for tier in chain.tiers} if chain else {}
    names = TIERS[1:]
    for field, text in _GAUGES.items():
        gauge = GaugeMetricFamily(f"baton_kvstore_tier_{field.removeprefix('num_')}", text, labels=["tier"])
        for name in names:
            gauge.add_metric([name], float(getattr(stats.get(name, BackStats()), field)))
        yield gauge
    for field, text in _COUNTERS.items():
        counter = CounterMetricFamily(f"baton_kvstore_tier_{field}", text, labels=["tier"])
        for name in names:
            counter.add_metric([name], getattr(stats.get(name, BackStats()), field))
        yield counter
    counts = dataclasses.asdict(chain.counters if chain else ChainCounters())
    for field, text in _CHAIN.items():
        yield CounterMetricFamily(f"baton_kvstore_{field}", text, value=counts[field])
