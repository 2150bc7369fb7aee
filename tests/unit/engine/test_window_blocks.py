from __future__ import annotations

import hashlib

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.sequence import WindowGroups, WindowTable
from baton.kv_cache.block_pool import BlockPool
from baton.kv_cache.events import BlocksRemoved, BlocksStored, KVEvent
from baton.kv_cache.layout import LayerGroup
from baton.types import BlockHash, BlockId

NULL, SIZE = 99, 4


def hashes(count: int) -> list[BlockHash]:
    return [BlockHash(hashlib.sha256(bytes([i])).digest()) for i in range(count)]


@given(st.lists(st.tuples(st.sampled_from(("append", "pop_before", "pop_from")), st.integers(0, 40)), max_size=30))
def test_a_table_is_what_was_put_in_without_what_was_given_back(steps: list[tuple[str, int]]) -> None:
    table, places, fresh = WindowTable(1, 8, NULL), dict[int, BlockId](), iter(range(10_000))
    end = first = 0
    for step, number in steps:
        if step == "append":
            ids = [BlockId(next(fresh)) for _ in range(number % 5)]
            table.append(ids)
            places.update(zip(range(end, end + len(ids)), ids, strict=True))
            end += len(ids)
        elif step == "pop_before":
            want = [places.pop(i) for i in range(first, min(number, end))]
            assert table.pop_before(number) == want
            first = max(first, min(number, end))
        elif number >= first:
            assert table.pop_from(number) == [places.pop(i) for i in range(number, end)]
            end = min(end, number)
        assert table.first == first
        assert table.block_ids == [places[i] for i in range(first, end)]
        assert table.table[:end].tolist() == [NULL] * first + table.block_ids
    assert table.pop_all() == list(places.values())
    assert (table.first, table.block_ids) == (0, [])
    assert set(table.table.tolist()) == {NULL}


@given(first=st.integers(0, 100), count=st.integers(0, 100))
def test_a_table_may_begin_behind_its_capacity(first: int, count: int) -> None:
    table = WindowTable(1, 8, NULL)
    table.begin(first, [BlockId(number) for number in range(count)])
    assert table.table[: first + count].tolist() == [NULL] * first + list(range(count))


@given(
    have=st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), max_size=14),
    windows=st.tuples(st.integers(1, 30), st.sampled_from((0, 5, 9))),
)
def test_a_prefix_counts_only_with_what_its_next_token_sees(
    have: list[tuple[bool, bool, bool]], windows: tuple[int, int]
) -> None:
    chain = hashes(len(have))
    pool = BlockPool(64, np.zeros(64, np.uint64), groups=3)
    block_of: dict[tuple[int, int], BlockId] = {}
    for place, groups in enumerate(have):
        for group, there in enumerate(groups):
            if there:
                (block,) = pool.allocate(1) or ()
                pool.commit(block, chain[place], chain[place - 1] if place and not group else None, group=group)
                block_of[group, place] = block
    found = WindowGroups([LayerGroup((0,)), *(LayerGroup((1,), w) for w in windows)], NULL, SIZE).match(pool, chain)

    def reach(length: int, window: int) -> int:
        return max(0, length * SIZE - window + 1) // SIZE if window else 0

    def whole(length: int) -> bool:
        return all((0, i) in block_of for i in range(length)) and all(
            (group, i) in block_of for group, w in enumerate(windows, 1) for i in range(reach(length, w), length)
        )

    best = max(length for length in range(len(have) + 1) if whole(length))
    assert found.block_ids == [block_of[0, i] for i in range(best)]
    assert found.windows == [
        [block_of[group, i] for i in range(reach(best, w), best)] for group, w in enumerate(windows, 1)
    ]


def test_events_tell_of_the_first_group_and_eviction_forgets_in_all() -> None:
    events: list[KVEvent] = []
    pool = BlockPool(4, np.zeros(4, np.uint64), events.append, groups=2)
    (name,) = hashes(1)
    blocks = pool.allocate(2) or []
    pool.commit(blocks[0], name, None)
    pool.commit(blocks[1], name, None, group=1)
    assert events == [BlocksStored(None, (name,))]
    assert pool.find([name], 1) == [blocks[1]]
    pool.release(blocks)
    pool.check_integrity(idle=True)
    assert len(pool.allocate(4) or ()) == 4
    assert events == [BlocksStored(None, (name,)), BlocksRemoved((name,))]
    assert pool.find([name], 1) == [None]
    pool.check_integrity()
