"""What the store knows, without any I/O: which block lies in which slot, who leases it, and who has to go next.

One budget of bytes serves every kind of KV (fingerprint). Each kind has an arena of its own, mapped large enough for
the whole budget but given memory slot by slot; recency is one order over all of them. So the kind that is asked for
most takes the room of those nobody asks for, and nothing has to be divided up beforehand. Room is looked for in this
order: a free slot of the same kind that has memory, memory the budget still has, free slots of other kinds (their
pages go back to the kernel), and last the least recently used block of any kind that nobody leases.

Blocks come in two phases: ``reserve`` takes slots, the caller fills them, ``commit`` makes those that arrived whole
visible and gives the rest back. Nobody ever sees half a block, and a slot's generation rises whenever it is freed.

Methods are called from one thread (the service's event loop).
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

from baton.errors import InternalError, InvalidRequestError, QueueFullError
from baton.kv.arena import KVArena
from baton.kv.fingerprint import Fingerprint
from baton.types import BlockHash
from baton_kvstore.counts import Counters, StoreStats
from baton_kvstore.leases import Lease, LeaseTable
from baton_kvstore.pool import MAX_SLOTS, Entry, Pool, State
from baton_kvstore.recency import Recency
from baton_kvstore.reservation import Reservation

RETRY_AFTER_S = 1.0


class BlockStore:
    """Index, recency, leases and budget.

    Args:
        capacity_bytes: Memory for blocks.
        max_pools: Kinds of KV at once.
        max_leases: Leases at once.
        clock: Monotonic seconds.
        on_close: Told of every pool that was dropped; its arena is the callee's to close.
        behind: Whether there is a tier behind, which blocks must reach before they are evicted.
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
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.counters = Counters()
        self.leases = LeaseTable(max_leases, clock)
        self._max_pools = max_pools
        self._on_close = on_close
        self._pools: OrderedDict[bytes, Pool] = OrderedDict()
        self.recency = Recency(behind=behind)
        self._pinned: set[Entry] = set()

    @property
    def pools(self) -> list[Pool]:
        """Live pools, the one unused for longest first."""
        return list(self._pools.values())

    @property
    def used_bytes(self) -> int:
        """Bytes of slots that hold a block or are being filled."""
        return sum(pool.num_used * pool.block_bytes for pool in self._pools.values())

    @property
    def backed_bytes(self) -> int:
        """Memory taken, free slots that were not given back included; never above the capacity."""
        return sum(pool.backed_bytes for pool in self._pools.values())

    @property
    def num_blocks(self) -> int:
        """Blocks that can be found or are being filled."""
        return sum(len(pool.index) for pool in self._pools.values())

    # Put

    def reserve(self, fingerprint: Fingerprint, hashes: Sequence[BlockHash]) -> Reservation:
        """Take slots for the blocks that are not there; pins those that are until the commit.

        Raises:
            InvalidRequestError: A block is larger than the store, or a hash comes twice.
            QueueFullError: Everything is leased or being filled.
        """
        if len(set(hashes)) != len(hashes):
            raise InvalidRequestError("block_hashes names a block twice", field="block_hashes")
        self.expire()
        pool = self._pool_for(fingerprint)
        entries: list[Entry | None] = [self._ready(pool, block_hash) for block_hash in hashes]
        for entry in entries:
            if entry is not None:
                self._pin(entry)
        missing: list[int] = []
        for i, block_hash in enumerate(hashes):
            if block_hash in pool.index:
                continue
            slot = self._take_slot(pool)
            if slot is None:
                break
            entry = Entry(pool, block_hash, slot)
            pool.index[block_hash] = entries[i] = entry
            missing.append(i)
            self._pin(entry)
        if hashes and all(entry is None for entry in entries) and not any(h in pool.index for h in hashes):
            raise QueueFullError("every block of the store is leased or being filled", retry_after_s=RETRY_AFTER_S)
        return Reservation(pool, entries, missing)

    def commit(self, reservation: Reservation, arrived: Sequence[bool], *, promoted: bool = False) -> list[bool]:
        """End a Put.

        Args:
            reservation: From :meth:`reserve`; each can be ended once.
            arrived: Parallel to ``reservation.missing``: whether the block's bytes are whole.
            promoted: The blocks come from the tier behind, which still has them.

        Returns:
            Parallel to the hashes: whether the block can be found now.
        """
        if reservation.done:
            raise InternalError("a reservation was ended twice")
        reservation.done = True
        if not reservation.settled:
            self.settle(reservation, arrived, promoted=promoted)
        self._unpin(reservation.entries)
        return [e is not None and e.state is State.READY and not e.doomed for e in reservation.entries]

    def settle(self, reservation: Reservation, arrived: Sequence[bool], *, promoted: bool = False) -> None:
        """Make the blocks that arrived findable and leave them pinned until the commit; see there."""
        reservation.settled = True
        for i, ok in zip(reservation.missing, arrived, strict=True):
            entry = reservation.entries[i]
            if entry is None or entry.state is State.GONE:  # the store was closed meanwhile
                continue
            if ok:
                entry.state, entry.saved = State.READY, promoted
                self.counters.stored += not promoted
            else:
                self._hide(entry)

    def abort(self, reservation: Reservation) -> None:
        """End a Put whose bytes did not come."""
        self.commit(reservation, [False] * len(reservation.missing))

    def room(self) -> int:
        """Bytes that a Put could take at once: never used, free, or in blocks that may be evicted."""
        return self.capacity_bytes - self.used_bytes + self.recency.saved_bytes

    def begin_save(self, max_bytes: int) -> list[Entry]:
        """Pin the blocks of one kind that the tier behind should get next, the coldest first."""
        chosen: list[Entry] = []
        for entry in self.recency.unsaved:
            if chosen and (entry.pool is not chosen[0].pool or (len(chosen) + 1) * entry.pool.block_bytes > max_bytes):
                break
            chosen.append(entry)
        for entry in chosen:
            self._pin(entry)
        return chosen

    def pin(self, key: bytes, hashes: Sequence[BlockHash]) -> list[Entry]:
        """Pin those of a kind's blocks that are there, until :meth:`end_save`."""
        pool = self._pools.get(key)
        entries = [] if pool is None else [e for name in hashes if (e := self._ready(pool, name)) is not None]
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
        pool = self._pools.get(fingerprint.digest())
        found = [] if pool is None else list(self._prefix(pool, hashes))
        self.counters.hits += len(found)
        self.counters.misses += len(hashes) - len(found)
        if pool is None or not found:
            return None
        self._pools.move_to_end(pool.key)
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
        """End the leases whose time is up and return how many."""
        expired = self.leases.pop_expired()
        for lease in expired:
            self._unpin(lease.entries)
        self.counters.expired_leases += len(expired)
        return len(expired)

    def contains(self, fingerprint: Fingerprint, hashes: Sequence[BlockHash]) -> int:
        """Return how many leading blocks are there. Leaves recency as it is."""
        pool = self._pools.get(fingerprint.digest())
        return 0 if pool is None else sum(1 for _ in self._prefix(pool, hashes))

    def has(self, key: bytes, block_hash: BlockHash) -> bool:
        """Whether a block of the kind with this fingerprint digest can be found."""
        pool = self._pools.get(key)
        return pool is not None and self._ready(pool, block_hash) is not None

    def hashes(self, key: bytes) -> set[BlockHash]:
        """Return the blocks of a kind that can be found or are being filled."""
        pool = self._pools.get(key)
        return set() if pool is None else set(pool.index)

    # Delete

    def delete(self, fingerprint: Fingerprint, hashes: Sequence[BlockHash] | None) -> int:
        """Forget blocks (``None``: all of the fingerprint) and return how many; leased memory is reused later."""
        pool = self._pools.get(fingerprint.digest())
        if pool is None:
            return 0
        names = list(pool.index) if hashes is None else hashes
        found = [entry for name in names if (entry := pool.index.get(name)) is not None]
        for entry in found:
            self._hide(entry)
        return len(found)

    def stats(self) -> StoreStats:
        """Return a consistent view, which other threads may read."""
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
        """Drop every pool, leased blocks included."""
        for pool in self.pools:
            self._drop(pool)

    def check(self) -> None:
        """Raise ``InternalError`` unless slots, pins, recency and budget add up."""
        if self.backed_bytes > self.capacity_bytes:
            raise InternalError("the store is above its budget")
        for entry in self.recency:
            if entry.pins or entry.doomed or entry.state is not State.READY:
                raise InternalError("a block that must stay could be evicted")
        if self.recency.saved_bytes != sum(entry.pool.block_bytes for entry in self.recency if entry.saved):
            raise InternalError("bytes of saved blocks do not add up")
        held = [*self.recency, *self._pinned]
        for pool in self._pools.values():
            pool.check(entry for entry in held if entry.pool is pool)
            if pool.num_pinned != sum(1 for entry in self._pinned if entry.pool is pool):
                raise InternalError("pins of a pool do not add up")
            if any(entry not in self.recency and entry not in self._pinned for entry in pool.index.values()):
                raise InternalError("a block can be found but is held by nobody")

    # Inside

    def _ready(self, pool: Pool, block_hash: BlockHash) -> Entry | None:
        entry = pool.index.get(block_hash)
        return entry if entry is not None and entry.state is State.READY else None

    def _prefix(self, pool: Pool, hashes: Sequence[BlockHash]) -> Iterator[Entry]:
        for block_hash in hashes:
            entry = self._ready(pool, block_hash)
            if entry is None:
                return
            yield entry

    def _pin(self, entry: Entry) -> None:
        if entry.pins == 0:
            self.recency.discard(entry)
            self._pinned.add(entry)
            entry.pool.num_pinned += 1
        entry.pins += 1

    def _unpin(self, entries: Sequence[Entry | None]) -> None:
        # From the chain's end to its head: the tail, worthless without the head, is evicted first.
        for entry in reversed(entries):
            if entry is not None and entry.state is not State.GONE:
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
            self.recency.add(entry, used=used)

    def _hide(self, entry: Entry) -> None:
        """Make an entry unfindable; its slot is free at once or with its last pin."""
        if entry.pool.index.get(entry.block_hash) is entry:
            del entry.pool.index[entry.block_hash]
        entry.doomed = True
        if entry.pins == 0:
            self.recency.discard(entry)
            self._free(entry)

    def _free(self, entry: Entry) -> None:
        entry.state = State.GONE
        entry.pool.put_back(entry.slot)

    def _take_slot(self, pool: Pool) -> int | None:
        while True:
            slot = pool.take_warm()
            if slot is not None:
                return slot
            if self.backed_bytes + pool.block_bytes <= self.capacity_bytes:
                return pool.take_cold()
            if any(other.cool() for other in self._pools.values() if other is not pool):
                continue
            victim = self.recency.pop()
            if victim is None:
                return None
            self._hide(victim)
            self.counters.evictions += 1

    def _pool_for(self, fingerprint: Fingerprint) -> Pool:
        key = fingerprint.digest()
        pool = self._pools.get(key)
        if pool is None:
            num_slots = min(self.capacity_bytes // fingerprint.block_bytes, MAX_SLOTS) if fingerprint.block_bytes else 0
            if num_slots < 1:
                raise InvalidRequestError(
                    f"a block of {fingerprint.block_bytes} bytes does not fit a store of {self.capacity_bytes}",
                    field="fingerprint.block_bytes",
                )
            if len(self._pools) >= self._max_pools:
                self._drop_oldest_pool()
            pool = self._pools[key] = Pool(fingerprint, KVArena(num_slots, fingerprint.block_bytes))
        self._pools.move_to_end(key)
        return pool

    def _drop_oldest_pool(self) -> None:
        pool = next((pool for pool in self._pools.values() if not pool.num_pinned), None)
        if pool is None:
            raise QueueFullError(
                f"{len(self._pools)} kinds of KV are in use, which is as many as this store takes",
                retry_after_s=RETRY_AFTER_S,
            )
        self._drop(pool)

    def _drop(self, pool: Pool) -> None:
        lost = 0
        for entry in [e for e in (*self.recency, *self._pinned) if e.pool is pool]:
            self.recency.discard(entry)
            self._pinned.discard(entry)
            lost += not entry.doomed
            self._free(entry)
        self.counters.evictions += lost
        pool.index.clear()
        pool.num_pinned = 0
        del self._pools[pool.key]
        self._on_close(pool)
