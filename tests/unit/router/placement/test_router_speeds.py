"""Speeds learnt from what requests report, and what they do to the choice by cost."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.api.v1 import common_pb2
from baton.types import InstanceId, PrefillPath, Role
from baton_router.registry.load import LoadTracker
from baton_router.scheduler.policies import PolicyContext, Request, Side, make_policy
from baton_router.scheduler.policy import choose
from baton_router.scheduler.speeds import Fit, LinearFit, LinearFits, PromptWork, ServedRequest, Speeds


@given(st.floats(0, 100), st.floats(0.001, 10), st.lists(st.floats(1, 1e5), min_size=5, max_size=50))
def test_a_line_is_found_wherever_it_lies(base: float, slope: float, amounts: list[float]) -> None:
    line = LinearFit(flat=False, at=0.0)
    for amount in amounts:
        line.add(amount, base + slope * amount, 0.0)
    mean = sum(amounts) / len(amounts)
    assert line.fit.base >= 0
    assert line.fit.slope >= 0
    assert line.fit.at(mean) == pytest.approx(base + slope * mean, rel=0.35)
    spread = (sum((x - mean) ** 2 for x in amounts) / len(amounts)) ** 0.5
    if spread > 0.8 * mean:
        assert line.fit.slope == pytest.approx(slope, rel=0.05)


def test_what_does_not_vary_is_all_slope_or_all_base() -> None:
    steep, flat = LinearFit(flat=False, at=0.0), LinearFit(flat=True, at=0.0)
    for line in (steep, flat):
        for _ in range(10):
            line.add(100.0, 20.0, 0.0)
    assert steep.fit.at(200) == pytest.approx(40.0)
    assert flat.fit.at(200) == pytest.approx(20.0)


def test_own_observations_then_those_of_ones_like_then_the_prior() -> None:
    clock = [0.0]
    lines: LinearFits[str] = LinearFits(Fit(1.0, 2.0), lambda: clock[0])
    assert lines.get(["a"]) == [Fit(1.0, 2.0)]
    for _ in range(3):
        lines.add("a", 10.0, 50.0)
        lines.add("b", 10.0, 10.0)
    slow, fast, new = lines.get(["a", "b", "c"])
    assert (slow.at(10), fast.at(10)) == (pytest.approx(50.0), pytest.approx(10.0))
    assert 25.0 < new.at(10) < 35.0
    clock[0] = 61.0
    assert lines.get(["a"]) == lines.get(["c"]), "nobody confirmed that it is slow: it gets another chance"
    lines.add("a", 10.0, 10.0)
    lines.add("a", 10.0, 10.0)
    assert lines.get(["a"])[0].at(10) == pytest.approx(10.0), "what was known before is not mixed in"


def trace(**fields: object) -> common_pb2.RequestTrace:
    return common_pb2.RequestTrace(**fields)  # type: ignore[arg-type]


def test_each_path_teaches_its_own_speed() -> None:
    speeds = Speeds(lambda: 0.0)
    speeds.work.half = math.inf
    local, remote = common_pb2.PREFILL_PATH_LOCAL, common_pb2.PREFILL_PATH_REMOTE
    d = InstanceId("d")
    for _ in range(4):
        speeds.observe(
            ServedRequest(trace(path=local, recomputed_tokens=100, ttft_us=30_000, queue_us=10_000), "", d, 0.0, 1)
        )
        seen = trace(
            path=remote, prefill_instance="p", prompt_tokens=300, prefill_cached_tokens=100, cached_tokens=50,
            kv_bytes=10, exposed_us=4_000, queue_us=1_000, ttft_us=105_000,
        )  # fmt: skip
        speeds.observe(ServedRequest(seen, "p", d, 300.0, 1))
        speeds.observe(
            ServedRequest(seen, "another", d, 300.0, 1)
        )  # another candidate took it: says nothing of its queue
    assert speeds.local.get(["d"])[0].at(100) == pytest.approx(20.0)
    assert speeds.prefill.get(["p"])[0].at(500) == pytest.approx(100.0)
    assert speeds.prefill.get(["another"]) == speeds.prefill.get(["nobody"])
    assert speeds.transfer.get([("p", "d")])[0].at(10) == pytest.approx(4.0)


def test_what_context_costs_is_learnt() -> None:
    """A token takes 20 us and 0.4 ns for every token that it attends to: at 50,000 it takes twice as long."""
    work, rng = PromptWork(), random.Random(1)
    work.half = 1e3
    for _ in range(60):
        total = rng.choice((500, 4000, 30_000, 120_000))
        matched = rng.choice((0, total // 2, total - 400))
        work.add(matched, total, 0.02 * (total - matched) + 4e-7 * (total**2 - matched**2) / 2)
    assert work.half == pytest.approx(50_000, rel=1e-6)
    assert work.of(0.0, 100_000.0) == pytest.approx(200_000)
    assert work.of(50_000.0, 100_000.0) == pytest.approx(125_000)
    for _ in range(200):
        work.add(0, 1000, rng.uniform(20.0, 21.0))
    assert 1e4 < work.half < 1e6, "prompts of one length teach nothing of it"


# --- the choice by cost ---


def pair(role: Role, *matched: int, work: tuple[float, ...] = ()) -> Side:
    ids = [InstanceId(f"{role.value[0]}{i}") for i in range(len(matched))]
    loads = list(work) or [0.0] * len(ids)
    books = [LoadTracker(role) for _ in ids]
    return Side(role, ids, list(matched), [m / 1000 for m in matched], loads, loads, 1064, books)


def cheapest(
    speeds: Speeds, prefill: Side, decode: Side, request: Request
) -> tuple[PrefillPath | None, int | None, int]:
    policy = make_policy("cost_ms", PolicyContext(speeds=speeds))
    choice = choose(policy.score(request, prefill, decode), random.Random(0))
    return choice.path, choice.prefill, choice.decode


def knowing(**slow: float) -> Speeds:
    """One millisecond per token to compute anywhere, 0.1 to move one; ``slow``: factors per pair."""
    speeds = Speeds(lambda: 0.0)
    speeds.work.half = math.inf
    for at in range(3):
        for amount in (100, 1000, 3000):
            speeds.prefill.add(f"p{at}", amount, amount)
            speeds.local.add(f"d{at}", amount, amount)
            for other in range(3):
                speeds.transfer.add((f"p{at}", f"d{other}"), amount, 0.1 * amount * slow.get(f"p{at}d{other}", 1.0))
    return speeds


def test_a_pair_with_a_faster_pipe_is_taken_together() -> None:
    request = Request(1000, kv_bytes_per_token=1.0)
    prefill, decode = pair(Role.PREFILL, 0, 0, 0, work=(0, 0, 0)), pair(Role.DECODE, 0, 0, 0)
    decode.trackers[0].prompts = decode.trackers[1].prompts = decode.trackers[2].prompts = 5000
    slow = {f"p{p}d{d}": 20.0 for p in range(3) for d in range(3) if (p, d) != (2, 1)}
    assert cheapest(knowing(**slow), prefill, decode, request) == (PrefillPath.REMOTE, 2, 1)


def test_conditional_disaggregation_falls_out_of_the_cost() -> None:
    request = Request(1000, kv_bytes_per_token=1.0)
    prefill = pair(Role.PREFILL, 0)
    assert cheapest(knowing(), prefill, pair(Role.DECODE, 960), request)[0] is PrefillPath.LOCAL
    busy = pair(Role.DECODE, 0)
    busy.trackers[0].requests, busy.trackers[0].prompts = 40, 3000
    assert cheapest(knowing(), prefill, busy, request)[0] is PrefillPath.REMOTE
    queued = pair(Role.PREFILL, 0, work=(10_000.0,))
    assert cheapest(knowing(), queued, pair(Role.DECODE, 0), request)[0] is PrefillPath.LOCAL
    for threshold, path in ((1, PrefillPath.REMOTE), (2000, PrefillPath.LOCAL)):
        overridden = Request(1000, kv_bytes_per_token=1.0, threshold=threshold)
        assert cheapest(knowing(), queued, pair(Role.DECODE, 960), overridden)[0] is path


def test_an_operators_threshold_refuses_pairs_and_the_prefill_on_decode() -> None:
    policy = make_policy("cost_ms", PolicyContext(speeds=knowing()))
    request = Request(1000, kv_bytes_per_token=1.0, threshold=100)
    ratings = policy.score(request, pair(Role.PREFILL, 0), pair(Role.DECODE, 0, 960))
    assert ratings.pairs is not None
    assert ratings.local is not None
    assert [float(ratings.pairs.rows[d][0]) > -math.inf for d in range(2)] == [True, False]
    assert [float(x) > -math.inf for x in ratings.local.totals] == [False, True]
    assert ratings.pairs.explain(0, 1) == {"below_threshold": -math.inf}


def test_a_prompt_computed_on_decode_counts_what_its_sequences_wait() -> None:
    policy = make_policy("cost_ms", PolicyContext(speeds=knowing()))
    decode = pair(Role.DECODE, 0, 0)
    decode.trackers[1].requests = 10
    local = policy.score(Request(1000), pair(Role.PREFILL, 0), decode).local
    assert local is not None
    assert local.totals[0] - local.totals[1] == pytest.approx(1000.0)  # a tenth of its computing for each of ten


def test_no_store_is_loaded_from_that_has_nothing_more() -> None:
    policy = make_policy("cost_ms", PolicyContext(speeds=knowing()))
    decode = pair(Role.DECODE, 400, 400)
    decode.loadable = np.array([400.0, 900.0])
    store = policy.score(Request(1000, kv_bytes_per_token=1.0), pair(Role.PREFILL, 0), decode).store
    assert store is not None
    assert [float(x) > -math.inf for x in store.totals] == [False, True]


def test_short_answers_cost_little_decoding() -> None:
    speeds = knowing()
    for _ in range(5):
        speeds.decode.add("d0", 4, 40.0)
    policy = make_policy("cost_ms", PolicyContext(speeds=speeds))
    totals = [
        float(
            policy.score(Request(1000, max_tokens=most), pair(Role.PREFILL, 0), pair(Role.DECODE, 0)).decode.totals[0]
        )
        for most in (1, 10, 1_000_000, None)
    ]
    assert totals[1] == pytest.approx(10 * totals[0])
    assert totals[2] == totals[3] < totals[1]


@pytest.mark.parametrize("seed", range(20))
def test_no_pair_scores_more_than_the_bound_says(seed: int) -> None:
    """Decode instances whose bound is below the best found are not looked at."""
    rng = random.Random(seed)
    factors = {f"p{p}d{d}": rng.uniform(0.5, 30.0) for p in range(3) for d in range(3)}
    prefill = pair(Role.PREFILL, *[rng.randrange(1000) for _ in range(3)], work=(rng.random() * 500, 0, 900))
    decode = pair(Role.DECODE, *[rng.randrange(1000) for _ in range(3)])
    for tracker in decode.trackers:
        tracker.prompts = 50_000
    policy = make_policy("cost_ms", PolicyContext(speeds=knowing(**factors)))
    ratings = policy.score(Request(1000, kv_bytes_per_token=1.0), prefill, decode)
    assert ratings.pairs is not None
    assert ratings.pairs.most is not None
    found = np.array([ratings.prefill.totals + ratings.pairs.rows[d] for d in range(3)])
    assert (found.max(axis=1) <= ratings.pairs.most + 1e-6).all()
    assert choose(ratings, rng).score == pytest.approx(float((found + ratings.decode.totals[:, None]).max()))


def test_what_decode_holds_is_not_computed_again_by_prefill() -> None:
    speeds, request = knowing(), Request(1000, kv_bytes_per_token=1.0)
    policy = make_policy("cost_ms", PolicyContext(speeds=speeds))
    ratings = policy.score(request, pair(Role.PREFILL, 0, 800), pair(Role.DECODE, 0, 600))
    assert ratings.pairs is not None
    prefill_ms = [[-ratings.pairs.explain(p, d)["prefill_ms"] for p in range(2)] for d in range(2)]
    assert prefill_ms == [[pytest.approx(1000), pytest.approx(200)], [pytest.approx(400), pytest.approx(200)]]


def test_a_slow_instance_is_left_alone_once_that_is_known() -> None:
    speeds = knowing()
    for _ in range(40):
        speeds.prefill.add("p0", 1000, 9000)
        speeds.decode.add("d0", 4, 400.0)
        speeds.decode.add("d1", 4, 20.0)
    sides = pair(Role.PREFILL, 0, 0), pair(Role.DECODE, 0, 0)
    for tracker in sides[1].trackers:
        tracker.prompts = 50_000
    assert cheapest(speeds, *sides, Request(1000, kv_bytes_per_token=1.0)) == (PrefillPath.REMOTE, 1, 1)


def test_what_was_measured_beside_a_queue_counts_less() -> None:
    """Of a queue nobody knows how much was left; without one 8 tokens take a millisecond, and that is found."""
    speeds, rng = Speeds(lambda: 0.0), random.Random(1)
    for _ in range(100):
        computed, ahead = rng.randint(500, 4000), rng.choice([0, 0, rng.randint(1, 8000)])
        seen = trace(
            path=common_pb2.PREFILL_PATH_REMOTE, prefill_instance="p", prompt_tokens=computed,
            ttft_us=int(125 * (computed + rng.random() * ahead)),
        )  # fmt: skip
        speeds.observe(ServedRequest(seen, "p", InstanceId("d"), float(ahead), 1))
    (fit,) = speeds.prefill.get(["p"])
    assert fit.at(2000) == pytest.approx(250.0, rel=0.05)
    assert 0.095 < fit.slope < 0.13  # all counted alike, it is 0.086
    for _ in range(150):  # under load all are: then that is what there is to know
        speeds.observe(ServedRequest(trace(path=common_pb2.PREFILL_PATH_REMOTE, prefill_instance="p", prompt_tokens=100,
                                    ttft_us=3_000_000), "p", InstanceId("d"), 9900.0, 1))  # fmt: skip
    assert speeds.prefill.get(["p"])[0].at(10_000) == pytest.approx(3000.0, rel=0.05)


def test_a_small_difference_gives_way_to_balance_and_a_great_one_does_not() -> None:
    remote = Request(1000, kv_bytes_per_token=1.0, threshold=0)

    def chosen(factor: float, *loads: float) -> int | None:
        speeds = Speeds(lambda: 0.0)
        for amount in (100, 1000, 3000):
            speeds.prefill.add("p0", amount, amount)
            speeds.prefill.add("p1", amount, amount / factor)
        prefill = pair(Role.PREFILL, 0, 0)
        prefill.loads = list(loads)
        return cheapest(speeds, prefill, pair(Role.DECODE, 0), remote)[1]

    assert chosen(1.03, 0.0, 0.0) == 1
    assert chosen(1.03, 1000.0, 5000.0) == 0
    assert chosen(1.5, 1000.0, 5000.0) == 1


def test_balance_does_not_decide_between_pair_and_local() -> None:
    """What decode holds need not be computed, so hardly anything is left that one instance would be spared."""
    request = Request(1000, kv_bytes_per_token=1.0)
    policy = make_policy("cost_ms", PolicyContext(speeds=knowing()))
    decode = pair(Role.DECODE, 960)
    for loads in ([0.0, 0.0], [0.0, 9000.0], [9000.0, 0.0]):
        prefill = pair(Role.PREFILL, 0, 0)
        prefill.loads = loads
        ratings = policy.score(request, prefill, decode)
        even = ratings.prefill.terms["even_ms"]
        assert max(even) == 0.0
        assert min(even) == pytest.approx(-4.0 if any(loads) else 0.0)  # a tenth of what 40 tokens take
        assert choose(ratings, random.Random(0)).path is PrefillPath.LOCAL
        assert ratings.local is not None
        assert max(a + b for a, b in zip(even, ratings.pairs.rows[0] if ratings.pairs else [], strict=True)) == (
            pytest.approx(-44.0)
        )


def test_the_length_of_answers_is_learnt() -> None:
    speeds = Speeds(lambda: 0.0)
    before = speeds.output_tokens
    for _ in range(20):
        speeds.observe(ServedRequest(common_pb2.RequestTrace(), "", InstanceId("d"), 0.0, 1, 7.0))
    assert (before, speeds.output_tokens) == (128.0, pytest.approx(7.0))
