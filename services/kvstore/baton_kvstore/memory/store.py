"""The store in memory, without any I/O: which block is in which slot, which leases pin it, which is evicted next.

One byte budget is shared by all KV formats (fingerprints). Each format has an arena of its own, mapped large enough for
the whole budget but backed by memory slot by slot; the eviction policy orders the blocks of all formats. So a format
that is used more displaces the others, and the budget need not be divided beforehand. A slot is searched in this order:
a free slot of the same format that has memory, unused budget, free slots of other formats (their pages return to the
kernel), and last the unpinned block of any format that the eviction policy chooses.

Blocks are stored in two phases: ``reserve`` allocates slots, the caller fills them, and ``commit`` publishes the blocks
that arrived whole and frees the other slots. A partial block is never visible, and a slot's generation rises whenever
it is freed.

Methods are called from one thread (the service's event loop).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.errors import InternalError, InvalidRequestError, QueueFullError
from baton.kv_cache.fingerprint import Fingerprint
from baton.types import BlockHash, Tenant
from baton_kvstore.memory.eviction import make_policy
from baton_kvstore.memory.leases import ClientPins, Lease, LeaseTable
from baton_kvstore.memory.pool import RETRY_AFTER_S, Entry, Pool, PoolSet, Quotas, State
from baton_kvstore.types import Counters, KvFormat, Listeners, StoreStats, TierListener, by_kind


@dataclass(eq=False)
class Reservation:
    """Slots allocated for a Put that has not been committed yet.

    Attributes:
        pool: Pool of the blocks' KV format.
        entries: One per hash: the existing or reserved entry; ``None``: no room, or another Put is storing the block.
        missing: Indices into ``entries`` of the blocks to fill.
        published: Whether :meth:`BlockStore.publish` was called.
        done: Whether :meth:`BlockStore.commit` was called.
    """

    pool: Pool
    entries: list[Entry | None]
    missing: list[int]
    published: bool = False
    done: bool = False

    @property
    def slots(self) -> list[int]:
        """Slots to fill, parallel to ``missing``."""
        return [entry.slot for i in self.missing if (entry := self.entries[i]) is not None]


class BlockStore:
    """Blocks in memory: index, eviction order, leases, quotas and byte budget.

    Args:
        capacity_bytes: Memory budget for blocks, in bytes.
        max_pools: Maximum number of KV formats stored at once.
        max_leases: Maximum number of live leases.
        clock: Returns monotonic seconds.
        on_close: Called with each pool that is dropped; must close its arena.
        behind: Whether there are lower tiers; blocks are written there before they are evicted.
        eviction: Name of the eviction policy, from ``EVICTION_POLICIES``.
        quotas: Quotas of the tenants; default: unlimited.

    Attributes:
        eviction: The eviction policy, which orders the unpinned blocks.
        quotas: Usage and quotas of each tenant.
        client_pins: Blocks pinned by clients, and times to live.
    """

    def __init__(
        self,
        capacity_bytes: int,
        *,
        max_pools: int,
        max_leases: int,
        clock: Callable[[], float],
        on_close: Callable[[Pool], None] = lambda pool: pool.arena.close(),
        behind: bool = False,
        eviction: str = "lru",
        quotas: Quotas | None = None,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.counters = Counters()
        self.leases = LeaseTable(max_leases, clock)
        self._on_close = on_close
        self._pools = PoolSet(capacity_bytes, max_pools, self._drop)
        self.eviction = make_policy(eviction, behind=behind)
        self._pinned: set[Entry] = set()
        self.quotas = quotas or Quotas()
        self.client_pins = ClientPins(capacity_bytes, clock)
        self._listeners = Listeners("memory")

    @property
    def pools(self) -> list[Pool]:
        """Live pools, least recently used first."""
        return list(self._pools)

    @property
    def used_bytes(self) -> int:
        """Bytes of slots that hold a block or are being filled."""
        return sum(pool.num_used * pool.block_bytes for pool in self._pools)

    @property
    def backed_bytes(self) -> int:
        """Memory in use, including free slots whose memory was not released; never above the capacity."""
        return self._pools.backed_bytes

    @property
    def num_blocks(self) -> int:
        """Number of blocks that are stored or being filled."""
        return sum(len(pool.index) for pool in self._pools)

    def listen(self, listener: TierListener) -> None:
        """Report all present blocks to a listener, and then every change."""
        present = by_kind((pool.kind, name) for pool in self._pools for name in pool.index if pool.ready(name))
        self._listeners.add(listener, present)

    # Put

    def reserve(
        self, fingerprint: Fingerprint, hashes: Sequence[BlockHash], tenant: Tenant | None = None
    ) -> Reservation:
        """Allocate slots for the blocks that are missing, and pin all blocks until the commit.

        Args:
            fingerprint: KV format of the blocks.
            hashes: Distinct hashes of the blocks.
            tenant: Tenant whose quota the new blocks count against.

        Raises:
            InvalidRequestError: A block is larger than the store, or a hash is listed twice.
            QueueFullError: All blocks, or all blocks of a tenant at its quota, are leased or being filled.
        """
        if len(set(hashes)) != len(hashes):
            raise InvalidRequestError("block_hashes names a block twice", field="block_hashes")
        self.expire()
        pool = self._pools.open(fingerprint)
        entries: list[Entry | None] = [pool.ready(block_hash) for block_hash in hashes]
        for entry in filter(None, entries):
            self._pin(entry)
        missing: list[int] = []
        share = self.quotas.share_of(tenant)
        for i, block_hash in enumerate(hashes):
            if block_hash in pool.index:
                continue
            slot = self._allocate_slot(pool) if share.make_room(pool.block_bytes, self._evict) else None
            if slot is None:
                break
            entry = Entry(pool, block_hash, slot, share)
            share.add_entry(entry)
            pool.index[block_hash] = entries[i] = entry
            missing.append(i)
            self._pin(entry)
        if hashes and all(entry is None for entry in entries) and not any(h in pool.index for h in hashes):
            whose = f"tenant {share.name}'s quota" if share.quota_bytes else "the store"
            raise QueueFullError(f"every block of {whose} is leased or being filled", retry_after_s=RETRY_AFTER_S)
        return Reservation(pool, entries, missing)

    def commit(
        self, reservation: Reservation, arrived: Sequence[bool], *, promoted: bool = False, ttl_s: float = 0.0
    ) -> list[bool]:
        """Publish the blocks that arrived, free the other slots, and unpin all blocks of the reservation.

        Args:
            reservation: From :meth:`reserve`; can be committed once.
            arrived: One per index in ``reservation.missing``: whether all bytes of the block are in its slot.
            promoted: The blocks were read from a lower tier, which still holds them.
            ttl_s: Time to live of the new blocks in seconds, which lower tiers do not get; 0: unlimited.

        Returns:
            One per hash: whether the block is stored now.
        """
        if reservation.done:
            raise InternalError("a reservation was committed twice")
        reservation.done = True
        if not reservation.published:
            self.publish(reservation, arrived, promoted=promoted, ttl_s=ttl_s)
        self._unpin(reservation.entries)
        return [e is not None and e.state is State.READY and not e.doomed for e in reservation.entries]

    def publish(
        self, reservation: Reservation, arrived: Sequence[bool], *, promoted: bool = False, ttl_s: float = 0.0
    ) -> None:
        """Make the blocks that arrived visible, but keep them pinned; same arguments as :meth:`commit`."""
        reservation.published = True
        stored: list[BlockHash] = []
        for i, ok in zip(reservation.missing, arrived, strict=True):
            entry = reservation.entries[i]
            if entry is None or entry.state is State.GONE:  # the store was closed meanwhile
                continue
            if ok:
                entry.brief = ttl_s > 0
                entry.state = State.READY
                entry.saved = promoted or entry.brief
                if ttl_s > 0:
                    self.client_pins.expire_at(entry, ttl_s)
                self.counters.stored += not promoted
                if not entry.doomed:
                    stored.append(entry.block_hash)
            else:
                self._hide(entry)
        self._listeners.notify(reservation.pool.kind, stored, True)

    def room(self) -> int:
        """Return the bytes that a Put could store now: unused, free, or in saved blocks that may be evicted."""
        return self.capacity_bytes - self.used_bytes + self.eviction.saved_bytes

    def begin_save(self, max_bytes: int) -> list[Entry]:
        """Pin and return the blocks of one KV format to write to lower tiers next, the coldest first."""
        chosen: dict[Entry, None] = {}
        for entry in itertools.chain(self.quotas.unsaved(), self.eviction.unsaved):
            first = next(iter(chosen), entry)
            if chosen and (entry.pool is not first.pool or (len(chosen) + 1) * entry.pool.block_bytes > max_bytes):
                break
            chosen[entry] = None
        for entry in chosen:
            self._pin(entry)
        return list(chosen)

    def pin(self, key: bytes, hashes: Sequence[BlockHash]) -> list[Entry]:
        """Pin and return the blocks of a KV format that are present; :meth:`end_save` unpins them."""
        pool = self._pools.get(key)
        entries = [] if pool is None else [e for name in hashes if (e := pool.ready(name)) is not None]
        for entry in entries:
            self._pin(entry)
        return entries

    def end_save(self, entries: Sequence[Entry], *, saved: bool = True) -> None:
        """Unpin blocks; they keep their age unless they were used meanwhile.

        Args:
            entries: Pinned by :meth:`begin_save` or :meth:`pin`.
            saved: A lower tier holds the blocks now, or none can store them.
        """
        for entry in reversed(entries):
            if entry.state is not State.GONE:
                entry.saved = entry.saved or saved
                self._unpin_one(entry, used=False)

    # Get

    def lease(self, fingerprint: Fingerprint, hashes: Sequence[BlockHash], ttl_s: float) -> Lease | None:
        """Lease the longest stored prefix of a chain, or return ``None`` if its first block is missing.

        Args:
            fingerprint: KV format of the blocks.
            hashes: Hashes of the chain's blocks, in order.
            ttl_s: Duration of the lease, in seconds.

        Raises:
            QueueFullError: ``max_leases`` leases are alive.
        """
        self.expire()
        pool = self._pools.get(fingerprint.digest())
        entries = [] if pool is None else list(pool.prefix(hashes))
        self.counters.hits += len(entries)
        self.counters.misses += len(hashes) - len(entries)
        if pool is None or not entries:
            return None
        self._pools.touch(pool)
        lease = self.leases.grant(tuple(entries), ttl_s)
        for entry in entries:
            self._pin(entry)
        return lease

    def release(self, lease_id: int) -> bool:
        """End a lease; ``False`` if no lease has this id (any more)."""
        self.expire()
        lease = self.leases.remove(lease_id)
        if lease is not None:
            self._unpin(lease.entries)
        return lease is not None

    def expire(self) -> int:
        """End expired leases, delete blocks whose time to live has ended, and return the number of expired leases."""
        expired = self.leases.pop_expired()
        for lease in expired:
            self._unpin(lease.entries)
        self.counters.expired_leases += len(expired)
        for entry in self.client_pins.expired():
            self._hide(entry)
            self.counters.expired_blocks += 1
        return len(expired)

    def contains(self, fingerprint: Fingerprint, hashes: Sequence[BlockHash]) -> int:
        """Return the number of leading blocks that are stored. Does not count as a use."""
        pool = self._pools.get(fingerprint.digest())
        return 0 if pool is None else sum(1 for _ in pool.prefix(hashes))

    def find(self, key: bytes, block_hash: BlockHash) -> Entry | None:
        """Return a block, including one that is being filled, or ``None``."""
        pool = self._pools.get(key)
        return None if pool is None else pool.index.get(block_hash)

    def has(self, key: bytes, block_hash: BlockHash) -> bool:
        """Whether a block is stored; ``key`` is its fingerprint's digest."""
        pool = self._pools.get(key)
        return pool is not None and pool.ready(block_hash) is not None

    def hashes(self, key: bytes) -> set[BlockHash]:
        """Return the hashes of a KV format's blocks that are stored or being filled."""
        pool = self._pools.get(key)
        return set() if pool is None else set(pool.index)

    def delete(self, fingerprint: Fingerprint, hashes: Sequence[BlockHash] | None) -> int:
        """Delete blocks (``None``: all of the fingerprint) and return their number; pinned slots are freed later."""
        pool = self._pools.get(fingerprint.digest())
        if pool is None:
            return 0
        names = list(pool.index) if hashes is None else dict.fromkeys(hashes)
        entries = [entry for name in names if (entry := pool.index.get(name)) is not None]
        for entry in entries:
            self._hide(entry)
        return len(entries)

    def forget_tenant(self, name: str) -> dict[KvFormat, set[BlockHash]]:
        """Delete all blocks of a tenant and return their hashes by KV format."""
        share = self.quotas.find(name)
        if share is None:
            return {}
        blocks = share.blocks()
        for entry in [entry for entry in share.entries if not entry.doomed]:
            self._hide(entry)
        return blocks

    def pin_for_client(self, fingerprint: Fingerprint, hashes: Sequence[BlockHash]) -> list[bool]:
        """Pin blocks until :meth:`unpin_for_client`, and return for each whether it is present and pinned.

        Raises:
            QueueFullError: The limit of pinned bytes is reached; blocks pinned before that stay pinned.
        """
        pool = self._pools.get(fingerprint.digest())
        entries = [None if pool is None else pool.ready(name) for name in hashes]
        for entry in entries:
            if entry is not None and self.client_pins.add(entry):
                self._pin(entry)
        return [entry is not None for entry in entries]

    def unpin_for_client(self, fingerprint: Fingerprint, hashes: Sequence[BlockHash]) -> None:
        """Remove the client pins of blocks."""
        pool = self._pools.get(fingerprint.digest())
        for name in hashes:
            entry = None if pool is None else pool.ready(name)
            if entry is not None and entry.client_pinned:
                self._release_client_pin(entry)

    def _release_client_pin(self, entry: Entry) -> None:
        self.client_pins.remove(entry)
        self._unpin_one(entry, used=False)

    def stats(self) -> StoreStats:
        """Return a consistent snapshot, safe to read from other threads."""
        return StoreStats(
            capacity_bytes=self.capacity_bytes,
            used_bytes=self.used_bytes,
            backed_bytes=self.backed_bytes,
            num_blocks=self.num_blocks,
            num_pools=len(self._pools),
            num_leases=len(self.leases),
            **dataclasses.asdict(self.counters),
        )

    def close(self) -> None:
        """Drop all pools, including leased blocks."""
        for pool in self.pools:
            self._drop(pool)

    def _pin(self, entry: Entry) -> None:
        if entry.pins == 0:
            self.eviction.pin(entry)
            entry.share.pin(entry)
            self._pinned.add(entry)
            entry.pool.num_pinned += 1
        entry.pins += 1

    def _unpin(self, entries: Sequence[Entry | None]) -> None:
        # From the chain's end to its head: the tail, useless without the head, is evicted first.
        for entry in filter(None, reversed(entries)):
            if entry.state is not State.GONE:
                self._unpin_one(entry, used=True)

    def _unpin_one(self, entry: Entry, *, used: bool) -> None:
        entry.pins -= 1
        if entry.pins:
            if used:
                self.eviction.touch(entry)
            return
        self._pinned.discard(entry)
        entry.pool.num_pinned -= 1
        if entry.doomed:
            self._free(entry)
        else:
            self.eviction.unpin(entry, used=used)
            entry.share.unpin(entry, used=used)

    def _hide(self, entry: Entry) -> None:
        """Remove an entry from the index; its slot is freed now or with its last pin."""
        if entry.pool.index.get(entry.block_hash) is entry:
            del entry.pool.index[entry.block_hash]
            if entry.state is State.READY:
                self._listeners.notify(entry.pool.kind, [entry.block_hash], False)
        entry.doomed = True
        self.eviction.discard(entry)
        if entry.pins == 0:
            self._free(entry)
        elif entry.client_pinned:
            self._release_client_pin(entry)

    def _free(self, entry: Entry) -> None:
        entry.state = State.GONE
        entry.pool.free_slot(entry.slot)
        self.client_pins.remove(entry)
        entry.share.remove_entry(entry)

    def _evict(self, entry: Entry) -> None:
        self._hide(entry)
        self.counters.evictions += 1

    def _allocate_slot(self, pool: Pool) -> int | None:
        while (slot := self._pools.allocate_slot(pool)) is None:
            victim = self.eviction.pop()
            if victim is None:
                return None
            self._evict(victim)
        return slot

    def _drop(self, pool: Pool) -> None:
        ready = [name for name in pool.index if pool.ready(name) is not None]
        for entry in [e for e in (*self.eviction, *self._pinned) if e.pool is pool]:
            self.eviction.discard(entry)
            self._pinned.discard(entry)
            self.counters.evictions += not entry.doomed
            self._free(entry)
        pool.index.clear()
        pool.num_pinned = 0
        self._pools.remove(pool)
        self._listeners.notify(pool.kind, ready, False)
        self._on_close(pool)
