"""The prefix index against a model that is too simple to be wrong."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.hashing import block_hashes, root_hash
from baton.types import BlockHash
from baton_router.indexer.prefix_index import BlockTable, PendingChain, PrefixIndex

ROOT = root_hash(b"test")


def chain(tokens: list[int]) -> list[BlockHash]:
    """One block per token: short chains with many shared prefixes."""
    return block_hashes(tokens, 1, ROOT)


ALL = (1 << 64) - 1
ALL_70 = (1 << 70) - 1
tokens = st.lists(st.integers(0, 2), min_size=0, max_size=6)


@dataclass
class Held:
    blocks: set[BlockHash] = field(default_factory=set)
    expected: list[list[BlockHash]] = field(default_factory=list)

    def depth(self, hashes: list[BlockHash]) -> int:
        def leading(known: Collection[BlockHash]) -> int:
            return next((i for i, h in enumerate(hashes) if h not in known), len(hashes))

        return max(leading(known) for known in (self.blocks, *self.expected))


class IndexMachine(RuleBasedStateMachine):
    """Any order of any events on any slots, with parents evicted before their children as well."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        # A table with more than one word per set answers the same.
        self.others = [self.index.add() for _ in range(62)]
        self.model: dict[int, Held] = {}
        self.expectations: list[tuple[PendingChain, Held, list[BlockHash]]] = []

    def some(self, pick: int) -> int:
        return sorted(self.model)[pick % len(self.model)]

    @rule()
    @precondition(lambda self: len(self.model) < 5)
    def add(self) -> None:
        slot = self.index.add()
        assert slot not in self.model
        self.model[slot] = Held()

    @rule(pick=st.integers(0, 9))
    @precondition(lambda self: self.model)
    def drop(self, pick: int) -> None:
        slot = self.some(pick)
        self.index.drop(slot)
        del self.model[slot]

    @rule(pick=st.integers(0, 9))
    @precondition(lambda self: self.model)
    def replace(self, pick: int) -> None:
        slot = self.some(pick)
        held = self.model.pop(slot)
        held.blocks = set()
        self.model[self.index.replace(slot)] = held

    @rule(pick=st.integers(0, 9), prompt=tokens, start=st.integers(0, 3))
    @precondition(lambda self: self.model)
    def stored(self, pick: int, prompt: list[int], start: int) -> None:
        slot = self.some(pick)
        assert self.index.stored(slot, chain(prompt)[start:]) == 0
        self.model[slot].blocks.update(chain(prompt)[start:])

    @rule(pick=st.integers(0, 9), prompt=tokens, start=st.integers(0, 3), backwards=st.booleans())
    @precondition(lambda self: self.model)
    def removed(self, pick: int, prompt: list[int], start: int, backwards: bool) -> None:
        slot = self.some(pick)
        self.index.removed(slot, chain(prompt)[start:][:: -1 if backwards else 1])
        self.model[slot].blocks.difference_update(chain(prompt)[start:])

    @rule(pick=st.integers(0, 9), prompt=tokens)
    @precondition(lambda self: self.model)
    def expect(self, pick: int, prompt: list[int]) -> None:
        slot = self.some(pick)
        expectation = self.index.add_pending(slot, chain(prompt))
        assert expectation is not None
        self.model[slot].expected.append(chain(prompt))
        self.expectations.append((expectation, self.model[slot], chain(prompt)))

    @rule(pick=st.integers(0, 9))
    @precondition(lambda self: self.expectations)
    def forget(self, pick: int) -> None:
        expectation, held, hashes = self.expectations.pop(pick % len(self.expectations))
        expectation.release()
        held.expected.remove(hashes)

    @rule(budget=st.integers(1, 5))
    def sweep(self, budget: int) -> None:
        self.index.sweep(budget)

    @rule(prompt=tokens, mask=st.integers(0, 255))
    def match_of_some_slots(self, prompt: list[int], mask: int) -> None:
        mask <<= 62
        found = self.index.match(chain(prompt), mask)
        assert found == {
            s: depth for s, held in self.model.items() if mask >> s & 1 and (depth := held.depth(chain(prompt)))
        }

    @rule(prompt=tokens, picks=st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=3))
    @precondition(lambda self: self.model)
    def match_of_groups(self, prompt: list[int], picks: list[list[int]]) -> None:
        groups = [{self.some(pick) for pick in group} for group in picks]
        found = self.index.match_any(chain(prompt), [sum(1 << slot for slot in group) for group in groups])
        together = [Held(set().union(*(self.model[slot].blocks for slot in group))) for group in groups]
        assert found == [held.depth(chain(prompt)) for held in together]

    @invariant()
    def counts(self) -> None:
        assert {s: self.index.num_blocks(s) for s in self.model} == {s: len(h.blocks) for s, h in self.model.items()}
        assert {s: self.index.num_pending(s) for s in self.model} == {
            s: len(set().union(*h.expected)) for s, h in self.model.items()
        }

    def teardown(self) -> None:
        while not self.index.sweep(100):
            pass
        held = set().union(*(h.blocks for h in self.model.values())) if self.model else set()
        assert len(self.index) == len(held)


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


