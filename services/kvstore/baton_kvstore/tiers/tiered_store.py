"""Memory first, a chain of tiers behind it: what is evicted from memory was written there before, and comes back.

The coldest part of a full memory is always behind already. A Put waits until there is room; a Get of blocks in memory
never waits.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from baton.errors import DeadlineError, QueueFullError
from baton.kv_cache.fingerprint import Fingerprint
from baton.types import BlockHash, Tenant
from baton_kvstore.memory.leases import Lease
from baton_kvstore.memory.pool import Owner
from baton_kvstore.memory.quotas import NO_TENANT
from baton_kvstore.memory.store import BlockStore
from baton_kvstore.tiers.chain import Chain
from baton_kvstore.tiers.promotion import Ask, Promoter
from baton_kvstore.tiers.saver import Saver, Watermarks
from baton_kvstore.types import KvFormat, TierCounters, TierListener, by_kind, kv_format_of

_ROUNDS = 8
_FLUSH_S = 30.0
"""Longest time that a clean end waits for blocks that are to be written."""


DISK = "disk"
_MAX_BLOCKS = 1_000_000
"""That are known at once; the oldest are forgotten first."""
_MAX_LEAVING = 16384
"""That just left their last tier, perhaps for the next one."""
_BATCH = 256
"""Blocks that a tenant above its quota loses on disk at a time."""


@dataclass(slots=True)
class _Place:
    share: Owner
    tiers: set[str] = field(default_factory=set)


class BlockOwners:
    """Keeps the books of one store's tiers behind memory. Everything but :meth:`__call__` runs in the event loop.

    Args:
        store: In memory.
        chain: The tiers.
    """

    def __init__(self, store: BlockStore, chain: Chain) -> None:
        self._store, self._chain = store, chain
        self._places: OrderedDict[tuple[KvFormat, BlockHash], _Place] = OrderedDict()
        self._on_disk: dict[Owner, dict[tuple[KvFormat, BlockHash], None]] = {}
        self._left: OrderedDict[tuple[KvFormat, BlockHash], Owner] = OrderedDict()
        self._disk = next((tier for tier in chain.tiers if tier.name == DISK), None)
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Begin to listen, in the running loop."""
        self._loop = asyncio.get_running_loop()
        self._chain.listen(self)

    def __call__(self, kind: KvFormat, hashes: Sequence[BlockHash], tier: str, present: bool) -> None:
        """Hear of a change, in any thread; see :class:`~baton_kvstore.types.TierListener`."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._hear, kind, tuple(hashes), tier, present)

    def learn(self, kind: KvFormat, hashes: Iterable[BlockHash]) -> None:
        """Take note of whose blocks these are that were brought to memory."""
        for name in hashes:
            if (kind, name) not in self._places:
                for tier in self._chain.tiers:
                    if tier.holds(kind, name):
                        self._come(kind, name, tier.name)

    def blocks(self, tenant: str) -> dict[KvFormat, set[BlockHash]]:
        """Return what a tenant is known to have."""
        return by_kind(key for key, place in self._places.items() if place.share.name == tenant)

    def leaving(self, tenant: str) -> dict[KvFormat, set[BlockHash]]:
        """Return what of a tenant's may be on its way from one tier to the next; most of it is in none any more."""
        return by_kind(key for key, share in self._left.items() if share.name == tenant)

    def _trim(self) -> None:
        """Have tenants above their quota lose what they have had on disk for longest."""
        over = {share for share in self._store.quotas if share.disk_quota and share.disk_bytes > share.disk_quota}
        if not over or self._disk is None:
            return
        surplus: list[tuple[KvFormat, BlockHash]] = []
        for share in over:
            left = share.disk_bytes - share.disk_quota
            for kind, name in self._on_disk.get(share, ()):
                if left <= 0 or len(surplus) == _BATCH:
                    break
                left -= kind.block_bytes
                surplus.append((kind, name))
        for kind, name in surplus:
            self._places[kind, name].share.disk_evictions += 1
            self._go(kind, name, DISK)  # before the disk says so: nothing is counted, or deleted, twice
        for kind, names in by_kind(surplus).items():
            self._disk.delete(kind, list(names), lambda right: None)

    def _hear(self, kind: KvFormat, hashes: tuple[BlockHash, ...], tier: str, present: bool) -> None:
        for name in hashes:
            if present:
                self._come(kind, name, tier)
            else:
                self._go(kind, name, tier)
        if present:
            self._trim()

    def _come(self, kind: KvFormat, name: BlockHash, tier: str) -> None:
        key = kind, name
        place = self._places.get(key)
        if place is None:
            entry, left = self._store.find(kind.key, name), self._left.pop(key, None)
            share = left if entry is None else entry.share
            if share is None or share.name == NO_TENANT:
                return
            place = self._places[key] = _Place(share)
            if len(self._places) > _MAX_BLOCKS:
                oldest, old = self._places.popitem(last=False)
                if DISK in old.tiers:
                    self._count(oldest, old.share, present=False)
        if tier not in place.tiers:
            place.tiers.add(tier)
            if tier == DISK:
                self._count(key, place.share, present=True)

    def _go(self, kind: KvFormat, name: BlockHash, tier: str) -> None:
        key = kind, name
        place = self._places.get(key)
        if place is None or tier not in place.tiers:
            return
        place.tiers.discard(tier)
        if tier == DISK:
            self._count(key, place.share, present=False)
        if not place.tiers:
            del self._places[key]
            if len(self._chain.tiers) > 1:
                self._left[key] = place.share
                if len(self._left) > _MAX_LEAVING:
                    self._left.popitem(last=False)

    def _count(self, key: tuple[KvFormat, BlockHash], share: Owner, *, present: bool) -> None:
        """A block came to the disk, or left it."""
        blocks = self._on_disk.setdefault(share, {})
        if present:
            blocks[key] = None
            share.disk_bytes += key[0].block_bytes
            return
        del blocks[key]
        share.disk_bytes -= key[0].block_bytes
        if not blocks:
            del self._on_disk[share]


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
