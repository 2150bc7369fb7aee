"""Which block goes next: one small protocol, a file per policy."""

from __future__ import annotations

from baton_kvstore.memory.eviction.base import Eviction
from baton_kvstore.memory.eviction.lru import Lru
from baton_kvstore.memory.eviction.s3fifo import S3Fifo

POLICIES: dict[str, type[Lru] | type[S3Fifo]] = {"lru": Lru, "s3fifo": S3Fifo}
"""By the names that ``--eviction`` takes."""

__all__ = ["POLICIES", "Eviction", "Lru", "S3Fifo"]
