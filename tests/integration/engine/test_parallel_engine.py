"""Engines of several ranks: greedy output in float32 equals Hugging Face ``generate``; a rank that fails or dies."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import re
import signal
import threading
import time
from collections.abc import Iterator

import numpy as np
import psutil
import pytest
import torch
from tests.support.equality import References, mixed_prompts
from tests.support.preemption import expect_short_outputs

from baton.config import EngineConfig
from baton.engine import communicator
from baton.engine.build import make_arena
from baton.engine.executor import multiprocess
from baton.engine.executor.base import Executor, ExecutorLostError, load_executor
from baton.engine.llm import LLM
from baton.engine.runner.input_batch import ForwardBatch
from baton.errors import ConfigError, InternalError
from baton.kv_cache.shards import KVShards, ShardSpec, shard_layout
from baton.types import SamplingParams

VOCAB = 512
BLOCK = 16
NEW_TOKENS = 48

pytestmark = pytest.mark.usefixtures("warm_followers")
CASES = [
    *((name, *sizes) for name in ("qwen3", "mistral", "gemma3", "mixtral") for sizes in ((2, 1), (1, 2))),
    *((name, 2, 1) for name in ("phi3", "gemma2", "olmo2", "olmo3", "glm4", "qwen3_moe")),
    *(("gpt_oss", 2, 1), ("gpt_oss", 1, 3), ("deepseek_v3", 2, 1), ("deepseek_v3", 1, 2)),
]
"""Architecture, tp, pp; beside Llama with 2 x 2. pp 3 of 4 layers has stages of 2, 1 and 1."""
SQUARE = ("llama", 2, 2)


def engine_config(references: References, name: str = "llama", **values: object) -> EngineConfig:
    base = EngineConfig(model=str(references.checkpoint(name)), dtype="float32", kv_blocks=40)
    return dataclasses.replace(base, **values)  # type: ignore[arg-type]


def case_config(references: References, case: tuple[str, int, int]) -> EngineConfig:
    """A pool so small that preemption happens."""
    name, tp, pp = case
    pool = {"kv_blocks": 24, "max_model_len": 24 * BLOCK}
    steps = {"max_num_seqs": 32, "prefill_chunk": 64, "max_num_batched_tokens": 512}
    return engine_config(references, name, tp=tp, pp=pp, **pool, **steps)


def children() -> set[int]:
    """Processes that descend from this one, but for the one that ranks are forked from."""
    found = set()
    for each in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile, or waits to be asked how it ended
            if each.ppid() != os.getpid() or "tests.support.servers.warm" not in each.cmdline():
                found.add(each.pid)
    return found


def ended_since(before: set[int]) -> bool:
    """Wait until no more processes descend from this one than before; those that were killed go a moment later."""
    end = time.monotonic() + 240.0
    while children() - before:
        if time.monotonic() > end:
            return False
        threading.Event().wait(0.01)
    return True


@pytest.fixture(scope="module")
def bystanders(warm_followers: None) -> set[int]:
    """What earlier tests of this run left running on purpose, such as multiprocessing's resource tracker."""
    return children()


@pytest.fixture(scope="module")
def square(references: References, warm_followers: None, bystanders: set[int]) -> Iterator[LLM]:
    """An engine of 2 x 2 ranks; its last test kills one of them."""
    with LLM(case_config(references, SQUARE)) as llm:
        yield llm


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-tp{case[1]}-pp{case[2]}")
def test_equality_of_mixed_batches_with_chunks_and_preemption(
    references: References, case: tuple[str, int, int]
) -> None:
    with LLM(case_config(references, case)) as llm:
        assert llm.core.executor.description.startswith("fused decoder")
        check_equality(references, case[0], llm)


def test_equality_of_2_by_2_ranks(references: References, square: LLM) -> None:
    check_equality(references, SQUARE[0], square)


def check_equality(references: References, name: str, llm: LLM) -> None:
    prompts = mixed_prompts(2, VOCAB, count=14, longest=260)
    expected = references.greedy(name, prompts, NEW_TOKENS)
    expect_short_outputs(llm.core)
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS))
    assert [output.token_ids for output in outputs] == expected
    stats = llm.core.stats()
    assert stats.num_preemptions > 0
    assert stats.prefix_hit_tokens > 0
    llm.core.check_integrity()
    llm.core.clear_cache()