@pytest.fixture
def index() -> PrefixIndex:
    return PrefixIndex(max_blocks=100_000)


class PlainTable:
    """What :class:`BlockTable` does, with a Python set per slot."""

    def __init__(self, limit: int, slots: int) -> None:
        self.limit, self.held = limit, [set[BlockHash]() for _ in range(slots)]

    def __len__(self) -> int:
        return len(set().union(*self.held))

    def store(self, slot: int, hashes: list[BlockHash]) -> tuple[int, int]:
        known, held = set().union(*self.held), self.held[slot]
        added = refused = 0
        for each in hashes:
            if each in held:
                continue
            if each not in known and len(known) >= self.limit:
                refused += 1
                continue
            known.add(each)
            held.add(each)
            added += 1
        return added, refused

    def remove(self, slot: int, hashes: list[BlockHash]) -> int:
        before = len(self.held[slot])
        self.held[slot].difference_update(hashes)
        return before - len(self.held[slot])

    def depth(self, hashes: list[BlockHash], slots: int) -> int:
        known = set().union(*(held for slot, held in enumerate(self.held) if slots >> slot & 1))
        return next((i for i, each in enumerate(hashes) if each not in known), len(hashes))

    def match(self, hashes: list[BlockHash], slots: int) -> dict[int, int]:
        depths = {slot: self.depth(hashes, 1 << slot) for slot in range(len(self.held)) if slots >> slot & 1}
        return {slot: depth for slot, depth in depths.items() if depth}


def test_a_big_table_against_a_plain_one() -> None:
    """Thousands of entries, with churn: growth, gaps that close among the buckets, runs that go backwards."""
    rng = random.Random(7)
    table, plain = BlockTable(5_000), PlainTable(5_000, 70)
    table.widen(70)
    chains = [chain([rng.randrange(3) for _ in range(rng.randrange(1, 300))]) for _ in range(60)]
    actions = ("store", "store", "remove", "remove backwards", "match", "match", "match any", "sweep")
    for _ in range(2_000):
        hashes, slot, action = rng.choice(chains), rng.randrange(70), rng.choice(actions)
        begin, end = sorted(rng.randrange(len(hashes) + 1) for _ in range(2))
        data = b"".join(hashes)
        if action == "store":
            assert table.store(slot, b"".join(hashes[:end])) == plain.store(slot, hashes[:end])
        elif action.startswith("remove"):
            part = hashes[begin:end][:: -1 if "backwards" in action else 1]
            assert table.remove(slot, b"".join(part)) == plain.remove(slot, part)
        elif action == "match":
            slots = rng.getrandbits(70)
            assert table.match(data, slots) == plain.match(hashes, slots)
        elif action == "match any":
            groups = [rng.getrandbits(70) for _ in range(3)]
            assert table.match_any(data, groups) == [plain.depth(hashes, group) for group in groups]
        else:
            at = table.sweep(1 << slot, 0, 50)
            while at:
                at = table.sweep(1 << slot, at, 50)
            plain.held[slot].clear()
        assert len(table) == len(plain)


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_long_chains_on_many_slots(data: st.DataObject) -> None:
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    index = PrefixIndex()
    hashes = chain([rng.randrange(100) for _ in range(400)])
    depths = [rng.randrange(401) for _ in range(100)]
    slots = [index.add() for _ in depths]
    for slot, depth in zip(slots, depths, strict=True):
        index.stored(slot, hashes[:depth])
    assert index.match(hashes, (1 << 100) - 1) == {s: d for s, d in zip(slots, depths, strict=True) if d}


