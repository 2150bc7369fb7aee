"""The store's logic alone: budget, recency, leases, two-phase puts. Real arenas, a clock of the test's own."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.support.transport.named_blocks import names
from tests.support.transport.store_check import check_store

from baton.errors import InternalError, InvalidRequestError, QueueFullError
from baton.kv_cache.fingerprint import Fingerprint
from baton.kv_cache.layout import KVLayout, LayerShape
from baton.types import BlockHash
from baton_kvstore.memory.pool import Pool
from baton_kvstore.memory.store import BlockStore, Reservation


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def fingerprint(model: str = "m", block_bytes: int = 4096) -> Fingerprint:
    layout = KVLayout((LayerShape(1, 1, 1),), 16, "float32")
    return replace(Fingerprint.of(model=model, model_digest=model, rope="", layout=layout), block_bytes=block_bytes)


def make(
    blocks: int = 4, *, block_bytes: int = 4096, max_leases: int = 8, max_pools: int = 4
) -> tuple[BlockStore, Clock]:
    clock = Clock()
    return BlockStore(blocks * block_bytes, max_pools=max_pools, max_leases=max_leases, clock=clock), clock


def put(store: BlockStore, kind: Fingerprint, *labels: int) -> list[bool]:
    reservation = store.reserve(kind, names(*labels))
    return store.commit(reservation, [True] * len(reservation.missing))


KIND = fingerprint()


def test_what_was_put_is_found_and_only_as_a_prefix() -> None:
    store, _ = make()
    assert put(store, KIND, 1, 2, 3) == [True, True, True]
    assert store.contains(KIND, names(1, 2, 3, 4)) == 3
    assert store.contains(KIND, names(4, 1, 2)) == 0
    assert store.contains(fingerprint("other"), names(1)) == 0
    lease = store.lease(KIND, names(1, 2, 9, 3), 5.0)
    assert lease is not None
    assert [e.block_hash for e in lease.entries] == names(1, 2)
    assert (store.counters.hits, store.counters.misses) == (2, 2)


def test_nothing_is_found_before_the_commit_nor_after_a_failed_one() -> None:
    store, _ = make()
    reservation = store.reserve(KIND, names(1, 2, 3))
    assert store.contains(KIND, names(1)) == 0
    assert store.lease(KIND, names(1), 5.0) is None
    assert store.commit(reservation, [True, False, True]) == [True, False, True]
    assert store.contains(KIND, names(1, 2, 3)) == 1
    assert store.used_bytes == 2 * 4096
    with pytest.raises(InternalError):
        store.commit(reservation, [True, True, True])
    check_store(store)


def test_a_second_put_of_a_block_in_flight_takes_no_second_slot() -> None:
    store, _ = make()
    first = store.reserve(KIND, names(1, 2))
    second = store.reserve(KIND, names(1, 2, 3))
    assert second.missing == [2]
    assert store.commit(second, [True]) == [False, False, True]
    assert store.commit(first, [True, True]) == [True, True]
    assert store.contains(KIND, names(1, 2, 3)) == 3


def test_blocks_that_were_there_are_not_fetched_again_and_stay_until_the_commit() -> None:
    store, _ = make(2)
    put(store, KIND, 1)
    reservation = store.reserve(KIND, names(1, 2, 3))
    assert reservation.missing == [1]  # block 1 is pinned by this very Put: there is no room for block 3
    assert store.commit(reservation, [True]) == [True, True, False]


def test_the_least_recently_used_goes_first_and_a_chain_from_its_end() -> None:
    store, _ = make(4)
    put(store, KIND, 1, 2)
    put(store, KIND, 3, 4)
    lease = store.lease(KIND, names(1, 2), 5.0)
    assert lease is not None
    assert store.release(lease.lease_id)
    put(store, KIND, 5)
    assert store.contains(KIND, names(3)) == 1
    assert store.contains(KIND, names(4)) == 0
    put(store, KIND, 6, 7)
    assert store.contains(KIND, names(3)) == 0
    assert store.contains(KIND, names(1, 2)) == 1
    assert store.counters.evictions == 3


def test_leased_blocks_stay_and_a_full_store_says_so() -> None:
    store, clock = make(2)
    put(store, KIND, 1, 2)
    lease = store.lease(KIND, names(1, 2), 5.0)
    assert lease is not None
    with pytest.raises(QueueFullError) as caught:
        store.reserve(KIND, names(3))
    assert caught.value.retry_after_s is not None
    clock.now += 5.0
    assert put(store, KIND, 3) == [True]
    assert not store.release(lease.lease_id)
    assert store.contains(KIND, names(1, 2)) == 1


def test_a_reused_slot_has_another_generation() -> None:
    store, _ = make(1)
    put(store, KIND, 1)
    arena = store.pools[0].arena
    before = int(arena.generations[0])
    put(store, KIND, 2)
    assert int(arena.generations[0]) > before


def test_a_deleted_block_is_not_found_but_its_slot_waits_for_the_lease() -> None:
    store, _ = make(2)
    put(store, KIND, 1, 2)
    lease = store.lease(KIND, names(1), 5.0)
    assert lease is not None
    arena, slot = lease.entries[0].pool.arena, lease.entries[0].slot
    generation = int(arena.generations[slot])
    assert store.delete(KIND, names(1, 7)) == 1
    assert store.contains(KIND, names(1)) == 0
    assert put(store, KIND, 1) == [True]  # a new copy, in the place of block 2
    assert int(arena.generations[slot]) == generation
    assert store.release(lease.lease_id)
    assert int(arena.generations[slot]) > generation
    assert store.delete(KIND, None) == 1
    assert store.used_bytes == 0
    check_store(store)


def test_a_block_that_a_deletion_names_twice_gives_its_slot_back_once() -> None:
    store, _ = make()
    put(store, KIND, 1, 2)
    lease = store.lease(KIND, names(2), 5.0)
    assert lease is not None
    assert store.delete(KIND, names(1, 1, 2, 2, 9, 9)) == 2
    store.release(lease.lease_id)
    check_store(store)
    assert put(store, KIND, 3, 4, 5, 6) == [True] * 4
    check_store(store)


def test_a_block_deleted_while_it_is_put_is_not_stored() -> None:
    store, _ = make(2)
    reservation = store.reserve(KIND, names(1, 2))
    assert store.delete(KIND, names(1)) == 1
    assert store.commit(reservation, [True, True]) == [False, True]
    check_store(store)
    assert store.used_bytes == 4096


def test_leases_are_bounded() -> None:
    store, clock = make(2, max_leases=2)
    put(store, KIND, 1)
    assert store.lease(KIND, names(1), 3.0) is not None
    second = store.lease(KIND, names(1), 2.0)
    assert second is not None
    with pytest.raises(QueueFullError) as caught:
        store.lease(KIND, names(1), 2.0)
    assert caught.value.retry_after_s == pytest.approx(2.0)
    clock.now += 2.0
    assert store.lease(KIND, names(1), 2.0) is not None
    assert len(store.leases) == 2


def test_kinds_share_one_budget_by_recency() -> None:
    store, _ = make(4)
    small = fingerprint("small", 1024)
    put(store, KIND, 1, 2, 3)
    put(store, small, 1, 2, 3, 4)
    assert store.backed_bytes == 4 * 4096
    put(store, small, 5)  # one 4 KiB block has to go, and its memory with it
    assert store.contains(KIND, names(1, 2, 3)) == 2
    assert store.contains(small, names(1, 2, 3, 4, 5)) == 5
    put(store, KIND, 4)  # room for four small ones must be made
    assert store.backed_bytes <= 4 * 4096
    check_store(store)


def test_memory_goes_back_to_the_kernel_when_another_kind_needs_it() -> None:
    store, _ = make(64)
    other = fingerprint("other", 8192)
    put(store, KIND, *range(64))
    first = store.pools[0]
    first.arena.blocks[:] = 1
    put(store, other, *range(32))
    assert store.contains(KIND, names(0)) == 0
    assert not first.arena.blocks.any()  # punched pages read as zeros
    assert first.backed_bytes == 0


@pytest.mark.parametrize("block_bytes", [64, 1000 * 64, 4096, 6 * 1024])
def test_cooling_a_slot_leaves_its_neighbours_alone(block_bytes: int) -> None:
    count = 256 * 1024 // block_bytes
    store, _ = make(count, block_bytes=block_bytes)
    kind = fingerprint("a", block_bytes)
    put(store, kind, *range(count))
    pool = store.pools[0]
    pool.arena.blocks[:] = np.arange(count, dtype=np.uint64).astype(np.uint8)[:, None] | 1
    expected = pool.arena.blocks.copy()
    gone = names(*(i for i in range(count) if i % 3 == 1 or i < count // 2))
    slots = [pool.index[name].slot for name in gone]
    store.delete(kind, gone)
    while pool.release_memory():
        pass
    kept = np.setdiff1d(np.arange(count), slots)
    assert np.array_equal(pool.arena.blocks[kept], expected[kept])
    check_store(store)


def test_the_kind_unused_for_longest_makes_place_for_a_new_one() -> None:
    closed: list[Pool] = []
    store = BlockStore(1 << 20, max_pools=2, max_leases=4, clock=Clock(), on_close=closed.append)
    a, b, c = (fingerprint(label) for label in "abc")
    put(store, a, 1)
    put(store, b, 1)
    lease = store.lease(a, names(1), 5.0)
    assert lease is not None
    put(store, c, 1)
    assert [pool.fingerprint.model for pool in closed] == ["b"]
    store.lease(c, names(1), 5.0)
    with pytest.raises(QueueFullError):
        put(store, b, 1)
    store.close()
    assert len(closed) == 3
    assert store.used_bytes == 0


def test_a_commit_after_the_store_was_closed_stores_nothing() -> None:
    store, _ = make()
    reservation = store.reserve(KIND, names(1))
    store.close()
    assert store.commit(reservation, [True]) == [False]


def test_a_block_larger_than_the_store_and_repeated_hashes_are_refused() -> None:
    store, _ = make(1)
    with pytest.raises(InvalidRequestError) as caught:
        store.reserve(fingerprint("big", 8192), names(1))
    assert caught.value.field == "fingerprint.block_bytes"
    with pytest.raises(InvalidRequestError) as caught:
        store.reserve(KIND, names(1, 1))
    assert caught.value.field == "block_hashes"
    assert store.pools == []


KINDS = [fingerprint("x", 4096), fingerprint("y", 2048), fingerprint("z", 12288)]
LABELS = st.lists(st.integers(0, 9), min_size=1, max_size=6, unique=True)


def content(kind: Fingerprint, name: BlockHash) -> int:
    return hashlib.sha256(kind.digest() + name).digest()[0] | 1


class StoreMachine(RuleBasedStateMachine):
    """Random puts, gets, deletes and passing time; leased blocks must keep their bytes, everything must add up."""

    eviction = "lru"

    def __init__(self) -> None:
        super().__init__()
        self.closed = 0
        self.clock = Clock()
        self.store = BlockStore(
            5 * 4096,
            max_pools=2,
            max_leases=3,
            clock=self.clock,
            on_close=self.close_pool,
            eviction=self.eviction,
        )
        self.puts: list[tuple[Fingerprint, Reservation]] = []
        self.leases: dict[int, Callable[[], bool]] = {}
        self.ends: dict[int, float] = {}

    def close_pool(self, pool: Pool) -> None:
        self.closed += 1
        pool.arena.close()

    @rule(kind=st.sampled_from(KINDS), labels=LABELS)
    def reserve(self, kind: Fingerprint, labels: list[int]) -> None:
        try:
            reservation = self.store.reserve(kind, names(*labels))
        except QueueFullError:
            return
        for i, slot in zip(reservation.missing, reservation.slots, strict=True):
            reservation.pool.arena.blocks[slot] = 0
            assert reservation.entries[i] is not None
        self.puts.append((kind, reservation))

    @precondition(lambda self: self.puts)
    @rule(data=st.data(), ok=st.lists(st.booleans(), min_size=6, max_size=6))
    def commit(self, data: st.DataObject, ok: list[bool]) -> None:
        kind, reservation = self.puts.pop(data.draw(st.integers(0, len(self.puts) - 1)))
        for i, slot in zip(reservation.missing, reservation.slots, strict=True):
            entry = reservation.entries[i]
            assert entry is not None
            reservation.pool.arena.blocks[slot] = content(kind, entry.block_hash)
        self.store.commit(reservation, ok[: len(reservation.missing)])

    @rule(kind=st.sampled_from(KINDS), labels=LABELS, ttl=st.integers(1, 5))
    def lease(self, kind: Fingerprint, labels: list[int], ttl: int) -> None:
        held = self.store.contains(kind, names(*labels))
        self.store.expire()
        try:
            lease = self.store.lease(kind, names(*labels), float(ttl))
        except QueueFullError:
            assert len(self.store.leases) == 3
            return
        assert (0 if lease is None else len(lease.entries)) == held
        if lease is None:
            return
        arena = lease.entries[0].pool.arena
        seen = [(e.slot, int(arena.generations[e.slot]), content(kind, e.block_hash)) for e in lease.entries]

        def intact() -> bool:
            return all(
                int(arena.generations[slot]) == generation and bool((arena.blocks[slot] == byte).all())
                for slot, generation, byte in seen
            )

        assert intact()
        self.leases[lease.lease_id] = intact
        self.ends[lease.lease_id] = self.clock.now + ttl

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease_id = data.draw(st.sampled_from(list(self.leases)))  # ids are random: sorted, no run could be replayed
        assert self.store.release(lease_id) == (self.ends[lease_id] > self.clock.now)
        del self.leases[lease_id]

    @rule(seconds=st.integers(1, 4))
    def wait(self, seconds: int) -> None:
        self.clock.now += seconds
        for lease_id in [i for i in self.leases if self.ends[i] <= self.clock.now]:
            del self.leases[lease_id]

    @rule(kind=st.sampled_from(KINDS), labels=st.one_of(st.none(), LABELS))
    def delete(self, kind: Fingerprint, labels: list[int] | None) -> None:
        self.store.delete(kind, None if labels is None else names(*labels))
        assert self.store.contains(kind, names(*(labels or range(10)))) == 0

    @invariant()
    def adds_up(self) -> None:
        check_store(self.store)
        assert all(intact() for intact in self.leases.values())

    def teardown(self) -> None:
        for _, reservation in self.puts:
            self.store.commit(reservation, [False] * len(reservation.missing))
        self.clock.now += 100.0
        self.store.expire()
        check_store(self.store)
        assert not any(pool.num_pinned for pool in self.store.pools)
        for kind in KINDS:
            self.store.delete(kind, None)
        assert self.store.used_bytes == 0
        self.store.close()


StoreMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestStoreMachine = StoreMachine.TestCase


class S3FifoStoreMachine(StoreMachine):
    eviction = "s3fifo"


S3FifoStoreMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestS3FifoStoreMachine = S3FifoStoreMachine.TestCase
