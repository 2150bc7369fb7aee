"""The store in memory with a chain of lower tiers: blocks are written to a lower tier before memory evicts them.

The coldest part of a full memory is always saved already. A Put waits until there is room; a Get of blocks in memory
never waits.

:class:`BlockOwners` knows which tenant owns the blocks in lower tiers, for disk quotas and for deleting a tenant. Tiers
report blocks without their tenant; the block's entry in memory has it, while the block is written or after it was
promoted. So a block left on disk by an earlier process is counted for its tenant once that tenant has requested it, and
for no tenant before. A block that one tier hands to the next leaves the first before it enters the second, so its owner
is remembered for a while.
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
from baton_kvstore.memory.pool import NO_TENANT, Share
from baton_kvstore.memory.store import BlockStore
from baton_kvstore.tiers.chain import Chain
from baton_kvstore.tiers.promotion import LeaseRequest, Promoter
from baton_kvstore.tiers.saver import Saver, Watermarks
from baton_kvstore.types import KvFormat, TierCounters, TierListener, by_kind, kv_format_of

_ROUNDS = 8
_FLUSH_S = 30.0
"""Longest time that a clean shutdown waits for blocks to be written, in seconds."""


_DISK = "disk"
_MAX_OWNED_BLOCKS = 1_000_000
"""Maximum number of blocks whose owner is known; the oldest are forgotten first."""
_MAX_MOVING_BLOCKS = 16384
"""Maximum number of remembered blocks that just left their only tier, perhaps for the next one."""
_TRIM_BATCH = 256
"""Maximum number of blocks deleted from disk at a time for tenants above their disk quota."""


@dataclass(slots=True)
class _Ownership:
    share: Share
    tiers: set[str] = field(default_factory=set)


class BlockOwners:
    """Tracks which tenant owns the blocks in the lower tiers. Everything but :meth:`__call__` runs in the event loop.

    Args:
        store: The store in memory.
        chain: The lower tiers.
    """

    def __init__(self, store: BlockStore, chain: Chain) -> None:
        self._store = store
        self._chain = chain
        self._owned: OrderedDict[tuple[KvFormat, BlockHash], _Ownership] = OrderedDict()
        self._on_disk: dict[Share, dict[tuple[KvFormat, BlockHash], None]] = {}
        self._moving: OrderedDict[tuple[KvFormat, BlockHash], Share] = OrderedDict()
        self._disk = next((tier for tier in chain.tiers if tier.name == _DISK), None)
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Start to listen, in the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._chain.listen(self)

    def __call__(self, kind: KvFormat, hashes: Sequence[BlockHash], tier: str, present: bool) -> None:
        """Handle a change, in any thread; see :class:`~baton_kvstore.types.TierListener`."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._apply_change, kind, tuple(hashes), tier, present)

    def record_owners(self, kind: KvFormat, hashes: Iterable[BlockHash]) -> None:
        """Record the owners of blocks that are in memory, for the lower tiers that hold them."""
        for name in hashes:
            if (kind, name) not in self._owned:
                for tier in self._chain.tiers:
                    if tier.holds(kind, name):
                        self._add_location(kind, name, tier.name)

    def blocks(self, tenant: str) -> dict[KvFormat, set[BlockHash]]:
        """Return a tenant's known blocks in lower tiers."""
        return by_kind(key for key, owned in self._owned.items() if owned.share.name == tenant)

    def moving_blocks(self, tenant: str) -> dict[KvFormat, set[BlockHash]]:
        """Return a tenant's blocks that may be moving from one tier to the next; most are in no tier any more."""
        return by_kind(key for key, share in self._moving.items() if share.name == tenant)

    def _trim(self) -> None:
        """Delete the oldest blocks on disk of tenants above their disk quota."""
        over = {share: excess for share in self._store.quotas if (excess := share.disk_excess())}
        if not over or self._disk is None:
            return
        surplus: list[tuple[KvFormat, BlockHash]] = []
        for share, excess in over.items():
            for kind, name in self._on_disk.get(share, ()):
                if excess <= 0 or len(surplus) == _TRIM_BATCH:
                    break
                excess -= kind.block_bytes
                surplus.append((kind, name))
        for kind, name in surplus:
            self._owned[kind, name].share.disk_evictions += 1
            # Before the disk reports it, so that no block is counted or deleted twice.
            self._remove_location(kind, name, _DISK)
        for kind, names in by_kind(surplus).items():
            self._disk.delete(kind, list(names), lambda right: None)

    def _apply_change(self, kind: KvFormat, hashes: tuple[BlockHash, ...], tier: str, present: bool) -> None:
        for name in hashes:
            if present:
                self._add_location(kind, name, tier)
            else:
                self._remove_location(kind, name, tier)
        if present:
            self._trim()

    def _add_location(self, kind: KvFormat, name: BlockHash, tier: str) -> None:
        key = kind, name
        owned = self._owned.get(key)
        if owned is None:
            entry = self._store.find(kind.key, name)
            mover = self._moving.pop(key, None)
            share = mover if entry is None else entry.share
            if share is None or share.name == NO_TENANT:
                return
            owned = self._owned[key] = _Ownership(share)
            if len(self._owned) > _MAX_OWNED_BLOCKS:
                oldest, old = self._owned.popitem(last=False)
                if _DISK in old.tiers:
                    self._count_on_disk(oldest, old.share, present=False)
        if tier not in owned.tiers:
            owned.tiers.add(tier)
            if tier == _DISK:
                self._count_on_disk(key, owned.share, present=True)

    def _remove_location(self, kind: KvFormat, name: BlockHash, tier: str) -> None:
        key = kind, name
        owned = self._owned.get(key)
        if owned is None or tier not in owned.tiers:
            return
        owned.tiers.discard(tier)
        if tier == _DISK:
            self._count_on_disk(key, owned.share, present=False)
        if not owned.tiers:
            del self._owned[key]
            if len(self._chain.tiers) > 1:
                self._moving[key] = owned.share
                if len(self._moving) > _MAX_MOVING_BLOCKS:
                    self._moving.popitem(last=False)

    def _count_on_disk(self, key: tuple[KvFormat, BlockHash], share: Share, *, present: bool) -> None:
        """Count a block that entered or left the disk."""
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
    """The store in memory and a chain of lower tiers, which may be empty. Used in one event loop.

    Args:
        store: The store in memory, created with ``behind=True`` if the chain has tiers.
        chain: The lower tiers; closed with this.
        marks: When to write blocks ahead of eviction.

    Attributes:
        counters: Hits and misses by tier, and blocks moved between memory and lower tiers.
        saver: Writes blocks from memory to the chain; call ``kick`` whenever blocks may have become evictable.
    """

    def __init__(self, store: BlockStore, chain: Chain, marks: Watermarks) -> None:
        self.store = store
        self.chain = chain
        self.counters = TierCounters()
        self.saver = Saver(store, chain, self.counters, marks)
        self._promoter = Promoter(store, chain, self.saver, self.counters)
        self._owners = BlockOwners(store, chain)

    def start(self) -> None:
        """Start to track the owners of blocks, in the running event loop."""
        self._owners.start()

    def listen(self, listener: TierListener) -> None:
        """Report the blocks of each tier to a listener, and then every change; call in the event loop."""
        self.store.listen(listener)
        self.chain.listen(listener)

    # Put

    def piece_size(self, fingerprint: Fingerprint, count: int) -> int:
        """Return how many of a Put's ``count`` blocks to store at once, so that room can be made for them."""
        if not self.chain.tiers:
            return count
        return max(1, min(count, self.store.capacity_bytes // 4 // max(1, fingerprint.block_bytes)))

    async def stored_below(
        self, fingerprint: Fingerprint, hashes: Sequence[BlockHash], deadline: float, *, durable: bool = False
    ) -> list[bool]:
        """Return for each block whether it need not be stored: it is not in memory, but surely in a lower tier.

        Args:
            fingerprint: KV format of the blocks.
            hashes: Hashes of the blocks.
            deadline: ``time.monotonic()`` seconds.
            durable: Whether only the durable tier counts.
        """
        chain = self.chain
        kind = kv_format_of(fingerprint)
        if not chain.tiers:
            return [False] * len(hashes)
        holds = chain.is_durable if durable else chain.surely_holds
        absent = [name for name in hashes if not self.store.has(kind.key, name)]
        sure = {name for name in absent if holds(kind, name)}
        known = [name for name in absent if name not in sure and chain.holds(kind, name)]
        if known and not durable:
            # Other nodes may have deleted blocks from a shared tier, so ask it.
            sure |= await chain.find(kind, known, deadline, again=True)
        return [name in sure and not self.store.has(kind.key, name) for name in hashes]

    # Get

    async def get(self, hashes: Sequence[BlockHash], wanted: LeaseRequest) -> tuple[Lease | None, bool]:
        """Lease the longest prefix of a chain that is in memory or can be promoted to it.

        Args:
            hashes: Hashes of the chain's blocks, in order.
            wanted: The lease.

        Returns:
            The lease, if any, and whether more of the chain is stored, which can be leased after this part's release.

        Raises:
            QueueFullError: ``max_leases`` leases are alive.
        """
        kind = wanted.kind
        await self._find_shared(kind, hashes, wanted.deadline)
        levels = [0 if self.store.has(kind.key, name) else 1 + self.chain.fastest_tier(kind, name) for name in hashes]
        lease = await self._promote_prefix(hashes, wanted)
        if lease is None:
            lease = self.store.lease(wanted.fingerprint, hashes, wanted.ttl_s or 0.0)
        num_leased = 0 if lease is None else len(lease.entries)
        if lease is not None and wanted.tenant is not None:
            self._owners.record_owners(kind, [entry.block_hash for entry in lease.entries if entry.saved])
        names = ["memory", *(tier.name for tier in self.chain.tiers)]
        missed = levels[num_leased:].count(len(names))
        for at, name in enumerate(names):  # a hit in one tier is a miss in every faster one
            self.counters.hits[name] += levels[:num_leased].count(at)
            self.counters.misses[name] += missed + sum(level > at for level in levels[:num_leased])
        return lease, 0 < num_leased < len(hashes) and self._holds(kind, hashes[num_leased])

    async def contains(
        self, fingerprint: Fingerprint, hashes: Sequence[BlockHash], tenant: Tenant | None = None
    ) -> int:
        """Return the number of leading blocks that are in any tier, and start to promote them to memory."""
        kind = kv_format_of(fingerprint)
        await self._find_shared(kind, hashes, math.inf)
        count = 0
        while count < len(hashes) and self._holds(kind, hashes[count]):
            count += 1
        if self.chain.tiers:
            self._promoter.prefetch(fingerprint, hashes[:count], tenant)
        return count

    async def delete(self, fingerprint: Fingerprint, hashes: Sequence[BlockHash] | None) -> int:
        """Delete blocks (``None``: all of the fingerprint) from every tier, and return how many were known.

        Raises:
            InternalError: The deletion did not reach every tier; some blocks may be found again.
        """
        kind = kv_format_of(fingerprint)
        hashes = None if hashes is None else list(dict.fromkeys(hashes))
        in_memory = self.store.hashes(kind.key)
        deleted = in_memory if hashes is None else in_memory & set(hashes)
        self.store.delete(fingerprint, hashes)
        return len(deleted | await self.chain.delete(kind, hashes))

    async def delete_tenant(self, name: str) -> int:
        """Delete a tenant's blocks from memory, and its known blocks from lower tiers; return their number.

        Raises:
            InternalError: The deletion did not reach every tier; some blocks may be found again.
        """
        blocks = self.store.forget_tenant(name)
        moving = self._owners.moving_blocks(name)
        for kind, hashes in self._owners.blocks(name).items():
            blocks.setdefault(kind, set()).update(hashes)
        for kind in blocks.keys() | moving.keys():
            await self.chain.delete(kind, list(blocks.get(kind, set()) | moving.get(kind, set())))
        return sum(map(len, blocks.values()))

    async def close(self) -> None:
        """Finish running work and close the lower tiers; close the store in memory after this."""
        await self.saver.close(time.monotonic() + _FLUSH_S, flush=self.chain.write_all)
        await self._promoter.close()
        await self.chain.close()

    # Inside

    async def _find_shared(self, kind: KvFormat, hashes: Sequence[BlockHash], deadline: float) -> None:
        """Look up the blocks that this node does not know in the shared tiers."""
        if self.chain.shared:
            unknown = [name for name in hashes if not self._holds(kind, name)]
            if unknown:
                await self.chain.find(kind, unknown, deadline)

    async def _promote_prefix(self, hashes: Sequence[BlockHash], wanted: LeaseRequest) -> Lease | None:
        """Promote the missing blocks of the prefix and lease it; ``None``: nothing to promote, or it failed."""
        kind = wanted.kind
        promoter = self._promoter
        for _ in range(_ROUNDS if self.chain.tiers else 0):
            prefix, missing = promoter.plan(kind, hashes)
            if not missing or time.monotonic() >= wanted.deadline:
                break
            if prefix[0] != missing[0] and (
                promoter.is_queue_busy(wanted.tenant) or promoter.is_promoting(kind, missing[0])
            ):
                break  # the blocks in memory can be read meanwhile
            if promoter.is_promoting(kind, missing[0]):
                await promoter.wait_for(kind, missing[0], wanted.deadline)
                continue
            try:
                lease = await promoter.promote(prefix, wanted)
            except (DeadlineError, QueueFullError):
                break
            if lease is not None:
                return lease
        return None

    def _holds(self, kind: KvFormat, block_hash: BlockHash) -> bool:
        """Whether a block is in any tier, as far as this node knows."""
        return self.store.has(kind.key, block_hash) or self.chain.holds(kind, block_hash)
