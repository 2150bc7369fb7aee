"""What the store knows, without any I/O: which block lies in which slot, who leases it, and who has to go next.

One budget of bytes serves every kind of KV (fingerprint). Each kind has an arena of its own, mapped large enough for
the whole budget but given memory slot by slot; the eviction policy has one order over all of them. So the kind that is
asked for most takes the room of the others, and nothing has to be divided up beforehand. Room is looked for
in this order: a free slot of the same kind that has memory, memory the budget still has, free slots of other kinds
(their pages go back to the kernel), and last the block of any kind that the policy wants gone and no lease holds.

Blocks come in two phases: ``reserve`` takes slots, the caller fills them, ``commit`` makes those that arrived whole
visible and gives the rest back. Half a block is never visible, and a slot's generation rises whenever it is freed.

Methods are called from one thread (the service's event loop).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from baton.errors import InternalError, InvalidRequestError, QueueFullError
from baton.kv_cache.fingerprint import Fingerprint
from baton.types import BlockHash, Tenant
from baton_kvstore.memory.eviction import Eviction, make_policy
from baton_kvstore.memory.leases import Lease, LeaseTable, Pins
from baton_kvstore.memory.pool import RETRY_AFTER_S, Entry, Pool, PoolSet, State
from baton_kvstore.memory.quotas import Quotas
from baton_kvstore.types import Counters, KvFormat, Listeners, StoreStats, TierListener, by_kind


def check(pools: Collection[Pool], recency: Eviction, pinned: Collection[Entry], capacity_bytes: int) -> None:
    """Raise ``InternalError`` unless slots, pins, recency and budget add up."""
    if sum(pool.backed_bytes for pool in pools) > capacity_bytes:
        raise InternalError("the store is above its budget")
    for entry in recency:
        if entry.pins or entry.doomed or entry.state is not State.READY:
            raise InternalError("a block that must stay could be evicted")
    if recency.saved_bytes != sum(entry.pool.block_bytes for entry in recency if entry.saved):
        raise InternalError("bytes of saved blocks do not add up")
    held = [*recency, *pinned]
    if len(recency) + len(pinned) != len(held) or len(set(held)) != len(held):
        raise InternalError("evictable and pinned blocks do not add up")
    for pool in pools:
        pool.check(entry for entry in held if entry.pool is pool)
        if pool.num_pinned != sum(1 for entry in pinned if entry.pool is pool):
            raise InternalError("pins of a pool do not add up")
        if any(entry not in recency and entry not in pinned for entry in pool.index.values()):
            raise InternalError("a block can be found but is neither evictable nor pinned")


@dataclass(eq=False)
class Reservation:
    """The first phase of a Put.

    Attributes:
        entries: Parallel to the hashes: where the block is or will be; ``None``: no room, or another Put brings it.
        missing: Indices into ``entries`` of the blocks to be filled.
    """

    pool: Pool
    entries: list[Entry | None]
    missing: list[int]
    settled: bool = False
    done: bool = False

    @property
    def slots(self) -> list[int]:
        """Slots to fill, parallel to ``missing``."""
        return [entry.slot for i in self.missing if (entry := self.entries[i]) is not None]


class BlockStore:
    """Index, recency, leases and budget.

    Args:
        capacity_bytes: Memory for blocks.
        max_pools: PoolSet of KV at once.
        max_leases: Leases at once.
        clock: Monotonic seconds.
        on_close: Told of every pool that was dropped; its arena is the callee's to close.
        behind: Whether there is a tier behind, which blocks must reach before they are evicted.
        eviction: Name of the policy that says who goes.
        quotas: What tenants may have that say nothing themselves; default: anything.

    Attributes:
        recency: The policy's order.
        quotas: What each tenant has.
        holds: What is pinned by request, and what is to be forgotten.
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
        self._kinds = PoolSet(capacity_bytes, max_pools, self._drop)
        self.recency = make_policy(eviction, behind=behind)
        self._pinned: set[Entry] = set()
        self.quotas = quotas or Quotas()
        self.holds = Pins(capacity_bytes, clock)
        self._listeners = Listeners("memory")

    @property
    def pools(self) -> list[Pool]:
        """Live pools, the one unused for longest first."""
        return list(self._kinds)

    @property
    def used_bytes(self) -> int:
        """Bytes of slots that hold a block or are being filled."""
        return sum(pool.num_used * pool.block_bytes for pool in self._kinds)

    @property
    def backed_bytes(self) -> int:
        """Memory taken, free slots that were not given back included; never above the capacity."""
        return self._kinds.backed_bytes

    @property
    def num_blocks(self) -> int:
        """Blocks that can be found or are being filled."""
        return sum(len(pool.index) for pool in self._kinds)

    def listen(self, listener: TierListener) -> None:
        """Tell a listener what is there, and then every change."""
        there = by_kind((pool.kind, name) for pool in self._kinds for name in pool.index if pool.ready(name))
        self._listeners.add(listener, there)

    # Put

    def reserve(
        self, fingerprint: Fingerprint, hashes: Sequence[BlockHash], tenant: Tenant | None = None
    ) -> Reservation:
        """Take slots, for a tenant, for the blocks that are not there; pins those that are until the commit.

        Raises:
            InvalidRequestError: A block is larger than the store, or a hash comes twice.
            QueueFullError: Everything is leased or being filled, or all that the tenant may have.
        """
        if len(set(hashes)) != len(hashes):
            raise InvalidRequestError("block_hashes names a block twice", field="block_hashes")
        self.expire()
        pool = self._kinds.open(fingerprint)
        entries: list[Entry | None] = [pool.ready(block_hash) for block_hash in hashes]
        for entry in filter(None, entries):
            self._pin(entry)
        missing: list[int] = []
        share = self.quotas.of(tenant)
        for i, block_hash in enumerate(hashes):
            if block_hash in pool.index:
                continue
            slot = self._take_slot(pool) if share.make_room(pool.block_bytes, self._evict) else None
            if slot is None:
                break
            entry = Entry(pool, block_hash, slot, share=share)
            share.take(entry)
            pool.index[block_hash] = entries[i] = entry
            missing.append(i)
            self._pin(entry)
        if hashes and all(entry is None for entry in entries) and not any(h in pool.index for h in hashes):
            whose = f"tenant {share.name}'s quota" if share.quota else "the store"
            raise QueueFullError(f"every block of {whose} is leased or being filled", retry_after_s=RETRY_AFTER_S)
        return Reservation(pool, entries, missing)

    def commit(
        self, reservation: Reservation, arrived: Sequence[bool], *, promoted: bool = False, ttl_s: float = 0.0
    ) -> list[bool]:
        """End a Put.

        Args:
            reservation: From :meth:`reserve`; each can be ended once.
            arrived: Parallel to ``reservation.missing``: whether the block's bytes are whole.
            promoted: The blocks come from the tier behind, which still has them.
            ttl_s: Seconds after which the new blocks are forgotten, which no tier behind gets; 0: never.

        Returns:
            Parallel to the hashes: whether the block can be found now.
        """
        if reservation.done:
            raise InternalError("a reservation was ended twice")
        reservation.done = True
        if not reservation.settled:
            self.settle(reservation, arrived, promoted=promoted, ttl_s=ttl_s)
        self._unpin(reservation.entries)
        return [e is not None and e.state is State.READY and not e.doomed for e in reservation.entries]

    def settle(
        self, reservation: Reservation, arrived: Sequence[bool], *, promoted: bool = False, ttl_s: float = 0.0
    ) -> None:
        """Make the blocks that arrived findable and leave them pinned until the commit; see there."""
        reservation.settled = True
        stored: list[BlockHash] = []
        for i, ok in zip(reservation.missing, arrived, strict=True):
            entry = reservation.entries[i]
            if entry is None or entry.state is State.GONE:  # the store was closed meanwhile
                continue
            if ok:
                entry.brief = ttl_s > 0
                entry.state, entry.saved = State.READY, promoted or entry.brief
                if ttl_s > 0:
                    self.holds.expire_at(entry, ttl_s)
                self.counters.stored += not promoted
                if not entry.doomed:
                    stored.append(entry.block_hash)
            else:
                self._hide(entry)
        self._listeners.tell(reservation.pool.kind, stored, True)

    def abort(self, reservation: Reservation) -> None:
        """End a Put whose bytes did not come."""
        self.commit(reservation, [False] * len(reservation.missing))

    def room(self) -> int:
        """Bytes that a Put could take at once: never used, free, or in blocks that may be evicted."""
        return self.capacity_bytes - self.used_bytes + self.recency.saved_bytes

    def begin_save(self, max_bytes: int) -> list[Entry]:
        """Pin the blocks of one kind that the tier behind should get next, the coldest first."""
        chosen: dict[Entry, None] = {}
        for entry in itertools.chain(self.quotas.unsaved(), self.recency.unsaved):
            first = next(iter(chosen), entry)
            if chosen and (entry.pool is not first.pool or (len(chosen) + 1) * entry.pool.block_bytes > max_bytes):
                break
            chosen[entry] = None
        for entry in chosen:
            self._pin(entry)
        return list(chosen)

    def pin(self, key: bytes, hashes: Sequence[BlockHash]) -> list[Entry]:
        """Pin those of a kind's blocks that are there, until :meth:`end_save`."""
        pool = self._kinds.get(key)
        entries = [] if pool is None else [e for name in hashes if (e := pool.ready(name)) is not None]
        for entry in entries:
            self._pin(entry)
        return entries

    def end_save(self, entries: Sequence[Entry], *, saved: bool = True) -> None:
        """Unpin blocks, which are as old as before unless they were used meanwhile.

        Args:
            entries: Pinned by :meth:`begin_save` or :meth:`pin`.
            saved: The tier behind has got them, or cannot take them.
        """
        for entry in reversed(entries):
            if entry.state is not State.GONE:
                entry.saved = entry.saved or saved
                self._unpin_one(entry, used=False)

    # Get

    def lease(self, fingerprint: Fingerprint, hashes: Sequence[BlockHash], ttl_s: float) -> Lease | None:
        """Lease the longest prefix of a chain that is there; ``None`` if not even its first block is.

        Raises:
            QueueFullError: Too many leases.
        """
        self.expire()
        pool = self._kinds.get(fingerprint.digest())
        found = [] if pool is None else list(pool.prefix(hashes))
        self.counters.hits += len(found)
        self.counters.misses += len(hashes) - len(found)
        if pool is None or not found:
            return None
        self._kinds.touch(pool)
        lease = self.leases.grant(tuple(found), ttl_s)
        for entry in found:
            self._pin(entry)
        return lease

    def release(self, lease_id: int) -> bool:
        """End a lease; ``False`` if there is none of that id (any more)."""
        self.expire()
        lease = self.leases.remove(lease_id)
        if lease is not None:
            self._unpin(lease.entries)
        return lease is not None

    def expire(self) -> int:
        """End the leases whose time is up and return how many; forget the blocks whose time is up."""
        expired = self.leases.pop_expired()
        for lease in expired:
            self._unpin(lease.entries)
        self.counters.expired_leases += len(expired)
        for entry in self.holds.expired():
            self._hide(entry)
            self.counters.expired_blocks += 1
        return len(expired)

    def contains(self, fingerprint: Fingerprint, hashes: Sequence[BlockHash]) -> int:
        """Return how many leading blocks are there. Leaves recency as it is."""
        pool = self._kinds.get(fingerprint.digest())
        return 0 if pool is None else sum(1 for _ in pool.prefix(hashes))

    def find(self, key: bytes, block_hash: BlockHash) -> Entry | None:
        """Return a block of a kind, also one that is being filled."""
        pool = self._kinds.get(key)
        return None if pool is None else pool.index.get(block_hash)

    def has(self, key: bytes, block_hash: BlockHash) -> bool:
        """Whether a block of the kind with this fingerprint digest can be found."""
        pool = self._kinds.get(key)
        return pool is not None and pool.ready(block_hash) is not None

    def hashes(self, key: bytes) -> set[BlockHash]:
        """Return the blocks of a kind that can be found or are being filled."""
        pool = self._kinds.get(key)
        return set() if pool is None else set(pool.index)

    def delete(self, fingerprint: Fingerprint, hashes: Sequence[BlockHash] | None) -> int:
        """Forget blocks (``None``: all of the fingerprint) and return how many; leased memory is reused later."""
        pool = self._kinds.get(fingerprint.digest())
        if pool is None:
            return 0
        names = list(pool.index) if hashes is None else dict.fromkeys(hashes)
        found = [entry for name in names if (entry := pool.index.get(name)) is not None]
        for entry in found:
            self._hide(entry)
        return len(found)

    def forget_tenant(self, name: str) -> dict[KvFormat, set[BlockHash]]:
        """Forget everything of a tenant, and return what that was."""
        share = self.quotas.find(name)
        if share is None:
            return {}
        blocks = share.blocks()
        for entry in [entry for entry in share.entries if not entry.doomed]:
            self._hide(entry)
        return blocks

    def keep(self, fingerprint: Fingerprint, hashes: Sequence[BlockHash]) -> list[bool]:
        """Pin blocks until :meth:`unkeep`, and return which of them are there and pinned.

        Raises:
            QueueFullError: As much is pinned as may be; those before stay pinned.
        """
        pool = self._kinds.get(fingerprint.digest())
        found = [None if pool is None else pool.ready(name) for name in hashes]
        for entry in found:
            if entry is not None and self.holds.hold(entry):
                self._pin(entry)
        return [entry is not None for entry in found]

    def unkeep(self, fingerprint: Fingerprint, hashes: Sequence[BlockHash]) -> None:
        """Pin blocks no more."""
        pool = self._kinds.get(fingerprint.digest())
        for name in hashes:
            entry = None if pool is None else pool.ready(name)
            if entry is not None and entry.held:
                self._let_go(entry)

    def _let_go(self, entry: Entry) -> None:
        self.holds.drop(entry)
        self._unpin_one(entry, used=False)

    def stats(self) -> StoreStats:
        """Return a consistent view, which other threads may read."""
        return StoreStats(
            capacity_bytes=self.capacity_bytes,
            used_bytes=self.used_bytes,
            backed_bytes=self.backed_bytes,
            num_blocks=self.num_blocks,
            num_pools=len(self._kinds),
            num_leases=len(self.leases),
            **dataclasses.asdict(self.counters),
        )

    def close(self) -> None:
        """Drop every pool, leased blocks included."""
        for pool in self.pools:
            self._drop(pool)

    def check(self) -> None:
        """Raise ``InternalError`` unless slots, pins, recency and budget add up."""
        check(self.pools, self.recency, self._pinned, self.capacity_bytes)
        self.quotas.check()

    def _pin(self, entry: Entry) -> None:
        if entry.pins == 0:
            self.recency.pin(entry)
            if entry.share is not None:
                entry.share.pin(entry)
            self._pinned.add(entry)
            entry.pool.num_pinned += 1
        entry.pins += 1

    def _unpin(self, entries: Sequence[Entry | None]) -> None:
        # From the chain's end to its head: the tail, worthless without the head, is evicted first.
        for entry in filter(None, reversed(entries)):
            if entry.state is not State.GONE:
                self._unpin_one(entry, used=True)

    def _unpin_one(self, entry: Entry, *, used: bool) -> None:
        entry.pins -= 1
        if entry.pins:
            if used:
                self.recency.touch(entry)
            return
        self._pinned.discard(entry)
        entry.pool.num_pinned -= 1
        if entry.doomed:
            self._free(entry)
        else:
            self.recency.unpin(entry, used=used)
            if entry.share is not None:
                entry.share.unpin(entry, used=used)

    def _hide(self, entry: Entry) -> None:
        """Make an entry unfindable; its slot is free at once or with its last pin."""
        if entry.pool.index.get(entry.block_hash) is entry:
            del entry.pool.index[entry.block_hash]
            if entry.state is State.READY:
                self._listeners.tell(entry.pool.kind, [entry.block_hash], False)
        entry.doomed = True
        self.recency.discard(entry)
        if entry.pins == 0:
            self._free(entry)
        elif entry.held:
            self._let_go(entry)

    def _free(self, entry: Entry) -> None:
        entry.state = State.GONE
        entry.pool.put_back(entry.slot)
        self.holds.drop(entry)
        if entry.share is not None:
            entry.share.drop(entry)

    def _evict(self, entry: Entry) -> None:
        self._hide(entry)
        self.counters.evictions += 1

    def _take_slot(self, pool: Pool) -> int | None:
        while (slot := self._kinds.free_slot(pool)) is None:
            victim = self.recency.pop()
            if victim is None:
                return None
            self._evict(victim)
        return slot

    def _drop(self, pool: Pool) -> None:
        ready = [name for name in pool.index if pool.ready(name) is not None]
        for entry in [e for e in (*self.recency, *self._pinned) if e.pool is pool]:
            self.recency.discard(entry)
            self._pinned.discard(entry)
            self.counters.evictions += not entry.doomed
            self._free(entry)
        pool.index.clear()
        pool.num_pinned = 0
        self._kinds.remove(pool)
        self._listeners.tell(pool.kind, ready, False)
        self._on_close(pool)
