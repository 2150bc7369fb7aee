"""Whose blocks the memory holds, how much each tenant may have, and which of its own go when that is too little.

A tenant above its quota loses its own coldest blocks, never another tenant's. Below its quota it competes with all
others for the memory as if there were no tenants; quotas that add up to no more than the memory keep tenants apart
entirely. The order here is recency alone, whatever policy evicts from the store as a whole.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from baton.errors import InternalError
from baton.types import BlockHash, Tenant
from baton_kvstore.memory.pool import Entry
from baton_kvstore.types import KvFormat, by_kind

NO_TENANT = ""
_LOOKED_AT = 64
"""Cold blocks among which one is looked for that a tier behind has already."""
_NEARLY = 0.75
"""Of a quota: above it, cold blocks are written to tiers behind ahead of time."""
_MAX_IDLE_SHARES = 1024
"""Tenants without blocks that are remembered."""


@dataclass(frozen=True, slots=True)
class ShareUse:
    """A moment's view of a :class:`Share`, which other threads may read."""

    name: str
    num_blocks: int
    used_bytes: int
    quota_bytes: int
    pinned_bytes: int
    evictions: int
    disk_quota_bytes: int
    disk_bytes: int
    disk_evictions: int


class Share:
    """One tenant's part of the memory.

    Attributes:
        name: The tenant's id; :data:`NO_TENANT` for blocks without one.
        quota: Bytes that it may have; 0: any number.
        used_bytes: Of its slots, those that are being filled included.
        held_bytes: Of blocks that are pinned for it.
        evictions: Blocks that it lost to its own quota.
        disk_quota: Bytes that it may have on disk; 0: any number.
        disk_bytes: That it is known to have there.
        disk_evictions: Blocks that it lost there to its own quota.
        entries: Everything it has.
    """

    def __init__(self, name: str, quota: int) -> None:
        self.name, self.quota = name, quota
        self.used_bytes = self.held_bytes = self.evictions = 0
        self.disk_quota = self.disk_bytes = self.disk_evictions = 0
        self.entries: dict[Entry, None] = {}
        self._uses = 0
        self._cold: OrderedDict[Entry, None] = OrderedDict()

    def unsaved(self) -> Iterator[Entry]:
        """Go through blocks that it will soon lose and no tier behind has, the coldest first."""
        if self.quota and self.used_bytes > _NEARLY * self.quota:
            yield from [entry for entry in itertools.islice(self._cold, _LOOKED_AT) if not entry.saved]

    def blocks(self) -> dict[KvFormat, set[BlockHash]]:
        """Return everything of it that is in memory."""
        return by_kind((entry.pool.kind, entry.block_hash) for entry in self.entries)

    def make_room(self, num_bytes: int, evict: Callable[[Entry], None]) -> bool:
        """Have its own coldest blocks evicted until it may have so much more; ``False``: it cannot be had."""
        while self.quota and self.used_bytes + num_bytes > self.quota:
            victim = self.coldest()
            if victim is None:
                return False
            evict(victim)
            self.evictions += 1
        return True

    def coldest(self) -> Entry | None:
        """Return the block that should go first, one that a tier behind has if there is one; ``None``: none may."""
        saved = (entry for entry in itertools.islice(self._cold, _LOOKED_AT) if entry.saved)
        return next(saved, None) or next(iter(self._cold), None)

    def take(self, entry: Entry) -> None:
        """Count a slot that was taken for it."""
        self.entries[entry] = None
        self.used_bytes += entry.pool.block_bytes

    def drop(self, entry: Entry) -> None:
        """Count a slot that is free again."""
        del self.entries[entry]
        self._cold.pop(entry, None)
        self.used_bytes -= entry.pool.block_bytes

    def pin(self, entry: Entry) -> None:
        """A block is needed."""
        self._cold.pop(entry, None)

    def unpin(self, entry: Entry, *, used: bool) -> None:
        """Take note that a block may be evicted; one that was not used is as old as before, roughly."""
        if used:
            self._uses += 1
            entry.used_at = self._uses
        first = next(iter(self._cold), None)
        self._cold[entry] = None
        if not used and first is not None and entry.used_at < first.used_at:
            self._cold.move_to_end(entry, last=False)

    def use(self) -> ShareUse:
        """Return a view."""
        memory = len(self.entries), self.used_bytes, self.quota, self.held_bytes, self.evictions
        return ShareUse(self.name, *memory, self.disk_quota, self.disk_bytes, self.disk_evictions)

    def check(self) -> None:
        """Raise ``InternalError`` unless it adds up."""
        if self.used_bytes != sum(entry.pool.block_bytes for entry in self.entries):
            raise InternalError("a tenant's bytes do not add up")
        if set(self._cold) != {entry for entry in self.entries if not entry.pins}:
            raise InternalError("a tenant's cold blocks are not its unpinned ones")
        if self.held_bytes != sum(entry.pool.block_bytes for entry in self.entries if entry.held):
            raise InternalError("a tenant's pinned bytes do not add up")


class Quotas:
    """The shares of all tenants.

    Args:
        default_bytes: Quota of tenants that come without one; 0: none.
        default_disk_bytes: The same on disk.
    """

    def __init__(self, default_bytes: int = 0, default_disk_bytes: int = 0) -> None:
        self._default, self._disk_default = default_bytes, default_disk_bytes
        self._shares: OrderedDict[str, Share] = OrderedDict()

    def __iter__(self) -> Iterator[Share]:
        return iter(self._shares.values())

    def of(self, tenant: Tenant | None) -> Share:
        """Return a tenant's share; its quota is what was said last. ``None``: that of blocks without a tenant."""
        name = NO_TENANT if tenant is None else tenant.id
        share = self._shares.get(name)
        if share is None:
            share = self._shares[name] = Share(name, 0)
            if len(self._shares) > _MAX_IDLE_SHARES:
                self._forget_idle()
        if tenant is not None:
            share.quota = tenant.kv_bytes or self._default
            share.disk_quota = tenant.kv_disk_bytes or self._disk_default
        return share

    def unsaved(self) -> Iterator[Entry]:
        """Go through blocks that tenants will soon lose to their quotas and no tier behind has."""
        for share in self:
            yield from share.unsaved()

    def find(self, name: str) -> Share | None:
        """Return the share of a tenant that has or had blocks."""
        return self._shares.get(name)

    def largest(self, count: int) -> list[ShareUse]:
        """Return views of those that have most, the largest first."""
        return [x.use() for x in heapq.nlargest(count, self, key=lambda share: share.used_bytes)]

    def check(self) -> None:
        """Raise ``InternalError`` unless every share adds up."""
        for share in self:
            share.check()

    def _forget_idle(self) -> None:
        """Forget the oldest tenants that have no blocks, so that names alone cannot fill the memory."""
        surplus = len(self._shares) - _MAX_IDLE_SHARES
        idle = [name for name, share in self._shares.items() if not (share.entries or share.disk_bytes)][:-1]
        for name in idle[:surplus]:
            del self._shares[name]
