"""Rendezvous hashing: everybody agrees, little moves, nobody gets too much; and how chains are cut into segments."""

from __future__ import annotations

import hashlib
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.config.stores import StoreAddress
from baton.errors import ConfigError
from baton.kv_transfer.connector.store.backend import ChainPart
from baton.kv_transfer.connector.store.cluster import Placement, segments_of
from baton.kv_transfer.connector.store.values import mooncake_options
from baton.types import BlockHash

names = st.lists(st.text(min_size=1, max_size=12), min_size=1, max_size=12, unique=True)
keys = st.lists(st.binary(min_size=32, max_size=32), min_size=1, max_size=50)


def hashes(count: int, seed: int = 0) -> list[BlockHash]:
    return [BlockHash(hashlib.sha256(f"{seed}-{i}".encode()).digest()) for i in range(count)]


@given(names, keys, st.randoms())
def test_the_order_in_which_nodes_are_known_does_not_matter(nodes, keys, random):
    shuffled = list(nodes)
    random.shuffle(shuffled)
    for key in keys:
        ranked = Placement(nodes).ranked(key, len(nodes))
        assert ranked == Placement(shuffled * 2).ranked(key, len(nodes))
        assert sorted(ranked) == sorted(nodes)
        assert Placement(nodes).ranked(key, 2) == ranked[:2]


@given(names, st.text(min_size=1, max_size=12), keys)
def test_a_node_that_comes_takes_and_moves_nothing_else(nodes, new, keys):
    """So does one that goes, read backwards: only its own keys move."""
    others = [name for name in nodes if name != new]
    for key in keys:
        after = Placement([*others, new]).ranked(key, len(others) + 1)
        assert tuple(name for name in after if name != new) == Placement(others).ranked(key, len(others))


@pytest.mark.parametrize("count", [2, 3, 8, 31])
def test_keys_are_spread_evenly_and_one_in_n_moves(count):
    nodes = [f"10.0.0.{i}:8200" for i in range(count)]
    some = hashes(4000)
    before, after = Placement(nodes), Placement([*nodes, "10.0.1.1:8200"])
    for rank in range(2):  # the second replicas as well
        shares = Counter(before.ranked(key, 2)[rank] for key in some)
        expected = len(some) / count
        # Six standard deviations of a binomial count.
        assert all(abs(shares[node] - expected) < 6 * expected**0.5 for node in nodes)
    moved = sum(before.ranked(key, 1) != after.ranked(key, 1) for key in some)
    expected = len(some) / (count + 1)
    assert abs(moved - expected) < 6 * expected**0.5


def test_no_node_no_owner():
    assert Placement(()).ranked(b"key", 2) == ()


@given(st.integers(0, 200), st.integers(0, 200), st.integers(1, 70))
def test_segments_cover_a_part_and_depend_on_the_chain_alone(a, b, size):
    chain, start, stop = hashes(200), min(a, b), max(a, b)
    segments = list(segments_of(ChainPart(chain, start, stop), size))
    assert [i for segment in segments for i in range(segment.start, segment.stop)] == list(range(start, stop))
    whole = segments_of(ChainPart(chain, 0, 200), size)
    of = {i: segment.key for segment in whole for i in range(segment.start, segment.stop)}
    for segment in segments:
        assert segment.key == chain[segment.first] == of[segment.start]
        assert segment.first % size == 0
        assert segment.first <= segment.start < segment.stop <= segment.first + size


def test_addresses():
    assert StoreAddress.parse("a:1") == StoreAddress(nodes=("a:1",))
    assert StoreAddress.parse("a:1, [::1]:2,") == StoreAddress(nodes=("a:1", "[::1]:2"))
    assert StoreAddress.parse("discover") == StoreAddress(discover=True)
    for url in ("redis://u:p@h:1/0", "rediss://h", "redis+cluster://h:7000"):
        assert StoreAddress.parse(url) == StoreAddress(redis=url)


def test_addresses_of_a_mooncake_store():
    url = "mooncake://h:50051?host=10.0.0.3&segment_bytes=64"
    assert StoreAddress.parse(url) == StoreAddress(mooncake=url)
    options = mooncake_options(url)
    assert (options["master"], options["host"], options["segment_bytes"]) == ("h:50051", "10.0.0.3", "64")
    assert options["protocol"] == "tcp"


@pytest.mark.parametrize(
    "url", ["mooncake://h", "mooncake://:1", "mooncake://h:x", "mooncake://h:1/p", "mooncake://h:1?a=b"]
)
def test_mooncake_urls_that_cannot_be_read_are_refused(url):
    with pytest.raises(ConfigError) as caught:
        mooncake_options(url)
    assert caught.value.field == "kvstore"


@pytest.mark.parametrize("text", ["", ",", "nowhere", "a:1,b", "a:1,a:1", "http://h:1", "redis://", ":1", "a:x"])
def test_what_is_no_address_is_refused(text):
    with pytest.raises(ConfigError) as caught:
        StoreAddress.parse(text)
    assert caught.value.field == "kvstore"
