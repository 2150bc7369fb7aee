"""Select and reserve without a network: what a placement holds, and that it all comes back."""

from __future__ import annotations

import asyncio
import math
import random
from array import array
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc.aio
import pytest
from prometheus_client import CollectorRegistry
from tests.support.servers.fake_worker import FINGERPRINT

from baton.api.v1 import common_pb2, events_pb2
from baton.hashing import block_hashes, hash_chain, root_hash
from baton.kv_cache.fingerprint import Fingerprint
from baton.types import Epoch, InstanceId, PrefillPath, RequestId, Role, SamplingParams
from baton_router.config import RouterConfig
from baton_router.indexer.stores import Store
from baton_router.registry.instance import Instance, InstanceInfo, Status
from baton_router.registry.load import REQUEST_OVERHEAD_TOKENS, LoadReservation
from baton_router.registry.registry import Registry
from baton_router.scheduler.metrics import SchedulerMetrics
from baton_router.scheduler.placement import Placement, PlacementRequest
from baton_router.scheduler.placer import LowerTiers, Placer
from baton_router.scheduler.policies import POLICIES, Policy, PolicyContext, make_policy
from baton_router.scheduler.roster import Candidates
from baton_router.scheduler.speeds import ServedRequest, Speeds
from baton_router.types import RoutedRequest

PROMPT = list(range(40))
EIGHTS = replace(FINGERPRINT, block_size=8, block_bytes=256)


class Cluster:
    """A registry whose instances are known without having been asked."""

    def __init__(self, threshold: int | None = None, **fingerprints: Fingerprint) -> None:
        """Make instances p:1, p:2, d:1 and d:2; ``fingerprints`` (``p1=...``) are of those that differ."""
        self.metrics = CollectorRegistry()
        self.scheduler_metrics = SchedulerMetrics(self.metrics)
        # Without events, what was placed is remembered; here caches hold what a test says.
        config = RouterConfig(prefill=("p:1", "p:2"), decode=("d:1", "d:2"), index_decision_ttl_s=0)
        self.now = 0.0
        self.registry = Registry(config, self.metrics, now=lambda: self.now)
        self.registry.start()
        for _, task in self.registry._monitors.values():
            task.cancel()
        for x in self.registry.instances():
            fingerprint = fingerprints.get(x.address.replace(":", ""), FINGERPRINT)
            x.info = InstanceInfo(
                InstanceId(x.address), x.role, Epoch(b"e" * 16), fingerprint, 100, 1000, "m", "", 1000, frozenset()
            )
            x.status, x.generation, x.load.now = Status.READY, 1, lambda: self.now
        self.placer = self.make_placer(threshold=threshold)

    def make_placer(self, policy: str | Policy = "match_minus_load", **options: Any) -> Placer:
        options = {"max_prefills": 1, "threshold": None, "seed": 0, **options}
        if isinstance(policy, str):
            policy = make_policy(policy)
        return Placer(self.registry, policy, self.scheduler_metrics, **options)

    def get(self, address: str) -> Instance:
        return next(x for x in self.registry.instances() if x.address == address)

    def hold(self, address: str, tokens: list[int]) -> None:
        instance = self.get(address)
        assert instance.info is not None
        kind = instance.info.fingerprint
        hashes = block_hashes(tokens, kind.block_size, root_hash(kind.content_key()))
        event = events_pb2.KvEvent(stored=events_pb2.KvBlocksStored(block_hashes=hashes))
        instance.events.apply(events_pb2.KvEventBatch(epoch=b"e" * 16, sequence=1, events=[event], snapshot=True))

    def set_down(self, *instances: Instance) -> None:
        """Say, as a link does, that instances are not usable any more."""
        for x in instances:
            x.status = Status.DOWN
        self.registry._changed()

    def settle(self) -> None:
        """Have all events come that there may be of requests that ended."""
        self.now += 1.0
        for x in self.registry.instances():
            x.events.tick()

    def loads(self) -> dict[str, tuple[int, int]]:
        return {x.address: (x.load.requests, x.load.tokens) for x in self.registry.instances() if x.load.requests}