def test_a_full_index_refuses_new_blocks_and_still_knows_the_old() -> None:
    index = PrefixIndex(max_blocks=4)
    one, two = index.add(), index.add()
    first, second = chain([1, 2, 3]), chain([2, 2, 3])
    assert index.stored(one, first) == 0
    assert index.stored(two, first) == 0
    assert index.stored(two, second) == 2
    assert len(index) == 4
    assert index.match(second, ALL) == {two: 1}
    index.removed(one, first)
    index.removed(two, first)
    assert index.stored(two, second) == 0
    assert index.match(second, ALL) == {two: 3}


@pytest.mark.parametrize("stored", range(1226, 1250, 2))
def test_a_block_that_goes_and_comes_again_while_the_table_grows(stored: int) -> None:
    """At 1229 blocks the new buckets are made; until the last one has moved a block may be found in the old ones.

    A free entry's first four bytes are the number of the next one: of the hashes here, which begin with zeros, that
    leaves all as it was where the next free entry is the first.
    """
    blocks = [BlockHash(bytes(4) + i.to_bytes(4, "little") + bytes(24)) for i in range(2000)]
    index = PrefixIndex()
    slot = index.add()
    for block in blocks[:stored]:
        index.stored(slot, [block])
    index.removed(slot, blocks[:1])
    index.removed(slot, blocks[1200:1201])
    index.stored(slot, blocks[1200:1201])
    for block in blocks[stored:]:
        index.stored(slot, [block])
        assert index.match([blocks[1200]], ALL) == {slot: 1}
    assert index.match(blocks[:1], ALL) == {}
    assert index.match(blocks[1:], ALL) == {slot: len(blocks) - 1}
    assert len(index) == index.num_blocks(slot) == len(blocks) - 1


def test_free_entries_do_not_move_to_the_new_buckets() -> None:
    """As above, with so many free entries that some are still free when their turn to move comes."""
    blocks = [BlockHash(bytes(4) + i.to_bytes(4, "little") + bytes(24)) for i in range(2000)]
    index = PrefixIndex()
    slot = index.add()
    for block in blocks[:1240]:
        index.stored(slot, [block])
    gone = [blocks[0], blocks[600], *blocks[700:1000]]
    for block in gone:
        index.removed(slot, [block])
    for block in blocks[1240:1440]:
        index.stored(slot, [block])
    assert len(index) == 1440 - len(gone)
    index.stored(slot, [blocks[600]])
    assert len(index) == 1441 - len(gone)
    for block in blocks[1440:]:
        index.stored(slot, [block])
        assert index.match([blocks[600]], ALL) == {slot: 1}
    held = [x for x in blocks if x not in gone or x == blocks[600]]
    assert all(index.match([x], ALL) == {slot: 1} for x in held)
    assert len(index) == index.num_blocks(slot) == len(held)


def test_a_dropped_slot_is_not_given_out_again_before_it_was_swept(index: PrefixIndex) -> None:
    index.add()
    slot = index.add()
    index.stored(slot, chain([1, 2, 3]))
    index.drop(slot)
    again = index.add()
    assert again != slot
    assert index.match(chain([1, 2, 3]), ALL) == {}
    assert not index.sweep(1)
    while not index.sweep(1):
        assert index.add() != slot
    assert len(index) == 0
    assert index.add() == slot


def test_nothing_is_kept_for_nobody(index: PrefixIndex) -> None:
    slot = index.add()
    index.stored(slot, chain(list(range(50))))
    index.drop(slot)
    assert len(index) == 0
    assert index.add_pending(slot, chain([1])) is None


def test_what_was_expected_of_an_instance_outlives_a_snapshot_but_not_the_instance(index: PrefixIndex) -> None:
    slot, other = index.add(), index.add()
    hashes = chain([1, 2, 3])
    expectation = index.add_pending(slot, hashes)
    assert expectation is not None
    new = index.replace(slot)
    assert index.match(hashes, ALL) == {new: 3}
    index.drop(new)
    heir = index.add()
    assert index.match(hashes, ALL) == {}
    expectation.release()
    assert index.match(hashes, ALL) == {}
    index.stored(heir, hashes[:1])
    assert index.match(hashes, 1 << heir | 1 << other) == {heir: 1}


