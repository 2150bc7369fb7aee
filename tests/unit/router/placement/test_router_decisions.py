"""What the router remembers of its decisions: bounds, names, flows, terms, rates."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from baton.api.v1 import common_pb2
from baton.dialects.tool_use import read_tools
from baton.types import Grammar, InstanceId, PrefillPath, Role
from baton_router.frontend.console.explanation import explanation, summary
from baton_router.frontend.console.window_stats import Flow, Flows, WindowStats, quantile
from baton_router.processor.output_processor import GenerationClock, GenerationMetrics
from baton_router.processor.text_request import TextDelta
from baton_router.scheduler.decision import Decision, DecisionLog
from baton_router.scheduler.placer import SchedulerMetrics
from baton_router.scheduler.policies import make_policy
from baton_router.scheduler.policy import Ratings, Request, Scores, Side, choose, prefill_order

UUID = "0" * 32


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def side(role: Role, rates: list[float], work: list[float]) -> Side:
    ids = [InstanceId(f"{role.value}-{at}") for at in range(len(rates))]
    return Side(
        role=role,
        ids=ids,
        matched=[int(100 * rate) for rate in rates],
        match_rates=rates,
        work=work,
        loads=work,
        cost=164.0,
    )


def decide(ratings: Ratings | None = None, *, prefills: int = 2, decodes: int = 2) -> Decision:
    """A decision of the default policy, or with given ratings, over instances of which the last is the best."""
    prefill = side(Role.PREFILL, [at / prefills for at in range(prefills)], [0.0] * prefills)
    decode = side(Role.DECODE, [at / decodes for at in range(decodes)], [0.0] * decodes)
    if ratings is None:
        ratings = make_policy("match_minus_load").score(Request(100), prefill, decode)
    choice = choose(ratings, random.Random(0))
    order = prefill_order(ratings, choice, 3, random.Random(0))
    return Decision(
        100, "match_minus_load", prefill, decode, ratings, choice, choice.path, order, ["h:1"], "exact"
    )  # fmt: skip


def trace(num_bytes: int, **fields: object) -> common_pb2.RequestTrace:
    known = {"path": common_pb2.PREFILL_PATH_REMOTE, "prefill_instance": "prefill-1", "decode_instance": "decode-1"}
    return common_pb2.RequestTrace(**{**known, "pipe": "shm", "kv_bytes": num_bytes, **fields})  # type: ignore[arg-type]


def test_the_latest_are_kept_newest_first() -> None:
    log = DecisionLog(max_records=3)
    for at in range(5):
        log.end(log.begin(f"r{at}-{UUID}", 10), "done")
    assert [x.request_id for x in log.recent(10)] == [f"r{at}-{UUID}" for at in (4, 3, 2)]
    assert [x.request_id for x in log.recent(1)] == [f"r4-{UUID}"]
    assert [x.request_id for x in log.recent(10, containing="r3")] == [f"r3-{UUID}"]
    assert log.num_begun == 5
    assert log.num_running == 0


def test_large_decisions_push_others_out() -> None:
    log = DecisionLog(max_numbers=40)
    for at in range(10):
        log.placed(f"r{at}", decide(prefills=8, decodes=8))
    assert len(log.recent(100)) == 2, "16 candidates each"
    log.placed("huge", decide(prefills=64, decodes=64))
    assert [x.request_id for x in log.recent(100)] == ["huge"], "the latest stays whatever its size"


@given(st.lists(st.tuples(st.sampled_from(["begin", "place", "end"]), st.integers(0, 5)), max_size=60))
def test_the_count_of_numbers_is_that_of_what_is_kept(steps: list[tuple[str, int]]) -> None:
    log, open_ones = DecisionLog(max_records=3, max_numbers=10), {}
    decision = decide()
    for what, at in steps:
        name = f"r{at}"
        if what == "begin" and name not in open_ones:
            open_ones[name] = log.begin(name, 5)
        elif what == "place":
            log.placed(name, decision)
        elif what == "end" and name in open_ones:
            log.end(open_ones.pop(name), "done")
    assert log._numbers == sum(4 * len(x.placements) for x in log)
    assert len(log.recent(100)) <= 3
    assert log.num_running == len(open_ones)


@pytest.mark.parametrize("name", [f"chatcmpl-my-id-{UUID}", "chatcmpl-my-id", "my-id"])
def test_found_by_every_name(name: str) -> None:
    log = DecisionLog()
    record = log.begin(f"chatcmpl-my-id-{UUID}", 1)
    log.begin(f"chatcmpl-my-id2-{UUID}", 1)
    assert log.find(name) == [record]
    assert log.find("my") == []


@pytest.mark.parametrize("name", ["resp_ab12-my-id", "resp_ab12", "my-id"])
def test_a_response_is_found_by_its_id_too(name: str) -> None:
    log = DecisionLog()
    record = log.begin(f"resp_ab12-my-id-{UUID}", 1)
    log.begin(f"resp_ab1-my-id2-{UUID}", 1)
    log.begin(f"msg-other-{UUID}", 1)
    assert log.find(name) == [record]
    assert [found.request_id for found in log.find("other")] == [f"msg-other-{UUID}"]


def test_explanation_of_grammar_tools_and_reasoning() -> None:
    log = DecisionLog()
    record = log.begin("r", 100)
    log.placed("r", decide())
    record.grammar, record.thinking_budget = str(Grammar("tools", "start: TEXT")), 32
    names = [f"tool_{at}" for at in range(12)]
    record.tools = str(read_tools([{"function": {"name": name}} for name in names], "required", False))
    told = explanation(record)
    assert told["grammar"].startswith("tools sha256:")
    assert f"its answer is held to a grammar: {told['grammar']}" in told["why"]
    first = ", ".join(names[:8])
    assert told["tools"] == f"required: {first} and 4 more, one call at most"
    assert f"its tools are {told['tools']}" in told["why"]
    assert told["thinking_budget"] == 32
    assert "its reasoning ends after 32 tokens" in told["why"]
    plain = explanation(log.begin("s", 1))
    assert (plain["grammar"], plain["tools"], plain["thinking_budget"]) == (None, None, None)


def test_explanation_of_a_whole_request() -> None:
    clock, log, flows = Clock(), DecisionLog(), Flows()
    log.on_trace = flows.add
    timer = GenerationClock(GenerationMetrics(CollectorRegistry()), arrived=0.0)
    record = log.begin(f"cmpl-a-{UUID}", 100, timer)
    log.placed(record.request_id, decide())
    timer.count_deltas([TextDelta(0, "x", [1, 2, 3])])
    log.answered(record, trace(500))
    log.answered(record, trace(800, num_migrations=1, transfer_us=1500))
    clock.now += 2
    log.end(record, "done")
    told = explanation(record)
    assert (told["prefill"], told["decode"], told["path"], told["pipe"]) == ("prefill-1", "decode-1", "remote", "shm")
    assert (told["outcome"], told["generated_tokens"], told["migrations"]) == ("done", 3, 1)
    assert told["match_rate"] == 0.5
    assert told["ttft_ms"] > 0
    assert told["trace"]["transfer_ms"] == 1.5
    (placement,) = told["placements"]
    winners = [x["instance"] for x in placement["candidates"] if x["winner"]]
    assert sorted(winners) == ["decode-1", "prefill-1"]
    for x in placement["candidates"]:
        assert math.isclose(sum(x["terms"].values()), x["score"])
    assert math.isclose(sum(placement["terms"].values()), placement["score"])
    assert any("800 bytes over shm" in line for line in told["why"])
    assert summary(record).items() <= {**told, "placements": 1}.items()
    assert flows.recent() == {Flow("remote", "prefill-1", "decode-1", "shm"): (2, 800)}


def test_explanation_of_what_cannot_be_had_is_json() -> None:
    ratings = Ratings(
        Scores.of(), Scores.of(queue=[-1.0, -2.0]), local=Scores.of(prefill_ms=[-3.0, -math.inf])
    )  # fmt: skip
    log = DecisionLog()
    record = log.begin("r", 100)
    log.placed("r", decide(ratings, prefills=0))
    (placement,) = explanation(record)["placements"]
    by_name = {x["instance"]: x for x in placement["candidates"]}
    assert by_name["decode-0"]["winner"]
    assert by_name["decode-1"]["score"] is None
    assert placement["path"] == PrefillPath.LOCAL
    assert any(line.startswith("prefill: none") for line in explanation(record)["why"])


def test_a_request_that_was_never_placed_says_so() -> None:
    log = DecisionLog()
    record = log.begin("r", 7)
    log.end(record, "queue_full")
    assert explanation(record)["why"] == ["it was never placed: queue_full"]


def test_flows_forget() -> None:
    clock = Clock()
    flows = Flows(window_s=10, now=clock)
    flows.add(trace(100), 100)
    clock.now += 5
    flows.add(trace(50), 50)
    assert flows.recent() == {Flow("remote", "prefill-1", "decode-1", "shm"): (2, 150)}
    clock.now += 8
    assert flows.recent() == {Flow("remote", "prefill-1", "decode-1", "shm"): (1, 50)}
    for _ in range(100):
        clock.now += 1
        flows.add(trace(1), 1)
    assert len(flows._seconds) <= 11
    flows.add(common_pb2.RequestTrace(), 5)
    assert all(flow.path for flow in flows.recent())


def test_terms_are_a_histogram_with_bounded_names() -> None:
    registry = CollectorRegistry()
    terms = SchedulerMetrics(registry)
    for _ in range(3):
        terms.observe_terms(decide())
    assert registry.get_sample_value(
        "baton_router_decision_term_bucket", {"role": "decode", "term": "match", "le": "0.5"}
    ) == 3  # fmt: skip
    assert registry.get_sample_value(
        "baton_router_decision_term_bucket", {"role": "decode", "term": "match", "le": "0.4"}
    ) == 0  # fmt: skip
    assert terms._terms.labels("pair", "score").total == pytest.approx(3 * decide().score)
    for at in range(100):
        terms.observe_terms(decide(Ratings(Scores.of(a=[0.0, 1.0]), Scores.of(**{f"term{at}": [0.0, -math.inf]}))))
    names = {label for _, label in terms._terms._series}
    assert len(names) <= 32 + 4
    assert "other" in names
    generate_latest(registry)


def test_terms_of_a_busy_second_are_a_sample() -> None:
    clock = Clock()
    terms, decision = SchedulerMetrics(CollectorRegistry(), now=clock), decide()

    def counted() -> int:
        return sum(terms._terms.labels("pair", "score").counts)

    for _ in range(1000):
        terms.observe_terms(decision)
    assert counted() == 200
    clock.now += 1
    terms.observe_terms(decision)
    assert counted() == 201


def test_pulse_is_what_happened_in_the_window() -> None:
    clock, registry = Clock(), CollectorRegistry()
    metrics = GenerationMetrics(registry)
    stats = WindowStats(registry, now=clock)
    assert stats.window()["ttft_ms"] is None
    assert stats.window()["hit_rate"] is None
    for _ in range(100):
        metrics.ttft.observe(0.02)
    clock.now += 100
    stats.sample()  # all of that is over
    metrics.prompt_tokens.inc(200)
    metrics.cached_tokens.inc(50)
    metrics.finished.labels(outcome="done").inc(9)
    metrics.finished.labels(outcome="unavailable").inc(1)
    for _ in range(10):
        metrics.ttft.observe(0.2)
    clock.now += 20
    stats.sample()
    clock.now += 30
    seen = stats.window()
    assert 100 <= seen["ttft_ms"]["p50"] <= 250
    assert seen["hit_rate"] == 0.25
    assert (seen["failed"], seen["window_s"]) == (1, 50)
    assert seen["requests_per_s"] == pytest.approx(10 / 50)
    clock.now += 100
    assert stats.window()["ttft_ms"] is None
    for _ in range(1000):
        clock.now += 1
        stats.sample()
    assert len(stats._samples) <= 183
    assert len(stats.history()) == len(stats._samples) - 1
    assert [piece["ago_s"] for piece in stats.history()[-3:]] == [2, 1, 0]


@given(st.lists(st.floats(0.001, 5.0), min_size=1, max_size=80), st.floats(0.01, 0.99))
def test_quantiles_fall_into_the_right_bucket(values: list[float], q: float) -> None:
    bounds = [0.01, 0.1, 1.0, 2.0, math.inf]
    counts = [float(sum(value <= bound for value in values)) for bound in bounds]
    exact = sorted(values)[max(0, math.ceil(q * len(values)) - 1)]
    at = next(i for i, bound in enumerate(bounds) if exact <= bound)
    low, high = (bounds[at - 1] if at else 0.0), bounds[at]
    found = quantile(bounds, counts, q)
    assert low <= found <= (low if math.isinf(high) else high)


async def test_a_pause_is_a_piece_of_its_own_and_a_standstill_is_seen() -> None:
    clock = Clock()
    registry = CollectorRegistry()
    metrics = GenerationMetrics(registry)
    stats = WindowStats(registry, now=clock)
    running = [1]
    stats.is_busy = lambda: bool(running)
    clock.now += 60
    stats.follow()  # a request begins after a minute without any
    clock.now += 1
    metrics.generated_tokens.inc(5)
    stats._follow_on()
    rates = [(piece["seconds"], piece["tokens_per_s"]) for piece in stats.history()]
    assert rates == [(60, 0), (1, 5)]
    assert stats.stalled_s() is None
    for _ in range(12):
        clock.now += 1
        stats._follow_on()
    assert stats.stalled_s() == 12
    metrics.generated_tokens.inc(1)
    clock.now += 1
    stats._follow_on()
    assert stats.stalled_s() is None
    running.clear()
    stats._follow_on()
    assert stats._timer is None
