"""Chains that another replica told of: what is taken over of them, and that it all ends."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from prometheus_client import CollectorRegistry
from tests.support.router.pending_fleet import NAMES, Fleet, chain, told

from baton.config.router import RouterConfig
from baton.hashing import HASH_BYTES, HashChain
from baton.types import Epoch, InstanceId
from baton_router.registry.registry import Registry
from baton_router.replication.capacity import InstanceCapacity
from baton_router.replication.replica import SILENT_S, Replica
from baton_router.replication.wire import (
    LIFETIME_S,
    MAX_BYTES,
    MAX_CHAINS,
    Entry,
    Expected,
    ExpectedNews,
    encode,
)

PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=5)


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
