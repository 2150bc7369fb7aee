"""Per-tenant quotas: which tenant owns each block in memory, and which blocks a tenant above its quota loses.

A tenant above its quota loses its own coldest blocks, never another tenant's. Below its quota it competes with all
other tenants for the memory; if all quotas together fit the memory, tenants never affect each other. Within a tenant
the order is least recently used, whatever policy evicts from the store as a whole.
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
"""Number of cold blocks that are searched for one that a lower tier already holds."""
_NEARLY = 0.75
"""Share of a quota above which cold blocks are written to lower tiers ahead of eviction."""
_MAX_IDLE_SHARES = 1024
"""Number of tenants without blocks that are remembered."""


@dataclass(frozen=True, slots=True)
class ShareUse:
    """Immutable snapshot of a :class:`Share`, safe to read from other threads."""

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
        name: The tenant's id; :data:`NO_TENANT` for blocks without a tenant.
        quota: Maximum bytes in memory; 0: unlimited.
        used_bytes: Total size of the tenant's slots, including those being filled.
        pinned_bytes: Total size of the tenant's blocks that clients have pinned.
        evictions: Number of blocks evicted from memory because of the quota.
        disk_quota: Maximum bytes on disk; 0: unlimited.
        disk_bytes: Total size of the tenant's known blocks on disk.
        disk_evictions: Number of blocks deleted from disk because of the disk quota.
        entries: All of the tenant's blocks in memory (a dict used as an ordered set).
    """

    def __init__(self, name: str, quota: int) -> None:
        self.name = name
        self.quota = quota
        self.used_bytes = self.pinned_bytes = self.evictions = 0
        self.disk_quota = self.disk_bytes = self.disk_evictions = 0
        self.entries: dict[Entry, None] = {}
        self._uses = 0
        self._cold: OrderedDict[Entry, None] = OrderedDict()

    def unsaved(self) -> Iterator[Entry]:
        """Yield blocks that the quota will soon evict and no lower tier holds, the coldest first."""
        if self.quota and self.used_bytes > _NEARLY * self.quota:
            yield from [entry for entry in itertools.islice(self._cold, _LOOKED_AT) if not entry.saved]

    def blocks(self) -> dict[KvFormat, set[BlockHash]]:
        """Return the tenant's blocks in memory by KV format."""
        return by_kind((entry.pool.kind, entry.block_hash) for entry in self.entries)

    def make_room(self, num_bytes: int, evict: Callable[[Entry], None]) -> bool:
        """Evict the tenant's coldest blocks until ``num_bytes`` more fit its quota; ``False`` if they cannot."""
        while self.quota and self.used_bytes + num_bytes > self.quota:
            victim = self.coldest()
            if victim is None:
                return False
            evict(victim)
            self.evictions += 1
        return True

    def coldest(self) -> Entry | None:
        """Return the next victim, preferably one that a lower tier holds, or ``None`` if all blocks are pinned."""
        saved = (entry for entry in itertools.islice(self._cold, _LOOKED_AT) if entry.saved)
        return next(saved, None) or next(iter(self._cold), None)

    def add_entry(self, entry: Entry) -> None:
        """Count a slot that was allocated for the tenant."""
        self.entries[entry] = None
        self.used_bytes += entry.pool.block_bytes

    def remove_entry(self, entry: Entry) -> None:
        """Count a slot that was freed."""
        del self.entries[entry]
        self._cold.pop(entry, None)
        self.used_bytes -= entry.pool.block_bytes

    def pin(self, entry: Entry) -> None:
        self._cold.pop(entry, None)

    def unpin(self, entry: Entry, *, used: bool) -> None:
        """Make a block evictable; one that was not used roughly keeps its age."""
        if used:
            self._uses += 1
            entry.used_at = self._uses
        first = next(iter(self._cold), None)
        self._cold[entry] = None
        if not used and first is not None and entry.used_at < first.used_at:
            self._cold.move_to_end(entry, last=False)

    def usage(self) -> ShareUse:
        """Return a snapshot."""
        return ShareUse(
            name=self.name,
            num_blocks=len(self.entries),
            used_bytes=self.used_bytes,
            quota_bytes=self.quota,
            pinned_bytes=self.pinned_bytes,
            evictions=self.evictions,
            disk_quota_bytes=self.disk_quota,
            disk_bytes=self.disk_bytes,
            disk_evictions=self.disk_evictions,
        )

    def check(self) -> None:
        """Raise ``InternalError`` unless the counters match the entries."""
        if self.used_bytes != sum(entry.pool.block_bytes for entry in self.entries):
            raise InternalError("a tenant's bytes do not add up")
        if set(self._cold) != {entry for entry in self.entries if not entry.pins}:
            raise InternalError("a tenant's cold blocks are not its unpinned ones")
        if self.pinned_bytes != sum(entry.pool.block_bytes for entry in self.entries if entry.client_pinned):
            raise InternalError("a tenant's pinned bytes do not add up")


class Quotas:
    """The shares of all tenants.

    Args:
        default_bytes: Memory quota of tenants whose requests set none; 0: unlimited.
        default_disk_bytes: Disk quota of tenants whose requests set none; 0: unlimited.
    """

    def __init__(self, default_bytes: int = 0, default_disk_bytes: int = 0) -> None:
        self._default = default_bytes
        self._disk_default = default_disk_bytes
        self._shares: OrderedDict[str, Share] = OrderedDict()

    def __iter__(self) -> Iterator[Share]:
        return iter(self._shares.values())

    def share_of(self, tenant: Tenant | None) -> Share:
        """Return a tenant's share and update its quotas; ``None``: the share of blocks without a tenant."""
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
        """Yield blocks that quotas will soon evict and no lower tier holds."""
        for share in self:
            yield from share.unsaved()

    def find(self, name: str) -> Share | None:
        """Return the share of a known tenant, or ``None``."""
        return self._shares.get(name)

    def largest(self, count: int) -> list[ShareUse]:
        """Return snapshots of the tenants with the most bytes in memory, the largest first."""
        return [share.usage() for share in heapq.nlargest(count, self, key=lambda each: each.used_bytes)]

    def check(self) -> None:
        for share in self:
            share.check()

    def _forget_idle(self) -> None:
        """Forget the oldest tenants without blocks, so that tenant names cannot fill the memory."""
        surplus = len(self._shares) - _MAX_IDLE_SHARES
        idle = [name for name, share in self._shares.items() if not (share.entries or share.disk_bytes)][:-1]
        for name in idle[:surplus]:
            del self._shares[name]
