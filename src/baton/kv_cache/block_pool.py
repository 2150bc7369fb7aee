"""Ownership of the blocks of a KV pool, the prefix cache (which block holds the KV of which hash), and eviction.

A block is in one of three states::

    blank  --allocate-->  active  --release-->  blank            (no hash: nothing worth keeping)
                            |  ^
                            |  +--acquire-- cached --allocate--> active (evicted: its hash is forgotten)
                            +----release----> ^                  (registered by ``commit``)

Blank blocks are allocated before cached ones, cached ones least recently used first, with a fair share for each tenant:
part of the pool (``share``) is divided equally among the tenants that have cached blocks and used them lately. A
tenant's blocks beyond its part compete with all others' by recency; those within it are evicted only when there are no
others. So a tenant's new prompts evict its own blocks before the few of another one. With one tenant, or a share of 0,
this is plain LRU.
"""

from __future__ import annotations

import heapq
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from baton.errors import InternalError
from baton.kv_cache.events import BlocksRemoved, BlocksStored, CacheCleared, KVEvent
from baton.types import BlockHash, BlockId

IDLE_S = 600.0
"""Seconds without use after which a tenant has no part of its own."""
_MAX_IDLE = 1024
"""Number of tenants from which on those without blocks are removed."""


class _Tenant:
    # An ``OrderedDict`` is a linked list with a hash index in C: to remove the oldest entry, to add the youngest and to
    # remove one from the middle (a prefix hit) are each O(1) and about 0.1 us.
    __slots__ = ("blocks", "used_at")

    def __init__(self) -> None:
        self.blocks: OrderedDict[BlockId, int] = OrderedDict()
        """Free cached blocks, the least recently used first, each with the number of the release that freed it."""
        self.used_at = 0.0


