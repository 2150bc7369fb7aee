"""What a store counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Counters:
    """Since start; blocks unless a name says otherwise."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    stored: int = 0
    expired_leases: int = 0


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


@dataclass
class TierCounters:
    """Of the tiers, since start; blocks."""

    memory_hits: int = 0
    memory_misses: int = 0
    disk_hits: int = 0
    disk_misses: int = 0
    promotions: int = 0
    demotions: int = 0
    refused: int = 0
