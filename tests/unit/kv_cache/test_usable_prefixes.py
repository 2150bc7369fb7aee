"""KV of recurrent models is announced as far as a snapshot of the states makes it usable."""

from __future__ import annotations

import hashlib

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from baton.hashing import state_hashes
from baton.kv_cache.block_pool import STATES, BlockPool
from baton.kv_cache.events import BlocksRemoved, BlocksStored, CacheCleared, KVEvent
from baton.types import BlockHash, BlockId

NUM_BLOCKS, STATE_BLOCKS = 12, 2
paths = st.lists(st.integers(0, 1), min_size=1, max_size=5)


def chain(path: list[int]) -> list[BlockHash]:
    return [BlockHash(hashlib.sha256(bytes(path[: end + 1])).digest()) for end in range(len(path))]


class UsablePool(RuleBasedStateMachine):
    """Random sequences, snapshots and evictions; a listener rebuilds the cache from events alone."""

    def __init__(self) -> None:
        super().__init__()
        self.announced: dict[BlockHash, BlockHash | None] = {}
        generations = np.zeros(NUM_BLOCKS, np.uint64)
        self.pool = BlockPool(NUM_BLOCKS, generations, self.listen, state_blocks=STATE_BLOCKS)

    def listen(self, event: KVEvent) -> None:
        match event:
            case BlocksStored(parent, hashes):
                for block_hash in hashes:
                    assert block_hash not in self.announced
                    self.announced[block_hash] = parent
                    parent = block_hash
            case BlocksRemoved(hashes):
                for block_hash in hashes:
                    del self.announced[block_hash]
            case CacheCleared():
                self.announced.clear()

    def commit(self, hashes: list[BlockHash], parents: list[BlockHash | None], group: int) -> None:
        blocks = self.pool.allocate(len(hashes))
        if blocks is not None:
            for block, block_hash, parent in zip(blocks, hashes, parents, strict=True):
                self.pool.commit(block, block_hash, parent, group=group)
            self.pool.release(blocks)

    @rule(path=paths)
    def compute(self, path: list[int]) -> None:
        hashes = chain(path)
        held = self.pool.match(hashes)
        self.pool.acquire(held)
        self.commit(hashes[len(held) :], [None, *hashes][len(held) : len(hashes)], 0)
        self.pool.release(held)

    @rule(path=paths)
    def snapshot(self, path: list[int]) -> None:
        hashes = chain(path)
        held = self.pool.match(hashes)
        if len(held) == len(hashes) and self.pool.find(hashes[-1:], STATES) == [None]:
            self.pool.acquire(held)
            self.commit(state_hashes(hashes[-1], STATE_BLOCKS), [None] * STATE_BLOCKS, STATES)
            self.pool.release(held)

    @rule(count=st.integers(1, 9))
    def evict(self, count: int) -> None:
        blocks = self.pool.allocate(count)
        if blocks is not None:
            self.pool.release(blocks)

    @rule(path=paths, part=st.integers(0, STATE_BLOCKS), group=st.sampled_from([0, STATES]))
    def forget(self, path: list[int], part: int, group: int) -> None:
        name = chain(path)[-1]
        hashes = [name] if group == 0 else state_hashes(name, STATE_BLOCKS)[:part]
        blocks = [block for block in self.pool.find(hashes, group) if block is not None]
        self.pool.acquire(blocks)
        self.pool.forget(blocks)
        self.pool.release(blocks)

    @rule()
    def clear(self) -> None:
        self.pool.clear()

    @invariant()
    def announced_is_what_a_snapshot_lies_below(self) -> None:
        kv, states = (cache._block_of for cache in self.pool._caches)
        for block_hash in kv:
            below = [
                name for name in kv_chains_below(block_hash) if set(state_hashes(name, STATE_BLOCKS)) <= set(states)
            ]
            assert (block_hash in self.announced) == bool(below)
        assert self.announced.keys() <= kv.keys()

    @invariant()
    def a_resync_says_the_same(self) -> None:
        found = {}
        for run in self.pool.snapshot():
            parent = run.parent
            for block_hash in run.hashes:
                found[block_hash] = parent
                parent = block_hash
        assert found == self.announced
        self.pool.check_integrity(idle=True)


EVERY = [[(number >> bit) & 1 for bit in range(length)] for length in range(1, 6) for number in range(1 << length)]
HASHES = {tuple(path): chain(path)[-1] for path in EVERY}
BELOW = {
    name: [other for deeper, other in HASHES.items() if deeper[: len(path)] == path] for path, name in HASHES.items()
}


def kv_chains_below(block_hash: BlockHash) -> list[BlockHash]:
    return BELOW[block_hash]


TestUsablePool = UsablePool.TestCase
TestUsablePool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_states_of_no_listener_are_kept_all_the_same() -> None:
    pool = BlockPool(4, np.zeros(4, np.uint64), state_blocks=1)
    (block,) = pool.allocate(1) or [BlockId(-1)]
    pool.commit(block, chain([0])[0], None, group=STATES)
    pool.release([block])
    assert pool.find(chain([0]), STATES) == [block]
