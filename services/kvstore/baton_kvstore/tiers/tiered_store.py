"""Memory first, a chain of tiers behind it: what is evicted from memory was written there before, and comes back.

The coldest part of a full memory is always behind already. A Put waits until there is room; a Get of blocks in memory
never waits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from baton.errors import DeadlineError, InternalError, QueueFullError
from baton.kv_cache.fingerprint import Fingerprint
from baton.types import BlockHash, Tenant
from baton_kvstore.memory.leases import Lease
from baton_kvstore.memory.store import BlockStore
from baton_kvstore.tiers.chain import Chain
from baton_kvstore.tiers.lower_tiers import LowerTiers
from baton_kvstore.tiers.promotion import Ask, Promoter
from baton_kvstore.tiers.saver import Saver, Watermarks, ask
from baton_kvstore.types import KvFormat, TierCounters, TierListener, kv_format_of

_ROUNDS = 8
_FLUSH_S = 30.0
"""Longest time that a clean end waits for blocks that are to be written."""


class TieredStore:
    """A store in memory and, if there is one, a chain of tiers behind it. Used in one event loop.

    Args:
        store: In memory; made with ``behind`` if there is a chain.
        chain: The tiers behind; closed with this.
        marks: When memory counts as full.
    """

    def __init__(self, store: BlockStore, chain: Chain | None, marks: Watermarks) -> None:
        self.store, self.chain = store, chain
        self.counters = TierCounters()
        self._saver = Saver(store, chain, self.counters, marks) if chain else None
        self._promoter = Promoter(store, chain, self._saver, self.counters) if chain and self._saver else None
        self.behind_memory = LowerTiers(store, chain) if chain else None

    def start(self) -> None:
        """Begin to keep the books of tenants, in the running loop."""
        if self.behind_memory is not None:
            self.behind_memory.start()

    def listen(self, listener: TierListener) -> None:
        """Tell a listener what is in each tier, and then every change; called in the event loop."""
        self.store.listen(listener)
        if self.chain is not None:
            self.chain.listen(listener)

    # Put

    def piece(self, fingerprint: Fingerprint, count: int) -> int:
        """Return how many blocks of a Put to take at once, so that there can be room for them."""
        if self.chain is None:
            return count
        return max(1, min(count, self.store.capacity_bytes // 4 // max(1, fingerprint.block_bytes)))

    async def behind(
        self, fingerprint: Fingerprint, hashes: Sequence[BlockHash], deadline: float, *, durable: bool = False
    ) -> list[bool]:
        """Return which blocks need not be put: not in memory, but a tier surely has (``durable``: keeps) them."""
        chain, kind = self.chain, kv_format_of(fingerprint)
        if chain is None:
            return [False] * len(hashes)
        holds = chain.has_kept if durable else chain.surely_holds
        absent = [name for name in hashes if not self.store.has(kind.key, name)]
        sure = {name for name in absent if holds(kind, name)}
        known = [name for name in absent if name not in sure and chain.holds(kind, name)]
        if (
            known and not durable
        ):  # by a tier whose blocks others may have deleted: that costs a question, not a false promise
            sure |= await chain.find(kind, known, deadline, again=True)
        return [name in sure and not self.store.has(kind.key, name) for name in hashes]

    async def make_room(self, num_bytes: int, deadline: float) -> None:
        """Wait until so much can be taken, or nothing more can be done for it.

        Raises:
            DeadlineError: The tiers behind were too slow.
        """
        if self._saver is not None:
            await self._saver.make_room(num_bytes, deadline)

    def kick(self) -> None:
        """Have the next cold blocks written, if it is time; called whenever blocks may have become evictable."""
        if self._saver is not None:
            self._saver.kick()

    async def persist(self, fingerprint: Fingerprint, hashes: Sequence[BlockHash], deadline: float) -> list[bool]:
        """Write blocks, sync, and return which of them a restart would find.

        Raises:
            DeadlineError: It took too long.
        """
        if self._saver is None:
            return [False] * len(hashes)
        return await self._saver.persist(kv_format_of(fingerprint), hashes, deadline)

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
        where = self._where(kind, hashes)
        lease = await self._promoted(fingerprint, hashes, wanted, deadline)
        if lease is None:
            lease = self.store.lease(fingerprint, hashes, wanted.ttl_s or 0.0)
        found = 0 if lease is None else len(lease.entries)
        if lease is not None and wanted.tenant is not None and self.behind_memory is not None:
            self.behind_memory.learn(kind, [entry.block_hash for entry in lease.entries if entry.saved])
        self._count(where[:found], [at for at in where[found:] if at is None])
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
        if self._promoter is not None:
            self._promoter.prefetch(fingerprint, hashes[:found], tenant)
        return found

    async def delete(self, fingerprint: Fingerprint, hashes: Sequence[BlockHash] | None) -> int:
        """Forget blocks (``None``: all of the fingerprint) in every tier, for good, and return how many were known.

        Raises:
            InternalError: Some may be found again.
        """
        kind = kv_format_of(fingerprint)
        there = self.store.hashes(kind.key)
        gone = there if hashes is None else there & set(hashes)
        self.store.delete(fingerprint, hashes)
        return len(gone | await self._delete_behind(kind, hashes))

    async def delete_tenant(self, name: str) -> int:
        """Forget a tenant's blocks in memory, and in tiers behind those known; return how many that were.

        Raises:
            InternalError: Some may be found again.
        """
        blocks, leaving = forget_tenant(self.store, name), dict[KvFormat, set[BlockHash]]()
        if self.behind_memory is not None:
            leaving = self.behind_memory.leaving(name)
            for kind, hashes in self.behind_memory.blocks(name).items():
                blocks.setdefault(kind, set()).update(hashes)
        for kind in blocks.keys() | leaving.keys():
            await self._delete_behind(kind, list(blocks.get(kind, set()) | leaving.get(kind, set())))
        return sum(map(len, blocks.values()))

    async def _delete_behind(self, kind: KvFormat, hashes: Sequence[BlockHash] | None) -> set[BlockHash]:
        chain = self.chain
        if chain is None:
            return set()
        found: set[BlockHash] = set()

        def begin(done: Callable[[bool], None]) -> None:
            found.update(chain.delete(kind, hashes, done))

        if not await ask(begin, None):
            raise InternalError("the deletion did not reach every tier")
        return found

    async def close(self) -> None:
        """Wait for what runs and close the tiers behind; the store in memory is closed after this."""
        if self.chain is None or self._saver is None or self._promoter is None:
            return
        await self._saver.close(time.monotonic() + _FLUSH_S, flush=self.chain.write_all)
        await self._promoter.close()
        await self.chain.close()

    # Inside

    async def _find(self, kind: KvFormat, hashes: Sequence[BlockHash], deadline: float) -> None:
        """Have the tiers that others write to asked for what this node does not know of."""
        if self.chain is not None and self.chain.shared:
            unknown = [name for name in hashes if not self._holds(kind, name)]
            if unknown:
                await self.chain.find(kind, unknown, deadline)

    async def _promoted(
        self, fingerprint: Fingerprint, hashes: Sequence[BlockHash], wanted: Ask, deadline: float
    ) -> Lease | None:
        """Bring what is not in memory, and lease the prefix; ``None``: nothing to bring, or it did not come."""
        kind, promoter = kv_format_of(fingerprint), self._promoter
        if promoter is None:
            return None
        for _ in range(_ROUNDS):
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
        return self.store.has(kind.key, block_hash) or (self.chain is not None and self.chain.holds(kind, block_hash))

    def _where(self, kind: KvFormat, hashes: Sequence[BlockHash]) -> list[int | None]:
        """Return each block's fastest tier: 0 is memory, ``None`` nowhere."""
        found: list[int | None] = []
        for name in hashes:
            if self.store.has(kind.key, name):
                found.append(0)
            else:
                at = None if self.chain is None else self.chain.where(kind, name)
                found.append(None if at is None else at + 1)
        return found

    def _count(self, found: Sequence[int | None], missed: Sequence[None]) -> None:
        """Note a Get: where its blocks came from; every faster tier missed them."""
        counters = self.counters
        names = ["memory", *(tier.name for tier in (self.chain.tiers if self.chain else []))]
        for at, name in enumerate(names):
            counters.hits[name] += sum(1 for place in found if place == at)
            counters.misses[name] += sum(1 for place in found if place is None or place > at) + len(missed)


def keep(store: BlockStore, fingerprint: Fingerprint, hashes: Sequence[BlockHash]) -> list[bool]:
    """Pin blocks until :func:`unkeep`, and return which of them are there and pinned.

    Raises:
        QueueFullError: As much is pinned as may be; those before stay pinned.
    """
    found = []
    for name in hashes:
        entries = store.pin(fingerprint.digest(), [name])
        found.append(bool(entries))
        for entry in entries:
            is_new = False
            try:
                is_new = store.holds.hold(entry)
            finally:
                if not is_new:
                    store.end_save(entries, saved=False)
    return found


def unkeep(store: BlockStore, fingerprint: Fingerprint, hashes: Sequence[BlockHash]) -> None:
    """Pin blocks no more."""
    entries = store.pin(fingerprint.digest(), hashes)
    for entry in entries:
        if entry.held:
            store.let_go(entry)
    store.end_save(entries, saved=False)


def forget_tenant(store: BlockStore, name: str) -> dict[KvFormat, set[BlockHash]]:
    """Forget everything of a tenant that is in memory, and return what that was."""
    share = store.quotas.find(name)
    if share is None:
        return {}
    blocks = share.blocks()
    store.forget([entry for entry in share.entries if not entry.doomed])
    return blocks