def one_prompt(num_tokens: int = 40, *, first_token: int = 9, row: int | None = None) -> ForwardBatch:
    """A prompt in the blocks 3, 2, 1 ..., with the logits of its last token, or of another row."""
    blocks = -(-num_tokens // BLOCK)
    tokens = np.arange(num_tokens) + 20
    tokens[0] = first_token
    return ForwardBatch(
        token_ids=tokens,
        positions=np.arange(num_tokens),
        query_starts=np.array([0, num_tokens], np.int32),
        context_lens=np.array([num_tokens], np.int32),
        block_tables=np.arange(blocks, 0, -1, dtype=np.int32)[None],
        logit_rows=np.array([num_tokens - 1 if row is None else row]),
    )


def layer_bytes(runner: Executor, shards: KVShards, spec: ShardSpec, layer: int) -> np.ndarray:
    """Return what a rank has of a layer (by its index in the rank) in the blocks 1, 2 and 3."""
    layout = shard_layout(runner.geometry, spec, BLOCK, runner.layout.groups)
    begin, end = layout.places[layer].k, layout.places[layer].end
    own = np.arange(1, 4) * layout.num_groups + layout.group_of[layer]
    return shards.arenas[spec.index].blocks[own, begin:end]


@pytest.mark.parametrize(("name", "tp", "pp"), [("llama", 2, 2), ("gemma3", 2, 1)])
def test_shards_hold_the_parts_of_the_whole_and_layers_are_reported_when_all_ranks_have_written_them(
    references: References, request: pytest.FixtureRequest, name: str, tp: int, pp: int
) -> None:
    """With the fused decoder and with transformers' modules."""
    whole_config = engine_config(references, name)
    whole_runner = load_executor(whole_config)
    whole = make_arena(whole_config, whole_runner)
    want = whole_runner.forward(one_prompt()).logits
    if pp > 1:
        llm = request.getfixturevalue("square")
        runner, shards = llm.core.executor, llm.core.shards
    else:
        runner = load_executor(engine_config(references, name, tp=tp, pp=pp))
        shards = make_arena(runner.config, runner)
    seen: list[int] = []

    def look(layer: int) -> None:
        seen.append(layer)
        for spec in runner.shards[:tp]:
            assert layer_bytes(runner, shards, spec, layer).any()
        own = len(runner.layout.layers)
        if layer + 1 < own:
            assert not layer_bytes(runner, shards, runner.shards[0], layer + 1).any()

    for arena in shards.arenas:
        arena.blocks[:] = 0
    runner.on_layer = look
    try:
        got = runner.forward(one_prompt()).logits
    finally:
        runner.on_layer = None
    assert seen == list(range(len(runner.layout.layers)))
    assert (got - want).abs().max() <= 1e-4 * want.abs().max()
    assert runner.geometry == whole_runner.geometry
    assert runner.fingerprint.content_key() == whole_runner.fingerprint.content_key()
    assert runner.fingerprint.layer_shapes == whole_runner.fingerprint.layer_shapes
    first = 0
    for spec in runner.shards:
        layout = shard_layout(runner.geometry, spec, BLOCK)
        heads = runner.geometry.layers[0].kv_heads // tp
        first = spec.pp_rank * len(layout.layers)
        for layer, shape in enumerate(layout.layers):
            mine = layer_bytes(runner, shards, spec, layer).copy().view(np.float32)
            theirs = layer_bytes(whole_runner, whole, ShardSpec(), first + layer).copy().view(np.float32)
            at = 0
            for dim in (shape.k_dim, shape.v_dim):
                part = mine[:, at * heads : (at + BLOCK * dim) * heads].reshape(3, heads, BLOCK, dim)
                kv_heads = heads * tp
                all_heads = theirs[:, at * kv_heads : (at + BLOCK * dim) * kv_heads].reshape(3, kv_heads, BLOCK, dim)
                part_of = all_heads[:, spec.tp_rank * heads : (spec.tp_rank + 1) * heads]
                assert np.allclose(part, part_of, rtol=1e-3, atol=1e-4 * np.abs(theirs).max())
                at += BLOCK * dim
    whole.close()
    if pp == 1:
        runner.close()
        shards.close()


def test_bfloat16_with_packed_linears(references: References) -> None:
    before = children()
    one = load_executor(engine_config(references, dtype="bfloat16"))
    pool = make_arena(one.config, one)
    want = one.forward(one_prompt()).logits.float()
    runner = load_executor(engine_config(references, dtype="bfloat16", tp=2))
    shards = make_arena(runner.config, runner)
    got = runner.forward(one_prompt()).logits.float()
    assert (got - want).norm() <= 0.12 * want.norm()  # weights this large lose digits in bfloat16
    assert runner.description.split(", tp")[0] == one.description
    for arenas in (shards, pool):
        arenas.close()
    del runner
    gc.collect()
    assert ended_since(before), "an executor that was not closed left a process"


def test_a_step_that_fails_anywhere_fails_alone(square: LLM) -> None:
    """Token 9999 is in no vocabulary: the ranks that embed fail. Row 77: the rank that has the head, a follower."""
    runner = square.core.executor
    want = runner.forward(one_prompt()).logits
    for bad, rank in ((one_prompt(first_token=9999), "[01]"), (one_prompt(row=77), "2")):
        began = time.monotonic()
        with pytest.raises(InternalError, match=f"rank {rank}: IndexError"):
            runner.forward(bad)
        assert time.monotonic() - began < multiprocess.STEP_TIMEOUT_S / 2, "ranks waited until their time was up"
        assert torch.equal(runner.forward(one_prompt()).logits, want)
    with pytest.raises(InternalError, match="larger than was planned"):
        runner.forward(dataclasses.replace(one_prompt(), logit_rows=np.zeros(1_000_000, np.int64)))
    assert torch.equal(runner.forward(one_prompt()).logits, want)


def test_a_follower_killed_in_the_middle_of_generation_ends_it(square: LLM, bystanders: set[int]) -> None:
    """Rank 3 is not connected with the leader at all, who learns of it through rank 2, or as its parent."""
    lost: list[ExecutorLostError] = []
    told = threading.Event()

    def on_lost(error: ExecutorLostError) -> None:
        lost.append(error)
        told.set()

    runner = square.core.executor
    runner.watch(on_lost)
    victim = max(children() - bystanders)
    killer = threading.Timer(0.3, os.kill, (victim, signal.SIGKILL))
    killer.start()
    endless = [[9, 10, 11]] * 1000
    with pytest.raises(ExecutorLostError) as caught:
        square.generate(endless, SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True))
    killer.join()
    assert re.fullmatch(rf"rank 3 \(.*process {victim}\) was killed by SIGKILL", caught.value.message)
    assert told.wait(240.0)
    runner.watch(on_lost)  # who asks later is told as well
    assert [error.message for error in lost] == [caught.value.message] * 2
    with pytest.raises(ExecutorLostError):
        runner.forward(one_prompt())
    assert not square.core.has_work()
    square.core.check_integrity()
    square.close()
    square.close()
    assert ended_since(bystanders)


