"""The scheduler, seen through a real engine: limits, order, preemption, and that everything always ends."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.models.toy_runner import ToyRunner
from tests.support.preemption import expect_short_outputs

from baton.config import EngineConfig
from baton.engine.core import EngineCore
from baton.engine.request import EngineRequest, SequenceOutput
from baton.engine.runner.input_batch import ForwardBatch
from baton.engine.scheduler import (
    BACKGROUND_PART,
    BACKGROUND_PROMPT_SHARE,
    LEAST_AWAITED,
    PASSES,
    PROMPTS_LATELY_S,
)
from baton.engine.sequence import SequenceState
from baton.engine.step_budget import StepBudget, StepCost, StepWork
from baton.errors import QueueFullError
from baton.types import BACKGROUND_PRIORITY, FinishReason, RequestId, SamplingParams

BLOCK = 4


class CheckedRunner(ToyRunner):
    """Checks every batch: no sequence writes where another one writes, and the limits hold."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(block_size=config.block_size)
        self.config = config
        self.steps: list[list[int]] = []

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        counts = np.diff(batch.query_starts)
        self.steps.append(counts.tolist())
        assert len(counts) <= self.config.max_num_seqs
        assert batch.query_starts[-1] == len(batch.token_ids) <= self.config.max_num_batched_tokens
        assert counts.min() >= 1
        assert counts.max() <= self.config.prefill_chunk
        assert len(batch.logit_rows) <= len(counts)
        rows = np.repeat(np.arange(len(counts)), counts)
        slots = batch.block_tables[rows, batch.positions // BLOCK] * BLOCK + batch.positions % BLOCK
        assert len(np.unique(slots)) == len(slots)
        return super().forward(batch)


@functools.cache
def toy() -> ToyRunner:
    return ToyRunner(block_size=BLOCK)


@functools.cache
def expected(prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    return toy().greedy(list(prompt), max_tokens)


def make(num_blocks: int = 64, **options: object) -> tuple[EngineCore, CheckedRunner]:
    values = {"block_size": BLOCK, "prefill_chunk": 8, "max_num_batched_tokens": 24, "max_num_seqs": 8, **options}
    config = EngineConfig(**values)
    runner = CheckedRunner(config)
    return EngineCore(config, runner, runner.make_arena(num_blocks)), runner


def request(name: str, prompt: list[int], max_tokens: int = 8, priority: int = 0) -> EngineRequest:
    return EngineRequest(
        RequestId(name), prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0), priority=priority
    )


def prompt_of(start: int, length: int) -> list[int]:
    return [2 + (start * 7 + i * 5 + i * i) % 60 for i in range(length)]


def run(core: EngineCore, limit: int = 2000) -> list[SequenceOutput]:
    outputs = []
    for _ in range(limit):
        if not core.has_work():
            core.check_integrity()
            return outputs
        outputs += core.step()
    raise AssertionError("no end in sight")


def tokens_of(outputs: list[SequenceOutput], name: str) -> list[int]:
    return [token for output in outputs if output.request_id == name for token in output.token_ids]


def order_of_first_tokens(outputs: list[SequenceOutput]) -> list[str]:
    return list(dict.fromkeys(output.request_id for output in outputs if output.token_ids))


@dataclass(frozen=True)
class Arrival:
    step: int
    prefix: int
    length: int
    max_tokens: int
    priority: int
    abort_after: int | None


arrivals = st.builds(
    Arrival,
    step=st.integers(0, 30),
    prefix=st.integers(0, 2),
    length=st.integers(1, 36),
    max_tokens=st.integers(1, 12),
    priority=st.sampled_from([-1, 0, 1, BACKGROUND_PRIORITY]),
    abort_after=st.one_of(st.none(), st.none(), st.integers(0, 12)),
)


@settings(max_examples=60, deadline=None)
@given(
    script=st.lists(arrivals, min_size=1, max_size=14),
    num_blocks=st.integers(12, 24),
    policy=st.sampled_from(["fcfs", "priority"]),
    caching=st.booleans(),
    chunk=st.sampled_from([1, 3, 8]),
    budget=st.sampled_from([3, 8, 24]),
)
def test_everything_ends_with_the_right_tokens_and_the_pool_adds_up(
    script: list[Arrival], num_blocks: int, policy: str, caching: bool, chunk: int, budget: int
) -> None:
    core, _ = make(
        num_blocks,
        policy=policy,
        prefix_caching=caching,
        prefill_chunk=chunk,
        max_num_batched_tokens=budget,
    )
    shared = [prompt_of(9, 36), prompt_of(5, 36), prompt_of(9, 10) + prompt_of(3, 26)]
    got: dict[str, list[int]] = {}
    ends: dict[str, FinishReason] = {}
    step = 0
    while step <= 30 or core.has_work():
        assert step < 4000
        for i, arrival in enumerate(script):
            if arrival.step == step:
                prompt = shared[arrival.prefix][: arrival.length]
                core.add_request(request(str(i), prompt, arrival.max_tokens, arrival.priority))
            if arrival.abort_after is not None and arrival.step + arrival.abort_after == step:
                core.abort(RequestId(str(i)))
        busy = core.has_work()
        for output in core.step():
            assert output.request_id not in ends
            got.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason is not None:
                ends[output.request_id] = output.finish_reason
        assert core.made_progress == core.has_work() or not busy
        core.check_integrity()
        step += 1
    assert len(ends) == len(script)
    for i, arrival in enumerate(script):
        reference = expected(tuple(shared[arrival.prefix][: arrival.length]), arrival.max_tokens)
        tokens = got.get(str(i), [])
        if ends[str(i)] is FinishReason.ABORT:
            assert arrival.abort_after is not None
            assert tokens == reference[: len(tokens)]
        else:
            assert tokens == reference
    stats = core.stats()
    assert stats.blocks_active == stats.num_running == stats.num_waiting == 0
    assert caching or stats.blocks_cached == 0


def test_decodes_go_on_while_a_long_prompt_is_chunked() -> None:
    core, runner = make()
    core.add_request(request("short", prompt_of(1, 3), max_tokens=12))
    core.step()
    core.add_request(request("long", prompt_of(2, 40)))
    outputs = run(core)
    mixed = runner.steps[1:6]
    assert mixed == [[1, 8]] * 5
    assert tokens_of(outputs, "long") == expected(tuple(prompt_of(2, 40)), 8)


def test_budget_is_shared_by_several_prompts() -> None:
    core, runner = make(max_num_batched_tokens=12, prefill_chunk=8)
    for i in range(3):
        core.add_request(request(str(i), prompt_of(i, 16), max_tokens=1))
    run(core)
    assert runner.steps == [[8, 4], [8, 4], [8, 4], [8], [4]]


def test_logits_are_computed_only_for_sampled_rows() -> None:
    core, runner = make()
    core.add_request(request("a", prompt_of(1, 30), max_tokens=4))
    outputs = run(core)
    assert runner.num_logit_rows == len(tokens_of(outputs, "a"))


def test_a_big_request_lets_a_bounded_number_of_small_ones_pass() -> None:
    core, _ = make(num_blocks=12, max_num_seqs=4)
    core.add_request(request("running", prompt_of(1, 24), max_tokens=20))
    core.step()
    core.add_request(request("big", prompt_of(2, 36), max_tokens=2))
    outputs: list[SequenceOutput] = []
    for i in range(2 * PASSES + 8):  # always one that is small, and there is always room for it
        core.add_request(request(f"small-{i}", prompt_of(3 + i, 2), max_tokens=2))
        outputs += core.step()
    order = order_of_first_tokens(outputs + run(core))
    passed = order.index("big") - 1
    assert passed == PASSES
    assert len(order) == 2 + 2 * PASSES + 8


def test_what_has_begun_to_answer_is_not_overtaken() -> None:
    core, _ = make(num_blocks=12)
    expect_short_outputs(core)
    for i in range(2):
        core.add_request(request(str(i), prompt_of(i, 14), max_tokens=24))
    while not core.stats().num_preemptions:
        core.step()
    core.add_request(request("small", prompt_of(5, 2), max_tokens=2))
    paused, small = (core._groups[RequestId(name)].sequences[0] for name in ("1", "small"))
    pause = 0
    while paused.state is SequenceState.WAITING:
        assert small.state is SequenceState.WAITING
        core.step()
        pause += 1
    assert pause > 2
    run(core)
    assert core.stats().num_preemptions == 1


def test_streams_that_began_do_not_pause_where_lengths_are_known() -> None:
    """A pool for three requests, and eight of them: with honest ``max_tokens``, or with outputs like those before."""
    core, _ = make(num_blocks=30, max_num_seqs=8)
    for i in range(8):
        core.add_request(request(str(i), prompt_of(i, 8), max_tokens=32))
    outputs = run(core)
    assert core.stats().num_preemptions == 0
    for i in range(8):
        assert tokens_of(outputs, str(i)) == expected(tuple(prompt_of(i, 8)), 32)
    # max_tokens says nothing now, what was observed does: not one after the other.
    running = []
    for i in range(8):
        core.add_request(request(f"again-{i}", prompt_of(i, 8), max_tokens=100))
    for _ in range(10):
        core.step()
        running.append(core.stats().num_running)
    assert max(running) >= 2
    run(core)


def test_an_important_request_waits_for_nothing_that_is_less_important() -> None:
    for limits in ({"max_num_seqs": 2}, {"num_blocks": 16}):
        core, _ = make(policy="priority", **{"num_blocks": 64, **limits})
        for i in range(2):
            core.add_request(request(f"low-{i}", prompt_of(i, 8), max_tokens=24, priority=5))
        outputs = core.step() + core.step()
        core.add_request(request("high", prompt_of(7, 30), max_tokens=3, priority=0))
        steps = 0
        while not tokens_of(outputs, "high"):
            outputs += core.step()
            steps += 1
        assert steps <= 5
        outputs += run(core)
        assert tokens_of(outputs, "high") == expected(tuple(prompt_of(7, 30)), 3)
        for i in range(2):
            assert tokens_of(outputs, f"low-{i}") == expected(tuple(prompt_of(i, 8)), 24)


def test_equals_do_not_preempt_each_other() -> None:
    core, _ = make(policy="priority", max_num_seqs=1)
    core.add_request(request("first", prompt_of(1, 8), max_tokens=20, priority=1))
    core.step()
    core.add_request(request("second", prompt_of(2, 8), max_tokens=2, priority=1))
    assert order_of_first_tokens(run(core)) == ["first", "second"]
    assert core.stats().num_preemptions == 0


@pytest.mark.parametrize(("policy", "order"), [("fcfs", ["a", "b", "c"]), ("priority", ["c", "b", "a"])])
def test_priority_counts_under_its_policy(policy: str, order: list[str]) -> None:
    core, _ = make(policy=policy, max_num_seqs=1)
    for name, priority in (("a", 1), ("b", 0), ("c", -1)):
        core.add_request(request(name, prompt_of(ord(name), 5), max_tokens=2, priority=priority))
    assert order_of_first_tokens(run(core)) == order


def test_the_last_one_is_preempted_and_comes_back_with_the_same_tokens() -> None:
    core, _ = make(num_blocks=12)
    expect_short_outputs(core)
    prompts = [prompt_of(i, 14) for i in range(2)]
    for i, prompt in enumerate(prompts):
        core.add_request(request(str(i), prompt, max_tokens=24))
    core.add_request(request("later", prompt_of(7, 14), max_tokens=2))
    outputs = run(core)
    for i, prompt in enumerate(prompts):
        assert tokens_of(outputs, str(i)) == expected(tuple(prompt), 24)
    ends = {output.request_id: output.metrics for output in outputs if output.finish_reason}
    assert core.stats().num_preemptions > 0
    first, second = ends[RequestId("0")], ends[RequestId("1")]
    assert first is not None
    assert second is not None
    assert first.num_preemptions == 0
    assert second.num_preemptions == core.stats().num_preemptions
    assert second.computed_tokens + second.cached_tokens == second.prompt_tokens
    assert order_of_first_tokens(outputs) == ["0", "1", "later"]


def test_under_priority_the_least_important_is_preempted() -> None:
    core, _ = make(num_blocks=12, policy="priority")
    expect_short_outputs(core)
    core.add_request(request("unimportant", prompt_of(1, 14), max_tokens=24, priority=5))
    core.add_request(request("important", prompt_of(2, 14), max_tokens=24, priority=0))
    ends = {output.request_id: output.metrics for output in run(core) if output.finish_reason}
    assert ends[RequestId("important")].num_preemptions == 0  # type: ignore[union-attr]
    assert ends[RequestId("unimportant")].num_preemptions > 0  # type: ignore[union-attr]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_background_request_pauses_while_another_prompt_is_computed(policy: str) -> None:
    core, runner = make(policy=policy)
    core.add_request(request("background", prompt_of(1, 4), max_tokens=20, priority=BACKGROUND_PRIORITY))
    outputs = core.step() + core.step()
    core.add_request(request("other", prompt_of(2, 20), max_tokens=4))
    before = len(runner.steps)
    while not tokens_of(outputs, "other"):
        outputs += core.step()
    assert runner.steps[before:] == [[8], [8], [4]]
    outputs += core.step()
    assert runner.steps[-1] == [1, 1]  # beside decodes it goes on
    outputs += run(core)
    assert tokens_of(outputs, "background") == expected(tuple(prompt_of(1, 4)), 20)
    assert tokens_of(outputs, "other") == expected(tuple(prompt_of(2, 20)), 4)


def test_a_background_prompt_gets_a_small_part_of_a_step() -> None:
    core, runner = make(max_num_batched_tokens=48, prefill_chunk=48)
    for i in range(3):
        core.add_request(request(str(i), prompt_of(i, 12), max_tokens=2, priority=BACKGROUND_PRIORITY))
    run(core)
    assert max(map(sum, runner.steps)) <= 48 // BACKGROUND_PART + 3  # and a token per decode


def test_background_prompts_take_shorter_steps_while_others_come() -> None:
    core, runner = make(max_num_batched_tokens=480, prefill_chunk=480)
    core.add_request(request("other", prompt_of(1, 200), max_tokens=1))
    run(core)
    lengths = []
    for number in range(2):
        runner.steps.clear()
        core.add_request(request(str(number), prompt_of(2 + number, 200), max_tokens=1, priority=BACKGROUND_PRIORITY))
        run(core)
        lengths.append(max(map(sum, runner.steps)))
        core._scheduler._prompt_at -= PROMPTS_LATELY_S
    assert lengths == [int(BACKGROUND_PROMPT_SHARE * 200), 480 // BACKGROUND_PART]


class FourMsPerRow(StepCost):
    """Every decode of a step takes 4 ms, whatever was observed."""

    def observe(self, work: StepWork, seconds: float) -> None:
        self._weights = np.array([0.0, 0.004, 0.0, 0.0, 0.0])


def test_background_decodes_get_a_bounded_time() -> None:
    core, runner = make()
    core._scheduler.step_budget = StepBudget(None, FourMsPerRow())
    for i in range(5):
        core.add_request(request(f"b{i}", prompt_of(i, 4), max_tokens=30, priority=BACKGROUND_PRIORITY))
    outputs: list[SequenceOutput] = []
    while not tokens_of(outputs, "b4"):
        outputs += core.step()
    core.step()
    assert runner.steps[-1] == [1, 1]  # 10 ms
    core.add_request(request("other", prompt_of(7, 4), max_tokens=4))
    before = len(runner.steps)
    while len(tokens_of(outputs, "other")) < 4:
        outputs += core.step()
    assert runner.steps[before:] == [[4], [1], [1], [1]]  # a tenth of 4 ms is too little for a row
    outputs += run(core)
    assert tokens_of(outputs, "other") == expected(tuple(prompt_of(7, 4)), 4)
    assert {output.request_id for output in outputs if output.finish_reason} == {"other", *(f"b{i}" for i in range(5))}


@pytest.mark.parametrize("limits", [{"max_num_seqs": 2}, {"num_blocks": 16}], ids=["slots", "blocks"])
def test_background_requests_are_preempted_under_every_policy(limits: dict[str, int]) -> None:
    core, _ = make(**limits)
    for i in range(2):
        core.add_request(request(f"b{i}", prompt_of(i, 8), max_tokens=24, priority=BACKGROUND_PRIORITY))
    outputs: list[SequenceOutput] = []
    while not tokens_of(outputs, "b1"):
        outputs += core.step()
    core.add_request(request("other", prompt_of(7, 30), max_tokens=3))
    while not tokens_of(outputs, "other"):
        outputs += core.step()
    assert len(tokens_of(outputs, "b0")) < 24
    outputs += run(core)
    assert core.stats().num_preemptions > 0
    for i in range(2):
        assert tokens_of(outputs, f"b{i}") == expected(tuple(prompt_of(i, 8)), 24)


def test_a_background_prompt_whose_blocks_others_wait_for_is_computed() -> None:
    core, _ = make(num_blocks=12)
    kept = EngineRequest(
        RequestId("kept"), prompt_of(2, 40), SamplingParams(temperature=0.0), prefill_only=True,
        priority=BACKGROUND_PRIORITY,
    )  # fmt: skip
    core.add_request(kept)
    core.step()
    core.add_request(request("other", prompt_of(1, 30), max_tokens=2))
    outputs: list[SequenceOutput] = []
    while not tokens_of(outputs, "kept"):
        outputs += core.step()
    core.release(RequestId("kept"))
    outputs += run(core)
    assert tokens_of(outputs, "other") == expected(tuple(prompt_of(1, 30)), 2)


def test_a_full_hit_computes_the_tail_alone() -> None:
    core, runner = make()
    prompt = prompt_of(1, 16)
    core.add_request(request("a", prompt, max_tokens=1))
    run(core)
    before = runner.num_tokens
    core.add_request(request("b", prompt, max_tokens=1))
    outputs = run(core)
    assert runner.num_tokens - before == BLOCK
    metrics = outputs[-1].metrics
    assert metrics is not None
    assert (metrics.cached_tokens, metrics.computed_tokens) == (12, 4)
    assert tokens_of(outputs, "b") == expected(tuple(prompt), 1)


def test_a_prefix_that_a_running_prompt_computes_is_not_computed_again() -> None:
    core, runner = make(num_blocks=256)
    shared, other = prompt_of(1, 160), prompt_of(4, 7)
    prompts = {"first": [*shared, *prompt_of(2, 6)], "second": [*shared, *prompt_of(3, 5)], "other": other}
    for name, prompt in prompts.items():
        core.add_request(request(name, prompt, max_tokens=2))
    outputs = core.step()
    assert runner.steps[0] == [8, 7], "the second waits for the first one's chunk, and the other one passes it"
    outputs += run(core)
    for name, prompt in prompts.items():
        assert tokens_of(outputs, name) == expected(tuple(prompt), 2)
    metrics = {output.request_id: output.metrics for output in outputs if output.metrics is not None}
    again = metrics[RequestId("second")].computed_tokens - 5
    assert 0 <= again < LEAST_AWAITED
    assert runner.num_tokens == len(prompts["first"]) + again + 5 + len(other) + 3


def test_an_important_prompt_does_not_wait_for_the_prefix_of_one_that_is_less_important() -> None:
    core, runner = make(num_blocks=256, policy="priority", max_num_batched_tokens=16)
    prompt = prompt_of(1, 160)
    core.add_request(request("late", prompt, max_tokens=1, priority=5))
    outputs = core.step()
    core.add_request(request("soon", prompt, max_tokens=1, priority=1))
    outputs += core.step()
    assert runner.steps == [[8], [8, 8]], "both compute"
    outputs += run(core)
    assert tokens_of(outputs, "soon") == tokens_of(outputs, "late") == expected(tuple(prompt), 1)


def test_a_prefix_is_computed_by_the_next_one_when_its_first_one_is_aborted() -> None:
    core, runner = make(num_blocks=256)
    prompt = prompt_of(1, 160)
    core.add_request(request("a", prompt, max_tokens=1))
    core.add_request(request("b", prompt, max_tokens=1))
    outputs = core.step()
    assert runner.steps == [[8]]
    core.abort(RequestId("a"))
    outputs += run(core)
    assert tokens_of(outputs, "b") == expected(tuple(prompt), 1)


def test_a_short_prefix_is_computed_again_rather_than_waited_for() -> None:
    core, runner = make()
    for name in ("a", "b"):
        core.add_request(request(name, prompt_of(1, 32), max_tokens=1))
    core.step()
    assert runner.steps == [[8, 8]]
    run(core)


def test_the_queue_is_bounded_and_preempted_sequences_do_not_count_against_it_twice() -> None:
    core, _ = make(max_queue=2, max_num_seqs=1)
    core.add_request(request("a", prompt_of(1, 4)))
    core.step()
    core.add_request(request("b", prompt_of(2, 4)))
    core.add_request(request("c", prompt_of(3, 4)))
    with pytest.raises(QueueFullError) as caught:
        core.add_request(request("d", prompt_of(4, 4)))
    assert caught.value.retry_after_s is not None
    assert {output.request_id for output in run(core)} == {"a", "b", "c"}


def test_prefill_only_is_never_preempted() -> None:
    core, _ = make(num_blocks=12)
    core.add_request(request("decode", prompt_of(1, 14), max_tokens=20))
    outputs = core.step() + core.step()
    waiting = EngineRequest(RequestId("prefill"), prompt_of(2, 26), SamplingParams(temperature=0.0), prefill_only=True)
    core.add_request(waiting)
    outputs += run(core)
    ends = {output.request_id: output for output in outputs if output.finish_reason}
    prefill = ends[RequestId("prefill")]
    assert prefill.token_ids == expected(tuple(prompt_of(2, 26)), 1)
    assert prefill.finish_reason is FinishReason.LENGTH
    assert prefill.metrics is not None
    assert prefill.metrics.num_preemptions == 0
    assert tokens_of(outputs, "decode") == expected(tuple(prompt_of(1, 14)), 20)
