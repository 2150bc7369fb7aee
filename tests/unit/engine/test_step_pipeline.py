"""Steps launched before the one before is read: the same answers, and nothing is taken from a step under way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.models.toy_runner import ToyRunner
from tests.support.preemption import expect_short_outputs

from baton.config import EngineConfig
from baton.engine.core import EngineCore
from baton.engine.device.compute import ComputeDevice
from baton.engine.device.staging import HostStaging
from baton.engine.executor.base import ExecutorLostError
from baton.engine.request import EngineRequest, SequenceOutput
from baton.engine.runner.input_batch import ForwardBatch, ForwardOutput, with_chosen
from baton.engine.sample.native import gpu_sampler
from baton.engine.sample.queued import queue_sample
from baton.engine.sample.sampler import SamplerRow, sample
from baton.engine.scheduler import StepPlan
from baton.errors import ConfigError
from baton.kv_cache.connector import KVConnector, LoadPlan, LoadRequest, LoadUpdate
from baton.kv_cache.events import BlocksRemoved, BlocksStored, KVEvent
from baton.types import BlockHash, BlockId, FinishReason, RequestId, SamplingParams
from baton_kernels.token_mask import pack_mask

BLOCK, VOCAB = 4, 64
PROMPT = [5, 9, 14, 33, 21, 7, 50, 3, 18, 42, 11]
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
INTERPRETED = ComputeDevice(torch.device("cpu"), on_gpu=True)


class NotedStaging(HostStaging):
    """Notes when a step's tokens are read; the n-th read may fail."""

    def __init__(self, log: list[str]) -> None:
        super().__init__(INTERPRETED)
        self._log, self._count = log, 0
        self.failures: dict[int, Exception] = {}

    def download(self, *tensors: torch.Tensor) -> Callable[[], list[Any]]:
        """Queue copies."""
        read, self._count = super().download(*tensors), self._count + 1
        number = self._count

        def noted() -> list[Any]:
            self._log.append(f"read {number}")
            if number in self.failures:
                raise self.failures[number]
            return read()

        return noted


