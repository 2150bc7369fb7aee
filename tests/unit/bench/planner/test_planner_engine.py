"""The simulated engine against the real one: its scheduler on virtual time, with steps of the same length."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.models.toy_runner import ToyRunner

from baton.config import EngineConfig
from baton.engine.core import EngineCore
from baton.engine.request import EngineRequest
from baton.engine.step_budget import StepBudget
from baton.types import RequestId, Role, SamplingParams
from baton_bench.simulator.engine import EngineExtras, ProfiledCost, SimulatedEngine, SimulatedSequence, Speculation
from baton_bench.simulator.profile import DecodeCost, EngineProfile, Limits, PrefillCost
from baton_bench.simulator.simulation import gaps_of, percentile_of
from baton_bench.simulator.timeline import Processors, Timeline

PROFILE = EngineProfile(
    1, 1, PrefillCost(0.002, 1e-4, 2e-7), DecodeCost(0.01, 1e-6, 3e-4), kv_tokens=4 * 4096, overlap=0.5
)
LIMITS = Limits(max_num_seqs=4, max_num_batched_tokens=48, prefill_chunk=32, block_size=4)


class Recorder:
    """Owner of a simulated engine that works alone."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.first: dict[int, float] = {}
        self.ended: dict[int, float] = {}
        self.gaps: dict[int, list[float]] = {}

    def needs_load(self, engine, sequence, matched) -> bool:
        return False

    def start_load(self, engine, sequence) -> None:
        raise AssertionError

    def on_chunk_computed(self, engine, sequence, tokens, began) -> None:
        raise AssertionError

    def on_first_token(self, engine, sequence) -> None:
        self.first[sequence.key] = self.timeline.now

    def on_finished(self, engine, sequence) -> None:
        self.ended[sequence.key] = self.timeline.now
        self.gaps[sequence.key] = [gap for gap, n in gaps_of(engine.gaps, sequence.slices) for _ in range(n)]


def simulate(requests, *, profile=PROFILE, limits=LIMITS, **extras):
    timeline = Timeline()
    recorder = Recorder(timeline)
    engine = SimulatedEngine(Role.DECODE, profile, limits, timeline, recorder, EngineExtras(**extras))
    for number, (at, prompt, output) in enumerate(requests):
        timeline.at(at, lambda n=number, p=prompt, o=output: engine.submit(SimulatedSequence(n, p, o, ())))
    timeline.run_while(lambda: True)
    return recorder, engine