def test_no_expectation_leaves_anything_behind() -> None:
    index, rng = PrefixIndex(), random.Random(3)
    slots, held = [index.add() for _ in range(4)], []
    for _ in range(500):
        prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 40))]
        expectation = index.add_pending(rng.choice(slots), chain(prompt))
        assert expectation is not None
        held.append(expectation)
        rng.shuffle(held)
        if len(held) > 30:
            held.pop().release()
    for expectation in held:
        expectation.release()
    assert index._pending._root.children == {}
    assert index._pending._bytes == {}


def test_hashes_that_are_no_chain_are_single_blocks(index: PrefixIndex) -> None:
    """A snapshot of a broken worker: its run is not in order. Other slots' answers must not suffer."""
    liar, honest = index.add(), index.add()
    hashes = chain([1, 2, 3])
    index.stored(liar, [hashes[0], chain([7])[0], hashes[2]])
    index.stored(honest, [hashes[0], hashes[2]])
    assert index.match(hashes, ALL) == {liar: 1, honest: 1}


# --- growing ---


@pytest.mark.parametrize("seed", range(4))
def test_the_table_is_right_at_every_step_of_its_growth(seed: int) -> None:
    """Against a dictionary: stores, removals and sweeps of all sizes while buckets double again and again."""
    rng, table = random.Random(seed), BlockTable(30_000)
    table.widen(2)
    held: dict[bytes, int] = {}
    names: list[bytes] = []
    while len(names) < 25_000:
        fresh = [rng.randbytes(32) for _ in range(rng.choice((1, 5, 200, 3000)))]
        slot = rng.randrange(2)
        assert table.store(slot, b"".join(fresh)) == (len(fresh), 0)
        held.update(dict.fromkeys(fresh, 1 << slot))
        names += fresh
        gone = rng.sample(names, min(len(names), rng.choice((0, 3, 150))))
        assert table.remove(slot, b"".join(gone)) == sum(held.get(name, 0) >> slot & 1 for name in gone)
        for name in gone:
            held[name] = held.get(name, 0) & ~(1 << slot)
        for name in rng.sample(names, min(len(names), 40)):
            bits = held[name]
            assert table.match(name, 3) == {at: 1 for at in range(2) if bits >> at & 1}
        assert table.match(rng.randbytes(32), 3) == {}
        assert len(table) == sum(bits > 0 for bits in held.values())
    start = table.sweep(1, 0, 500)
    while start:
        start = table.sweep(1, start, 500)
    assert len(table) == sum(bits >> 1 for bits in held.values())
    for name, bits in held.items():
        assert table.match(name, 3) == ({1: 1} if bits >> 1 else {})


def test_slots_that_come_later_take_nothing_from_the_earlier_ones() -> None:
    """Sets of 64, 65 and 129 slots have one, two and three words; the table is amid its growth each time."""
    index = PrefixIndex()
    chains: dict[int, list[BlockHash]] = {}
    for at in range(130):
        slot = index.add()
        chains[slot] = chain([at, *range(at % 7), *(5 for _ in range(40))])
        index.stored(slot, chains[slot])
        if at in (0, 63, 64, 65, 127, 128, 129):
            for known, hashes in chains.items():
                assert index.match(hashes, (1 << 130) - 1) == {known: len(hashes)}
    for slot in list(chains)[::2]:
        index.drop(slot)
    for known, hashes in chains.items():
        assert index.match(hashes, (1 << 130) - 1) == ({known: len(hashes)} if known % 2 else {})


def test_a_full_table_takes_no_more_and_forgets_nothing() -> None:
    table = BlockTable(5000)
    blocks = [number.to_bytes(32, "little") for number in range(6000)]
    assert table.store(0, b"".join(blocks)) == (5000, 1000)
    assert sum(bool(table.match(block, 1)) for block in blocks) == len(table) == 5000
    assert table.remove(0, blocks[0]) == 1
    assert table.store(0, blocks[5999]) == (1, 0), "what was freed is used again"
