"""Snapshots and merged events of the prefix cache."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.kv_cache.block_pool import PrefixCache
from baton.kv_cache.events import BlocksRemoved, BlocksStored, CacheCleared, KVEvent, merge_events, net_events
from baton.types import BlockHash, BlockId


def h(name: str) -> BlockHash:
    return BlockHash(name.encode().ljust(32, b"."))


def cache_of(*edges: tuple[str, str | None]) -> PrefixCache:
    cache = PrefixCache(32)
    for i, (name, parent) in enumerate(edges):
        cache.register(BlockId(i), h(name), None if parent is None else h(parent))
    return cache


def test_snapshot_gives_runs_parents_first() -> None:
    cache = cache_of(("a", None), ("b", "a"), ("c", "b"), ("d", "b"), ("e", "d"), ("x", None))
    assert cache.snapshot() == [
        BlocksStored(None, (h("a"), h("b"))),
        BlocksStored(h("b"), (h("c"),)),
        BlocksStored(h("b"), (h("d"), h("e"))),
        BlocksStored(None, (h("x"),)),
    ]


def test_snapshot_keeps_a_chain_whose_beginning_is_gone() -> None:
    cache = cache_of(("a", None), ("b", "a"), ("c", "b"))
    cache.drop([BlockId(0)])
    assert cache.match([h("a"), h("b")]) == []
    assert cache.snapshot() == [BlocksStored(h("a"), (h("b"), h("c")))]


@given(st.lists(st.integers(0, 30), max_size=30))
def test_snapshot_rebuilds_any_forest(parents: list[int]) -> None:
    edges = [(str(i), None if parent >= i else str(parent)) for i, parent in enumerate(parents)]
    seen: dict[BlockHash, BlockHash | None] = {}
    for run in cache_of(*edges).snapshot():
        parent = run.parent
        assert parent is None or parent in seen
        for block_hash in run.hashes:
            seen[block_hash] = parent
            parent = block_hash
    assert seen == {h(name): None if parent is None else h(parent) for name, parent in edges}


def test_a_block_has_one_hash() -> None:
    cache = cache_of(("a", None))
    assert cache.register(BlockId(0), h("a"), None)
    assert not cache.register(BlockId(1), h("a"), None)
    with pytest.raises(ValueError, match="another hash"):
        cache.register(BlockId(0), h("b"), None)


def test_merge_joins_neighbours_and_keeps_order() -> None:
    events: list[KVEvent] = [
        BlocksStored(None, (h("a"),)),
        BlocksStored(h("a"), (h("b"),)),
        BlocksStored(h("a"), (h("c"),)),
        BlocksRemoved((h("b"),)),
        BlocksRemoved((h("c"),)),
        CacheCleared(),
        BlocksStored(None, (h("a"),)),
    ]
    assert merge_events(events) == [
        BlocksStored(None, (h("a"), h("b"))),
        BlocksStored(h("a"), (h("c"),)),
        BlocksRemoved((h("b"), h("c"))),
        CacheCleared(),
        BlocksStored(None, (h("a"),)),
    ]


def held_after(events: list[KVEvent], held: dict[str, set[BlockHash]]) -> dict[str, set[BlockHash]]:
    """What somebody knows of each tier who applied the events."""
    known = {tier: set(blocks) for tier, blocks in held.items()}
    for event in events:
        if isinstance(event, CacheCleared):
            known[event.tier].clear()
        elif isinstance(event, BlocksStored):
            known[event.tier].update(event.hashes)
        else:
            known[event.tier].difference_update(event.hashes)
    return known


names = st.lists(st.sampled_from("abcdef"), min_size=1, max_size=4, unique=True).map(lambda x: tuple(map(h, x)))
tiers = st.sampled_from(["device", "host"])
some_events = st.lists(
    st.builds(BlocksStored, st.none(), names, tiers)
    | st.builds(BlocksRemoved, names, tiers)
    | st.builds(CacheCleared, tiers),
    max_size=12,
)


@given(some_events, st.fixed_dictionaries({"device": st.sets(names), "host": st.sets(names)}))
def test_net_events_lead_to_the_same_and_tell_no_block_twice(
    events: list[KVEvent], before: dict[str, set[tuple[BlockHash, ...]]]
) -> None:
    held = {tier: {name for run in runs for name in run} for tier, runs in before.items()}
    net = net_events(events)
    assert held_after(net, held) == held_after(events, held)
    told = [(event.tier, name) for event in net if not isinstance(event, CacheCleared) for name in event.hashes]
    assert len(told) == len(set(told))


def test_net_events_keep_runs_as_chains() -> None:
    run = BlocksStored(h("z"), tuple(map(h, "abcd")))
    assert net_events([run, BlocksRemoved((h("b"),)), BlocksRemoved((h("y"),))]) == [
        BlocksRemoved((h("b"), h("y"))),
        BlocksStored(h("z"), (h("a"),)),
        BlocksStored(h("b"), (h("c"), h("d"))),
    ]
