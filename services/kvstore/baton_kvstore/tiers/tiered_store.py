"""Memory first, a chain of tiers behind it: what is evicted from memory was written there before, and comes back.

The coldest part of a full memory is always behind already. A Put waits until there is room; a Get of blocks in memory
never waits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from baton.errors import DeadlineError, QueueFullError
from baton.kv_cache.fingerprint import Fingerprint
from baton.types import BlockHash, Tenant
from baton_kvstore.memory.leases import Lease
from baton_kvstore.memory.store import BlockStore
from baton_kvstore.tiers.chain import Chain
from baton_kvstore.tiers.owners import BlockOwners
from baton_kvstore.tiers.promotion import Ask, Promoter
from baton_kvstore.tiers.saver import Saver, Watermarks
from baton_kvstore.types import KvFormat, TierCounters, TierListener, kv_format_of

_ROUNDS = 8
_FLUSH_S = 30.0
"""Longest time that a clean end waits for blocks that are to be written."""


class TieredStore:
    """A store in memory and a chain of tiers behind it, which may be empty. Used in one event loop.

    Args:
        store: In memory; made with ``behind`` if the chain has tiers.
        chain: The tiers behind; closed with this.
        marks: When memory counts as full.

    Attributes:
        saver: Writes blocks of the memory to the chain; to be kicked whenever blocks may have become evictable.
    """

    def __init__(self, store: BlockStore, chain: Chain, marks: Watermarks) -> None:
        self.store, self.chain = store, chain
        self.counters = TierCounters()
        self.saver = Saver(store, chain, self.counters, marks)
        self._promoter = Promoter(store, chain, self.saver, self.counters)
        self._owners = BlockOwners(store, chain)

    def start(self) -> None:
        """Begin to keep the books of tenants, in the running loop."""
        self._owners.start()

    def listen(self, listener: TierListener) -> None:
        """Tell a listener what is in each tier, and then every change; called in the event loop."""
        self.store.listen(listener)
        self.chain.listen(listener)

    # Put

    def piece(self, fingerprint: Fingerprint, count: int) -> int:
        """Return how many blocks of a Put to take at once, so that there can be room for them."""
        if not self.chain.tiers:
            return count
        return max(1, min(count, self.store.capacity_bytes // 4 // max(1, fingerprint.block_bytes)))

    async def behind(
        self, fingerprint: Fingerprint, hashes: Sequence[BlockHash], deadline: float, *, durable: bool = False
    ) -> list[bool]:
        """Return which blocks need not be put: not in memory, but a tier surely has (``durable``: keeps) them."""
        chain, kind = self.chain, kv_format_of(fingerprint)
        if not chain.tiers:
            return [False] * len(hashes)
        holds = chain.has_kept if durable else chain.surely_holds
        absent = [name for name in hashes if not self.store.has(kind.key, name)]
        sure = {name for name in absent if holds(kind, name)}
        known = [name for name in absent if name not in sure and chain.holds(kind, name)]
        if known and not durable:
            # By a tier whose blocks others may have deleted: that costs a question, not a false promise.
            sure |= await chain.find(kind, known, deadline, again=True)
        return [name in sure and not self.store.has(kind.key, name) for name in hashes]

    # Get

    async def get(
        self, fingerprint: Fingerprint, hashes: Sequence[BlockHash], wanted: Ask, deadline: float
    ) -> tuple[Lease | None, bool]:
        """Lease the longest prefix that is in memory or can be brought there.

        Args:
            fingerprint: What the blocks are.
            hashes: A chain.
            wanted: How long the lease lasts, and whose blocks these are.
            deadline: ``time.monotonic()`` seconds.

        Returns:
            The lease, and whether the chain goes on: more could be had once these blocks are released.

        Raises:
            QueueFullError: Too many leases.
        """
        kind = kv_format_of(fingerprint)
        await self._find(kind, hashes, deadline)
        where = [0 if self.store.has(kind.key, name) else 1 + self.chain.where(kind, name) for name in hashes]
        lease = await self._promoted(fingerprint, hashes, wanted, deadline)
        if lease is None:
            lease = self.store.lease(fingerprint, hashes, wanted.ttl_s or 0.0)
        found = 0 if lease is None else len(lease.entries)
        if lease is not None and wanted.tenant is not None:
            self._owners.learn(kind, [entry.block_hash for entry in lease.entries if entry.saved])
        names = ["memory", *(tier.name for tier in self.chain.tiers)]
        missed = where[found:].count(len(names))
        for at, name in enumerate(names):  # every faster tier than the one that had a block missed it
            self.counters.hits[name] += where[:found].count(at)
            self.counters.misses[name] += missed + sum(place > at for place in where[:found])
        return lease, 0 < found < len(hashes) and self._holds(kind, hashes[found])

    async def contains(
        self, fingerprint: Fingerprint, hashes: Sequence[BlockHash], tenant: Tenant | None = None
    ) -> int:
        """Return how many leading blocks are in any tier, and begin to bring them to memory."""
        kind = kv_format_of(fingerprint)
        await self._find(kind, hashes, math.inf)
        found = 0
        while found < len(hashes) and self._holds(kind, hashes[found]):
            found += 1
        if self.chain.tiers:
            self._promoter.prefetch(fingerprint, hashes[:found], tenant)
        return found

    async def delete(self, fingerprint: Fingerprint, hashes: Sequence[BlockHash] | None) -> int:
        """Forget blocks (``None``: all of the fingerprint) in every tier, for good, and return how many were known.

        Raises:
            InternalError: Some may be found again.
        """
        kind = kv_format_of(fingerprint)
        hashes = None if hashes is None else list(dict.fromkeys(hashes))
        there = self.store.hashes(kind.key)
        gone = there if hashes is None else there & set(hashes)
        self.store.delete(fingerprint, hashes)
        return len(gone | await self.chain.delete(kind, hashes))

    async def delete_tenant(self, name: str) -> int:
        """Forget a tenant's blocks in memory, and in tiers behind those known; return how many that were.

        Raises:
            InternalError: Some may be found again.
        """
        blocks, leaving = self.store.forget_tenant(name), self._owners.leaving(name)
        for kind, hashes in self._owners.blocks(name).items():
            blocks.setdefault(kind, set()).update(hashes)
        for kind in blocks.keys() | leaving.keys():
            await self.chain.delete(kind, list(blocks.get(kind, set()) | leaving.get(kind, set())))
        return sum(map(len, blocks.values()))

    async def close(self) -> None:
        """Wait for what runs and close the tiers behind; the store in memory is closed after this."""
        await self.saver.close(time.monotonic() + _FLUSH_S, flush=self.chain.write_all)
        await self._promoter.close()
        await self.chain.close()

    # Inside

    async def _find(self, kind: KvFormat, hashes: Sequence[BlockHash], deadline: float) -> None:
        """Have the tiers that others write to asked for what this node does not know of."""
        if self.chain.shared:
            unknown = [name for name in hashes if not self._holds(kind, name)]
            if unknown:
                await self.chain.find(kind, unknown, deadline)

    async def _promoted(
        self, fingerprint: Fingerprint, hashes: Sequence[BlockHash], wanted: Ask, deadline: float
    ) -> Lease | None:
        """Bring what is not in memory, and lease the prefix; ``None``: nothing to bring, or it did not come."""
        kind, promoter = kv_format_of(fingerprint), self._promoter
        for _ in range(_ROUNDS if self.chain.tiers else 0):
            prefix, missing = promoter.plan(kind, hashes)
            if not missing or time.monotonic() >= deadline:
                break
            if prefix[0] != missing[0] and (promoter.crowded(wanted.tenant) or promoter.brings(kind, missing[0])):
                break  # what is there can be read meanwhile
            if promoter.brings(kind, missing[0]):
                await promoter.wait_for(kind, missing[0], deadline)
                continue
            try:
                lease = await promoter.bring(fingerprint, prefix, wanted, deadline)
            except (DeadlineError, QueueFullError):
                break
            if lease is not None:
                return lease
        return None

    def _holds(self, kind: KvFormat, block_hash: BlockHash) -> bool:
        """Whether a block is in any tier, as far as this node knows."""
        return self.store.has(kind.key, block_hash) or self.chain.holds(kind, block_hash)
