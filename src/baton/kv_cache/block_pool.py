"""Ownership of the blocks of a KV pool, and the prefix cache: which of them holds the KV of which hash.

A block is in one of three states::

    blank  --allocate-->  active  --release-->  blank            (no hash: nothing worth keeping)
                            |  ^
                            |  +--acquire-- cached --allocate--> active (evicted: its hash is forgotten)
                            +----release----> ^                  (registered by ``commit``)

Blank blocks are handed out before cached ones, cached ones least recently used first, with a part for each tenant
(:mod:`baton.kv_cache.block_pool`).
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
"""A tenant that has used nothing for so long has no part of its own any more."""
_MAX_IDLE = 1024
"""Tenants from which on those without blocks are forgotten."""


class _Tenant:
    __slots__ = ("blocks", "used_at")

    def __init__(self) -> None:
        self.blocks: OrderedDict[BlockId, int] = OrderedDict()
        """Free cached blocks, the least recently used first, each with the number of the release that freed it."""
        self.used_at = 0.0


class EvictionQueue:
    """The free cached blocks of a pool.

    Args:
        num_blocks: Blocks in the pool.
        share: Part of the pool that is divided among tenants, 0 to 1.
        clock: Seconds, monotonic.
    """

    def __init__(self, num_blocks: int, share: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._share, self._room, self._clock = share, int(share * num_blocks), clock
        nobody = _Tenant()
        self._tenants = {"": nobody}
        self._of = [nobody] * num_blocks
        self._num = self._releases = 0
        self._most = _MAX_IDLE

    def __len__(self) -> int:
        return self._num

    def __iter__(self) -> Iterator[BlockId]:
        return (block_id for tenant in self._tenants.values() for block_id in tenant.blocks)

    def own(self, block_id: BlockId, tenant: str) -> None:
        """Say whose a block is that is in use."""
        found = self._tenants.get(tenant if self._share else "")
        if found is None:
            if len(self._tenants) >= self._most:
                self._forget_idle()
            found = self._tenants[tenant] = _Tenant()
        self._of[block_id] = found

    def add(self, block_ids: Sequence[BlockId]) -> None:
        """Take blocks that are not in use any more, the one that goes first in front."""
        if not block_ids:
            return
        self._releases = now = self._releases + 1
        of = self._of
        for block_id in block_ids:
            of[block_id].blocks[block_id] = now
        of[block_ids[0]].used_at = self._clock()
        self._num += len(block_ids)

    def remove(self, block_id: BlockId) -> None:
        """Give back a block that is used again."""
        del self._of[block_id].blocks[block_id]
        self._num -= 1

    def pop(self, count: int) -> list[BlockId]:
        """Take out those that go first; there must be so many."""
        if len(self._tenants) == 1:
            popitem = self._tenants[""].blocks.popitem
            out = [popitem(last=False)[0] for _ in range(count)]
            self._num -= count
            return out
        out = []
        while len(out) < count:
            taken = self._pop_beyond_parts(count - len(out))
            self._num -= len(taken)
            out += taken
        return out

    def _pop_beyond_parts(self, count: int) -> list[BlockId]:
        """Take out the oldest of those that are beyond their tenants' parts: one at least, ``count`` at most."""
        lately = self._clock() - IDLE_S
        having = [tenant for tenant in self._tenants.values() if tenant.blocks]
        num_active = sum(tenant.used_at > lately for tenant in having)
        part = self._room // num_active if num_active > 1 else 0
        heap = []
        for at, tenant in enumerate(having):
            kept = part if tenant.used_at > lately else 0
            if len(tenant.blocks) > kept:
                heap.append((_oldest(tenant), at, kept))
        if not heap:  # none is beyond its part: who has most gives one, of several the one that was here last
            most = max(having, key=lambda tenant: (len(tenant.blocks), next(reversed(tenant.blocks.values()))))
            return [most.blocks.popitem(last=False)[0]]
        heapq.heapify(heap)
        out: list[BlockId] = []
        while heap and len(out) < count:
            _, at, kept = heap[0]
            blocks = having[at].blocks
            out.append(blocks.popitem(last=False)[0])
            if len(blocks) > kept:
                heapq.heapreplace(heap, (_oldest(having[at]), at, kept))
            else:
                heapq.heappop(heap)
        return out

    def clear(self) -> list[BlockId]:
        """Take out all."""
        everything = list(self)
        for tenant in self._tenants.values():
            tenant.blocks.clear()
        self._num = 0
        return everything

    def check_integrity(self) -> None:
        """Check that counts add up and every block lies with its tenant.

        Raises:
            AssertionError: They don't.
        """
        if self._num != sum(1 for _ in self):
            raise AssertionError("the free cached blocks are counted wrongly")
        for tenant in self._tenants.values():
            if any(self._of[block_id] is not tenant for block_id in tenant.blocks):
                raise AssertionError("a cached block lies with another tenant")

    def _forget_idle(self) -> None:
        """Forget tenants that have no blocks, cached or in use, so that names alone cannot fill the memory."""
        used = {id(tenant) for tenant in self._of}
        self._tenants = {name: each for name, each in self._tenants.items() if not name or id(each) in used}
        self._most = max(_MAX_IDLE, 2 * len(self._tenants))