def run_real(requests, *, kv_tokens=PROFILE.kv_tokens, limits=LIMITS):
    """Run the real engine, scheduler included; its clock moves by what the profile says of each step."""
    runner = ToyRunner(block_size=limits.block_size, max_model_len=1024)
    config = EngineConfig(
        block_size=limits.block_size,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        prefill_chunk=limits.prefill_chunk,
        prefix_caching=False,
    )
    core = EngineCore(config, runner, runner.make_arena(kv_tokens // limits.block_size))
    budget_ms = limits.step_budget_ms
    if budget_ms is None or budget_ms > 0:
        seconds = None if budget_ms is None else budget_ms / 1e3
        core._scheduler.step_budget = StepBudget(seconds, ProfiledCost(PROFILE))
    plans, schedule = [], core._scheduler.schedule

    def noted():
        plan = schedule()
        decodes = [s for s in plan.counts if s.num_computed >= s.num_prompt and s.num_missing == 1]
        prompts = [(s.num_computed, n) for s, n in plan.counts.items() if s not in decodes]
        plans.append(
            PROFILE.step_s(
                len(decodes),
                sum(s.num_tokens for s in decodes),
                sum(n for _, n in prompts),
                sum(n * (start + 0.5 * n) for start, n in prompts),
            )
        )
        return plan

    core._scheduler.schedule = noted
    now, first, ended, todo = 0.0, {}, {}, list(enumerate(requests))
    while todo or core.has_work():
        while todo and (todo[0][1][0] <= now + 1e-12 or not core.has_work()):
            number, (at, prompt, output) = todo.pop(0)
            now = max(now, at)
            sampling = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
            core.add_request(EngineRequest(RequestId(str(number)), [2 + i % 60 for i in range(prompt)], sampling))
        outputs = core.step()
        now += plans[-1]
        for each in outputs:
            first.setdefault(int(each.request_id), now)
            if each.finish_reason is not None:
                ended[int(each.request_id)] = now
    return first, ended, core.stats().num_preemptions


def workload(seed: int, count: int = 40, most: int = 120):
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(0.15, count))
    return [(float(at), int(rng.integers(1, most)), int(rng.integers(1, 30))) for at in times]


PAUSES = st.floats(0, 0.4).map(lambda pause: round(pause, 6))
"""Seconds between arrivals; real ones are equal or differ by more than :func:`run_real` takes for equal."""


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.tuples(PAUSES, st.integers(1, 120), st.integers(1, 30)), min_size=1, max_size=25),
    st.sampled_from([1, 2, 4, 7]),
    st.sampled_from([16, 48, 200]),
    st.sampled_from([8, 32, 128]),
    st.sampled_from([None, 0.0, 25.0]),
)
def test_every_token_time_is_the_real_schedulers(pauses, max_num_seqs, budget, chunk, step_budget_ms):
    """The rules are restated in the simulator, because the real scheduler would be 6 to 15 times as slow."""
    times = np.cumsum([pause for pause, _, _ in pauses])
    requests = [(float(at), prompt, output) for at, (_, prompt, output) in zip(times, pauses, strict=True)]
    limits = Limits(max_num_seqs, budget, chunk, block_size=4, step_budget_ms=step_budget_ms)
    first, ended, preemptions = run_real(requests, limits=limits)
    simulated, engine = simulate(requests, limits=limits)
    assert preemptions == engine.use.preemptions == 0
    assert simulated.first == pytest.approx(first, abs=1e-9)
    assert simulated.ended == pytest.approx(ended, abs=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_with_little_kv_times_are_near_the_real_engines(seed):
    requests = workload(seed, most=80)
    profile = EngineProfile(1, 1, PROFILE.prefill, PROFILE.decode, 240, PROFILE.overlap)
    first, ended, _ = run_real(requests, kv_tokens=240)
    found, _ = simulate(requests, profile=profile)
    assert len(found.ended) == len(requests)
    for real, simulated in ((first, found.first), (ended, found.ended)):
        mean = np.mean([real[n] - at for n, (at, _, _) in enumerate(requests)])
        other = np.mean([simulated[n] - at for n, (at, _, _) in enumerate(requests)])
        assert other == pytest.approx(mean, rel=0.1)


def test_the_last_of_those_that_decode_is_preempted_and_still_ends():
    requests = [(0.0, 40, 100), (0.001, 40, 100), (0.002, 40, 100)]
    profile = EngineProfile(1, 1, PROFILE.prefill, PROFILE.decode, 300, PROFILE.overlap)
    engine_sees = []
    timeline = Timeline()
    recorder = Recorder(timeline)
    engine = SimulatedEngine(Role.DECODE, profile, LIMITS, timeline, recorder, EngineExtras())
    engine._fits = lambda sequence: engine.cache.free_tokens > sequence.prompt + 8  # type: ignore[method-assign] # as without foresight
    for number, (at, prompt, output) in enumerate(requests):
        timeline.at(at, lambda n=number, p=prompt, o=output: engine.submit(SimulatedSequence(n, p, o, ())))
    timeline.run_while(lambda: engine_sees.append(engine.cache.used_tokens) is None)
    assert engine.use.preemptions > 0
    assert max(engine_sees) <= 300
    assert recorder.ended.keys() == {0, 1, 2}
    assert recorder.ended[0] < recorder.ended[2]
    assert engine.cache.used_tokens == pytest.approx(0.0, abs=1e-6)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.floats(0, 2), st.integers(1, 150), st.integers(1, 40)), min_size=1, max_size=12),
    st.integers(0, 3),
)
def test_all_end_with_all_their_gaps_and_nothing_is_left(requests, drafts):
    requests = sorted(requests)
    speculation = Speculation(drafts, 0.6)
    profile = EngineProfile(1, 1, PROFILE.prefill, PROFILE.decode, 400, PROFILE.overlap)
    found, engine = simulate(requests, profile=profile, speculation=speculation)
    assert found.ended.keys() == set(range(len(requests)))
    for number, (at, _, output) in enumerate(requests):
        assert at < found.first[number] <= found.ended[number]
        gaps = found.gaps[number]
        assert sum(gaps) == pytest.approx(found.ended[number] - found.first[number], abs=1e-6)
        if not drafts and not engine.use.preemptions:
            assert len(gaps) == output - 1
        elif not engine.use.preemptions:
            assert len(gaps) == math.ceil((output - 1) / speculation.per_step - 1e-9)
    assert engine.cache.used_tokens == pytest.approx(0.0, abs=1e-6)
    assert engine._context == pytest.approx(0.0, abs=1e-6)
    assert engine._worst == pytest.approx(0.0, abs=1e-6)


