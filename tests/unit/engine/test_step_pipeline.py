"""Steps launched before the one before is read: the same answers, and nothing is taken from a step under way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.models.noted_engine import BLOCK, GREEDY, INTERPRETED, PROMPT, Answer, Engine, both
from tests.support.models.toy_runner import ToyRunner
from tests.support.preemption import expect_short_outputs

from baton.config import EngineConfig
from baton.engine.core import EngineCore
from baton.engine.device import HostStaging
from baton.engine.runner.input_batch import with_chosen
from baton.engine.sampler import gpu_sampler, queue_sample, sample
from baton.engine.sampler_row import SamplerRow
from baton.errors import ConfigError
from baton.kv_cache.connector import KVConnector, LoadPlan, LoadRequest, LoadUpdate
from baton.types import FinishReason, RequestId, SamplingParams
from baton_kernels.token_mask import pack_mask


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
    assert engine.core.steps.in_flight is not None
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
    stopped = set(engine.core._bridge.deferred_blocks)
    assert stopped & engine.runner.writing
    engine.add("load", PROMPT, GREEDY.replace(max_tokens=2))  # needs blocks that are in use by the step on its way
    while not loader.blocks:
        assert engine.step() or engine.core.has_work()
    assert engine.core.steps.in_flight is None or loader.blocks[RequestId("load")].isdisjoint(engine.runner.writing)
    assert stopped & loader.blocks[RequestId("load")]  # as soon as that was read
    loader.updates.append(LoadUpdate(RequestId("load"), 0, error="it was nothing"))
    engine.run()
    assert engine.tokens("load") == engine.runner.greedy(PROMPT, 2, ignore_eos=True)
    assert engine.tokens("runs") == engine.runner.greedy(PROMPT[:7], 9, ignore_eos=True)


# What else looks at an engine between two steps


def test_a_roll_back_leaves_the_step_on_its_way_out() -> None:
    engine = Engine("on")
    engine.add("a", sampling=GREEDY.replace(max_tokens=12))
    engine.add("b", PROMPT[:4], GREEDY.replace(max_tokens=12))
    while len(engine.answers.get(("a", 0), Answer()).tokens) < 6:
        engine.step()
    assert engine.core.steps.in_flight is not None
    engine.core.roll_back(RequestId("a"), 3)
    assert engine.core.steps.in_flight is None
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
    logits = torch.randn(10, 300) * 3
    logits[3, 7] = float("nan")
    kinds = [
        SamplingParams(temperature=0.0, logprobs=3),
        SamplingParams(logprobs=0),
        SamplingParams(top_k=9, top_p=0.8),
        SamplingParams(logprobs=2),
        SamplingParams(logit_bias={3: 4.0}, presence_penalty=0.4, repetition_penalty=1.2, min_tokens=5),
        SamplingParams(temperature=0.0, logprobs=1),
        *(SamplingParams(logprobs=logprobs) for logprobs in (1, None, None, None)),
    ]
    rows = [SamplerRow(one, 5 + i, stop_ids=(8,), prompt=(1,), output=(1, 2)) for i, one in enumerate(kinds)]
    for row in rows[5:]:
        row.mask = pack_mask(np.arange(300) % 3 == 0)
    logits[8, 1] = float("nan")  # which its mask forbids
    want = sample(logits.clone(), rows, on_gpu=True)
    operator = gpu_sampler(torch.device("cpu"))
    assert operator is not None
    queued = queue_sample(logits.clone(), rows, operator, HostStaging(INTERPRETED))
    assert queued.read() == want
    assert want.bad_rows == (3,)
    good = [0, 1, 2, *range(4, 10)]
    assert queued.token_ids[good].tolist() == [want.token_ids[i] for i in good]
    assert all(token % 3 == 0 for token in want.token_ids[5:])
    cpu = sample(logits.clone(), rows)
    assert cpu.token_ids == want.token_ids
    assert cpu.bad_rows == (3,)
