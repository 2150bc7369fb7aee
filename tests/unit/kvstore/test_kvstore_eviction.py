"""Eviction policies against models that are slow and plain."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.support.transport.named_blocks import name_of
from tests.support.transport.store_check import check_store

from baton.kv_cache.arena import HostArena
from baton.kv_cache.fingerprint import Fingerprint
from baton.kv_cache.layout import KVLayout, LayerShape
from baton.types import BlockHash
from baton_kvstore.memory.eviction import MAX_USES, POLICIES, Eviction, Lru, S3Fifo, make_policy
from baton_kvstore.memory.pool import Entry, Pool, Share
from baton_kvstore.memory.store import BlockStore

BLOCK = 64
WHICH = st.integers(0, 30)


def make_pool(block_bytes: int = BLOCK) -> Pool:
    layout = KVLayout((LayerShape(1, 1, 1),), 16, "float32")
    kind = replace(Fingerprint.of(model="m", model_digest="m", rope="", layout=layout), block_bytes=block_bytes)
    return Pool(kind, HostArena(64, block_bytes))


class LruModel:
    """What was used longest ago goes first."""

    def __init__(self) -> None:
        self.used: list[Entry] = []

    def unpin(self, entry: Entry, used: bool, pins: int) -> None:
        if used and entry in self.used:
            self.used.remove(entry)
        if used or entry not in self.used:
            self.used.append(entry)

    def pop(self, evictable: set[Entry]) -> Entry:
        victim = next(entry for entry in self.used if entry in evictable)
        self.used.remove(victim)
        return victim

    def discard(self, entry: Entry) -> None:
        if entry in self.used:
            self.used.remove(entry)


class S3FifoModel:
    """The queues as lists of entries, pinned ones included."""

    def __init__(self, share: float, uses: int) -> None:
        self.share, self.needed = share, uses
        self.small: list[Entry] = []
        self.main: list[Entry] = []
        self.ghosts: list[BlockHash] = []
        self.uses: dict[Entry, int] = {}

    def unpin(self, entry: Entry, used: bool, pins: int) -> None:
        if entry in self.small or entry in self.main:
            self.uses[entry] = min(MAX_USES, self.uses[entry] + used)
        elif pins == 0 and entry in self.uses:  # it was pinned when it was to go
            self.main.append(entry)
        elif pins == 0:
            self.uses[entry] = 0
            (self.main if entry.block_hash in self.ghosts else self.small).append(entry)
            self.ghosts = [name for name in self.ghosts if name != entry.block_hash]

    def pop(self, evictable: set[Entry]) -> Entry:
        while True:
            count = len(self.small) + len(self.main)
            first = len(self.small) >= self.share * count
            queue = next(q for q in ((self.small, self.main) if first else (self.main, self.small)) if q)
            entry = queue.pop(0)
            if entry not in evictable:
                continue
            if queue is self.small and self.uses[entry] >= self.needed:
                self.uses[entry] = 0
                self.main.append(entry)
            elif queue is self.main and self.uses[entry]:
                self.uses[entry] -= 1
                self.main.append(entry)
            else:
                del self.uses[entry]
                if queue is self.small:
                    self.ghosts = [*self.ghosts, entry.block_hash][-(len(self.small) + len(self.main) + 1) :]
                return entry

    def discard(self, entry: Entry) -> None:
        for queue in (self.small, self.main):
            if entry in queue:
                queue.remove(entry)
        self.uses.pop(entry, None)


class PolicyMachine(RuleBasedStateMachine):
    """Entries come, are pinned, used, saved, evicted and deleted; without a tier behind, each victim is the model's.

    A policy without a model here is held to what :class:`Eviction` promises.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pool = make_pool()
        self.entries: list[Entry] = []
        self.behind = False
        self.policy: Eviction = Lru()
        self.model: LruModel | S3FifoModel | None = LruModel()

    @initialize(name=st.sampled_from(POLICIES), behind=st.booleans(), share=st.sampled_from([0.1, 0.6]))
    def choose(self, name: str, behind: bool, share: float) -> None:
        self.behind = behind
        if name == "lru":
            self.policy, self.model = Lru(behind=behind), LruModel()
        elif name == "s3fifo":
            self.policy, self.model = S3Fifo(behind=behind, small_share=share), S3FifoModel(share, 1)
        else:
            self.policy, self.model = make_policy(name, behind=behind), None

    def evictable(self) -> set[Entry]:
        return {entry for entry in self.entries if not entry.pins}

    def unpin_one(self, entry: Entry, used: bool) -> None:
        entry.pins -= 1
        if not entry.pins:
            self.policy.unpin(entry, used=used)
        elif used:
            self.policy.touch(entry)
        if self.model is not None:
            self.model.unpin(entry, used, entry.pins)

    @rule(label=st.integers(0, 30), saved=st.booleans())
    def come(self, label: int, saved: bool) -> None:
        if all(entry.block_hash != name_of(label) for entry in self.entries):
            entry = Entry(self.pool, name_of(label), 0, Share(""), pins=1, saved=saved and self.behind)
            self.policy.pin(entry)
            self.entries.append(entry)
            self.unpin_one(entry, used=True)

    @precondition(lambda self: self.entries)
    @rule(which=WHICH)
    def pin(self, which: int) -> None:
        entry = self.entries[which % len(self.entries)]
        if not entry.pins:
            self.policy.pin(entry)
        entry.pins += 1

    @precondition(lambda self: any(entry.pins for entry in self.entries))
    @rule(which=WHICH, used=st.booleans(), saved=st.booleans())
    def unpin(self, which: int, used: bool, saved: bool) -> None:
        pinned = [entry for entry in self.entries if entry.pins]
        entry = pinned[which % len(pinned)]
        entry.saved = entry.saved or (saved and self.behind)
        self.unpin_one(entry, used or not self.behind)  # without a tier behind, nothing is pinned but to be used

    @rule()
    def pop(self) -> None:
        able = self.evictable()
        victim = self.policy.pop()
        if self.behind:
            assert (victim is None) == (not any(entry.saved for entry in able))
            assert victim is None or (victim in able and victim.saved)
        elif self.model is not None:
            assert victim is (self.model.pop(able) if able else None)
        else:
            assert victim in able if able else victim is None
        if victim is not None:
            self.entries.remove(victim)

    @precondition(lambda self: self.entries)
    @rule(which=WHICH)
    def discard(self, which: int) -> None:
        entry = self.entries[which % len(self.entries)]
        self.policy.discard(entry)
        if self.model is not None:
            self.model.discard(entry)
        self.entries.remove(entry)

    @rule(count=st.integers(0, 4), lost=st.sets(st.integers(0, 30)))
    def recheck(self, count: int, lost: set[int]) -> None:
        names = {name_of(label) for label in lost}
        before = {entry for entry in self.evictable() if entry.saved}
        self.policy.recheck(count, lambda entry: entry.block_hash not in names)
        changed = {entry for entry in before if not entry.saved}
        assert all(entry.block_hash in names for entry in changed)
        assert self.model is None or len(changed) <= 2 * count  # of each queue

    @invariant()
    def adds_up(self) -> None:
        able = self.evictable()
        assert set(self.policy) == able
        assert len(self.policy) == len(able)
        assert all((entry in self.policy) == (entry in able) for entry in self.entries)
        assert self.policy.saved_bytes == BLOCK * sum(entry.saved for entry in able)
        assert set(self.policy.unsaved) == {entry for entry in able if not entry.saved}
        assert len(self.policy.unsaved) == sum(not entry.saved for entry in able)
        assert self.policy.in_order or self.policy.unsaved or any(entry.pins for entry in self.entries)


PolicyMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
TestPolicyMachine = PolicyMachine.TestCase


def make_store(eviction: str, blocks: int) -> tuple[BlockStore, Fingerprint]:
    kind = make_pool(4096).fingerprint
    return BlockStore(blocks * 4096, max_pools=1, max_leases=8, clock=lambda: 0.0, eviction=eviction), kind


def put(store: BlockStore, kind: Fingerprint, *labels: int) -> None:
    reservation = store.reserve(kind, [name_of(label) for label in labels])
    assert all(store.commit(reservation, [True] * len(reservation.missing)))


def get(store: BlockStore, kind: Fingerprint, *labels: int) -> int:
    lease = store.lease(kind, [name_of(label) for label in labels], 1.0)
    if lease is None:
        return 0
    assert store.release(lease.lease_id)
    return len(lease.entries)


def held(store: BlockStore, kind: Fingerprint, *labels: int) -> list[int]:
    return [label for label in labels if store.contains(kind, [name_of(label)])]


@pytest.mark.parametrize("eviction", POLICIES)
@pytest.mark.parametrize("uses", [0, 1, 5])
def test_a_chain_goes_from_its_end_to_its_head(eviction: str, uses: int) -> None:
    store, kind = make_store(eviction, 4)
    put(store, kind, 0, 1, 2, 3)
    for _ in range(uses):
        assert get(store, kind, 0, 1, 2, 3) == 4
    for gone in range(1, 5):
        victim = store.eviction.pop()
        assert victim is not None
        assert victim.block_hash == name_of(4 - gone)
        store.eviction.unpin(victim, used=False)  # back, so that the store adds up
        store.delete(kind, [victim.block_hash])
        assert held(store, kind, 0, 1, 2, 3) == list(range(4 - gone))
        check_store(store)


def test_s3fifo_keeps_what_is_used_again_through_a_scan_that_flushes_lru() -> None:
    kept = {}
    for eviction in ("lru", "s3fifo"):
        store, kind = make_store(eviction, 20)
        put(store, kind, 0, 1, 2, 3)
        assert get(store, kind, 0, 1, 2, 3) == 4
        for label in range(100, 160):
            put(store, kind, label)
        kept[eviction] = held(store, kind, 0, 1, 2, 3)
        check_store(store)
    assert kept == {"lru": [], "s3fifo": [0, 1, 2, 3]}


def test_s3fifo_remembers_who_left_and_lets_it_begin_in_the_main_queue() -> None:
    store, kind = make_store("s3fifo", 8)
    put(store, kind, 0)
    for label in range(100, 108):
        put(store, kind, label)
    assert held(store, kind, 0) == []
    put(store, kind, 0)
    for label in range(200, 230):  # newcomers that nobody uses do not drive it out again
        put(store, kind, label)
    assert held(store, kind, 0) == [0]
    check_store(store)


def test_s3fifo_forgets_a_block_that_was_deleted_while_it_was_read() -> None:
    store, kind = make_store("s3fifo", 4)
    put(store, kind, 0, 1)
    lease = store.lease(kind, [name_of(0)], 1.0)
    assert lease is not None
    assert store.delete(kind, [name_of(0)]) == 1
    check_store(store)
    assert store.release(lease.lease_id)
    check_store(store)
    put(store, kind, 10, 11, 12)
    assert held(store, kind, 0, 1, 10, 11, 12) == [1, 10, 11, 12]


def test_s3fifo_remembers_no_more_names_than_there_are_blocks() -> None:
    store, kind = make_store("s3fifo", 4)
    for label in range(100):
        put(store, kind, label)
    assert isinstance(store.eviction, S3Fifo)
    assert len(store.eviction._ghosts) <= 5
