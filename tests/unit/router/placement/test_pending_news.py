"""What replicas are told of chains that instances are about to compute: on the wire, when, and that both ends agree."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.router.pending_fleet import NAMES, Fleet, chain

from baton.hashing import HASH_BYTES, HashChain, hash_chain
from baton.types import BlockHash, Epoch, InstanceId
from baton_router.indexer.prefix_index import PendingBlocks, PendingChain
from baton_router.replication.pending_sync import MAX_ENTRY_CHAIN_BYTES, PendingPublisher
from baton_router.replication.wire import (
    LIFETIME_S,
    MAX_BYTES,
    MAX_CHAIN_BLOCKS,
    MAX_CHAINS,
    Entry,
    EntryError,
    Expected,
    ExpectedNews,
    decode,
    encode,
)

NUMBERS = st.integers(0, 2**53 - 1)


# --- the wire ---


@st.composite
def news(draw: st.DrawFn) -> ExpectedNews:
    chains = draw(st.lists(st.binary(min_size=1, max_size=4).map(lambda x: x * HASH_BYTES), min_size=1, max_size=3))
    one = st.builds(
        Expected,
        NUMBERS,
        st.text(min_size=1, max_size=8).map(InstanceId),
        st.binary(min_size=1, max_size=16).map(Epoch),
        st.sampled_from(chains),
    )
    numbers = st.lists(NUMBERS, max_size=4).map(tuple)
    return ExpectedNews(tuple(draw(st.lists(one, max_size=6))), draw(numbers), draw(numbers))


@given(sent=news())
def test_news_travel(sent: ExpectedNews) -> None:
    entry = Entry("r", "e", 7, full=True, expected=sent)
    assert decode(encode(entry)) == entry


JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(where=st.sampled_from(["", "at", "chains", "new", "over", "live"]), value=JSON)
def test_other_news_are_refused_as_entries_are(where: str, value: Any) -> None:
    told = Expected(1, InstanceId("d0"), Epoch(b"e"), bytes(HASH_BYTES))
    sent = orjson.loads(encode(Entry("r", "e", 7, expected=ExpectedNews((told,), (2,), (3,)))))
    if where:
        sent["expected"][where] = value
    else:
        sent["expected"] = value
    try:
        entry = decode(orjson.dumps(sent))
    except EntryError:
        return
    assert decode(encode(entry)) == entry


def test_what_is_wrong_with_news_is_said() -> None:
    told = Expected(1, InstanceId("d0"), Epoch(b"e"), bytes(HASH_BYTES))

    def said(**fields: Any) -> str:
        sent = orjson.loads(encode(Entry("r", "e", 7, expected=ExpectedNews((told,)))))
        sent["expected"].update(fields)
        with pytest.raises(EntryError) as refused:
            decode(orjson.dumps(sent))
        return str(refused.value)

    assert "33 bytes is no 1 to 512 hashes" in said(chains=["A" * 44])
    assert "0 bytes" in said(chains=[""])
    assert "16416 bytes" in said(chains=["AAAA" * (HASH_BYTES * (MAX_CHAIN_BLOCKS + 1) // 3)])
    assert "not there" in said(new=[[1, 1, 0]])
    assert "not there" in said(new=[[1, 0, 1]])
    assert "`$.expected.new[0][1]`" in said(new=[[1, -1, 0]])
    assert "an epoch of 0 bytes" in said(at=[["d0", ""]])
    assert "length <= 1024 - at `$.expected.live`" in said(live=list(range(MAX_CHAINS + 1)))


def test_entries_of_other_versions_are_read() -> None:
    sent = Entry("r", "e", 7)
    earlier = orjson.loads(encode(sent))
    del earlier["expected"]
    assert decode(orjson.dumps(earlier)) == sent
    assert (
        decode(
            orjson.dumps(
                {
                    **earlier,
                    "later": [1],
                    "expected": {**{key: [] for key in ("at", "chains", "new", "over", "live")}, "later": 1},
                }
            )
        )
        == sent
    )


# --- what is told ---


def test_neither_what_came_before_nor_what_stands_in_for_events_is_told() -> None:
    fleet = Fleet(decision_ttl_s=60)
    fleet.place("d0", chain([1]))
    assert fleet.index.news is None
    publisher = fleet.publisher()
    assert publisher.news(full=True) == ExpectedNews()
    fleet.place("d0", chain([2])).release()
    assert fleet.match("d0", [2]) == 1
    assert publisher.news(full=True) == ExpectedNews()


def test_a_chain_is_told_once_until_all_of_its_requests_are_over(fleet: Fleet) -> None:
    publisher, prompt = fleet.publisher(), chain([1, 2, 3])
    first, second = fleet.place("d0", prompt), fleet.place("d0", prompt)
    (told,) = publisher.news(full=False).new
    assert (told.instance, told.epoch, told.chain) == ("d0", b"0", prompt.data)
    third = fleet.place("d0", prompt)
    for ended in (first, third):
        ended.release()
        assert publisher.news(full=False) == ExpectedNews()
    second.release()
    assert publisher.news(full=False).over == (told.number,)
    assert (len(publisher), fleet.count._value.get()) == (0, 1)


def test_what_was_over_at_once_is_not_told(fleet: Fleet) -> None:
    publisher = fleet.publisher()
    fleet.place("d0", chain([1])).release()
    assert publisher.news(full=False) == ExpectedNews()


def test_what_the_instance_has_told_of_is_not_told_or_over(fleet: Fleet) -> None:
    publisher, prompt = fleet.publisher(), chain(list(range(64)))
    fleet.snapshot("p0", prompt[:61])
    fleet.place("p0", prompt)
    assert publisher.news(full=False) == ExpectedNews(), "three of 64 blocks are missing"
    fleet.snapshot("p0", prompt[:60])
    held = fleet.place("p0", prompt)
    (told,) = publisher.news(full=False).new
    fleet.snapshot("p0", prompt)
    assert publisher.news(full=False).over == (told.number,)
    assert not held.over


def test_a_chain_is_over_when_the_instance_restarts_or_its_time_is_up(fleet: Fleet) -> None:
    publisher = fleet.publisher()
    fleet.place("d0", chain([1]))
    fleet.place("p0", chain([1]))
    numbers = {x.instance: x.number for x in publisher.news(full=False).new}
    fleet.restart("d0")
    assert publisher.news(full=False).over == (numbers["d0"],)
    fleet.clock += LIFETIME_S
    assert publisher.news(full=False).over == (numbers["p0"],)


def test_long_chains_are_cut_and_entries_and_books_are_bounded(fleet: Fleet) -> None:
    publisher, rng = fleet.publisher(), random.Random(1)
    biggest = 0
    for _ in range(200):
        for _ in range(10):
            blocks = rng.choice([30, 200, 700])
            prompt = HashChain(rng.randbytes(HASH_BYTES * blocks))
            for name in NAMES:
                fleet.place(name, prompt)
        entry = publisher.news(full=rng.random() < 0.2)
        assert 0 < len({x.chain for x in entry.new}) < len(entry.new), "a chain of two instances travels once"
        assert max(len(x.chain) for x in entry.new) <= HASH_BYTES * MAX_CHAIN_BLOCKS
        biggest = max(biggest, sum(map(len, {x.chain for x in entry.new})))
        assert len(encode(Entry("r", "e", 1, expected=entry))) < 2 * MAX_ENTRY_CHAIN_BYTES
        assert sum(len(x.expected.chain) for x in publisher._published.values()) == publisher._bytes <= MAX_BYTES
        assert len(publisher) <= MAX_CHAINS
        assert fleet.index.news is not None
        assert len(fleet.index.news) <= 512
    assert biggest <= MAX_ENTRY_CHAIN_BYTES
    assert publisher._bytes > MAX_BYTES * 0.9, "the bound was reached"
    publisher.stop()
    assert (len(publisher), fleet.index.news, publisher._bytes) == (0, None, 0)


# --- both ends ---


def entries(publisher: PendingPublisher) -> Iterator[tuple[Entry, bool]]:
    """Entries as a replica makes them, every fourth one full; the test says which get lost."""
    for sequence in itertools.count(1):
        full = sequence % 4 == 0
        entry = Entry("a", "1", sequence, full=full, expected=publisher.news(full=full))
        yield decode(encode(entry)), full


@given(seed=st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_after_a_full_entry_both_ends_agree_whatever_was_lost_before(seed: int) -> None:
    rng = random.Random(seed)
    here, there = Fleet(), Fleet()
    publisher, taken = here.publisher(), there.remote_pending()
    sent, running = entries(publisher), list[tuple[str, list[int], PendingChain]]()
    for _ in range(60):
        for _ in range(rng.randrange(3)):
            name, prompt = rng.choice(NAMES), [rng.randrange(2) for _ in range(rng.randrange(1, 6))]
            running.append((name, prompt, here.place(name, chain(prompt))))
        while running and rng.random() < 0.4:
            running.pop(rng.randrange(len(running)))[2].release()
        entry, full = next(sent)
        if full or rng.random() < 0.5:
            taken.apply(entry)
        if full:
            assert len(taken) == len(publisher)
            for name, prompt, _ in running:
                assert there.match(name, prompt) == len(prompt)
            for name in NAMES:
                live = {block for n, prompt, _ in running if n == name for block in chain(prompt)}
                assert there.index.num_pending(there.feeds[name].slot) == len(live)
    for *_, expectation in running:
        expectation.release()
    for _ in range(4):
        taken.apply(next(sent)[0])
    assert (len(publisher), len(taken), here.is_empty(), there.is_empty()) == (0, 0, True, True)


def test_a_look_up_of_the_same_chain_sees_what_changed_meanwhile() -> None:
    tree, chain = PendingBlocks(), hash_chain(list(range(64)), 8, BlockHash(b"r" * 32))
    copy = HashChain(bytes(bytearray(chain.data)))
    first = tree.add(1, chain)
    assert tree.match(chain) == {1: 8}
    first.release()
    assert tree.match(chain) == {}
    again = tree.add(2, chain)
    tree.add(3, copy)
    assert tree.match(chain) == tree.match(copy) == {2: 8, 3: 8}
    again.release()
    assert tree.match(chain) == tree.match(copy) == {3: 8}
