"""The slots of one kind of KV: an arena that could hold the whole budget, of which only used slots take memory."""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from baton.errors import InternalError, InvalidRequestError, QueueFullError
from baton.kv_cache.arena import HostArena
from baton.kv_cache.fingerprint import Fingerprint
from baton.types import BlockHash
from baton_kvstore.types import PAGE, kv_format_of

MAX_SLOTS = 2**32 - 1
"""Block ids are uint32 on the wire."""


class State(enum.Enum):
    """Life of an entry: ``PENDING`` while its bytes are pulled, then ``READY``, in the end ``GONE``."""

    PENDING = enum.auto()
    READY = enum.auto()
    GONE = enum.auto()


class Owner(Protocol):
    """Whose quota a block counts against; :class:`baton_kvstore.memory.quotas.Share` is one."""

    name: str
    quota: int
    held_bytes: int
    disk_quota: int
    disk_bytes: int
    disk_evictions: int

    def drop(self, entry: Entry) -> None:
        """Count a slot that is free again."""

    def pin(self, entry: Entry) -> None:
        """Take note that a block must stay."""

    def unpin(self, entry: Entry, *, used: bool) -> None:
        """Take note that a block may be evicted again."""


@dataclass(eq=False, slots=True)
class Entry:
    """A block in a slot.

    Attributes:
        pins: Leases and running Puts that need the block to stay; a pinned block is neither evicted nor reused.
        doomed: Deleted while it was pinned: no longer found, and its slot is given back with the last pin.
        saved: The tier behind has it, or will never have it: nothing is lost if it is evicted.
        stamp: Of the eviction policy: when it was used last, or when it came; rises over all entries.
        uses: Of the eviction policy: how often it was used lately.
        share: Of the memory: whose it is.
        used_at: Of the share: when it was used last; rises over all entries of a share.
        held: One of its pins was asked for by a client (``Pin``).
        brief: It has a time to live, so no tier behind gets it.
    """

    pool: Pool
    block_hash: BlockHash
    slot: int
    state: State = State.PENDING
    pins: int = 0
    doomed: bool = False
    saved: bool = False
    stamp: int = 0
    uses: int = 0
    share: Owner | None = None
    used_at: int = 0
    held: bool = False
    brief: bool = False


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
        """Bytes of a slot."""
        return self.arena.block_bytes

    @property
    def backed_bytes(self) -> int:
        """Memory that this pool takes, free warm slots included."""
        return self.num_backed * self.block_bytes

    def ready(self, block_hash: BlockHash) -> Entry | None:
        """Return a block that can be found and is whole."""
        entry = self.index.get(block_hash)
        return entry if entry is not None and entry.state is State.READY else None

    def prefix(self, hashes: Sequence[BlockHash]) -> Iterator[Entry]:
        """Go through the leading blocks of a chain that can be found."""
        for block_hash in hashes:
            entry = self.ready(block_hash)
            if entry is None:
                return
            yield entry

    def take_warm(self) -> int | None:
        """Take a free slot that has memory already."""
        if not self._warm:
            return None
        self.num_used += 1
        return self._warm.pop()

    def take_cold(self) -> int:
        """Take a free slot that has no memory yet; the caller has made room in the budget."""
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

    def put_back(self, slot: int) -> None:
        """Free a slot and raise its generation, so that a reader still at it learns that it read too late."""
        self.arena.generations[slot] += np.uint64(1)
        self.num_used -= 1
        self._warm.append(slot)

    def cool(self) -> bool:
        """Give the memory of one free slot back to the kernel; ``False`` if no free slot has any."""
        if not self._warm:
            return False
        slot = self._warm.pop()
        self._backed[slot] = False
        self.num_backed -= 1
        self._cold.append(slot)
        # A page may be shared with neighbours: it can go only if they have no memory to keep either.
        first, stop = slot, slot + 1
        while first > max(0, slot - self._reach) and not self._backed[first - 1]:
            first -= 1
        while stop < min(self.arena.num_blocks, slot + 1 + self._reach) and not self._backed[stop]:
            stop += 1
        self.arena.discard(first, stop)
        return True

    def check(self, entries: Iterator[Entry]) -> None:
        """Raise ``InternalError`` unless used, warm and cold slots add up.

        Args:
            entries: Every entry of this pool that holds a slot, doomed ones included.
        """
        used = [entry.slot for entry in entries]
        slots = used + self._warm + self._cold
        if len(slots) != self._next or len(set(slots)) != len(slots):
            raise InternalError("slots of a pool do not add up")
        if len(used) != self.num_used or self.num_backed != len(used) + len(self._warm):
            raise InternalError("counters of a pool do not add up")
        if int(self._backed.sum()) != self.num_backed:
            raise InternalError("backed slots of a pool do not add up")


RETRY_AFTER_S = 1.0


class PoolSet:
    """Pools by the digest of their fingerprint, the one unused for longest first.

    Args:
        capacity_bytes: Memory for all.
        max_pools: PoolSet at once.
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
        """Take a slot without evicting a block; ``None``: there is none."""
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
