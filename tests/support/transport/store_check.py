"""Invariants of a KV store in memory."""

from __future__ import annotations

from baton_kvstore.memory.pool import Entry, Pool, State
from baton_kvstore.memory.store import BlockStore


def check_store(store: BlockStore) -> None:
    """Assert that slots, pins, eviction order, quotas and budget add up."""
    evictable = list(store.eviction)
    entries = [*evictable, *store._pinned]
    assert store.backed_bytes <= store.capacity_bytes
    assert all(not entry.pins and not entry.doomed and entry.state is State.READY for entry in evictable)
    assert store.eviction.saved_bytes == sum(entry.pool.block_bytes for entry in evictable if entry.saved)
    assert len(store.eviction) + len(store._pinned) == len(entries) == len(set(entries))
    for pool in store.pools:
        check_pool(pool, [entry for entry in entries if entry.pool is pool])
        assert pool.num_pinned == sum(entry.pool is pool for entry in store._pinned)
        assert set(entries) >= set(pool.index.values())
    for share in store.quotas:
        assert share.used_bytes == sum(entry.pool.block_bytes for entry in share.entries)
        assert set(share._cold) == {entry for entry in share.entries if not entry.pins}
        assert share.pinned_bytes == sum(entry.pool.block_bytes for entry in share.entries if entry.client_pinned)


def check_pool(pool: Pool, entries: list[Entry]) -> None:
    """Assert that used, warm and cold slots add up; ``entries``: all that occupy a slot, including doomed ones."""
    used = [entry.slot for entry in entries]
    slots = used + pool._warm + pool._cold
    assert len(slots) == len(set(slots)) == pool._next
    assert len(used) == pool.num_used
    assert pool.num_backed == len(used) + len(pool._warm) == int(pool._backed.sum())
