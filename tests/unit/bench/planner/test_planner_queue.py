"""The simulation against queueing theory, and hand-overs against what can be worked out by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from baton_bench.planner.search import bounds, md1_wait_s
from baton_bench.planner.workload import from_lengths
from baton_bench.simulator.profile import DecodeCost, EngineProfile, Limits, Link, Overheads, PrefillCost
from baton_bench.simulator.router import VirtualRouter
from baton_bench.simulator.simulation import Deployment, Route, Simulation
from baton_bench.traces import TraceRequest

ENGINE = EngineProfile(1, 1, PrefillCost(0.01, 1e-4), DecodeCost(0.01, 0.0, 1e-4), kv_tokens=1_000_000)
LIMITS = Limits(max_num_seqs=64, max_num_batched_tokens=512, prefill_chunk=512)
DEPLOYMENT = Deployment(1, 1, ENGINE, ENGINE, LIMITS, Link(0.0, 1e12), layers=10, kv_bytes_per_token=1000.0)


class Straight:
    """Routes everything to the first instances."""

    def __init__(self, fleet, now) -> None:
        self._prefill = 0 if fleet.prefills else None

    def place(self, request):
        return Route(0, self._prefill)

    def on_blocks_changed(self, role, number, new, gone) -> None: ...

    def on_first_token(self, route, served) -> None: ...

    def on_finished(self, route, tokens) -> None: ...


def of_length(rate: float, count: int, seed: int) -> list[TraceRequest]:
    times = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, count))
    return [TraceRequest(1e3 * float(at), 512, 1, (n,)) for n, at in enumerate(times)]


@pytest.mark.parametrize(("load", "count"), [(0.3, 8000), (0.5, 12_000), (0.7, 25_000)])
def test_prompts_of_one_length_wait_as_in_an_md1_queue(load, count):
    service = ENGINE.prefill.prompt(512)
    rate = load / service
    outcome = Simulation(DEPLOYMENT, Straight).run(of_length(rate, count, seed=1))
    wait = np.mean([each.ttft_ms for each in outcome.requests]) / 1e3 - service
    assert wait == pytest.approx(md1_wait_s(rate, service), rel=0.03)
    assert outcome.prefill.prefill == pytest.approx(load, rel=0.03)


def one(deployment: Deployment, isl: int = 512, osl: int = 11):
    outcome = Simulation(deployment, VirtualRouter).run([TraceRequest(0.0, isl, osl, tuple(range(-(-isl // 512))))])
    (times,) = outcome.requests
    return times


def test_a_request_alone_takes_its_prompt_the_hand_over_and_its_steps():
    prompt, token = ENGINE.prefill.prompt(512), ENGINE.decode.seconds(1, 0)
    times = one(DEPLOYMENT)
    assert times.remote
    assert times.ttft_ms == pytest.approx(1e3 * prompt, rel=1e-3)
    assert times.tpot_ms == pytest.approx(1e3 * token)
    assert times.e2e_ms == pytest.approx(1e3 * (prompt + 10 * token), rel=1e-3)
    more = dataclasses.replace(DEPLOYMENT, overheads=Overheads(0.002, 0.004, 0.001))
    # Steps take a millisecond longer, that of the prompt too.
    assert one(more).ttft_ms == pytest.approx(times.ttft_ms + 7, rel=1e-3)
    assert one(more).tpot_ms == pytest.approx(times.tpot_ms + 1)


def test_kv_travels_while_it_is_computed_but_for_the_last_layer():
    prompt = 1e3 * ENGINE.prefill.prompt(512)
    kv = 512 * 1000.0
    fast = dataclasses.replace(DEPLOYMENT, link=Link(0.0, kv / 0.02))  # 20 ms for what takes 61 to compute
    assert one(fast).ttft_ms == pytest.approx(prompt + 2)
    slow = dataclasses.replace(DEPLOYMENT, link=Link(0.0, kv / 0.1))
    assert one(slow).ttft_ms == pytest.approx(100)
    late = dataclasses.replace(DEPLOYMENT, link=Link(0.003, kv / 0.02, layerwise=False))
    assert one(late).ttft_ms == pytest.approx(prompt + 20 + 3)


def test_links_carry_one_transfer_at_a_time():
    kv = 512 * 1000.0
    deployment = dataclasses.replace(
        DEPLOYMENT, prefills=2, link=Link(0.0, kv / 0.2), limits=dataclasses.replace(LIMITS, max_num_seqs=8)
    )
    requests = [TraceRequest(0.0, 512, 1, (n,)) for n in range(4)]
    outcome = Simulation(deployment, VirtualRouter).run(requests)
    # All four end in one decode instance, whose link takes 200 ms for each.
    assert sorted(round(each.ttft_ms) for each in outcome.requests) == [200, 400, 600, 800]
    assert outcome.decode.link == pytest.approx(1.0)


def test_short_prompts_and_those_without_prefill_instances_are_computed_by_decode():
    assert not one(DEPLOYMENT, isl=63).remote
    assert one(DEPLOYMENT, isl=64).remote
    alone = dataclasses.replace(DEPLOYMENT, prefills=0)
    times = one(alone)
    assert not times.remote
    assert times.ttft_ms == pytest.approx(1e3 * ENGINE.prefill.prompt(512))


def test_what_is_cached_is_neither_computed_nor_sent():
    requests = [TraceRequest(0.0, 1536, 2, (1, 2, 3)), TraceRequest(5000.0, 1600, 2, (1, 2, 3, 4))]
    outcome = Simulation(DEPLOYMENT, VirtualRouter).run(requests)
    first, second = sorted(outcome.requests, key=lambda each: each.number)
    # 64 tokens are missing on the decode instance: as many as go to prefill, where the rest is cached, too.
    assert second.remote
    assert second.ttft_ms < 0.2 * first.ttft_ms
    assert outcome.prefill.matched == pytest.approx(1536 / 3136)
    assert outcome.prefill.link == pytest.approx(1600 * 1000 / 1e12 / outcome.seconds, rel=0.01)


def test_what_decode_alone_holds_comes_from_there():
    """A prompt that decode computed by itself (there was no prefill instance) is not computed again by prefill."""
    simulation = Simulation(DEPLOYMENT, VirtualRouter)
    request = TraceRequest(0.0, 1600, 2, (1, 2, 3, 4))
    # The router's index has to know the names: it learns them when it places the first request.
    simulation._routing.on_finished(simulation._routing.place(request), 2)
    simulation.decodes[0].cache.store((1, 2, 3))
    outcome = simulation.run([request])
    assert outcome.requests[0].ttft_ms < 25
    assert outcome.prefill.matched == pytest.approx(0.96)


def test_goodput_counts_those_that_keep_all_targets_and_a_run_may_end_early():
    workload = from_lengths(512, 16, 400, seed=3)
    targets = {"ttft": 300.0, "itl": 20.0}
    slow = Simulation(DEPLOYMENT, Straight).run(workload.requests, speedup=8.0)
    fast = Simulation(DEPLOYMENT, Straight).run(workload.requests, speedup=40.0)
    assert slow.attainment(targets) > 0.9 > 0.5 > fast.attainment(targets)
    assert slow.goodput(targets) == pytest.approx(8.0 * slow.attainment(targets), rel=0.05)
    early = Simulation(DEPLOYMENT, Straight, slos=targets, most_failed=20).run(workload.requests, speedup=40.0)
    assert early.stopped
    assert len(early.requests) < 400
    assert early.attainment(targets) < 0.9


def test_no_more_is_served_than_the_bounds_allow():
    workload = from_lengths(512, 32, 250, seed=4)
    for prefills, decodes in ((1, 1), (2, 1), (0, 2)):
        deployment = dataclasses.replace(DEPLOYMENT, prefills=prefills, decodes=decodes)
        bound = bounds(deployment, workload, {})
        outcome = Simulation(deployment, VirtualRouter).run(workload.requests, speedup=3 * bound.rate)
        assert 0.6 * bound.rate < len(outcome.requests) / outcome.seconds < 1.02 * bound.rate
        if prefills:
            strict = dataclasses.replace(deployment, threshold=64)
            apart = bounds(strict, workload, {})
            assert apart.rate == min(bound.prefill, bound.link, bound.decode)
            outcome = Simulation(strict, VirtualRouter).run(workload.requests, speedup=3 * bound.rate)
            assert all(each.remote for each in outcome.requests)
            assert 0.6 * apart.rate < len(outcome.requests) / outcome.seconds < 1.02 * apart.rate


def test_a_link_that_is_too_slow_is_what_binds():
    workload = from_lengths(512, 16, 300, seed=5)
    deployment = dataclasses.replace(DEPLOYMENT, link=Link(0.0, 512_000 / 0.2))
    bound = bounds(deployment, workload, {})
    assert (bound.limit, bound.link) == ("link", pytest.approx(5.0, rel=0.01))
    outcome = Simulation(deployment, Straight).run(workload.requests, speedup=20.0)
    assert len(outcome.requests) / outcome.seconds == pytest.approx(5.0, rel=0.03)