def nothing_expected(cluster: Cluster) -> bool:
    index = cluster.registry.index
    return not any(index.num_pending(x.events.slot) for x in cluster.registry.instances())


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    cluster = Cluster()
    yield cluster
    await cluster.registry.close()


async def test_holds_of_a_placement(cluster: Cluster) -> None:
    cluster.hold("p:2", PROMPT[:24])
    cluster.hold("d:1", PROMPT[:8])
    placement = cluster.placer.place(PlacementRequest(PROMPT, num_sequences=2))
    assert placement is not None
    assert placement.decision.prefill_addresses == ["p:2"]
    assert cluster.loads() == {"p:2": (1, 16), "d:1": (2, 40)}
    placement.grow(5)
    assert cluster.loads()["d:1"] == (2, 45)
    placement.prefilled()
    placement.prefilled()
    assert cluster.loads() == {"d:1": (2, 45)}
    placement.release()
    placement.release()
    placement.grow(1)
    assert cluster.loads() == {}
    cluster.settle()
    assert nothing_expected(cluster)


async def test_a_computed_prompt_counts_until_events_must_have_told_of_it(cluster: Cluster) -> None:
    """Instances gather events, also beyond a request's end: in between nobody else says that its blocks are there."""
    for address in ("p:1", "p:2", "d:1", "d:2"):
        cluster.hold(address, [])

    def expected() -> int:
        for x in cluster.registry.instances():
            x.events.tick()
        return sum(cluster.registry.index.num_pending(x.events.slot) for x in cluster.registry.instances())

    def serve(*, computed: bool) -> None:
        placement = cluster.placer.place(PlacementRequest(PROMPT))
        assert placement is not None
        assert expected() >= 2 * len(PROMPT) // FINGERPRINT.block_size
        if computed:
            placement.prefilled()
        placement.release()
        placement.release()

    serve(computed=False)
    assert nothing_expected(cluster)
    serve(computed=True)
    cluster.now = 0.8
    blocks = expected()
    assert blocks == 2 * (len(PROMPT) // FINGERPRINT.block_size)
    cluster.now = 0.95
    assert expected() == 0
    serve(computed=True)
    for x in cluster.registry.instances():
        x.events.restarted(Epoch(b"another"))
    assert nothing_expected(cluster)
    for address in ("p:1", "p:2", "d:1", "d:2"):
        cluster.hold(address, [])
    serve(computed=True)
    for x in cluster.registry.instances():
        x.events.close()
    assert cluster.registry.index._pending._root.children == {}


async def test_a_short_rest_is_no_work_for_prefill(cluster: Cluster) -> None:
    cluster.placer = cluster.make_placer(max_prefills=2, threshold=17)
    cluster.hold("d:2", PROMPT[:24])
    placement = cluster.placer.place(PlacementRequest(PROMPT))
    assert placement is not None
    assert placement.decode.address == "d:2"
    assert len(placement.prefill) == 2, "the worker decides; it gets its candidates all the same"
    assert cluster.loads() == {"d:2": (1, 40)}
    placement.release()


async def test_excluded_and_draining_instances_get_nothing(cluster: Cluster) -> None:
    one, two = cluster.get("d:1"), cluster.get("d:2")
    for _ in range(5):
        placement = cluster.placer.place(PlacementRequest(PROMPT, exclude={one.identity}), reserve=False)
        assert placement is not None
        assert placement.decode is two
    two.load.observe(common_pb2.LoadReport(draining=True), 4)
    cluster.registry._changed()  # as the link says that took the report
    assert cluster.placer.place(PlacementRequest(PROMPT, exclude={one.identity})) is None
    one.generation += 1
    assert cluster.placer.place(PlacementRequest(PROMPT, exclude={("d:1", 1)}), reserve=False) is not None


async def test_concurrent_placements_see_each_other_at_once(cluster: Cluster) -> None:
    placements = [cluster.placer.place(PlacementRequest([i] * 40)) for i in range(10)]
    assert {x.address: x.load.requests for x in cluster.registry.ready(Role.DECODE)} == {"d:1": 5, "d:2": 5}
    assert {x.address: x.load.requests for x in cluster.registry.ready(Role.PREFILL)} == {"p:1": 5, "p:2": 5}
    assert cluster.get("d:1").load.work == 5 * (40 + REQUEST_OVERHEAD_TOKENS)
    for placement in placements:
        assert placement is not None
        placement.release()
    assert cluster.loads() == {}


async def test_a_restart_while_a_request_runs(cluster: Cluster) -> None:
    placement = cluster.placer.place(PlacementRequest(PROMPT))
    assert placement is not None
    cluster.hold(placement.decode.address, PROMPT)
    placement.decode.events.restarted(Epoch(b"f" * 16))
    placement.release()
    assert cluster.loads() == {}
    assert nothing_expected(cluster)


async def test_no_decode_instance(cluster: Cluster) -> None:
    cluster.set_down(*cluster.registry.ready(Role.DECODE))
    assert cluster.placer.place(PlacementRequest(PROMPT)) is None


# --- blocks of different sizes ---


async def test_match_rates_are_in_tokens_whatever_the_blocks() -> None:
    cluster = Cluster(p2=EIGHTS, d2=EIGHTS)
    for address in ("p:1", "p:2", "d:1", "d:2"):
        cluster.hold(address, PROMPT[:24])
    placement = cluster.placer.place(PlacementRequest(PROMPT), reserve=False)
    assert placement is not None
    assert {x.instance_id: x.match_rate for x in placement.decision.candidates} == dict.fromkeys(
        ("p:1", "p:2", "d:1", "d:2"), 24 / 40
    )
    # 36 of 40 tokens in fours beat 32 in eights, and 32 in eights beat 28 in fours.
    for fours, best in ((36, "d:1"), (28, "d:2")):
        cluster.hold("d:1", PROMPT[:fours])
        cluster.hold("d:2", PROMPT[:32])
        placement = cluster.placer.place(PlacementRequest(PROMPT), reserve=False)
        assert placement is not None
        assert placement.decode.address == best
    await cluster.registry.close()


async def test_holds_and_expectations_are_made_of_the_instances_own_blocks() -> None:
    cluster = Cluster(d1=EIGHTS, d2=EIGHTS)
    cluster.hold("d:1", PROMPT[:16])
    cluster.hold("p:2", PROMPT[:20])
    placement = cluster.placer.place(PlacementRequest(PROMPT))
    assert placement is not None
    assert (placement.decode.address, placement.prefill[0].address) == ("d:1", "p:2")
    assert cluster.loads() == {"d:1": (1, 40), "p:2": (1, 20)}
    index = cluster.registry.index
    assert index.num_pending(cluster.get("d:1").events.slot) == 5, "blocks of eight"
    assert index.num_pending(cluster.get("p:2").events.slot) == 10, "blocks of four"
    again = cluster.placer.place(PlacementRequest(PROMPT), reserve=False)
    assert again is not None
    rates = {x.instance_id: x.match_rate for x in again.decision.candidates}
    assert rates == {"p:1": 0.0, "p:2": 1.0, "d:1": 1.0, "d:2": 0.0}
    placement.release()
    assert nothing_expected(cluster)
    await cluster.registry.close()


async def test_the_threshold_compares_tokens() -> None:
    cluster = Cluster(threshold=9, d1=EIGHTS, d2=EIGHTS)
    cluster.hold("d:2", PROMPT[:32])
    placement = cluster.placer.place(PlacementRequest(PROMPT))
    assert placement is not None
    assert cluster.loads() == {"d:2": (1, 40)}, "8 tokens are missing: decode prefills by itself"
    placement.release()
    await cluster.registry.close()


@pytest.mark.parametrize(
    ("fingerprints", "chains"),
    [
        ({}, 1),
        ({"d1": replace(FINGERPRINT, tp_size=2), "p2": replace(FINGERPRINT, pp_size=2)}, 1),
        ({"p1": EIGHTS, "d2": EIGHTS}, 2),
        ({"p1": EIGHTS, "d2": replace(FINGERPRINT, block_size=16)}, 3),
    ],
)
async def test_a_prompt_is_hashed_once_per_block_size(
    monkeypatch: pytest.MonkeyPatch, fingerprints: dict[str, Fingerprint], chains: int
) -> None:
    cluster, calls = Cluster(**fingerprints), []

    def counted(*args: Any) -> Any:
        calls.append(args[1])
        return hash_chain(*args)

    monkeypatch.setattr("baton_router.scheduler.placer.hash_chain", counted)
    assert cluster.placer.place(PlacementRequest(PROMPT), reserve=False) is not None
    assert len(calls) == len(set(calls)) == chains
    await cluster.registry.close()


# --- what lies in slower tiers, and who learns ---


def tell(cluster: Cluster, address: str, *stored: tuple[str, int]) -> None:
    """Let an instance say which leading blocks of PROMPT it has in which tiers."""
    instance = cluster.get(address)
    assert instance.info is not None
    hashes = block_hashes(PROMPT, 4, root_hash(instance.info.content_key))
    batch = events_pb2.KvEventBatch(epoch=b"e" * 16, sequence=1, snapshot=True)
    for tier, blocks in stored:
        batch.events.add(stored=events_pb2.KvBlocksStored(block_hashes=hashes[:blocks], tier=tier))
    instance.events.apply(batch)


async def test_blocks_in_slower_tiers_count_by_weight(cluster: Cluster) -> None:
    tell(cluster, "d:1", ("device", 2), ("host", 4), ("remote", 10))
    tell(cluster, "d:2", ("device", 5))
    placer = cluster.make_placer(tiers=LowerTiers({"host": 0.5, "remote": 0.25}))
    placement = placer.place(PlacementRequest(PROMPT), reserve=False)
    assert placement is not None
    rates = {x.instance_id: x.match_rate for x in placement.decision.candidates}
    assert rates["d:1"] == pytest.approx((2 + 0.5 * 2 + 0.25 * 6) / 10)
    assert rates["d:2"] == pytest.approx(0.5)
    assert list(placement.decision.decode.loadable) == [40, 20]
    assert list(placement.decision.decode.matched) == [8, 20]
    assert placement.decision.decode.tiers == [{"host": 8, "remote": 24}, {}]


async def test_blocks_in_a_kv_store_count_for_the_instances_that_load_from_it(cluster: Cluster) -> None:
    tell(cluster, "d:1", ("device", 2), ("host", 4))
    tell(cluster, "d:2", ("device", 5))
    stores = cluster.registry.stores
    info = cluster.get("d:1").info
    assert info is not None
    hashes = block_hashes(PROMPT, 4, root_hash(info.content_key))
    for address, memory, disk in (("s:1", 6, 0), ("s:2", 0, 8), ("other:1", 10, 0)):
        store = Store(address, grpc.aio.insecure_channel(address), stores.make_applier())
        batch = events_pb2.KvEventBatch(epoch=b"s" * 16, sequence=1, snapshot=True)
        batch.events.add(stored=events_pb2.KvBlocksStored(block_hashes=hashes[:memory], tier="host"))
        batch.events.add(stored=events_pb2.KvBlocksStored(block_hashes=hashes[memory:disk], tier="disk"))
        store.events.apply(batch)
        stores._links[address] = store, asyncio.create_task(asyncio.sleep(0))
    placer = cluster.make_placer(tiers=LowerTiers({"host": 0.5, "store": 0.5, "store_disk": 0.25}, stores))
    cluster.get("d:1").info = replace(info, kvstore="s:1,s:2")
    placement = placer.place(PlacementRequest(PROMPT), reserve=False)
    assert placement is not None
    side = placement.decision.decode
    assert side.tiers == [{"host": 8, "store": 8, "store_disk": 8}, {}]
    assert list(side.loadable) == [32, 20]
    assert side.match_rates == pytest.approx([(2 + 0.5 * 2 + 0.5 * 2 + 0.25 * 2) / 10, 0.5])
    # A store that died counts no more; one that the instance does not use never did.
    next(x for x in stores if x.address == "s:1").events.lost()
    placement = placer.place(PlacementRequest(PROMPT), reserve=False)
    assert placement is not None
    assert placement.decision.decode.tiers == [{"host": 8, "store_disk": 16}, {}]
    cluster.get("d:1").info = replace(info, kvstore="discover")
    placement = placer.place(PlacementRequest(PROMPT), reserve=False)
    assert placement is not None
    assert placement.decision.decode.tiers == [{"host": 8, "store": 24}, {}]
    await cluster.registry.close()


async def test_the_kv_store_is_a_candidate_where_loading_is_cheaper_than_computing(cluster: Cluster) -> None:
    tell(cluster, "d:1", ("device", 1), ("remote", 10))
    speeds = Speeds(lambda: 0.0)
    cheap = common_pb2.RequestTrace(path=common_pb2.PREFILL_PATH_STORE, kv_bytes=1000, transfer_us=10)
    for _ in range(4):
        speeds.observe(ServedRequest(cheap, "", InstanceId("d:1"), 0.0, 1))
    slow = common_pb2.RequestTrace(path=common_pb2.PREFILL_PATH_LOCAL, recomputed_tokens=10, ttft_us=1_000_000)
    for _ in range(4):
        speeds.observe(ServedRequest(slow, "", InstanceId("d:1"), 0.0, 1))
    policy = make_policy("cost_ms", PolicyContext(speeds=speeds))
    cluster.set_down(*cluster.registry.ready(Role.PREFILL))
    placement = cluster.make_placer(policy, speeds=speeds).place(PlacementRequest(PROMPT))
    assert placement is not None
    assert (placement.decode.address, placement.decision.path) == ("d:1", PrefillPath.STORE)
    assert {term.name for term in placement.decision.terms} >= {"load_ms", "prefill_ms", "decode_ms"}
    assert sum(term.value for term in placement.decision.terms) == pytest.approx(placement.decision.score)
    placement.release()


async def test_a_choice_by_cost_is_told_to_decode_and_an_operators_threshold_overrides_it(cluster: Cluster) -> None:
    speeds = Speeds(lambda: 0.0)
    cluster.hold("d:1", PROMPT[:36])
    policy = make_policy("cost_ms", PolicyContext(speeds=speeds))
    local = cluster.make_placer(policy).place(PlacementRequest(PROMPT))
    assert local is not None
    assert (local.decode.address, local.decision.path) == ("d:1", PrefillPath.LOCAL)
    assert local.remote_threshold is not None
    assert local.remote_threshold > 2**30
    assert local.decision.prefill_instance == ""
    assert cluster.get("d:1").load.prompts == 4
    local.prefilled()
    assert cluster.get("d:1").load.prompts == 0
    local.release()
    cluster.settle()
    forced = cluster.make_placer(policy, threshold=1).place(PlacementRequest(PROMPT))
    assert forced is not None
    assert (forced.decision.path, forced.remote_threshold) == (PrefillPath.REMOTE, 1)
    assert forced.prefill_reservation is not None
    forced.release()
    assert cluster.loads() == {}


async def test_a_request_that_was_served_teaches_its_instances_speeds(cluster: Cluster) -> None:
    clock = [0.0]
    speeds = Speeds(lambda: clock[0])
    placer = cluster.make_placer(speeds=speeds)
    for _ in range(5):
        placement = placer.place(PlacementRequest(PROMPT))
        assert placement is not None
        p, d = placement.decision.prefill_instance, placement.decision.decode_instance
        placement.grow(1)
        clock[0] += 0.9
        placement.grow(9)
        placement.trace = common_pb2.RequestTrace(
            path=common_pb2.PREFILL_PATH_REMOTE,
            prefill_instance=p,
            prompt_tokens=40,
            kv_bytes=1000,
            ttft_us=90_000,
            queue_us=5_000,
            exposed_us=5_000,
        )
        placement.release()
        placement.release()
    assert speeds.prefill.get([p])[0].at(40) == pytest.approx(80.0)
    assert speeds.transfer.get([(p, d)])[0].at(1000) == pytest.approx(5.0)
    assert speeds.decode.get([d])[0].at(1) == pytest.approx(100.0)
    assert speeds.output_tokens == pytest.approx(10.0)


async def test_what_a_request_teaches_is_told_once_and_of_who_served_it(cluster: Cluster) -> None:
    told: list[ServedRequest] = []

    class Listening(Speeds):
        def observe(self, request: ServedRequest) -> None:
            told.append(request)

    speeds = Listening(lambda: 0.0)
    remote, local = cluster.make_placer(speeds=speeds), cluster.make_placer(speeds=speeds, threshold=1000)
    for placer in (remote, local):
        placement = placer.place(PlacementRequest(PROMPT, num_sequences=2))
        assert placement is not None
        placement.grow(2)
        placement.grow(8)
        placement.trace = common_pb2.RequestTrace()
        placement.release()
        placement.release()
    assert [(x.prefill != "", x.tokens) for x in told] == [(True, 1 + 8 / 2), (False, 1 + 8 / 2)]


def test_a_prompt_whose_probabilities_are_asked_for_is_computed_where_it_is_decoded() -> None:
    for wanted in (None, 3):
        sampling = SamplingParams(n=2, max_tokens=7, prompt_logprobs=wanted)
        request = PlacementRequest.of(RoutedRequest(RequestId("r"), array("I", [1, 2]), sampling))
        assert (request.local_only, request.num_sequences, request.max_tokens) == (wanted is not None, 2, 7)


async def test_who_asks_for_prefill_first_gets_it_whatever_waits_there(cluster: Cluster) -> None:
    """The policy would have decode compute what has to wait: then nobody would compute it first."""
    speeds = Speeds(lambda: 0.0)
    for amount in (100.0, 1000.0, 3000.0):
        speeds.prefill.add("p:1", amount, amount)
    placer = cluster.make_placer(make_policy("match_minus_load", PolicyContext(speeds=speeds)))
    queues = [LoadReservation(cluster.get(x).load, 5000) for x in ("p:1", "p:2")]
    usual = placer.place(PlacementRequest(PROMPT), reserve=False)
    assert usual is not None
    assert usual.decision.path is PrefillPath.LOCAL
    first = placer.place(PlacementRequest(PROMPT, prefill_only=True))
    assert first is not None
    assert first.decision.path is not PrefillPath.LOCAL
    assert first.prefill_reservation is not None
    assert first.decode_reservation is None
    first.release()
    for queue in queues:
        queue.release()


async def test_every_decision_can_be_written_out_and_its_terms_add_up(cluster: Cluster) -> None:
    cluster.hold("d:1", PROMPT[:8])
    for name in POLICIES:
        placement = cluster.make_placer(name).place(PlacementRequest(PROMPT, session="s"), reserve=False)
        assert placement is not None
        message = placement.decision.to_pb()
        assert len(message.candidates) == 4
        assert message.policy == name
        for scored in (message, *message.candidates):
            assert sum(term.value for term in scored.terms) == pytest.approx(scored.score), name


# --- one prefix that everybody shares ---


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kept_up", [False, True])
async def test_a_shared_system_prompt_does_not_pile_up(cluster: Cluster, seed: int, kept_up: bool) -> None:
    """All requests share their first 20 blocks; ``kept_up``: each is done before the next one comes."""
    clock, rng = [0.0], random.Random(seed)
    for x in cluster.registry.instances():
        x.load.now = lambda: clock[0]
    placer, counts = cluster.make_placer(seed=seed), Counter[str]()
    system, running = [rng.randrange(1000) for _ in range(80)], list[Placement]()
    sequence = dict.fromkeys(("p:1", "p:2", "d:1", "d:2"), 0)
    for _ in range(400):
        clock[0] += 0.5
        prompt = system + [rng.randrange(1000) for _ in range(4 * rng.randint(1, 8))]
        placement = placer.place(PlacementRequest(prompt))
        assert placement is not None
        running.append(placement)
        for x in (placement.decode, placement.prefill[0]):
            counts[x.address] += 1
            sequence[x.address] += 1
            assert x.info is not None
            hashes = block_hashes(prompt, 4, root_hash(x.info.content_key))
            event = events_pb2.KvEvent(stored=events_pb2.KvBlocksStored(block_hashes=hashes))
            first = sequence[x.address] == 1
            batch = events_pb2.KvEventBatch(
                epoch=b"e" * 16, sequence=sequence[x.address], events=[event], snapshot=first
            )
            x.events.apply(batch)
        if len(running) > (0 if kept_up else 40):
            running.pop(rng.randrange(len(running))).release()
    for pair in (("p:1", "p:2"), ("d:1", "d:2")):
        assert max(counts[name] for name in pair) <= 1.2 * 400 / 2, counts
    for placement in running:
        placement.release()


HALF = replace(FINGERPRINT, kv_dtype="bfloat16", block_bytes=FINGERPRINT.block_bytes // 2)
CASTING = replace(HALF, kv_cast=True)


async def test_a_decode_instance_is_paired_with_those_whose_kv_it_takes() -> None:
    """p1 is of float32, p2 of bfloat16; d1 takes its own dtype alone, d2 any."""
    cluster = Cluster(p2=HALF, d1=HALF, d2=CASTING)
    cluster.placer = cluster.make_placer(max_prefills=2)
    seen = set()
    for address, prompt in (("p:1", PROMPT), ("p:2", [7, *PROMPT])):
        cluster.hold(address, prompt)
        for _ in range(6):
            placement = cluster.placer.place(PlacementRequest(prompt))
            assert placement is not None
            seen.add((placement.decode.address, tuple(placement.decision.prefill_addresses)))
    # Loads even out between the two decode instances; only d2 is ever told of p1.
    assert {address for address, _ in seen} == {"d:1", "d:2"}
    assert {named for address, named in seen if address == "d:1"} == {("p:2",)}
    assert {frozenset(named) for address, named in seen if address == "d:2"} == {frozenset({"p:1", "p:2"})}
    await cluster.registry.close()


async def test_kv_that_was_computed_in_another_dtype_counts_where_it_lies() -> None:
    cluster = Cluster(p2=HALF, d1=CASTING, d2=CASTING)
    cluster.hold("p:1", PROMPT)
    placement = cluster.placer.place(PlacementRequest(PROMPT))
    assert placement is not None
    assert placement.decision.prefill_addresses == ["p:1"]
    assert placement.decision.match_rate_of(InstanceId("p:1")) == 1.0
    assert placement.decision.match_rate_of(InstanceId("p:2")) == 0.0
    await cluster.registry.close()


async def test_an_instance_without_partners_is_used_when_no_other_is_free() -> None:
    cluster = Cluster(p1=HALF, p2=HALF, d2=HALF)
    for _ in range(4):
        placement = cluster.placer.place(PlacementRequest(PROMPT))
        assert placement is not None
        assert (placement.decode.address, bool(placement.decision.prefill_addresses)) == ("d:2", True)
    cluster.set_down(cluster.get("d:2"))
    placement = cluster.placer.place(PlacementRequest(PROMPT))
    assert placement is not None
    assert (placement.decode.address, placement.decision.prefill_addresses) == ("d:1", [])
    assert placement.decision.path is PrefillPath.LOCAL
    assert math.isfinite(placement.decision.score)
    await cluster.registry.close()


async def test_a_request_of_more_sequences_than_the_routers_part_is_placed(cluster: Cluster) -> None:
    one, two = cluster.get("d:1"), cluster.get("d:2")
    one.load.limit = two.load.limit = 4
    large = cluster.placer.place(PlacementRequest(PROMPT, num_sequences=6))
    assert large is not None
    assert cluster.placer.place(PlacementRequest(PROMPT, num_sequences=3)) is not None
    other = two if large.decode is one else one
    assert other.load.requests == 3, "what follows goes elsewhere"
    another = cluster.placer.place(PlacementRequest(PROMPT, num_sequences=5))
    assert another is not None
    assert another.decode is other, "there is room for one: it needs not wait until there is nothing else"
    assert cluster.placer.place(PlacementRequest(PROMPT)) is None, "more than the parts waits"
    large.release()
    assert cluster.placer.place(PlacementRequest(PROMPT, num_sequences=4)) is not None
    one.load.limit = two.load.limit = 0
    for x in (one, two):
        x.load.requests = 0
    assert cluster.placer.place(PlacementRequest(PROMPT, num_sequences=6)) is None, "no part, no request"


# --- what is kept between requests ---


async def test_a_full_instance_costs_no_new_roster(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    class Counted(Candidates):
        def __init__(self, *args: Any) -> None:
            made.append(1)
            super().__init__(*args)

    monkeypatch.setattr("baton_router.scheduler.placer.Candidates", Counted)
    cluster.get("d:1").load.limit = 0
    placed = [cluster.placer.place(PlacementRequest(PROMPT)) for _ in range(5)]
    assert [x.decode.address for x in placed if x is not None] == ["d:2"] * 5
    assert len(made) == 1
    cluster.set_down(cluster.get("p:1"))
    assert cluster.placer.place(PlacementRequest(PROMPT)) is not None
    assert len(made) == 2, "an instance has gone"


async def test_what_is_kept_is_what_a_new_placer_would_see(cluster: Cluster) -> None:
    """Two placers in turns over the same instances, whose load, room and health change all the time."""
    rng, held = random.Random(5), []
    placers = [cluster.placer, cluster.make_placer(seed=0)]
    for step in range(300):
        cluster.now += 0.01
        for x in cluster.registry.instances():
            x.load.limit = rng.choice((0, 1, 2, 2**62)) if x.role is Role.DECODE else x.load.limit
            x.load.observe(common_pb2.LoadReport(waiting_prompt_tokens=rng.randrange(1000)), 4)
        if step % 20 == 0:
            x = rng.choice(cluster.registry.instances())
            x.status = Status.DOWN if x.status is Status.READY else Status.READY
            cluster.registry._changed()
        exclude = [cluster.get("d:2").identity] if rng.random() < 0.2 else []
        ask = PlacementRequest(PROMPT, exclude=exclude, local_only=rng.random() < 0.2)
        seen = [x.place(ask, reserve=False) for x in (rng.choice(placers), cluster.make_placer())]
        assert [x is None for x in seen] in ([True, True], [False, False])
        if seen[0] is not None and seen[1] is not None:
            kept, new = ([(c[0], c[2], c[4]) for c in x.decision.candidates] for x in seen if x is not None)
            assert [c[:2] for c in kept] == [c[:2] for c in new]
            assert [c[2] for c in kept] == pytest.approx([c[2] for c in new], rel=1e-9)
        placement = rng.choice(placers).place(ask)
        if placement is not None:
            assert placement.decode.identity not in exclude
            placement.grow(3)
            held.append(placement)
        if len(held) > 2:
            held.pop(rng.randrange(3)).release()
    for placement in held:
        placement.release()
    assert cluster.loads() == {}
