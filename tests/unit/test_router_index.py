"""The prefix index against a model that is too simple to be wrong."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.hashing import block_hashes, root_hash
from baton.types import BlockHash
from baton_router.index import Expectation, PrefixIndex

ROOT = root_hash(b"test")


def chain(tokens: list[int]) -> list[BlockHash]:
    """One block per token: short chains with many shared prefixes."""
    return block_hashes(tokens, 1, ROOT)


ALL = (1 << 64) - 1
tokens = st.lists(st.integers(0, 2), min_size=0, max_size=6)


@dataclass
class Held:
    blocks: set[BlockHash] = field(default_factory=set)
    expected: list[list[BlockHash]] = field(default_factory=list)

    def depth(self, hashes: list[BlockHash]) -> int:
        expected = {h for hs in self.expected for h in hs}
        return next((i for i, h in enumerate(hashes) if h not in self.blocks and h not in expected), len(hashes))


class IndexMachine(RuleBasedStateMachine):
    """Any order of any events on any slots, with parents evicted before their children as well."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.model: dict[int, Held] = {}
        self.expectations: list[tuple[int, Expectation, Held, list[BlockHash]]] = []

    @rule()
    @precondition(lambda self: len(self.model) < 5)
    def add(self) -> None:
        slot = self.index.add()
        assert slot not in self.model
        self.model[slot] = Held()

    @rule(pick=st.integers(0, 9))
    @precondition(lambda self: self.model)
    def drop(self, pick: int) -> None:
        slot = sorted(self.model)[pick % len(self.model)]
        self.index.drop(slot)
        del self.model[slot]

    @rule(pick=st.integers(0, 9), prompt=tokens, start=st.integers(0, 3))
    @precondition(lambda self: self.model)
    def stored(self, pick: int, prompt: list[int], start: int) -> None:
        slot = sorted(self.model)[pick % len(self.model)]
        assert self.index.stored(slot, chain(prompt)[start:]) == 0
        self.model[slot].blocks.update(chain(prompt)[start:])

    @rule(pick=st.integers(0, 9), prompt=tokens, start=st.integers(0, 3))
    @precondition(lambda self: self.model)
    def removed(self, pick: int, prompt: list[int], start: int) -> None:
        slot = sorted(self.model)[pick % len(self.model)]
        self.index.removed(slot, chain(prompt)[start:])
        self.model[slot].blocks.difference_update(chain(prompt)[start:])

    @rule(pick=st.integers(0, 9), prompt=tokens)
    @precondition(lambda self: self.model)
    def expect(self, pick: int, prompt: list[int]) -> None:
        slot = sorted(self.model)[pick % len(self.model)]
        expectation = self.index.expect(slot, chain(prompt))
        assert expectation is not None
        self.model[slot].expected.append(chain(prompt))
        self.expectations.append((slot, expectation, self.model[slot], chain(prompt)))

    @rule(pick=st.integers(0, 9))
    @precondition(lambda self: self.expectations)
    def forget(self, pick: int) -> None:
        _, expectation, held, hashes = self.expectations.pop(pick % len(self.expectations))
        self.index.forget(expectation)
        held.expected.remove(hashes)

    @rule(budget=st.integers(1, 5))
    def sweep(self, budget: int) -> None:
        self.index.sweep(budget)

    @rule(prompt=tokens, mask=st.integers(0, 255))
    def match_of_some_slots(self, prompt: list[int], mask: int) -> None:
        found = self.index.match(chain(prompt), mask)
        assert found == {
            s: depth for s, held in self.model.items() if mask >> s & 1 and (depth := held.depth(chain(prompt)))
        }

    @invariant()
    def counts(self) -> None:
        assert {s: self.index.num_blocks(s) for s in self.model} == {s: len(h.blocks) for s, h in self.model.items()}

    def teardown(self) -> None:
        while not self.index.sweep(100):
            pass
        held = set().union(*(h.blocks for h in self.model.values())) if self.model else set()
        assert len(self.index) == len(held)


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_long_chains_on_many_slots(data: st.DataObject) -> None:
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    index = PrefixIndex()
    hashes = chain([rng.randrange(100) for _ in range(400)])
    depths = [rng.randrange(401) for _ in range(40)]
    slots = [index.add() for _ in depths]
    for slot, depth in zip(slots, depths, strict=True):
        index.stored(slot, hashes[:depth])
    assert index.match(hashes, ALL) == {s: d for s, d in zip(slots, depths, strict=True) if d}


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


def test_a_dropped_slot_is_not_given_out_again_before_it_was_swept() -> None:
    index = PrefixIndex()
    index.add()
    slot = index.add()
    index.stored(slot, chain([1, 2, 3]))
    index.drop(slot)
    again = index.add()
    assert again != slot
    assert index.match(chain([1, 2, 3]), ALL) == {}
    assert not index.sweep(2)
    assert index.sweep(2)
    assert len(index) == 0
    assert index.add() == slot


def test_nothing_is_kept_for_nobody() -> None:
    index = PrefixIndex()
    slot = index.add()
    index.stored(slot, chain(list(range(50))))
    index.drop(slot)
    assert len(index) == 0
    assert index.expect(slot, chain([1])) is None
