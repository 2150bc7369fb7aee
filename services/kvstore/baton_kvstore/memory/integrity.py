"""What must add up in a store, at any moment."""

from __future__ import annotations

from collections.abc import Collection

from baton.errors import InternalError
from baton_kvstore.memory.eviction import Eviction
from baton_kvstore.memory.pool import Entry, Pool, State


def check(pools: Collection[Pool], recency: Eviction, pinned: Collection[Entry], capacity_bytes: int) -> None:
    """Raise ``InternalError`` unless slots, pins, recency and budget add up."""
    if sum(pool.backed_bytes for pool in pools) > capacity_bytes:
        raise InternalError("the store is above its budget")
    for entry in recency:
        if entry.pins or entry.doomed or entry.state is not State.READY:
            raise InternalError("a block that must stay could be evicted")
    if recency.saved_bytes != sum(entry.pool.block_bytes for entry in recency if entry.saved):
        raise InternalError("bytes of saved blocks do not add up")
    held = [*recency, *pinned]
    if len(recency) + len(pinned) != len(held) or len(set(held)) != len(held):
        raise InternalError("evictable and pinned blocks do not add up")
    for pool in pools:
        pool.check(entry for entry in held if entry.pool is pool)
        if pool.num_pinned != sum(1 for entry in pinned if entry.pool is pool):
            raise InternalError("pins of a pool do not add up")
        if any(entry not in recency and entry not in pinned for entry in pool.index.values()):
            raise InternalError("a block can be found but is held by nobody")
