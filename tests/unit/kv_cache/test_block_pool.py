"""Block pool and prefix cache: a model-based property test, and the promises one by one."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from baton.errors import InternalError
from baton.kv_cache.block_pool import BlockPool
from baton.kv_cache.events import BlocksRemoved, BlocksStored, CacheCleared, KVEvent
from baton.types import BlockHash, BlockId

NUM_BLOCKS = 12


def hash_of(*tokens: int) -> BlockHash:
    return BlockHash(hashlib.sha256(repr(tokens).encode()).digest())


def chain(*tokens: int) -> list[BlockHash]:
    return [hash_of(*tokens[: i + 1]) for i in range(len(tokens))]


def make_pool(num_blocks: int = NUM_BLOCKS) -> tuple[BlockPool, np.ndarray, list[KVEvent]]:
    generations = np.zeros(num_blocks, np.uint64)
    events: list[KVEvent] = []
    return BlockPool(num_blocks, generations, events.append), generations, events


def fill(pool: BlockPool, hashes: list[BlockHash]) -> list[BlockId]:
    blocks = pool.allocate(len(hashes))
    assert blocks is not None
    for i, (block, block_hash) in enumerate(zip(blocks, hashes, strict=True)):
        pool.commit(block, block_hash, hashes[i - 1] if i else None)
    return blocks


class PoolMachine(RuleBasedStateMachine):
    """Random sequences that match, allocate, commit and release, against plain dictionaries."""

    sequences = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.generations, self.events = make_pool()
        self.seen = 0
        self.told: set[BlockHash] = set()
        self.live: list[list[BlockId]] = []

    @rule(target=sequences, tokens=st.lists(st.integers(0, 2), min_size=1, max_size=6))
    def begin(self, tokens: list[int]) -> object:
        hashes = chain(*tokens)
        found = self.pool.match(hashes)
        room = self.pool.num_free_without(found) >= len(hashes) - len(found)
        self.pool.acquire(found)
        before, free = self.generations.copy(), self.pool.num_free
        new = self.pool.allocate(len(hashes) - len(found))
        assert (new is not None) == room
        if new is None:
            assert self.pool.num_free == free
            assert (self.generations == before).all()
            self.pool.release(found)
            return multiple()
        changed = np.flatnonzero(self.generations != before).tolist()
        assert sorted(changed) == sorted(new)
        held = {block for blocks in self.live for block in blocks} | set(found)
        assert not held & set(new)
        blocks = found + new
        for i in range(len(found), len(blocks)):
            self.pool.commit(blocks[i], hashes[i], hashes[i - 1] if i else None)
        assert len(self.pool.match(hashes)) == len(hashes)
        self.live.append(blocks)
        return blocks

    @rule(blocks=consumes(sequences))
    def end(self, blocks: list[BlockId]) -> None:
        self.live.remove(blocks)
        self.pool.release(blocks)

    @rule()
    def clear(self) -> None:
        self.pool.clear()
        assert self.pool.num_cached == 0

    @rule()
    def clear_unused(self) -> None:
        before = self.pool.num_cached
        assert self.pool.clear_unused() == before - self.pool.num_cached
        assert self.pool.num_cached <= self.pool.num_active

    @invariant()
    def books_balance(self) -> None:
        self.pool.check_integrity(idle=not self.live)
        assert self.pool.num_active == len({block for blocks in self.live for block in blocks})

    @invariant()
    def events_tell_the_cache(self) -> None:
        for event in self.events[self.seen :]:
            if isinstance(event, BlocksStored):
                assert not self.told & set(event.hashes)
                self.told |= set(event.hashes)
            elif isinstance(event, BlocksRemoved):
                assert set(event.hashes) <= self.told
                self.told -= set(event.hashes)
            else:
                self.told.clear()
        self.seen = len(self.events)
        snapshot = [block_hash for run in self.pool.snapshot() for block_hash in run.hashes]
        assert len(snapshot) == len(set(snapshot)) == self.pool.num_cached
        assert set(snapshot) == self.told


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_allocation_is_all_or_nothing() -> None:
    pool, generations, _ = make_pool(4)
    assert pool.allocate(3) == [0, 1, 2]
    assert pool.allocate(2) is None
    assert generations.tolist() == [1, 1, 1, 0]
    assert pool.num_free == 1


def test_tail_of_a_chain_is_evicted_first_and_blank_blocks_before_it() -> None:
    pool, _, events = make_pool(4)
    hashes = chain(1, 2, 3)
    blocks = fill(pool, hashes)
    pool.release(blocks)
    assert pool.allocate(1) == [3]
    assert pool.allocate(1) == [blocks[2]]
    assert events[-1] == BlocksRemoved((hashes[2],))
    assert pool.match(hashes) == blocks[:2]


def test_least_recently_used_chain_goes_first() -> None:
    pool, _, _ = make_pool(4)
    old, young = chain(1, 2), chain(7, 8)
    old_blocks = fill(pool, old)
    pool.release(old_blocks)
    young_blocks = fill(pool, young)
    pool.release(young_blocks)
    pool.acquire(pool.match(old))
    pool.release(old_blocks)
    assert pool.allocate(2) == young_blocks[::-1]
    assert pool.match(old) == old_blocks


def test_a_hit_is_shared_and_survives_its_first_holder() -> None:
    pool, _, _ = make_pool(4)
    hashes = chain(1, 2)
    blocks = fill(pool, hashes)
    pool.acquire(pool.match(hashes))
    pool.release(blocks)
    assert pool.num_active == 2
    assert pool.allocate(3) is None
    pool.release(blocks)
    assert pool.num_active == 0
    assert pool.num_cached == 2


def test_the_first_block_of_a_hash_stays() -> None:
    pool, _, events = make_pool(4)
    hashes = chain(1)
    first, second = fill(pool, hashes), fill(pool, hashes)
    assert pool.match(hashes) == first
    assert len(events) == 1
    pool.release(second)
    pool.check_integrity()
    assert pool.num_free == 3
    assert pool.num_cached == 1


def test_what_nobody_holds_is_forgotten_and_told_of() -> None:
    pool, _, events = make_pool(5)
    held, free = fill(pool, chain(1, 2)), fill(pool, chain(5))
    pool.release(free)
    assert pool.clear_unused() == 1
    assert events[-1] == BlocksRemoved((chain(5)[0],))
    assert pool.match(chain(1, 2)) == held
    assert pool.match(chain(5)) == []
    assert (pool.num_cached, pool.num_active, pool.num_free) == (2, 2, 3)
    assert pool.clear_unused() == 0
    pool.release(held)
    assert pool.clear_unused() == 2
    pool.check_integrity(idle=True)


def test_clear_forgets_cached_content_and_leaves_holders_alone() -> None:
    pool, _, events = make_pool(4)
    held, free = fill(pool, chain(1, 2)), fill(pool, chain(5))
    pool.release(free)
    pool.clear()
    assert events[-1] == CacheCleared()
    assert pool.match(chain(1)) == []
    assert pool.num_active == 2
    pool.release(held)
    pool.check_integrity(idle=True)
    assert pool.num_free == 4


def test_release_of_a_free_block_is_refused() -> None:
    pool, _, _ = make_pool(2)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.release(blocks)
    with pytest.raises(InternalError, match="more often"):
        pool.release(blocks)


def test_commit_of_a_free_block_is_refused() -> None:
    pool, _, _ = make_pool(2)
    with pytest.raises(InternalError, match="without being held"):
        pool.commit(BlockId(0), hash_of(1), None)


def test_integrity_check_sees_a_leak() -> None:
    pool, _, _ = make_pool(2)
    pool.allocate(1)
    pool.check_integrity()
    with pytest.raises(AssertionError, match="1 blocks are held"):
        pool.check_integrity(idle=True)