def test_speculation_saves_the_steps_that_its_acceptance_says():
    assert Speculation(0, 0.9).per_step == 1
    assert Speculation(3, 1.0).per_step == 4
    assert Speculation(5, 0.8).per_step == pytest.approx((1 - 0.8**6) / 0.2)
    plain, _ = simulate([(0.0, 16, 200)])
    fast, _ = simulate([(0.0, 16, 200)], speculation=Speculation(3, 0.8))
    cost = PROFILE.decode
    more = (cost.fixed_s + 4 * cost.per_sequence_s) / (cost.fixed_s + cost.per_sequence_s)
    speedup = (plain.ended[0] - plain.first[0]) / (fast.ended[0] - fast.first[0])
    assert speedup == pytest.approx(Speculation(3, 0.8).per_step / more, rel=0.02)


def test_processors_are_shared_evenly_beyond_their_number():
    timeline = Timeline()
    processors = Processors(timeline, cores=2)
    done: dict[str, float] = {}
    for name, at, work in (("a", 0.0, 1.0), ("b", 0.0, 2.0), ("c", 0.5, 1.0)):
        timeline.at(at, lambda n=name, w=work: processors.start(w, lambda: done.__setitem__(n, timeline.now)))
    timeline.run_while(lambda: True)
    # From 0.5 on three jobs share two cores: a's other half takes 0.75 s; then two have one each.
    assert done == pytest.approx({"a": 1.25, "c": 1.75, "b": 2.25})


def test_instances_of_one_machine_slow_each_other_down():
    def ends(cores: float) -> float:
        timeline = Timeline()
        processors, recorders = Processors(timeline, cores), []
        for _ in range(3):
            recorder = Recorder(timeline)
            engine = SimulatedEngine(
                Role.DECODE, PROFILE, LIMITS, timeline, recorder, EngineExtras(processors=processors)
            )
            timeline.at(0.0, lambda e=engine: e.submit(SimulatedSequence(0, 20, 50, ())))
            recorders.append(recorder)
        timeline.run_while(lambda: True)
        return recorders[0].ended[0]

    assert ends(3) == pytest.approx(simulate([(0.0, 20, 50)])[0].ended[0])
    assert ends(1) == pytest.approx(3 * ends(3))


def test_a_step_takes_what_its_parts_share_once():
    both = PROFILE.step_s(4, 400, 32, 512)
    prefill, decode = PROFILE.prefill.seconds(32, 512), PROFILE.decode.seconds(4, 400)
    assert both == pytest.approx(prefill + decode - 0.5 * min(prefill, PROFILE.decode.fixed_s))


@given(st.floats(0.0005, 0.2), st.integers(0, 500), st.booleans(), st.floats(0, 1))
def test_affordable_prompts_take_no_longer_and_one_token_more_would(seconds, start, begun, overlap):
    profile = EngineProfile(1, 1, PROFILE.prefill, PROFILE.decode, 4096, overlap)
    cost = ProfiledCost(profile)

    def more(tokens: int) -> float:
        before = profile.step_s(3, 300, 64 if begun else 0, 2048.0 if begun else 0)
        pairs = tokens * (start + 0.5 * tokens)
        return profile.step_s(3, 300, tokens + (64 if begun else 0), pairs + (2048.0 if begun else 0)) - before

    cost._begun = begun
    count = cost.affordable(seconds, start)
    if count:
        assert more(count) <= seconds + 1e-9
    if not begun:
        assert more(count + 1) > seconds - 1e-9


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(1, 5)), min_size=1, max_size=9), st.floats(0, 100))
def test_percentiles_of_runs_are_those_of_their_gaps(runs, share):
    every = [gap for gap, count in runs for _ in range(count)]
    assert percentile_of(runs, share) == pytest.approx(np.percentile(every, share), abs=1e-12)