class NotedRunner(ToyRunner):
    """Notes each step, and into which blocks it writes.

    Attributes:
        failures: What the n-th step fails with.
    """

    def __init__(self, *, on_device: bool = False) -> None:
        super().__init__(block_size=BLOCK, vocab_size=VOCAB)
        self.log: list[str] = []
        self.launches = 0
        self.writing: set[int] = set()
        self.failures: dict[int, Exception] = {}
        self.staging = NotedStaging(self.log) if on_device else None

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        """Run a step."""
        self.launches += 1
        self.log.append(f"launch {self.launches}")
        rows = np.repeat(np.arange(len(batch.context_lens)), np.diff(batch.query_starts))
        self.writing = set(batch.block_tables[rows, batch.positions // BLOCK].tolist())
        if self.launches in self.failures:
            raise self.failures[self.launches]
        return replace(super().forward(batch), staging=self.staging)


@dataclass
class Answer:
    """What one sequence was given."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[tuple[int, float, int]] = field(default_factory=list)
    finish: FinishReason | None = None
    stop: int | None = None
    error: str | None = None


class Engine:
    """An engine, and all it has said; watches that no block is given away that a step on its way writes to."""

    def __init__(self, way: str, num_blocks: int = 64, *, on_device: bool = False, **options: Any) -> None:
        values = {"block_size": BLOCK, "prefill_chunk": 8, "max_num_batched_tokens": 24, "max_num_seqs": 4, **options}
        connector = values.pop("connector", None)
        self.runner = NotedRunner(on_device=on_device)
        self.events: list[KVEvent] = []
        self.answers: dict[tuple[str, int], Answer] = {}
        arena = self.runner.make_arena(num_blocks)
        config = EngineConfig(async_scheduling=way, **values)
        self.core = EngineCore(config, self.runner, arena, connector, on_events=self.events.extend)
        self._plan_ahead, self._allocate = self.core._scheduler.schedule_ahead, self.core._pool.allocate
        self._ahead = False
        self.core._scheduler.schedule_ahead = self._noted_plan  # type: ignore[method-assign]
        self.core._pool.allocate = self._checked_blocks  # type: ignore[method-assign]

    def _noted_plan(self) -> StepPlan:
        self._ahead = True
        try:
            return self._plan_ahead()
        finally:
            self._ahead = False

    def _checked_blocks(self, count: int) -> list[BlockId] | None:
        blocks = self._allocate(count)
        assert not self._ahead or self.runner.writing.isdisjoint(blocks or ())
        return blocks

    def add(self, name: str, prompt: list[int] = PROMPT, sampling: SamplingParams = GREEDY, **fields: Any) -> None:
        self.core.add_request(EngineRequest(RequestId(name), prompt, sampling, **fields))

    def step(self) -> list[SequenceOutput]:
        outputs = self.core.step()
        for output in outputs:
            answer = self.answers.setdefault((output.request_id, output.index), Answer())
            assert answer.finish is None
            answer.tokens += output.token_ids
            answer.logprobs += [(each.token_id, each.logprob, each.rank) for each in output.logprobs or ()]
            answer.finish, answer.stop, answer.error = output.finish_reason, output.stop_token_id, output.error
        self.core.check_integrity()
        return outputs

    def run(self) -> None:
        for _ in range(3000):
            if not self.core.has_work():
                assert self.core.stats().blocks_active == 0
                assert not self.core._bridge.landing
                return
            self.step()
        raise AssertionError("no end in sight")

    def tokens(self, name: str, index: int = 0) -> list[int]:
        return self.answers[name, index].tokens

    def told(self) -> set[BlockHash]:
        """What the events say is in the prefix cache."""
        told: set[BlockHash] = set()
        for event in self.events:
            if isinstance(event, BlocksStored):
                told |= set(event.hashes)
            elif isinstance(event, BlocksRemoved):
                told -= set(event.hashes)
        return told


def both(*, on_device: bool = False, **options: Any) -> list[Engine]:
    return [Engine(way, on_device=on_device and way == "on", **options) for way in ("off", "on")]


# Order


def test_the_next_step_is_launched_before_the_one_before_is_read() -> None:
    engine = Engine("on", on_device=True)
    engine.add("a", sampling=GREEDY.replace(max_tokens=4))
    engine.add("b", PROMPT[:3], GREEDY.replace(max_tokens=6, seed=3, temperature=1.0))
    engine.run()
    # Two chunks of a's prompt, and three or five more tokens; ends by length are foreseen.
    assert engine.runner.log == [
        *("launch 1", "launch 2", "read 1", "launch 3", "read 2", "launch 4", "read 3", "launch 5", "read 4"),
        *("launch 6", "read 5", "read 6"),
    ]
    plain = Engine("off")
    plain.add("a", sampling=GREEDY.replace(max_tokens=4))
    plain.add("b", PROMPT[:3], GREEDY.replace(max_tokens=6, seed=3, temperature=1.0))
    plain.run()
    assert engine.answers == plain.answers


def test_what_needs_the_tokens_comes_in_the_plain_order() -> None:
    for sampling in (GREEDY.replace(presence_penalty=0.5), GREEDY.replace(prompt_logprobs=1, max_tokens=1)):
        engine = Engine("on", on_device=True)
        engine.add("a", PROMPT[:6], sampling)
        engine.run()
        assert all(
            engine.runner.log[i] == f"launch {1 + i // 2}" and engine.runner.log[i + 1] == f"read {1 + i // 2}"
            for i in range(0, len(engine.runner.log), 2)
        )


# Equality


def params(kind: int, max_tokens: int, seed: int, n: int, logprobs: int | None) -> SamplingParams:
    common = {"max_tokens": max_tokens, "seed": seed, "n": n, "logprobs": logprobs}
    return [
        SamplingParams(temperature=0.0, **common),
        SamplingParams(temperature=1.3, top_p=0.9, **common),
        SamplingParams(top_k=8, stop_token_ids=tuple(range(2, 14)), **common),
        SamplingParams(temperature=0.8, min_tokens=min(3, max_tokens), logit_bias={7: 3.0, 40: -8.0}, **common),
        SamplingParams(frequency_penalty=0.6, repetition_penalty=1.3, **common),
    ][kind]


requests = st.fixed_dictionaries(
    {
        "step": st.integers(0, 20),
        "prefix": st.integers(0, 2),
        "length": st.integers(1, 30),
        "sampling": st.builds(
            params,
            st.sampled_from([0, 0, 1, 1, 2, 2, 3, 4]),
            st.integers(1, 12),
            st.integers(0, 99),
            st.sampled_from([1, 1, 1, 3]),
            st.sampled_from([None, None, 0, 2]),
        ),
        "priority": st.integers(0, 1),
        "abort_after": st.one_of(st.none(), st.none(), st.none(), st.integers(0, 14)),
    }
)
SHARED = [[2 + (start * 7 + i * 5 + i * i) % 60 for i in range(30)] for start in (9, 5, 3)]
SHARED[2][:10] = SHARED[0][:10]


@settings(max_examples=20, deadline=None)
@given(
    script=st.lists(requests, min_size=1, max_size=10),
    num_blocks=st.sampled_from([12, 16, 24, 400]),
    policy=st.sampled_from(["fcfs", "fcfs", "priority"]),
    caching=st.booleans(),
    budget=st.sampled_from([4, 24]),
    poisoned=st.sampled_from([(), (), (20,)]),
)
def test_any_requests_are_answered_as_in_the_plain_order(
    script: list[dict[str, Any]], num_blocks: int, policy: str, caching: bool, budget: int, poisoned: tuple[int, ...]
) -> None:
    engines = both(num_blocks=num_blocks, policy=policy, prefix_caching=caching, max_num_batched_tokens=budget)
    for engine in engines:
        engine.runner.poisoned = frozenset(poisoned)
        expect_short_outputs(engine.core)
        step = 0
        while step <= 20 or engine.core.has_work():
            assert step < 4000
            for i, each in enumerate(script):
                if each["step"] == step:
                    prompt = SHARED[each["prefix"]][: each["length"]]
                    engine.add(str(i), prompt, each["sampling"], priority=each["priority"])
                if each["abort_after"] is not None and each["step"] + each["abort_after"] == step:
                    engine.core.abort(RequestId(str(i)))
            engine.step()
            step += 1
        engine.run()
        assert engine.told() == {name for run in engine.core.snapshot() for name in run.hashes}
    off, on = engines
    assert off.answers.keys() == on.answers.keys()
    for name, answer in off.answers.items():
        other = on.answers[name]
        if FinishReason.ABORT in (answer.finish, other.finish) or (poisoned and script[int(name[0])]["sampling"].n > 1):
            # When it is aborted, or a sibling fails, it may be further here than there.
            count = min(len(answer.tokens), len(other.tokens))
            assert answer.tokens[:count] == other.tokens[:count]
        else:
            assert answer == other
    if num_blocks == 400 and not poisoned and all(each["abort_after"] is None for each in script):
        assert off.told() == on.told()


def test_mixed_rows_on_the_device() -> None:
    """By the operator of GPUs: greedy and drawn rows, log probabilities, ends in the middle, preemption."""
    engines = both(on_device=True, num_blocks=13)
    for engine in engines:
        expect_short_outputs(engine.core)
        stop = SamplingParams(seed=8, max_tokens=12, stop_token_ids=tuple(range(2, 12)))
        engine.add("greedy", PROMPT, GREEDY.replace(logprobs=2))
        engine.add("drawn", PROMPT[2:], SamplingParams(seed=5, max_tokens=7, top_p=0.9))
        engine.add("stops", PROMPT[::-1], stop)
        engine.add("biased", PROMPT[:5], GREEDY.replace(logit_bias={9: 4.0}, min_tokens=2, max_tokens=5))
        engine.run()
    off, on = engines
    assert on.answers.keys() == off.answers.keys()
    for name, answer in off.answers.items():
        assert replace(on.answers[name], logprobs=[]) == replace(answer, logprobs=[])
        pairs = zip(on.answers[name].logprobs, answer.logprobs, strict=True)
        assert all(one[::2] == two[::2] and one[1] == pytest.approx(two[1], abs=1e-5) for one, two in pairs)
    assert len(off.answers["greedy", 0].logprobs) == 10
    assert off.answers["stops", 0].finish is FinishReason.STOP
    assert len(off.tokens("stops")) < 12
    assert on.core.stats().num_preemptions > 0


def test_an_abort_while_a_step_is_on_its_way_gives_the_blocks_back_when_that_is_read() -> None:
    engine = Engine("on", num_blocks=8, max_num_seqs=2)
    engine.add("a", PROMPT[:6], GREEDY)
    while not engine.answers:
        engine.step()
    assert engine.core.steps.flying is not None
    held = set(engine.core._groups[RequestId("a")].sequences[0].block_ids)
    assert engine.runner.writing <= held
    engine.core.abort(RequestId("a"))
    assert engine.core.stats().blocks_active == len(held)
    engine.add("b", PROMPT[:6], GREEDY.replace(max_tokens=3))
    engine.step()
    assert engine.answers["a", 0].finish is FinishReason.ABORT
    engine.run()
    assert engine.tokens("b") == engine.runner.greedy(PROMPT[:6], 3, ignore_eos=True)


class Loader(KVConnector):
    """Loads what it is asked for, never; notes the blocks that it may write to."""

    def __init__(self) -> None:
        self.blocks: dict[RequestId, set[int]] = {}
        self.updates: list[LoadUpdate] = []

    def plan_load(self, request: LoadRequest, num_local_tokens: int) -> LoadPlan | None:
        """All but the last token may come."""
        return LoadPlan(len(request.token_ids)) if request.request_id.startswith("load") else None

    def start_load(self, request: LoadRequest, num_local_tokens: int, block_ids: Any) -> None:
        """Begin."""
        self.blocks[request.request_id] = {int(block) for block in block_ids}

    def poll_loads(self) -> list[LoadUpdate]:
        """Those that a test says have ended."""
        ended, self.updates = self.updates, []
        return ended

    def has_pending(self) -> bool:
        """Loads under way are."""
        return bool(self.updates)


def test_loads_begin_and_end_beside_a_step_on_its_way_and_never_get_its_blocks() -> None:
    loader = Loader()
    engine = Engine("on", num_blocks=7, max_num_seqs=3, connector=loader)
    expect_short_outputs(engine.core)
    ends = engine.runner.greedy(PROMPT[:6], 10, ignore_eos=True)[2]
    engine.add("stops", PROMPT[:6], GREEDY.replace(stop_token_ids=(ends,)))
    engine.add("runs", PROMPT[:7], GREEDY.replace(max_tokens=9))
    while ("stops", 0) not in engine.answers or engine.answers["stops", 0].finish is None:
        engine.step()
    assert len(engine.runner.writing) == 2
    stopped = set(engine.core._bridge.landing)
    assert stopped & engine.runner.writing
    engine.add("load", PROMPT, GREEDY.replace(max_tokens=2))  # needs blocks that are in use by the step on its way
    while not loader.blocks:
        assert engine.step() or engine.core.has_work()
    assert engine.core.steps.flying is None or loader.blocks[RequestId("load")].isdisjoint(engine.runner.writing)
    assert stopped & loader.blocks[RequestId("load")]  # as soon as that was read
    loader.updates.append(LoadUpdate(RequestId("load"), 0, error="it was nothing"))
    engine.run()
    assert engine.tokens("load") == engine.runner.greedy(PROMPT, 2, ignore_eos=True)
    assert engine.tokens("runs") == engine.runner.greedy(PROMPT[:7], 9, ignore_eos=True)


# Failures


@pytest.mark.parametrize("number", range(1, 8))
def test_a_step_that_cannot_be_launched_ends_the_same_requests(number: int) -> None:
    engines = both()
    for engine in engines:
        engine.runner.failures[number] = RuntimeError("no")
        engine.add("a", PROMPT, GREEDY.replace(max_tokens=4))
        engine.add("b", PROMPT[:3], GREEDY)
        engine.run()
    off, on = engines
    assert on.answers == off.answers
    assert any(each.error for each in off.answers.values())
    assert any(each.tokens for each in off.answers.values()) == (number > 1)
    many = Engine("on")
    many.runner.failures[number] = RuntimeError("no")
    many.add("many", PROMPT[:5], GREEDY.replace(n=3, max_tokens=8, temperature=1.0))
    many.run()
    assert {each.error for each in many.answers.values()} == {"RuntimeError: no"}


@pytest.mark.parametrize("number", [1, 2, 4])
def test_a_step_that_fails_when_it_is_read_ends_its_sequences_and_no_others(number: int) -> None:
    engine = Engine("on", on_device=True, max_num_seqs=2)
    assert engine.runner.staging is not None
    engine.runner.staging.failures[number] = RuntimeError("no")
    for name in ("a", "b", "c"):
        engine.add(name, PROMPT[:5], GREEDY.replace(max_tokens=6))
    engine.run()
    plain = engine.runner.greedy(PROMPT[:5], 6, ignore_eos=True)
    for name in ("a", "b"):
        assert engine.answers[name, 0].error == "RuntimeError: no"
        assert engine.tokens(name) == plain[: number - 1]
    assert engine.tokens("c") == plain


@pytest.mark.parametrize("where", ["launch", "read"])
def test_a_device_that_fails_ends_the_engine(where: str) -> None:
    engine = Engine("on", on_device=True)
    assert engine.runner.staging is not None
    failures = engine.runner.failures if where == "launch" else engine.runner.staging.failures
    failures[3] = RuntimeError("CUDA error: an illegal memory access was encountered")
    engine.add("a", PROMPT[:5])
    engine.step()
    engine.step()
    assert len(engine.tokens("a")) == 2
    with pytest.raises(ExecutorLostError, match="illegal memory access"):
        engine.step()


def test_logits_that_are_not_finite_end_their_own_request_and_what_follows_them_is_dropped() -> None:
    engine = Engine("on", on_device=True)
    free = engine.runner.greedy(PROMPT, 10, ignore_eos=True)
    engine.runner.poisoned = frozenset({free[3]})
    engine.add("bad", PROMPT)
    engine.add("good", PROMPT[::-1], GREEDY.replace(logit_bias={free[3]: -100.0}))
    engine.run()
    assert engine.tokens("bad") == free[:4]
    assert "not finite" in (engine.answers["bad", 0].error or "")
    assert len(engine.tokens("good")) == 10
    assert engine.told() == {name for run in engine.core.snapshot() for name in run.hashes}
    engine.runner.poisoned = frozenset()
    engine.add("again", PROMPT)
    engine.run()
    assert engine.tokens("again") == free


# What else looks at an engine between two steps


def test_a_roll_back_leaves_the_step_on_its_way_out() -> None:
    engine = Engine("on")
    engine.add("a", sampling=GREEDY.replace(max_tokens=12))
    engine.add("b", PROMPT[:4], GREEDY.replace(max_tokens=12))
    while len(engine.answers.get(("a", 0), Answer()).tokens) < 6:
        engine.step()
    assert engine.core.steps.flying is not None
    engine.core.roll_back(RequestId("a"), 3)
    assert engine.core.steps.flying is None
    del engine.tokens("a")[-3:]
    engine.run()
    assert engine.tokens("a") == engine.runner.greedy(PROMPT, 12, ignore_eos=True)
    assert engine.tokens("b") == engine.runner.greedy(PROMPT[:4], 12, ignore_eos=True)


def test_a_cleared_cache_beside_a_step_on_its_way() -> None:
    engine = Engine("on")
    engine.add("a", sampling=GREEDY.replace(max_tokens=12))
    for _ in range(4):
        engine.step()
    engine.core.clear_cache()
    engine.run()
    engine.add("b", sampling=GREEDY.replace(max_tokens=12))
    engine.run()
    assert engine.tokens("a") == engine.tokens("b")


def test_steps_may_come_in_the_plain_order_from_now_on() -> None:
    engine = Engine("on", on_device=True)
    engine.add("a", PROMPT[:5], GREEDY.replace(max_tokens=6))
    engine.step()
    engine.core.steps.ahead = False
    engine.run()
    assert engine.runner.log[3:] == ["read 2", *(f"{what} {i}" for i in range(3, 7) for what in ("launch", "read"))]
    assert engine.tokens("a") == engine.runner.greedy(PROMPT[:5], 6, ignore_eos=True)


def test_who_launches_ahead() -> None:
    assert not Engine("auto").core.steps.ahead
    assert not Engine("off", device="cuda:0").core.steps.ahead
    assert Engine("auto", device="cuda:0").core.steps.ahead
    runner = ToyRunner(block_size=BLOCK)
    runner.takes_chosen = False
    for way, device in (("auto", "cuda:0"), ("on", "cpu")):
        config = EngineConfig(block_size=BLOCK, async_scheduling=way, device=device)
        if way == "auto":
            assert not EngineCore(config, runner, runner.make_arena(8)).steps.ahead
        else:
            with pytest.raises(ConfigError, match="takes tokens from the host") as caught:
                EngineCore(config, runner, runner.make_arena(8))
            assert caught.value.field == "async_scheduling"


# Its parts


def test_tokens_are_put_in_that_the_step_before_chose() -> None:
    tokens, chosen = torch.tensor([4, -1, 9, -3, -2]), torch.tensor([30, -1, 50])
    assert with_chosen(tokens, chosen).tolist() == [4, 30, 9, 50, 0]  # below 0 none could be chosen: any will do
    assert with_chosen(tokens[:1], None).tolist() == [4]


def test_queued_sampling_is_sampling() -> None:
    torch.manual_seed(2)
    logits = torch.randn(6, 300) * 3
    logits[3, 7] = float("nan")
    kinds = [
        SamplingParams(temperature=0.0, logprobs=3),
        SamplingParams(logprobs=0),
        SamplingParams(top_k=9, top_p=0.8),
        SamplingParams(logprobs=2),
        SamplingParams(logit_bias={3: 4.0}, presence_penalty=0.4, repetition_penalty=1.2, min_tokens=5),
        SamplingParams(temperature=0.0, logprobs=1),
    ]
    rows = [SamplerRow(one, 5 + i, stop_ids=(8,), prompt=(1,), output=(1, 2)) for i, one in enumerate(kinds)]
    rows[5].mask = pack_mask(np.arange(300) % 3 == 0)
    want = sample(logits.clone(), rows, on_gpu=True)
    operator = gpu_sampler(torch.device("cpu"))
    assert operator is not None
    queued = queue_sample(logits.clone(), rows, operator, HostStaging(INTERPRETED))
    assert queued.read() == want
    assert want.bad_rows == (3,)
    assert queued.token_ids[[0, 1, 2, 4, 5]].tolist() == [want.token_ids[i] for i in (0, 1, 2, 4, 5)]
    assert want.token_ids[5] % 3 == 0
