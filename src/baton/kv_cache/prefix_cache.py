"""Which block holds the KV of which hash, and the events that tell others so."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from baton.kv_cache.events import DEVICE, BlocksRemoved, BlocksStored, CacheCleared, KVEvent
from baton.types import BlockHash, BlockId


class PrefixCache:
    """A map between block hashes and the blocks that hold their KV, one block per hash.

    It owns no memory: :class:`~baton.kv_cache.block_pool.BlockPool` decides when a block's content goes.
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


def merge_events(events: Iterable[KVEvent]) -> list[KVEvent]:
    """Join neighbours: a run and its continuation, removals that follow one another. Order is kept."""
    merged: list[KVEvent] = []
    stored: list[BlockHash] = []
    removed: list[BlockHash] = []
    parent: BlockHash | None = None
    tier = DEVICE

    def flush() -> None:
        if stored:
            merged.append(BlocksStored(parent, tuple(stored), tier))
            stored.clear()
        if removed:
            merged.append(BlocksRemoved(tuple(removed), tier))
            removed.clear()

    for event in events:
        if event.tier != tier:
            flush()
            tier = event.tier
        if isinstance(event, BlocksStored):
            # Parents are not known in lower tiers, so any two runs go together.
            if not stored or (tier == DEVICE and stored[-1] != event.parent):
                flush()
                parent = event.parent
            stored.extend(event.hashes)
        elif isinstance(event, BlocksRemoved):
            if stored:
                flush()
            removed.extend(event.hashes)
        else:
            flush()
            merged.append(event)
    flush()
    return merged
