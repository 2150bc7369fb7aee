"""Chains that instances are about to compute: what is told of them, what is taken over, and that it all ends."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import msgspec
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from prometheus_client import CollectorRegistry, Counter

from baton.api.v1 import events_pb2
from baton.hashing import HASH_BYTES, HashChain, hash_chain, root_hash
from baton.types import BlockHash, Epoch, InstanceId
from baton_router.config import RouterConfig
from baton_router.indexer.event_applier import EventApplier
from baton_router.indexer.prefix_index import PendingBlocks, PendingChain, PrefixIndex
from baton_router.registry.registry import Registry
from baton_router.replication.capacity import InstanceCapacity
from baton_router.replication.pending_sync import MAX_ENTRY_CHAIN_BYTES, PendingPublisher, RemotePending
from baton_router.replication.replica import SILENT_S, Replica
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

NAMES = ("p0", "d0")
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=5)
NUMBERS = st.integers(0, 2**53 - 1)


def chain(prompt: list[int]) -> HashChain:
    return hash_chain(prompt, 1, root_hash(b"k"))


class Fleet:
    """The part of a registry that matters here: instances by name, each with a feed, on a clock of the test's."""

    def __init__(self, decision_ttl_s: float = 0.0) -> None:
        self.clock = 100.0
        self.index = PrefixIndex(1000)
        self.count = Counter("told", "", registry=CollectorRegistry())
        self.feeds: dict[str, EventApplier] = {}
        self.epochs = dict.fromkeys(NAMES, Epoch(b"0"))
        for name in NAMES:
            self.feeds[name] = EventApplier(self.index, now=self.now, decision_ttl_s=decision_ttl_s)
            self.feeds[name].restarted(self.epochs[name])

    def now(self) -> float:
        return self.clock

    def instances(self) -> list[Any]:
        return [
            SimpleNamespace(instance_id=InstanceId(name), events=feed, info=SimpleNamespace(epoch=self.epochs[name]))
            for name, feed in self.feeds.items()
        ]

    def restart(self, name: str) -> None:
        self.epochs[name] = Epoch(self.epochs[name] + b"+")
        self.feeds[name].restarted(self.epochs[name])

    def snapshot(self, name: str, hashes: HashChain) -> None:
        """The instance tells that it holds just this."""
        event = events_pb2.KvEvent(stored=events_pb2.KvBlocksStored(block_hashes=list(hashes)))
        batch = events_pb2.KvEventBatch(epoch=self.epochs[name], sequence=1, events=[event], snapshot=True)
        self.feeds[name].apply(batch)

    def place(self, name: str, hashes: HashChain) -> PendingChain:
        expectation = self.feeds[name].add_pending(hashes)
        assert expectation is not None
        return expectation

    def match(self, name: str, prompt: list[int]) -> int:
        slot = self.feeds[name].slot
        return self.index.match(chain(prompt), 1 << slot).get(slot, 0)

    def publisher(self) -> PendingPublisher:
        publisher = PendingPublisher(self, self.count, self.now)  # type: ignore[arg-type]
        publisher.start()
        return publisher

    def remote_pending(self) -> RemotePending:
        return RemotePending(self, self.now)  # type: ignore[arg-type]

    def is_empty(self) -> bool:
        return not self.index._pending._root.children and not self.index._pending._bytes


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


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


# --- what is taken over ---


def told(number: int, name: str, prompt: list[int], epoch: bytes = b"0") -> Expected:
    return Expected(number, InstanceId(name), Epoch(epoch), chain(prompt).data)


def test_only_instances_and_processes_that_are_known_count(fleet: Fleet) -> None:
    taken = fleet.remote_pending()
    strangers = told(1, "d1", [1]), told(2, "d0", [1], epoch=b"1")
    taken.apply(Entry("b", "1", 1, expected=ExpectedNews(strangers)))
    assert (len(taken), fleet.match("d0", [1])) == (0, 0)
    fleet.restart("p0")
    fleet.epochs["d0"] = Epoch(b"1")
    fleet.feeds["d0"].restarted(fleet.epochs["d0"])
    taken.apply(Entry("b", "1", 2, full=True, expected=ExpectedNews(strangers, live=(1, 2))))
    assert (len(taken), fleet.match("d0", [1])) == (1, 1), "told anew, and known now"