def test_a_follower_that_hangs_is_given_up(references: References, monkeypatch: pytest.MonkeyPatch) -> None:
    before = children()
    with LLM(engine_config(references, tp=2)) as llm:
        (follower,) = children() - before
        for module in (communicator, multiprocess):
            monkeypatch.setattr(module, "STEP_TIMEOUT_S", 5.0)
        with pytest.raises(InternalError, match="IndexError"):
            llm.core.executor.forward(one_prompt(row=77))  # the ranks meet anew after it, with the shorter time
        llm.core.executor.forward(one_prompt())
        os.kill(follower, signal.SIGSTOP)
        with pytest.raises(ExecutorLostError, match=f"process {follower}\\).* does not answer"):
            llm.generate([[9, 10, 11]], SamplingParams(temperature=0.0, max_tokens=3))
    assert ended_since(before)


@pytest.mark.parametrize(("values", "field", "words"), [({"tp": 3}, "tp", "2 KV heads"), ({"pp": 5}, "pp", "4 layers")])
def test_what_cannot_be_divided_is_refused_and_leaves_no_process(
    references: References, values: dict[str, object], field: str, words: str
) -> None:
    before = children()
    with pytest.raises(ConfigError, match=words) as caught:
        LLM(engine_config(references, **values))
    assert caught.value.field == field
    assert "\n" not in caught.value.message
    assert ended_since(before)
