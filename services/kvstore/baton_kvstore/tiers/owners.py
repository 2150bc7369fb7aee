"""What tenants have in the tiers behind memory, as far as this process knows: for quotas on disk, and to forget it.

The tiers tell of their blocks without saying whose they are; a block's entry in memory does, while it is written or
after it was brought back. So a block that lies on disk from an earlier process is known by tenant once its tenant has
asked for it; until then only that tenant could, and it counts for none. What one tier hands to the next leaves
the one before it comes to the other: its owner is remembered for a while.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from baton.types import BlockHash
from baton_kvstore.memory.pool import Owner
from baton_kvstore.memory.quotas import NO_TENANT
from baton_kvstore.memory.store import BlockStore
from baton_kvstore.tiers.chain import Chain
from baton_kvstore.types import KvFormat, by_kind

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
