"""Ownership of the blocks of a KV pool, and the prefix cache: which block holds the KV of which hash.

A block is in one of three states::

    blank  --allocate-->  active  --release-->  blank            (no hash: nothing worth keeping)
                            |  ^
                            |  +--acquire-- cached --allocate--> active (evicted: its hash is forgotten)
                            +----release----> ^                  (registered by ``commit``)

Blank blocks are allocated before cached ones, and these in the order of :mod:`baton.kv_cache.eviction`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from baton.errors import InternalError
from baton.kv_cache.events import BlocksRemoved, BlocksStored, CacheCleared, KVEvent
from baton.kv_cache.eviction import EvictionQueue
from baton.kv_cache.usable_prefixes import UsablePrefixes
from baton.types import BlockHash, BlockId

STATES = 1
"""Group of the blocks that hold snapshots of recurrent states; models that have some have no layer groups."""


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
        clock: Callable[[], float] = time.monotonic,
        state_blocks: int = 0,
    ) -> None:
        """Begin with all blocks blank.

        Args:
            num_blocks: Number of blocks in the pool, with ids 0 to ``num_blocks - 1``.
            generations: Generation of each block, uint64 [num_blocks], shared with one-sided readers: raised before a
                block gets another user.
            on_event: Called with every change of the prefix cache of the first layer group, or of what of it is usable.
            tenant_share: Part of the pool that is divided among tenants with cached blocks, 0 to 1.
            groups: Number of layer groups that have blocks of their own for the same hash.
            clock: Monotonic clock in seconds.
            state_blocks: Number of blocks of a snapshot of recurrent states, which are group :data:`STATES` then; 0:
                there are none.
        """
        if len(generations) != num_blocks:
            raise InternalError(f"{len(generations)} generations for {num_blocks} blocks")
        self.num_blocks = num_blocks
        self._generations = generations
        self._refs = [0] * num_blocks
        self._blank = [BlockId(i) for i in range(num_blocks - 1, -1, -1)]
        self._cached = EvictionQueue(num_blocks, tenant_share, clock)
        self._usable: UsablePrefixes | None = None
        if state_blocks and on_event is not None:
            self._usable = UsablePrefixes(on_event, state_blocks)
            self._cache = PrefixCache(num_blocks, self._usable.on_kv_event)
            self._caches = [self._cache, PrefixCache(num_blocks, self._usable.on_state_event)]
            return
        self._cache = PrefixCache(num_blocks, on_event)
        self._caches = [
            self._cache,
            *(PrefixCache(num_blocks) for _ in range(1, STATES + 1 if state_blocks else groups)),
        ]

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

    @property
    def early_evictions(self) -> int:
        """Number of blocks evicted before older ones since their session's usual gap is long."""
        return self._cached.early_evictions

    @property
    def spared_blocks(self) -> int:
        """Number of times that a hint spared a block that was to be evicted."""
        return self._cached.spared_blocks

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

    def begin_turn(self, block_ids: Sequence[BlockId], tenant: str, session: bytes, retention_s: float = 0.0) -> None:
        """Begin a request of a conversation; call it before :meth:`acquire`.

        Args:
            block_ids: Blocks that it found; those of other sessions belong to none from now on.
            tenant: Tenant of the request; empty: no tenant.
            session: Key of the request's conversation; empty: none, then its hint has no effect.
            retention_s: Seconds for which the conversation's blocks are to be spared from their release on, a hint;
                below 0: this is its last request, its blocks are evicted first.
        """
        self._cached.begin_turn(block_ids, tenant, session, retention_s)

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
        self,
        block_id: BlockId,
        block_hash: BlockHash,
        parent: BlockHash | None,
        *,
        tenant: str = "",
        session: bytes = b"",
        group: int = 0,
    ) -> None:
        """Register a full block that the caller holds; if another block has that hash already, that one stays.

        Args:
            block_id: The block, whose KV is complete.
            block_hash: Chained hash of the block.
            parent: Hash of the block before it; ``None`` for the first of a chain.
            tenant: Tenant that owns the block; empty: no tenant.
            session: Conversation that owns it, as in :meth:`begin_turn`; empty: none.
            group: Index of the layer group whose KV the block holds.
        """
        if self._refs[block_id] == 0:
            raise InternalError(f"block {block_id} is committed without being held")
        if self._caches[group].register(block_id, block_hash, parent):
            self._cached.set_owner(block_id, tenant, session)

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
        """Return the cached chains, parents before children; with recurrent states what of them is usable."""
        runs = self._cache.snapshot()
        return runs if self._usable is None else self._usable.usable(runs)

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
