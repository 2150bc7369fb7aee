"""What placement weighs: KV in slower tiers and stores, speeds it has learnt, a prefix that everybody shares."""

from __future__ import annotations

import asyncio
import math
import random
from array import array
from collections import Counter
from dataclasses import replace

import grpc.aio
import pytest
from tests.support.router.placement_cluster import PROMPT, Cluster

from baton.api.v1 import common_pb2, events_pb2
from baton.hashing import block_hashes, root_hash
from baton.types import InstanceId, PrefillPath, RequestId, Role, SamplingParams
from baton_router.indexer.stores import Store
from baton_router.registry.load import LoadReservation
from baton_router.scheduler.placement import Placement, PlacementRequest
from baton_router.scheduler.placer import LowerTiers
from baton_router.scheduler.policies import POLICIES, PolicyContext, make_policy
from baton_router.scheduler.speeds import ServedRequest, Speeds
from baton_router.types import RoutedRequest


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
    speeds.work.half = math.inf
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


async def test_an_expected_output_is_load_of_its_decode_instance(cluster: Cluster) -> None:
    placer = cluster.make_placer()
    long = placer.place(PlacementRequest(array("I", range(4)), num_sequences=2, expected_tokens=1000))
    assert long is not None
    assert long.decode.load.tokens == 4 + 2 * 1000
    for at in range(1, 4):
        short = placer.place(PlacementRequest(array("I", range(100 * at, 100 * at + 40)), expected_tokens=10))
        assert short is not None
        assert short.decode is not long.decode, "it avoids what the first one is going to do"
    long.grow(2 * 1000)
    assert long.decode.load.tokens == 4 + 2 * 1000
    long.release()
    assert long.decode.load.tokens == 0


async def test_predicted_milliseconds_follow_the_expected_output(cluster: Cluster) -> None:
    speeds = Speeds(lambda: 0.0)
    for d in ("d:1", "d:2"):
        speeds.decode.add(d, 1, 10.0)
    placer = cluster.make_placer(make_policy("cost_ms", PolicyContext(speeds=speeds)), speeds=speeds)
    costs = []
    for expected, most in ((None, 50), (7, 50), (70, 50)):
        placement = placer.place(PlacementRequest(PROMPT, max_tokens=most, expected_tokens=expected), reserve=False)
        assert placement is not None
        costs.append(placement.decision.ratings.decode.terms["decode_ms"][0])
    assert costs[0] == costs[2] == pytest.approx(50 / 7 * costs[1]), "without a hint 128 are expected, 50 are possible"


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
        for candidate in placement.decision.candidates:
            parts = (*candidate.own, *candidate.partner_terms, *candidate.pair_terms)
            assert sum(term.value for term in parts) == pytest.approx(candidate.score), name
            assert bool(candidate.partner) == placement.decision.ratings.couples, name


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
