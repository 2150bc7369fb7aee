"""Blocks in slots, the shares that tenants have of them, and the slots of each KV format.

Each format has an arena as large as the whole budget, of which only used slots take memory.
"""

from __future__ import annotations

import enum
import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from baton.errors import InternalError, InvalidRequestError, QueueFullError
from baton.kv_cache.arena import HostArena
from baton.kv_cache.fingerprint import Fingerprint
from baton.types import BlockHash, Tenant
from baton_kvstore.types import PAGE, KvFormat, by_kind, kv_format_of

MAX_SLOTS = 2**32 - 1
"""Block ids are uint32 on the wire."""
_LOOKED_AT = 64
"""Number of cold blocks that are searched for one that a lower tier already holds."""
_NEARLY = 0.75
"""Share of a quota above which cold blocks are written to lower tiers ahead of eviction."""
NO_TENANT = ""
_MAX_IDLE_SHARES = 1024
"""Number of tenants without blocks that are remembered."""


class State(enum.Enum):
    """Life of an entry: ``PENDING`` while its bytes are pulled, then ``READY``, in the end ``GONE``."""

    PENDING = enum.auto()
    READY = enum.auto()
    GONE = enum.auto()


@dataclass(eq=False, slots=True)
class Entry:
    """A block in a slot.

    Attributes:
        share: Tenant whose quota the block counts against.
        pins: Number of leases, running Puts and client pins; a pinned block is neither evicted nor overwritten.
        doomed: Deleted while pinned: it can no longer be found, and its slot is freed with the last pin.
        saved: A lower tier holds the block, or never will, so evicting it loses nothing.
        stamp: Used by the eviction policy: counter value of the last use or of the arrival.
        uses: Used by the eviction policy: number of recent uses.
        used_at: Used by the share: counter value of the last use.
        client_pinned: One of the pins was requested by a client (``Pin``).
        brief: The block has a time to live, so it is not written to lower tiers.
    """

    pool: Pool
    block_hash: BlockHash
    slot: int
    share: Share
    state: State = State.PENDING
    pins: int = 0
    doomed: bool = False
    saved: bool = False
    stamp: int = 0
    uses: int = 0
    used_at: int = 0
    client_pinned: bool = False
    brief: bool = False


class Share:
    """One tenant's part of the memory.

    Attributes:
        name: The tenant's id; empty for blocks without a tenant.
        quota_bytes: Maximum bytes in memory; 0: unlimited.
        used_bytes: Total size of the tenant's slots, including those being filled.
        pinned_bytes: Total size of the tenant's blocks that clients have pinned.
        evictions: Number of blocks evicted from memory because of the quota.
        disk_quota_bytes: Maximum bytes on disk; 0: unlimited.
        disk_bytes: Total size of the tenant's known blocks on disk.
        disk_evictions: Number of blocks deleted from disk because of the disk quota.
        entries: All of the tenant's blocks in memory (a dict used as an ordered set).
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.quota_bytes = self.used_bytes = self.pinned_bytes = self.evictions = 0
        self.disk_quota_bytes = self.disk_bytes = self.disk_evictions = 0
        self.entries: dict[Entry, None] = {}
        self._uses = 0
        self._cold: OrderedDict[Entry, None] = OrderedDict()

    @property
    def num_blocks(self) -> int:
        """Number of the tenant's blocks in memory."""
        return len(self.entries)

    def disk_excess(self, more_bytes: int = 0) -> int:
        """Return the bytes by which the tenant is above its disk quota with ``more_bytes`` more on disk."""
        return max(0, self.disk_bytes + more_bytes - self.disk_quota_bytes) if self.disk_quota_bytes else 0

    def unsaved(self) -> Iterator[Entry]:
        """Yield blocks that the quota will soon evict and no lower tier holds, the coldest first."""
        if self.quota_bytes and self.used_bytes > _NEARLY * self.quota_bytes:
            yield from [entry for entry in itertools.islice(self._cold, _LOOKED_AT) if not entry.saved]

    def blocks(self) -> dict[KvFormat, set[BlockHash]]:
        """Return the tenant's blocks in memory by KV format."""
        return by_kind((entry.pool.kind, entry.block_hash) for entry in self.entries)

    def make_room(self, num_bytes: int, evict: Callable[[Entry], None]) -> bool:
        """Evict the tenant's coldest blocks until ``num_bytes`` more fit its quota; ``False`` if they cannot."""
        while self.quota_bytes and self.used_bytes + num_bytes > self.quota_bytes:
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


