"""The budget of a step in time: what is learnt, and what prompts get beside decodes. The clock is that of a made-up
machine, which every forward pass moves on by what its work costs there.
"""

from __future__ import annotations

import numpy as np
import pytest
from tests.support.models.toy_runner import ToyRunner

from baton.config import EngineConfig
from baton.engine.core import EngineCore
from baton.engine.request import EngineRequest, SequenceOutput
from baton.engine.runner.input_batch import ForwardBatch, ForwardOutput
from baton.engine.step_budget import StepBudget, StepCost, StepWork, step_budget
from baton.errors import ConfigError
from baton.types import BACKGROUND_PRIORITY, RequestId, SamplingParams

MS = 1e-3
LONG = 200


def seconds_of(work: StepWork) -> float:
    """A made-up machine: 4 ms for the weights, 0.1 ms a row, 0.2 ms a prompt token, and attention."""
    prompt = 0.2 * work.prompt_tokens + 5e-4 * work.prompt_attention
    return (4.0 + 0.1 * work.rows + 1e-4 * work.decode_context + prompt) * MS


class TimedRunner(ToyRunner):
    """Moves a clock on.

    Attributes:
        now: Seconds.
        steps: Per step its seconds, decodes and prompt tokens.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.steps: list[tuple[float, int, int]] = []

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        work = StepWork()
        for count, context in zip(np.diff(batch.query_starts).tolist(), batch.context_lens.tolist(), strict=True):
            if count == 1:
                work.add_decode(context)
            else:
                work.add_prompt(context - count, count)
        seconds = seconds_of(work)
        self.now += seconds
        self.steps.append((seconds, work.rows, work.prompt_tokens))
        return super().forward(batch)


def make(**options: object) -> tuple[EngineCore, TimedRunner]:
    config = EngineConfig(block_size=4, prefix_caching=False, **options)  # type: ignore[arg-type]
    runner = TimedRunner()
    return EngineCore(config, runner, runner.make_arena(256), clock=lambda: runner.now), runner


def add(core: EngineCore, name: str, length: int, max_tokens: int = 1) -> None:
    prompt = [2 + (i * 5 + len(name)) % 60 for i in range(length)]
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    core.add_request(EngineRequest(RequestId(name), prompt, params))


def run_mixed(core: EngineCore, streams: int = 4, prompts: int = 6) -> list[SequenceOutput]:
    """Long prompts one after the other beside streams that last longer."""
    for i in range(streams):
        add(core, f"stream-{i}", 8, max_tokens=240)
    outputs = core.step()
    for i in range(prompts):
        add(core, f"prompt-{i}", LONG)
        while core.stats().num_waiting + core.stats().num_running > streams:
            outputs += core.step()
    while core.has_work():
        outputs += core.step()
    core.check_integrity()
    return outputs


def test_costs_are_learnt_from_noisy_steps() -> None:
    rng, cost = np.random.default_rng(0), StepCost()

    def some() -> StepWork:
        work = StepWork()
        for _ in range(int(rng.integers(0, 33))):
            work.add_decode(int(rng.integers(1, 4000)))
        if rng.random() < 0.5:
            work.add_prompt(int(rng.integers(0, 3000)), int(rng.integers(2, 600)))
        return work

    for step in range(300):
        work = some()
        outlier = 20.0 if step % 50 == 49 else 1.0  # somebody else had the machine
        cost.observe(work, seconds_of(work) * float(rng.normal(1.0, 0.05)) * outlier)
    wrong = [abs(cost.predict(work) / seconds_of(work) - 1.0) for work in (some() for _ in range(200))]
    assert np.median(wrong) < 0.05
    assert max(wrong) < 0.3
    for start in (0, 1000):
        work = StepWork()
        work.add_prompt(start, cost.affordable(50 * MS, start))
        assert 0.8 < (seconds_of(work) - 4 * MS) / (50 * MS) < 1.2


def test_costs_follow_a_machine_that_becomes_slower() -> None:
    cost, work = StepCost(), StepWork()
    work.add_prompt(0, 256)
    for factor in (1.0, 4.0):
        for _ in range(60):
            cost.observe(work, factor * seconds_of(work))
        assert cost.predict(work) == pytest.approx(factor * seconds_of(work), rel=0.1)


def test_prompts_leave_decodes_their_time() -> None:
    core, runner = make(step_budget_ms=20.0)
    outputs = run_mixed(core)
    mixed = [(seconds, tokens) for seconds, rows, tokens in runner.steps if rows and tokens]
    assert max(seconds for seconds, _ in mixed) <= 20 * MS * 1.1
    # What there was room for was used, once that was known.
    late = [tokens for _, tokens in mixed[len(mixed) // 2 :]]
    assert np.median(late) > 50
    assert core.stats().num_bounded_steps > 0
    assert {output.request_id for output in outputs if output.finish_reason} >= {f"prompt-{i}" for i in range(6)}


def test_the_time_between_tokens_gives_the_budget() -> None:
    core, runner = make(itl_slo_ms=20.0)
    run_mixed(core)
    assert max(seconds for seconds, rows, tokens in runner.steps if rows and tokens) <= 16 * MS * 1.1
    both = step_budget(EngineConfig(itl_slo_ms=20.0, step_budget_ms=10.0), bounded=False)
    assert both is not None
    assert both.seconds == 10 * MS


def test_without_decodes_a_step_is_as_long_as_its_tokens_allow() -> None:
    core, runner = make(step_budget_ms=5.0, max_num_batched_tokens=300, prefill_chunk=100)
    for i in range(3):
        add(core, f"p{i}", 100)
    while core.has_work():
        core.step()
    assert [tokens for _, _, tokens in runner.steps] == [300]


def test_decodes_that_take_more_than_the_budget_do_not_starve_prompts() -> None:
    core, runner = make(step_budget_ms=1.0)
    run_mixed(core, prompts=2)
    mixed = [tokens for _, rows, tokens in runner.steps if rows == 4 and tokens]
    assert min(mixed[:-1]) >= 4
    assert len(mixed) <= 2 * LONG / 4 + 2


def test_unless_told_otherwise_only_instances_with_streams_bound_their_steps() -> None:
    core, runner = make()
    run_mixed(core, prompts=1)
    assert max(tokens for _, _, tokens in runner.steps) == LONG
    core, runner = make()
    core.limit_step_time(True)
    run_mixed(core)
    assert max(seconds for seconds, rows, tokens in runner.steps if rows and tokens) <= 50 * MS * 1.1
    assert step_budget(EngineConfig(step_budget_ms=0.0), bounded=True) is None


@pytest.mark.parametrize("field", ["step_budget_ms", "itl_slo_ms"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_nonsense_is_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**{field: value})
    assert caught.value.field == field


def test_idle_work_takes_steps_of_a_tenth_of_a_prompts_time() -> None:
    budget = StepBudget(None)
    alone = StepWork()
    assert budget.background_seconds(alone) == 0.01
    for _ in range(50):  # two steps each, 200 ms together
        budget.observe_prompts(0, 0.15)
        budget.observe_prompts(1, 0.05)
    assert budget.background_seconds(alone) == pytest.approx(0.02)
    for seconds, bound in ((10.0, 0.05), (0.001, 0.002)):
        for _ in range(500):
            budget.observe_prompts(2, 2 * seconds)
        assert budget.background_seconds(alone) == bound


def test_only_prompts_that_others_wait_for_say_how_long_prompts_take() -> None:
    core, _ = make(step_budget_ms=20.0)
    budget = core._scheduler.step_budget
    assert budget is not None
    for name, priority in (("idle", BACKGROUND_PRIORITY), ("other", 0)):
        assert budget._prompts == budget._prompt_seconds == 0.0
        prompt = [2 + (i * 5 + len(name)) % 60 for i in range(LONG)]
        params = SamplingParams(temperature=0.0, max_tokens=1)
        core.add_request(EngineRequest(RequestId(name), prompt, params, priority=priority))
        while core.has_work():
            core.step()
    assert budget._prompt_seconds / budget._prompts > LONG * 0.2 * MS