def _oldest(tenant: _Tenant) -> int:
    return next(iter(tenant.blocks.values()))


class PrefixCache:
    """A map between block hashes and the blocks that hold their KV, one block per hash.

    It owns no memory: :class:`BlockPool` decides when a block's content goes.
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

    def put(self, block_id: BlockId, block_hash: BlockHash, parent: BlockHash | None) -> bool:
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
        found: list[BlockId] = []
        for block_hash in hashes:
            block_id = self._block_of.get(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def find(self, block_hash: BlockHash) -> BlockId | None:
        """Return the block that holds a hash's KV, or ``None``."""
        return self._block_of.get(block_hash)

    def drop(self, block_ids: Iterable[BlockId]) -> None:
        """Forget blocks whose memory gets another user; those that have no hash are skipped."""
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
        """Forget everything."""
        for block_id in self._block_of.values():
            self._hash_of[block_id] = self._parent_of[block_id] = None
        self._block_of.clear()
        if self._on_event is not None:
            self._on_event(CacheCleared())

    def snapshot(self) -> list[BlocksStored]:
        """Return what is cached as if it had just been stored: every run comes after the one that holds its parent.

        A chain whose beginning is gone starts with the hash of a parent that isn't cached.
        """
        children: dict[BlockHash | None, list[BlockHash]] = {}
        for block_hash, block_id in self._block_of.items():
            parent = self._parent_of[block_id]
            children.setdefault(parent, []).append(block_hash)
        starts = [(parent, child) for parent in children if parent not in self._block_of for child in children[parent]]
        runs: list[BlocksStored] = []
        todo = starts[::-1]
        while todo:
            parent, at = todo.pop()
            run = [at]
            while len(below := children.get(at, [])) == 1:
                at = below[0]
                run.append(at)
            runs.append(BlocksStored(parent, tuple(run)))
            todo.extend((at, child) for child in reversed(below))
        return runs

    def check_integrity(self) -> None:
        """Check that both directions of the map agree.

        Raises:
            AssertionError: They do not.
        """
        there = {block_hash: BlockId(i) for i, block_hash in enumerate(self._hash_of) if block_hash is not None}
        if there != self._block_of:
            raise AssertionError("prefix cache: the two directions of the map differ")


class BlockPool:
    """Reference counts, eviction order and the prefix cache of ``num_blocks`` blocks.

    Not thread-safe: one engine thread owns it.

    Attributes:
        num_blocks: Blocks in all.
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
            num_blocks: Blocks in the pool, ids 0 to ``num_blocks - 1``.
            generations: uint64 [num_blocks], shared with one-sided readers: raised before a block changes hands.
            on_event: Called with every change of the prefix cache.
            tenant_share: Part of them that is divided among tenants with cached blocks, 0 to 1.
            groups: Layer groups that have blocks of their own for the same hash. Events tell of the first one's.
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
        """Blocks without references, cached ones included."""
        return len(self._blank) + len(self._cached)

    @property
    def num_active(self) -> int:
        """Blocks with references."""
        return self.num_blocks - self.num_free

    @property
    def num_cached(self) -> int:
        """Blocks that can be found by their hash, held ones included."""
        return len(self._cache)

    def num_free_without(self, block_ids: Sequence[BlockId]) -> int:
        """Free blocks that would be left if these (a prefix hit) were held."""
        refs = self._refs
        return self.num_free - sum(1 for i in block_ids if refs[i] == 0)

    def allocate(self, count: int) -> list[BlockId] | None:
        """Hand out ``count`` blocks with one reference each, or ``None`` (and nothing is changed) if there are fewer.

        Generations are raised, and cached content is forgotten, before this returns.
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
        """Take one reference from each block.

        Goes from the last to the first, so that of a chain the tail is evicted before what it needs to be found.

        Args:
            block_ids: A sequence's blocks in its order.
        """
        refs, hash_of = self._refs, self._cache.hash_of if len(self._caches) == 1 else self._hash_of
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
            block_hash: Its chained hash.
            parent: Hash of the block before it, ``None`` for the first of a chain.
            tenant: Whose it is; empty: nobody's.
            group: Of the layers whose KV it has.
        """
        if self._refs[block_id] == 0:
            raise InternalError(f"block {block_id} is committed without being held")
        if self._caches[group].put(block_id, block_hash, parent):
            self._cached.own(block_id, tenant)

    def forget(self, block_ids: Sequence[BlockId]) -> None:
        """Take blocks that the caller holds out of the prefix cache: their KV is wrong. Who else holds them keeps them.

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
        """Return for each hash the block of a group, or ``None``; acquire what is used as after :meth:`match`."""
        return [self._caches[group].find(block_hash) for block_hash in hashes]

    def clear(self) -> None:
        """Forget all cached content; blocks in use stay with their holders."""
        for cache in self._caches:
            cache.clear()
        self._blank.extend(self._cached.clear())

    def clear_unused(self) -> int:
        """Forget the cached content that nobody holds; return how many blocks had some."""
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
        return next((found for cache in self._caches if (found := cache.hash_of(block_id)) is not None), None)

    def _drop(self, block_ids: Sequence[BlockId]) -> None:
        for cache in self._caches:
            cache.drop(block_ids)