def test_a_chain_whose_time_was_up_does_not_count_again(fleet: Fleet) -> None:
    taken, entry = fleet.remote_pending(), ExpectedNews((told(1, "d0", [1]),), live=(1,))
    taken.apply(Entry("b", "1", 1, full=True, expected=entry))
    fleet.clock += LIFETIME_S
    taken.tick()
    taken.apply(Entry("b", "1", 2, full=True, expected=entry))
    assert (len(taken), fleet.match("d0", [1]), fleet.is_empty()) == (0, 0, True)


def test_a_replica_cannot_have_more_counted_than_it_may(fleet: Fleet) -> None:
    taken, rng, number = fleet.remote_pending(), random.Random(1), itertools.count()
    for sequence in range(100):
        many = [
            Expected(next(number), InstanceId("d0"), Epoch(b"0"), rng.randbytes(HASH_BYTES * (512 if sequence else 1)))
            for _ in range(8)
        ]
        taken.apply(Entry("b", "1", sequence, expected=ExpectedNews(tuple(many))))
    assert fleet.index.num_pending(fleet.feeds["d0"].slot) * HASH_BYTES <= MAX_BYTES
    taken.apply(Entry("b", "2", 1))
    assert fleet.is_empty()
    for sequence in range(MAX_CHAINS + 10):
        taken.apply(Entry("b", "2", sequence, expected=ExpectedNews((told(sequence, "d0", [sequence]),))))
    assert len(taken) == MAX_CHAINS
    taken.clear()
    assert fleet.is_empty()


@dataclass
class Known:
    """What the machine below knows of one replica."""

    epoch: int
    sequence: int = 0
    numbers: int = 0


class TakenMachine(RuleBasedStateMachine):
    """Whatever comes in whatever order: what counts is the set of chains that are live."""

    @initialize()
    def begin(self) -> None:
        self.fleet = Fleet()
        self.remote_pending = self.fleet.remote_pending()
        self.known = {name: Known(0) for name in "bc"}
        self.live: dict[tuple[str, int], tuple[str, list[int], float]] = {}

    def entry(self, replica: str, expected: ExpectedNews, **options: Any) -> None:
        known = self.known[replica]
        known.sequence += 1
        self.remote_pending.apply(Entry(replica, str(known.epoch), known.sequence, expected=expected, **options))

    def lose(self, replica: str) -> None:
        self.live = {key: value for key, value in self.live.items() if key[0] != replica}

    @rule(replica=st.sampled_from("bc"), name=st.sampled_from(NAMES), prompt=PROMPTS)
    def add(self, replica: str, name: str, prompt: list[int]) -> None:
        number = self.known[replica].numbers = self.known[replica].numbers + 1
        item = msgspec.structs.replace(told(number, name, prompt), epoch=self.fleet.epochs[name])
        self.entry(replica, ExpectedNews((item,)))
        self.live[replica, number] = name, prompt, self.fleet.clock + LIFETIME_S

    @rule(replica=st.sampled_from("bc"), number=st.integers(1, 8))
    def over(self, replica: str, number: int) -> None:
        self.entry(replica, ExpectedNews(over=(number, 10**6)))
        self.live.pop((replica, number), None)

    @rule(replica=st.sampled_from("bc"), keep=st.sets(st.integers(1, 8)), name=st.sampled_from(NAMES), prompt=PROMPTS)
    def full(self, replica: str, keep: set[int], name: str, prompt: list[int]) -> None:
        number = self.known[replica].numbers = self.known[replica].numbers + 1
        item = msgspec.structs.replace(told(number, name, prompt), epoch=self.fleet.epochs[name])
        again = [
            msgspec.structs.replace(told(n, *value[:2]), epoch=self.fleet.epochs[value[0]])
            for (r, n), value in self.live.items()
            if r == replica and n in keep
        ]
        self.entry(replica, ExpectedNews((item, *again), live=(*keep, number)), full=True)
        self.live = {key: value for key, value in self.live.items() if key[0] != replica or key[1] in keep}
        self.live[replica, number] = name, prompt, self.fleet.clock + LIFETIME_S

    @rule(replica=st.sampled_from("bc"))
    def leave(self, replica: str) -> None:
        self.entry(replica, ExpectedNews(), left=True)
        self.lose(replica)

    @rule(replica=st.sampled_from("bc"))
    def come_back_as_another_process(self, replica: str) -> None:
        self.known[replica] = Known(self.known[replica].epoch + 1)
        self.entry(replica, ExpectedNews())
        self.lose(replica)

    @rule(replica=st.sampled_from("bc"))
    def fall_silent(self, replica: str) -> None:
        self.remote_pending.drop(replica)
        self.lose(replica)

    @rule(name=st.sampled_from(NAMES))
    def restart_instance(self, name: str) -> None:
        self.fleet.restart(name)
        self.remote_pending.tick()
        self.live = {key: value for key, value in self.live.items() if value[0] != name}

    @rule(name=st.sampled_from(NAMES))
    def snapshot(self, name: str) -> None:
        self.fleet.snapshot(name, HashChain())

    @rule()
    def let_time_pass(self) -> None:
        self.fleet.clock += LIFETIME_S / 3
        self.remote_pending.tick()
        self.live = {key: value for key, value in self.live.items() if value[2] > self.fleet.clock}

    @rule()
    def redis_goes_away(self) -> None:
        self.remote_pending.clear()
        self.live.clear()

    @invariant()
    def the_books_are_as_the_set_of_live_ones_says(self) -> None:
        assert len(self.remote_pending) == len(self.live)
        for name in NAMES:
            chains = [chain(prompt) for n, prompt, _ in self.live.values() if n == name]
            blocks = set(itertools.chain.from_iterable(chains))
            assert self.fleet.index.num_pending(self.fleet.feeds[name].slot) == len(blocks)
            for prompt in itertools.product((0, 1), repeat=4):
                asked = chain(list(prompt))
                depth = next((at for at, block in enumerate(asked) if block not in blocks), len(asked))
                assert self.fleet.match(name, list(prompt)) == depth

    def teardown(self) -> None:
        if hasattr(self, "fleet"):
            self.remote_pending.clear()
            assert self.fleet.is_empty()


