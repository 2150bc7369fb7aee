"""The pools of all kinds of KV under one budget of bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator

from baton.errors import InvalidRequestError, QueueFullError
from baton.kv_cache.arena import HostArena
from baton.kv_cache.fingerprint import Fingerprint
from baton_kvstore.memory.pool import MAX_SLOTS, Pool

RETRY_AFTER_S = 1.0


class Kinds:
    """Pools by the digest of their fingerprint, the one unused for longest first.

    Args:
        capacity_bytes: Memory for all.
        max_pools: Kinds at once.
        drop: Called with a pool that has to go for another one; removes it.
    """

    def __init__(self, capacity_bytes: int, max_pools: int, drop: Callable[[Pool], None]) -> None:
        self._capacity, self._max_pools, self._drop = capacity_bytes, max_pools, drop
        self._pools: OrderedDict[bytes, Pool] = OrderedDict()

    def __iter__(self) -> Iterator[Pool]:
        return iter(self._pools.values())

    def __len__(self) -> int:
        return len(self._pools)

    @property
    def backed_bytes(self) -> int:
        """Memory taken, free slots that were not given back included; never above the capacity."""
        return sum(pool.backed_bytes for pool in self)

    def get(self, key: bytes) -> Pool | None:
        """Return a kind's pool."""
        return self._pools.get(key)

    def touch(self, pool: Pool) -> None:
        """Note that a pool was used."""
        self._pools.move_to_end(pool.key)

    def open(self, fingerprint: Fingerprint) -> Pool:
        """Return a kind's pool, a new one if there is none yet.

        Raises:
            InvalidRequestError: A block is larger than the store.
            QueueFullError: Other kinds are in use, as many as may be.
        """
        key = fingerprint.digest()
        pool = self._pools.get(key)
        if pool is None:
            num_slots = min(self._capacity // fingerprint.block_bytes, MAX_SLOTS) if fingerprint.block_bytes else 0
            if num_slots < 1:
                raise InvalidRequestError(
                    f"a block of {fingerprint.block_bytes} bytes does not fit a store of {self._capacity}",
                    field="fingerprint.block_bytes",
                )
            if len(self) >= self._max_pools:
                self._drop_oldest()
            pool = self._pools[key] = Pool(fingerprint, HostArena(num_slots, fingerprint.block_bytes))
        self.touch(pool)
        return pool

    def remove(self, pool: Pool) -> None:
        """Forget a pool."""
        del self._pools[pool.key]

    def free_slot(self, pool: Pool) -> int | None:
        """Take a slot that costs nobody a block; ``None``: there is none."""
        while True:
            slot = pool.take_warm()
            if slot is not None:
                return slot
            if self.backed_bytes + pool.block_bytes <= self._capacity:
                return pool.take_cold()
            if not any(other.cool() for other in self if other is not pool):
                return None

    def _drop_oldest(self) -> None:
        pool = next((pool for pool in self if not pool.num_pinned), None)
        if pool is None:
            message = f"{len(self)} kinds of KV are in use, which is as many as this store takes"
            raise QueueFullError(message, retry_after_s=RETRY_AFTER_S)
        self._drop(pool)