class Quotas:
    """The shares of all tenants, by which each has a quota.

    A tenant above its quota loses its own coldest blocks, never another tenant's. Below its quota it competes with all
    other tenants for the memory; if all quotas together fit the memory, tenants never affect each other. Within a
    tenant the order is least recently used, whatever policy evicts from the store as a whole.

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
            share = self._shares[name] = Share(name)
            if len(self._shares) > _MAX_IDLE_SHARES:
                self._forget_idle()
        if tenant is not None:
            share.quota_bytes = tenant.kv_bytes or self._default
            share.disk_quota_bytes = tenant.kv_disk_bytes or self._disk_default
        return share

    def unsaved(self) -> Iterator[Entry]:
        """Yield blocks that quotas will soon evict and no lower tier holds."""
        for share in self:
            yield from share.unsaved()

    def find(self, name: str) -> Share | None:
        """Return the share of a known tenant, or ``None``."""
        return self._shares.get(name)

    def largest(self, count: int) -> list[Share]:
        """Return the tenants with the most bytes in memory, the largest first."""
        return heapq.nlargest(count, self, key=lambda share: share.used_bytes)

    def _forget_idle(self) -> None:
        """Forget the oldest tenants without blocks, so that tenant names cannot fill the memory."""
        surplus = len(self._shares) - _MAX_IDLE_SHARES
        idle = [name for name, share in self._shares.items() if not (share.entries or share.disk_bytes)][:-1]
        for name in idle[:surplus]:
            del self._shares[name]


@dataclass(eq=False)
class Pool:
    """Slots and index of one fingerprint. Slots are free and cold (no memory), free and warm (memory kept), or used."""

    fingerprint: Fingerprint
    arena: HostArena
    index: dict[BlockHash, Entry] = field(default_factory=dict)
    num_used: int = 0
    num_pinned: int = 0

    def __post_init__(self) -> None:
        self.kind = kv_format_of(self.fingerprint)
        self.key = self.kind.key
        self._warm: list[int] = []
        self._cold: list[int] = []
        self._next = 0
        self._backed = np.zeros(self.arena.num_blocks, dtype=np.bool_)
        self.num_backed = 0
        self._reach = -(-PAGE // self.arena.block_bytes)  # slots on each side that may share a page

    @property
    def block_bytes(self) -> int:
        """Size of one slot, in bytes."""
        return self.arena.block_bytes

    @property
    def backed_bytes(self) -> int:
        """Memory in use by this pool, including free warm slots."""
        return self.num_backed * self.block_bytes

    def ready(self, block_hash: BlockHash) -> Entry | None:
        """Return a block that is complete, or ``None``."""
        entry = self.index.get(block_hash)
        return entry if entry is not None and entry.state is State.READY else None

    def prefix(self, hashes: Sequence[BlockHash]) -> Iterator[Entry]:
        """Yield the leading blocks of a chain up to the first that is missing."""
        for block_hash in hashes:
            entry = self.ready(block_hash)
            if entry is None:
                return
            yield entry

    def allocate_warm(self) -> int | None:
        """Allocate a free slot that has memory, or return ``None``."""
        if not self._warm:
            return None
        self.num_used += 1
        return self._warm.pop()

    def allocate_cold(self) -> int:
        """Allocate a free slot that has no memory yet; the caller has checked the budget."""
        if self._cold:
            slot = self._cold.pop()
        elif self._next < self.arena.num_blocks:
            slot = self._next
            self._next += 1
        else:
            raise InternalError("a pool within its budget has no free slot")
        self._backed[slot] = True
        self.num_backed += 1
        self.num_used += 1
        return slot

    def free_slot(self, slot: int) -> None:
        """Free a slot and raise its generation, so that a concurrent reader detects that its read is stale."""
        self.arena.generations[slot] += np.uint64(1)
        self.num_used -= 1
        self._warm.append(slot)

    def release_memory(self) -> bool:
        """Return the memory of one free slot to the kernel; ``False`` if no free slot has memory."""
        if not self._warm:
            return False
        slot = self._warm.pop()
        self._backed[slot] = False
        self.num_backed -= 1
        self._cold.append(slot)
        # A page may be shared with neighbouring slots: it is released only if they have no memory either.
        first = slot
        stop = slot + 1
        while first > max(0, slot - self._reach) and not self._backed[first - 1]:
            first -= 1
        while stop < min(self.arena.num_blocks, slot + 1 + self._reach) and not self._backed[stop]:
            stop += 1
        self.arena.discard(first, stop)
        return True


RETRY_AFTER_S = 1.0


class PoolSet:
    """Pools by fingerprint digest, least recently used first.

    Args:
        capacity_bytes: Memory budget of all pools together, in bytes.
        max_pools: Maximum number of pools.
        drop: Removes a pool to make room for another one; must call :meth:`remove`.
    """

    def __init__(self, capacity_bytes: int, max_pools: int, drop: Callable[[Pool], None]) -> None:
        self._capacity = capacity_bytes
        self._max_pools = max_pools
        self._drop = drop
        self._pools: OrderedDict[bytes, Pool] = OrderedDict()

    def __iter__(self) -> Iterator[Pool]:
        return iter(self._pools.values())

    def __len__(self) -> int:
        return len(self._pools)

    @property
    def backed_bytes(self) -> int:
        """Memory in use, including free slots whose memory was not released; never above the capacity."""
        return sum(pool.backed_bytes for pool in self)

    def get(self, key: bytes) -> Pool | None:
        return self._pools.get(key)

    def touch(self, pool: Pool) -> None:
        """Mark a pool as the most recently used."""
        self._pools.move_to_end(pool.key)

    def open(self, fingerprint: Fingerprint) -> Pool:
        """Return the pool of a KV format, creating it if necessary.

        Raises:
            InvalidRequestError: A block is larger than the store.
            QueueFullError: ``max_pools`` other pools are in use.
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
        del self._pools[pool.key]

    def allocate_slot(self, pool: Pool) -> int | None:
        """Allocate a slot without evicting a block, or return ``None``."""
        while True:
            slot = pool.allocate_warm()
            if slot is not None:
                return slot
            if self.backed_bytes + pool.block_bytes <= self._capacity:
                return pool.allocate_cold()
            if not any(other.release_memory() for other in self if other is not pool):
                return None

    def _drop_oldest(self) -> None:
        pool = next((pool for pool in self if not pool.num_pinned), None)
        if pool is None:
            message = f"{len(self)} kinds of KV are in use, which is as many as this store takes"
            raise QueueFullError(message, retry_after_s=RETRY_AFTER_S)
        self._drop(pool)
