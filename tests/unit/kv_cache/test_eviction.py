"""Who loses cached blocks: by recency, and nobody below a fair share; a property test against the plain definition."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.unit.kv_cache.test_block_pool import chain

from baton.kv_cache.block_pool import BlockPool
from baton.kv_cache.eviction import IDLE_S, EvictionQueue
from baton.types import BlockHash, BlockId

NUM_BLOCKS = 64


class Tenants:
    """A pool in which tenants compute prompts of their own, one after the other."""

    def __init__(self, share: float) -> None:
        self.pool = BlockPool(NUM_BLOCKS, np.zeros(NUM_BLOCKS, np.uint64), tenant_share=share)
        self.count = 0

    def prompt(self, tenant: str, length: int) -> list[BlockHash]:
        self.count += 1
        hashes = chain(*(hash((tenant, self.count, i)) for i in range(length)))
        blocks = self.pool.allocate(length)
        assert blocks is not None
        for i, block in enumerate(blocks):
            self.pool.commit(block, hashes[i], hashes[i - 1] if i else None, tenant=tenant)
        self.pool.release(blocks)
        self.pool.check_integrity(idle=True)
        return hashes


def test_a_tenant_that_floods_an_instance_leaves_others_their_part() -> None:
    # With all divided both give half of what the first of the others' prompts needs.
    for share, kept in ((0.0, 0), (0.5, NUM_BLOCKS // 4), (1.0, NUM_BLOCKS // 2 - 4)):
        tenants = Tenants(share)
        mine = tenants.prompt("b", NUM_BLOCKS // 2)
        for _ in range(100):
            tenants.prompt("a", 8)
        assert len(tenants.pool.match(mine)) == kept


def test_one_tenant_has_everything_and_plain_recency() -> None:
    tenants = Tenants(1.0)
    first, second = tenants.prompt("a", NUM_BLOCKS // 2), tenants.prompt("a", NUM_BLOCKS // 2)
    tenants.prompt("a", 3)
    assert len(tenants.pool.match(first)) == NUM_BLOCKS // 2 - 3
    assert len(tenants.pool.match(second)) == NUM_BLOCKS // 2


def test_who_has_more_than_a_part_gives_by_recency() -> None:
    tenants = Tenants(0.5)
    old = tenants.prompt("a", 24)
    new = tenants.prompt("b", 40)
    tenants.prompt("c", 8)  # a part is a quarter of 64 for two tenants
    assert len(tenants.pool.match(old)) == 16
    assert len(tenants.pool.match(new)) == 40
    tenants.prompt("c", 8)
    assert len(tenants.pool.match(old)) >= 10


def queue_of(tenants: list[str], clock: list[float], share: float = 0.5) -> EvictionQueue:
    queue = EvictionQueue(len(tenants), share, lambda: clock[0])
    for block_id, tenant in enumerate(tenants):
        queue.set_owner(BlockId(block_id), tenant)
    return queue


def test_who_uses_nothing_for_long_keeps_nothing() -> None:
    clock = [0.0]
    queue = queue_of(["b"] * 4 + ["a"] * 12, clock)
    queue.add([BlockId(i) for i in range(4)])
    queue.add([BlockId(i) for i in range(4, 16)])
    assert queue.pop(1) == [4]  # not the oldest: its tenant has as much as its part
    clock[0] = IDLE_S + 1
    queue.remove(BlockId(15))
    queue.add([BlockId(15)])
    assert queue.pop(3) == [0, 1, 2]


def test_who_uses_nothing_for_long_keeps_nothing_from_several_either() -> None:
    clock = [0.0]
    queue = queue_of(["idle"] * 2 + ["a"] * 6 + ["b"] * 8, clock)
    queue.add([BlockId(0), BlockId(1)])
    clock[0] = IDLE_S + 1
    queue.add([BlockId(i) for i in range(2, 8)])
    queue.add([BlockId(i) for i in range(8, 16)])
    assert queue.pop(2) == [0, 1]  # fewer than the part that three would have
    assert queue.pop(3) == [2, 3, 8]  # of what is beyond the parts of two, the oldest; then there is none of a's


def test_of_several_that_have_most_the_one_that_was_here_last_gives() -> None:
    for last, gives in (("a", 0), ("b", 2)):
        queue = queue_of(["a", "a", "b", "b", "c"], [0.0], share=1.0)
        blocks = {"a": [BlockId(0), BlockId(1)], "b": [BlockId(2), BlockId(3)]}
        for tenant in sorted(blocks, key=lambda name: name == last):
            queue.add(blocks[tenant])
        queue._num_shared = 6  # parts of 3
        assert queue.pop(1) == [gives]


def test_without_a_share_nobody_is_told_apart() -> None:
    queue = queue_of(["a", "b", "c"], [0.0], share=0.0)
    assert len(queue._tenants) == 1


def test_tenants_with_blocks_are_not_looked_through_for_each_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    forget = EvictionQueue._remove_idle_tenants
    monkeypatch.setattr(EvictionQueue, "_remove_idle_tenants", lambda queue: (looks.append(0), forget(queue)))
    queue_of([f"tenant {i}" for i in range(4000)], [0.0])
    assert len(looks) <= 3  # at 1024, 2048 and 4096


def test_names_of_tenants_do_not_add_up() -> None:
    queue = EvictionQueue(4, 0.5)
    for at in range(10_000):
        queue.set_owner(BlockId(at % 4), f"tenant {at}")
    assert len(queue._tenants) <= 1024 + 1
    queue.add([BlockId(i) for i in range(4)])
    queue.check_integrity()
    assert sorted(queue.pop(4)) == [0, 1, 2, 3]


@settings(max_examples=200, deadline=None)
@given(
    owners=st.lists(st.sampled_from("abc"), min_size=1, max_size=40),
    share=st.sampled_from([0.0, 0.3, 0.5, 1.0]),
    counts=st.lists(st.integers(1, 10), max_size=6),
)
def test_nobody_is_pushed_below_a_part_while_others_have_more(
    owners: list[str], share: float, counts: list[int]
) -> None:
    queue = queue_of(owners, [0.0], share)
    for block_id in range(len(owners)):
        queue.add([BlockId(block_id)])
    for count in counts:
        if len(queue) < count:
            break
        before = Counter(owners[block_id] for block_id in queue)
        part = int(share * len(owners)) // len(before) if len(before) > 1 else 0
        taken = queue.pop(count)
        assert len(set(taken)) == count
        left = Counter(owners[block_id] for block_id in queue)
        queue.check_integrity()
        for name in before:
            if left[name] < min(before[name], part):  # then there was nobody beyond what was his part
                assert all(left[other] <= part for other in before)
                assert max(left.values(), default=0) - left[name] <= 1 or before[name] == left[name]
        if not share:
            assert taken == sorted(taken)
        for name in before:  # of its own, the oldest
            mine = [block_id for block_id in taken if owners[block_id] == name]
            assert mine == sorted(mine)
            assert all(owners[b] != name or not mine or b > mine[-1] for b in queue)


class QueueMachine(RuleBasedStateMachine):
    """Blocks are owned, freed, used again and evicted; who has what is counted in a plain dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = [0.0]
        self.queue = EvictionQueue(16, 0.5, lambda: self.clock[0])
        self.free: set[BlockId] = set()

    @rule(block=st.integers(0, 15), tenant=st.sampled_from(["", "a", "b", "c"]))
    def free_one(self, block: int, tenant: str) -> None:
        block_id = BlockId(block)
        if block_id in self.free:
            self.queue.remove(block_id)
            self.free.remove(block_id)
        else:
            self.queue.set_owner(block_id, tenant)
            self.queue.add([block_id])
            self.free.add(block_id)

    @rule(count=st.integers(1, 16), pause=st.sampled_from([0.0, 1.0, IDLE_S]))
    def evict(self, count: int, pause: float) -> None:
        self.clock[0] += pause
        if count <= len(self.free):
            taken = self.queue.pop(count)
            assert len(taken) == count
            assert set(taken) <= self.free
            self.free -= set(taken)

    @rule()
    def clear(self) -> None:
        assert set(self.queue.clear()) == self.free
        self.free.clear()

    @invariant()
    def adds_up(self) -> None:
        self.queue.check_integrity()
        assert set(self.queue) == self.free
        assert len(self.queue) == len(self.free)


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