class EvictionQueue:
    """The free cached blocks of a pool.

    Args:
        num_blocks: Number of blocks in the pool.
        share: Part of the pool that is divided among tenants, 0 to 1.
        clock: Monotonic clock in seconds.
    """

    def __init__(self, num_blocks: int, share: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._share = share
        self._num_shared = int(share * num_blocks)
        self._clock = clock
        no_tenant = _Tenant()
        self._tenants = {"": no_tenant}
        self._owner_of = [no_tenant] * num_blocks
        self._num = self._releases = 0
        self._max_tenants = _MAX_IDLE

    def __len__(self) -> int:
        return self._num

    def __iter__(self) -> Iterator[BlockId]:
        return (block_id for tenant in self._tenants.values() for block_id in tenant.blocks)

    def set_owner(self, block_id: BlockId, tenant: str) -> None:
        """Set the tenant that owns a block in use."""
        owner = self._tenants.get(tenant if self._share else "")
        if owner is None:
            if len(self._tenants) >= self._max_tenants:
                self._remove_idle_tenants()
            owner = self._tenants[tenant] = _Tenant()
        self._owner_of[block_id] = owner

    def add(self, block_ids: Sequence[BlockId]) -> None:
        """Add blocks that are not in use any more, the one to evict first in front."""
        if not block_ids:
            return
        self._releases = now = self._releases + 1
        owner_of = self._owner_of
        for block_id in block_ids:
            owner_of[block_id].blocks[block_id] = now
        owner_of[block_ids[0]].used_at = self._clock()
        self._num += len(block_ids)

    def remove(self, block_id: BlockId) -> None:
        """Remove a block that is used again."""
        del self._owner_of[block_id].blocks[block_id]
        self._num -= 1

    def pop(self, count: int) -> list[BlockId]:
        """Remove and return the ``count`` blocks to evict first; there must be that many."""
        if len(self._tenants) == 1:
            popitem = self._tenants[""].blocks.popitem
            out = [popitem(last=False)[0] for _ in range(count)]
            self._num -= count
            return out
        out = []
        while len(out) < count:
            popped = self._pop_beyond_parts(count - len(out))
            self._num -= len(popped)
            out += popped
        return out

    def _pop_beyond_parts(self, count: int) -> list[BlockId]:
        """Remove and return the oldest blocks beyond their tenants' parts, between 1 and ``count``; O(tenants)."""
        lately = self._clock() - IDLE_S
        tenants = [tenant for tenant in self._tenants.values() if tenant.blocks]
        num_active = sum(tenant.used_at > lately for tenant in tenants)
        part = self._num_shared // num_active if num_active > 1 else 0
        heap = []
        for index, tenant in enumerate(tenants):
            protected = part if tenant.used_at > lately else 0
            if len(tenant.blocks) > protected:
                heap.append((_oldest(tenant), index, protected))
        if not heap:  # none is beyond its part: evict from the tenant with most blocks, of several the latest user
            most = max(tenants, key=lambda tenant: (len(tenant.blocks), next(reversed(tenant.blocks.values()))))
            return [most.blocks.popitem(last=False)[0]]
        heapq.heapify(heap)
        out: list[BlockId] = []
        while heap and len(out) < count:
            _, index, protected = heap[0]
            blocks = tenants[index].blocks
            out.append(blocks.popitem(last=False)[0])
            if len(blocks) > protected:
                heapq.heapreplace(heap, (_oldest(tenants[index]), index, protected))
            else:
                heapq.heappop(heap)
        return out

    def clear(self) -> list[BlockId]:
        """Remove and return all blocks."""
        everything = list(self)
        for tenant in self._tenants.values():
            tenant.blocks.clear()
        self._num = 0
        return everything

    def check_integrity(self) -> None:
        """Check that counts add up and every block is in its tenant's queue.

        Raises:
            AssertionError: They don't.
        """
        if self._num != sum(1 for _ in self):
            raise AssertionError("the free cached blocks are counted wrongly")
        for tenant in self._tenants.values():
            if any(self._owner_of[block_id] is not tenant for block_id in tenant.blocks):
                raise AssertionError("a cached block lies with another tenant")

    def _remove_idle_tenants(self) -> None:
        """Remove tenants that have no blocks, cached or in use, so that names alone cannot fill the memory."""
        used = {id(tenant) for tenant in self._owner_of}
        self._tenants = {name: each for name, each in self._tenants.items() if not name or id(each) in used}
        self._max_tenants = max(_MAX_IDLE, 2 * len(self._tenants))


def _oldest(tenant: _Tenant) -> int:
    return next(iter(tenant.blocks.values()))


class PrefixCache:
    """A map between block hashes and the blocks that hold their KV, one block per hash.

    It owns no memory: :class:`BlockPool` decides when a block's content is dropped.
    """

    def __init__(self, num_blocks: int, on_event: Callable[[KVEvent], None] | None = None) -> None:
        self._block_of: dict[BlockHash, BlockId] = {}
        self._hash_of: list[BlockHash | None] = [None] * num_blocks
        self._parent_of: list[BlockHash | None] = [None] * num_blocks
        self._on_event = on_event

    def __len__(self) -> int:
        return len(self._block_of)

    def hash_of(self, block_id: BlockId) -> BlockHash | None:
        """Return the hash under which a block is found, or ``None``."""
        return self._hash_of[block_id]

    def register(self, block_id: BlockId, block_hash: BlockHash, parent: BlockHash | None) -> bool:
        """Register a full block; returns ``False`` if another block already holds that hash (the first one stays)."""
        if self._block_of.setdefault(block_hash, block_id) != block_id:
            return False
        if self._hash_of[block_id] == block_hash:
            return True
        if self._hash_of[block_id] is not None:
            raise ValueError(f"block {block_id} is registered under another hash already")
        self._hash_of[block_id] = block_hash
        self._parent_of[block_id] = parent
        if self._on_event is not None:
            self._on_event(BlocksStored(parent, (block_hash,)))
        return True

    def match(self, hashes: Sequence[BlockHash]) -> list[BlockId]:
        """Return the blocks of the longest known prefix of a chain."""
        block_ids: list[BlockId] = []
        for block_hash in hashes:
            block_id = self._block_of.get(block_hash)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def find(self, block_hash: BlockHash) -> BlockId | None:
        """Return the block that holds a hash's KV, or ``None``."""
        return self._block_of.get(block_hash)

    def drop(self, block_ids: Iterable[BlockId]) -> None:
        """Remove blocks whose memory gets another user; those without a hash are skipped."""
        gone: list[BlockHash] = []
        for block_id in block_ids:
            block_hash = self._hash_of[block_id]
            if block_hash is None:
                continue
            del self._block_of[block_hash]
            self._hash_of[block_id] = self._parent_of[block_id] = None
            gone.append(block_hash)
        if gone and self._on_event is not None:
            self._on_event(BlocksRemoved(tuple(gone)))

    def clear(self) -> None:
        """Remove all blocks."""
        for block_id in self._block_of.values():
            self._hash_of[block_id] = self._parent_of[block_id] = None
        self._block_of.clear()
        if self._on_event is not None:
            self._on_event(CacheCleared())

    def snapshot(self) -> list[BlocksStored]:
        """Return the cached blocks as if they had just been stored, every run after the one that holds its parent.

        A chain whose beginning was evicted starts with a parent that is not cached.
        """
        children: dict[BlockHash | None, list[BlockHash]] = {}
        for block_hash, block_id in self._block_of.items():
            parent = self._parent_of[block_id]
            children.setdefault(parent, []).append(block_hash)
        starts = [(parent, child) for parent in children if parent not in self._block_of for child in children[parent]]
        runs: list[BlocksStored] = []
        todo = starts[::-1]
        while todo:
            parent, last = todo.pop()
            run = [last]
            while len(below := children.get(last, [])) == 1:
                last = below[0]
                run.append(last)
            runs.append(BlocksStored(parent, tuple(run)))
            todo.extend((last, child) for child in reversed(below))
        return runs

    def check_integrity(self) -> None:
        """Check that both directions of the map agree.

        Raises:
            AssertionError: They do not.
        """
        reverse = {block_hash: BlockId(i) for i, block_hash in enumerate(self._hash_of) if block_hash is not None}
        if reverse != self._block_of:
            raise AssertionError("prefix cache: the two directions of the map differ")


class BlockPool:
    """Reference counts, eviction order and the prefix cache of ``num_blocks`` blocks.

    Not thread-safe: one engine thread owns it.

    Attributes:
        num_blocks: Number of blocks in the pool.
    """

    def __init__(
        self,
        num_blocks: int,
        generations: npt.NDArray[np.uint64],
        on_event: Callable[[KVEvent], None] | None = None,
        tenant_share: float = 0.0,
        groups: int = 1,
    ) -> None:
        """Begin with all blocks blank.

        Args:
            num_blocks: Number of blocks in the pool, with ids 0 to ``num_blocks - 1``.
            generations: Generation of each block, uint64 [num_blocks], shared with one-sided readers: raised before a
                block gets another user.
            on_event: Called with every change of the prefix cache of the first layer group.
            tenant_share: Part of the pool that is divided among tenants with cached blocks, 0 to 1.
            groups: Number of layer groups that have blocks of their own for the same hash.
        """
        if len(generations) != num_blocks:
            raise InternalError(f"{len(generations)} generations for {num_blocks} blocks")
        self.num_blocks = num_blocks
        self._generations = generations
        self._refs = [0] * num_blocks
        self._blank = [BlockId(i) for i in range(num_blocks - 1, -1, -1)]
        self._cached = EvictionQueue(num_blocks, tenant_share)
        self._cache = PrefixCache(num_blocks, on_event)
        self._caches = [self._cache, *(PrefixCache(num_blocks) for _ in range(1, groups))]

    @property
    def num_free(self) -> int:
        """Number of blocks without references, cached ones included."""
        return len(self._blank) + len(self._cached)

    @property
    def num_active(self) -> int:
        """Number of blocks with references."""
        return self.num_blocks - self.num_free

    @property
    def num_cached(self) -> int:
        """Number of blocks that can be found by their hash, those in use included."""
        return len(self._cache)

    def num_free_without(self, block_ids: Sequence[BlockId]) -> int:
        """Return the number of free blocks that would be left if these (a prefix hit) were acquired."""
        refs = self._refs
        return self.num_free - sum(1 for i in block_ids if refs[i] == 0)

    def allocate(self, count: int) -> list[BlockId] | None:
        """Allocate ``count`` blocks with one reference each; ``None``, without any change, if there are fewer.

        Generations are raised, and cached content is dropped, before this returns.
        """
        if count > self.num_free:
            return None
        if count <= 0:
            return []
        blank = min(count, len(self._blank))
        ids = self._blank[len(self._blank) - blank :][::-1]
        del self._blank[len(self._blank) - blank :]
        if blank < count:
            evicted = self._cached.pop(count - blank)
            self._drop(evicted)
            ids += evicted
        refs = self._refs
        for block_id in ids:
            refs[block_id] = 1
        self._generations[ids] += np.uint64(1)
        return ids

    def acquire(self, block_ids: Sequence[BlockId]) -> None:
        """Add a reference to blocks that :meth:`match` found or that have one already."""
        refs = self._refs
        for block_id in block_ids:
            if refs[block_id] == 0:
                self._cached.remove(block_id)
            refs[block_id] += 1

    def release(self, block_ids: Sequence[BlockId]) -> None:
        """Remove one reference from each block.

        Proceeds from the last block to the first, so that the tail of a chain is evicted before its head.

        Args:
            block_ids: Blocks of a sequence, in its order.
        """
        refs = self._refs
        hash_of = self._cache.hash_of if len(self._caches) == 1 else self._hash_of
        cached: list[BlockId] = []
        for block_id in reversed(block_ids):
            count = refs[block_id] - 1
            if count < 0:
                raise InternalError(f"block {block_id} was released more often than taken")
            refs[block_id] = count
            if count == 0:
                if hash_of(block_id) is None:
                    self._blank.append(block_id)
                else:
                    cached.append(block_id)
        self._cached.add(cached)

    def commit(
        self, block_id: BlockId, block_hash: BlockHash, parent: BlockHash | None, *, tenant: str = "", group: int = 0
    ) -> None:
        """Register a full block that the caller holds; if another block has that hash already, that one stays.

        Args:
            block_id: The block, whose KV is complete.
            block_hash: Chained hash of the block.
            parent: Hash of the block before it; ``None`` for the first of a chain.
            tenant: Tenant that owns the block; empty: no tenant.
            group: Index of the layer group whose KV the block holds.
        """
        if self._refs[block_id] == 0:
            raise InternalError(f"block {block_id} is committed without being held")
        if self._caches[group].register(block_id, block_hash, parent):
            self._cached.set_owner(block_id, tenant)

    def forget(self, block_ids: Sequence[BlockId]) -> None:
        """Remove blocks that the caller holds from the prefix cache because their KV is wrong; other users keep them.

        Args:
            block_ids: The blocks; those that are not registered are skipped.
        """
        if not all(self._refs[block_id] for block_id in block_ids):
            raise InternalError("blocks are forgotten without being held")
        self._drop(block_ids)

    def match(self, hashes: Sequence[BlockHash]) -> list[BlockId]:
        """Return the blocks of the longest cached prefix; :meth:`acquire` them before anything else is allocated."""
        return self._cache.match(hashes)

    def find(self, hashes: Sequence[BlockHash], group: int) -> list[BlockId | None]:
        """Return for each hash the block of a group, or ``None``; acquire the blocks as after :meth:`match`."""
        return [self._caches[group].find(block_hash) for block_hash in hashes]

    def clear(self) -> None:
        """Drop all cached content; blocks in use stay with their users."""
        for cache in self._caches:
            cache.clear()
        self._blank.extend(self._cached.clear())

    def clear_unused(self) -> int:
        """Drop the cached content of blocks without references; return the number of these blocks."""
        unused = self._cached.clear()
        self._drop(unused)
        self._blank.extend(unused)
        return len(unused)

    def snapshot(self) -> list[BlocksStored]:
        """Return the cached chains, parents before children."""
        return self._cache.snapshot()

    def check_integrity(self, *, idle: bool = False) -> None:
        """Check that free lists, references and cache agree.

        Args:
            idle: Also check that no block is held.

        Raises:
            AssertionError: A block is lost, listed twice, or held though it should not be.
        """
        free = [*self._blank, *self._cached]
        if len(set(free)) != len(free):
            raise AssertionError("a block is free twice")
        if {i for i, count in enumerate(self._refs) if count == 0} != set(free):
            raise AssertionError("the free lists are not the blocks without references")
        if any(self._hash_of(i) is not None for i in self._blank):
            raise AssertionError("a blank block has a hash")
        if any(self._hash_of(i) is None for i in self._cached):
            raise AssertionError("a cached block has no hash")
        self._cached.check_integrity()
        for cache in self._caches:
            cache.check_integrity()
        if idle and self.num_active:
            raise AssertionError(f"{self.num_active} blocks are held although nothing runs")

    def _hash_of(self, block_id: BlockId) -> BlockHash | None:
        hashes = (cache.hash_of(block_id) for cache in self._caches)
        return next((block_hash for block_hash in hashes if block_hash is not None), None)

    def _drop(self, block_ids: Sequence[BlockId]) -> None:
        for cache in self._caches:
            cache.drop(block_ids)