TestTaken = TakenMachine.TestCase
TestTaken.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


# --- a replica ---


async def make_replica(fleet: Fleet, metrics: CollectorRegistry, *, shares: bool) -> Replica:
    """Make a replica without Redis that has read an entry of another one's, called b."""
    config = RouterConfig(redis="redis://127.0.0.1:1", replica_expectations=shares)
    registry = Registry(config, CollectorRegistry())
    registry.index, registry.instances = fleet.index, fleet.instances  # type: ignore[method-assign]
    replica = Replica(config, registry, InstanceCapacity("a", None, 0, shared=True, freed=id), metrics, now=fleet.now)
    replica._totals = dict  # type: ignore[method-assign, assignment]
    replica._spread = lambda: None  # type: ignore[method-assign]

    async def read() -> AsyncIterator[list[bytes]]:
        yield [encode(Entry("b", "1", 1, expected=ExpectedNews((told(1, "d0", [1]), told(2, "p0", [1])))))]

    replica._store.read = read  # type: ignore[method-assign]
    await replica._read()
    return replica


async def test_without_any_entry_chains_end_with_the_instance_and_with_a_replica_that_fell_silent(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton_router.replication.replica._TICK_S", 0.001)
    replica = await make_replica(fleet, CollectorRegistry(), shares=True)
    ticking = asyncio.create_task(replica._tick())

    async def counted(number: int) -> None:
        async with asyncio.timeout(240):
            while len(replica.remote_pending) != number:
                await asyncio.sleep(0)

    await counted(2)
    fleet.restart("d0")
    await counted(1)
    assert fleet.match("p0", [1]) == 1
    fleet.clock += SILENT_S + 1
    await counted(0)
    assert fleet.is_empty()
    ticking.cancel()
    await replica.close()


@pytest.mark.parametrize("shares", [True, False])
async def test_a_replica_tells_and_takes_over_only_if_it_may(fleet: Fleet, shares: bool) -> None:
    metrics = CollectorRegistry()
    replica = await make_replica(fleet, metrics, shares=shares)
    assert (len(replica.remote_pending), replica.report()["others"][0]["expectations"]) == (
        (2, 2) if shares else (0, 0)
    )
    assert metrics.get_sample_value("baton_router_replica_expectations") == 2 * shares
    if replica.publisher is not None:
        replica.publisher.start()
    fleet.place("p0", chain([2]))
    entry = replica._news(full=False)
    assert (entry is not None and len(entry.expected.new) == 1) is shares
    assert replica.report()["expectations_told"] == int(shares)
    await replica.close()
    assert (len(replica.remote_pending), replica.report()["expectations_told"], fleet.index.news) == (0, 0, None)


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
