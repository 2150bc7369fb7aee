"""Tiers against baselines, one client each, and what Baton aims at."""

from __future__ import annotations

from collections.abc import Sequence

from baton.bench.core.stats import paired_ratio
from baton_kvstore.bench.records import RatioRecord
from baton_kvstore.bench.samples import Cell

NAMES = {"shm": "memory over shm", "tcp": "memory over tcp", "disk": "disk", "redis": "Redis", "plain": "plain reads"}
NAMES |= {"redis-mget": "Redis MGET", "redis-bare": "Redis, bare socket"}
_AIMS: tuple[tuple[str, str, float | None], ...] = (
    ("shm", "memcpy", 0.6),
    ("tcp", "memcpy", None),
    ("disk", "plain", 0.8),
    ("disk", "dd", 0.8),
    ("shm", "redis", 3.0),
    ("tcp", "redis", 3.0),
    ("disk", "redis", 3.0),
    ("shm", "redis-mget", 3.0),
    ("tcp", "redis-mget", 3.0),
    ("disk", "redis-mget", 3.0),
    ("shm", "redis-bare", None),
    ("tcp", "redis-bare", None),
    ("disk", "redis-bare", None),
)


def find_ratios(geometry: str, cells: Sequence[Cell]) -> list[RatioRecord]:
    """Return the ratios of what was measured: medians of the quotients within a round."""
    found = {cell.method: cell for cell in cells if (cell.op, cell.clients, cell.hit_percent) == ("get", 1, 100)}
    out = []
    for tier, other, aim in _AIMS:
        if tier in found and other in found:
            value = round(paired_ratio(found[tier].rates, found[other].rates), 3)
            name = f"get, {NAMES[tier]} / {NAMES.get(other, other)}"
            out.append(RatioRecord(geometry, name, value, ">=", aim, None if aim is None else value >= aim))
    return out
