"""What a store counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Counters:
    """Since start; blocks unless a name says otherwise."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    stored: int = 0
    expired_leases: int = 0
    expired_blocks: int = 0


@dataclass(frozen=True, slots=True)
class StoreStats:
    """A moment's view of a store; counts of blocks unless a name says otherwise."""

    capacity_bytes: int
    used_bytes: int
    backed_bytes: int
    num_blocks: int
    num_pools: int
    num_leases: int
    hits: int
    misses: int
    evictions: int
    stored: int
    expired_leases: int
    expired_blocks: int


@dataclass
class TierCounters:
    """Of the tiers, since start; blocks. ``hits`` and ``misses`` by tier."""

    hits: Counter[str] = field(default_factory=Counter)
    misses: Counter[str] = field(default_factory=Counter)
    promotions: int = 0
    demotions: int = 0
    refused: int = 0
