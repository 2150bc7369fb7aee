"""Events of the KV that a request can begin with, where it needs a snapshot of recurrent states too.

A cached prefix of a recurrent model is of use up to its last snapshot. So a block's KV is announced while a snapshot
lies at its end or further down its chain: the index of a router then finds what the engine finds, but for prompts that
part from a chain between two of its snapshots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from baton.hashing import state_hashes
from baton.kv_cache.events import BlocksRemoved, BlocksStored, CacheCleared, KVEvent
from baton.types import BlockHash


class UsablePrefixes:
    """Turns the events of two prefix caches, of KV and of snapshots, into those of usable KV.

    Args:
        on_event: Called with each event.
        state_blocks: Number of blocks of a snapshot, at least 1.
    """

    def __init__(self, on_event: Callable[[KVEvent], None], state_blocks: int) -> None:
        self._on_event = on_event
        self._state_blocks = state_blocks
        self._stored: set[BlockHash] = set()
        self._parent_of: dict[BlockHash, BlockHash | None] = {}
        """Of blocks whose KV is stored, or was when a snapshot came that is still there."""
        self._num_snapshots: dict[BlockHash, int] = {}
        """Number of complete snapshots at a block's end and further down."""
        self._missing: dict[BlockHash, set[BlockHash]] = {}
        """Of each snapshot, by the hash that it is named after, the blocks that are not stored."""
        self._snapshot_of: dict[BlockHash, BlockHash] = {}

    def on_kv_event(self, event: KVEvent) -> None:
        """Handle a change of the stored KV."""
        match event:
            case BlocksStored(parent, hashes):
                for block_hash in hashes:
                    self._stored.add(block_hash)
                    self._parent_of[block_hash] = parent
                    if block_hash in self._num_snapshots:
                        self._on_event(BlocksStored(parent, (block_hash,)))
                    parent = block_hash
            case BlocksRemoved(hashes):
                self._stored.difference_update(hashes)
                announced = tuple(block_hash for block_hash in hashes if block_hash in self._num_snapshots)
                for block_hash in set(hashes).difference(announced):
                    self._parent_of.pop(block_hash, None)
                if announced:
                    self._on_event(BlocksRemoved(announced))
            case CacheCleared():
                for state in (self._stored, self._parent_of, self._num_snapshots, self._missing, self._snapshot_of):
                    state.clear()
                self._on_event(event)

    def on_state_event(self, event: KVEvent) -> None:
        """Handle a change of the stored snapshots."""
        match event:
            case BlocksStored(_, hashes):
                for block_hash in hashes:
                    self._add_state(block_hash)
            case BlocksRemoved(hashes):
                for block_hash in hashes:
                    self._remove_state(block_hash)
            case CacheCleared():
                pass  # the KV was cleared before

    def usable(self, runs: list[BlocksStored]) -> list[BlocksStored]:
        """Return the usable beginnings of runs of stored KV."""
        usable = []
        for run in runs:
            count = sum(1 for block_hash in run.hashes if block_hash in self._num_snapshots)
            if count:
                usable.append(BlocksStored(run.parent, run.hashes[:count]))
        return usable

    def _add_state(self, block_hash: BlockHash) -> None:
        name = self._snapshot_of.get(block_hash)
        if name is None:  # the first block, which has the name of the snapshot
            name = block_hash
            every = state_hashes(name, self._state_blocks)
            self._snapshot_of.update(dict.fromkeys(every, name))
            self._missing[name] = set(every)
        self._missing[name].discard(block_hash)
        if not self._missing[name]:
            self._count(name, 1)

    def _remove_state(self, block_hash: BlockHash) -> None:
        name = self._snapshot_of[block_hash]
        missing = self._missing[name]
        if not missing:
            self._count(name, -1)
        missing.add(block_hash)
        if len(missing) == self._state_blocks:
            del self._missing[name]
            for each in missing:
                del self._snapshot_of[each]

    def _count(self, name: BlockHash, change: int) -> None:
        """Count a snapshot that came or went; announces the KV that becomes usable by it, or no longer is."""
        changed = []
        for block_hash in self._chain_to(name):
            before = self._num_snapshots.get(block_hash, 0)
            self._num_snapshots[block_hash] = before + change
            if not before + change:
                del self._num_snapshots[block_hash]
            if 0 in (before, before + change):
                changed.append(block_hash)
        stored = [block_hash for block_hash in changed if block_hash in self._stored]
        if change > 0:
            for block_hash in reversed(stored):
                self._on_event(BlocksStored(self._parent_of[block_hash], (block_hash,)))
            return
        if stored:
            self._on_event(BlocksRemoved(tuple(stored)))
        for block_hash in set(changed).difference(stored):
            del self._parent_of[block_hash]

    def _chain_to(self, block_hash: BlockHash | None) -> Iterator[BlockHash]:
        """Walk a chain from a block up to its beginning."""
        while block_hash is not None and block_hash in self._parent_of:
            parent = self._parent_of[block_hash]
            yield block_hash
            block_hash = parent
