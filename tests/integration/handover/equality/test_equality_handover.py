"""Prefill on one instance, KV over a pipe, decode on another: the tokens of Hugging Face ``generate``, one by one."""

from __future__ import annotations

import asyncio

import pytest
from tests.support.equality import ARCHITECTURES, References, mixed_prompts
from tests.support.preemption import expect_short_outputs
from tests.support.servers.cluster import LocalCluster, Result

from baton.api.v1 import common_pb2
from baton.config import EngineConfig
from baton.config.worker import WorkerConfig
from baton.types import FinishReason, SamplingParams
from baton.worker.instance import WorkerInstance

NEW_TOKENS = 12
GROWING_TOKENS = 60
VOCAB = 512


@pytest.fixture
def checkpoint(request: pytest.FixtureRequest, references: References):
    prompts = references.decided(request.param, mixed_prompts(7, VOCAB), NEW_TOKENS)
    return references.checkpoint(request.param), prompts, references.greedy(request.param, prompts, NEW_TOKENS)


def engine_config(path, **changes) -> EngineConfig:
    values = {"dtype": "float32", "kv_blocks": 700, "prefill_chunk": 64, "max_num_batched_tokens": 256, **changes}
    return EngineConfig(model=str(path), **values)


ORDERS = ["decode_first", "prefill_first"]


async def generate_all(
    cluster: LocalCluster, decode: WorkerInstance, prompts, new_tokens=NEW_TOKENS, order="decode_first"
) -> list[Result]:
    sampling = SamplingParams(temperature=0.0, max_tokens=new_tokens)

    async def generate(at: int, prompt: list[int]) -> Result:
        prefilled = None
        if order == "prefill_first":
            prefilled = await cluster.prefill_first(cluster.prefill[at % len(cluster.prefill)], prompt, sampling)
            if at % 2:
                prefilled.key = ""  # then it is found by its tokens
        return await cluster.generate(decode, prompt, sampling, prefilled=prefilled)

    return await asyncio.gather(*(generate(at, prompt) for at, prompt in enumerate(prompts)))


def assert_moved(results: list[Result], prompts, order: str, kinds: set[str]) -> None:
    """Check that prompts came over the pipes, with all of their tokens and without failures."""
    moved = [result.trace for result in results if result.trace.path == common_pb2.PREFILL_PATH_REMOTE]
    # Prompts that decode already holds but for a few tokens may be finished there, unless they were computed before.
    assert len(moved) > len(prompts) // 2
    assert order == "decode_first" or len(moved) == len(prompts)
    assert {trace.pipe for trace in moved if trace.kv_bytes} == kinds
    for trace in moved:
        assert trace.cached_tokens + trace.transferred_tokens == trace.prompt_tokens
        assert not trace.failed_prefills


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("checkpoint", "kinds"),
    [*((name, ("memory", "shm", "tcp")) for name in ARCHITECTURES), ("llama", ("nixl", "gloo"))],
    indirect=["checkpoint"],
)
async def test_equality_through_every_pipe(checkpoint, kinds, order):
    path, prompts, expected = checkpoint
    async with LocalCluster(engine_config(path), decode_pipes=[(kind,) for kind in kinds]) as cluster:
        for kind, decode in zip(kinds, cluster.decode, strict=True):
            results = await generate_all(cluster, decode, prompts, order=order)
            assert [result.token_ids for result in results] == expected
            assert_moved(results, prompts, order, {kind})
        await cluster.check_integrity()


@pytest.mark.parametrize("checkpoint", ["llama", "gpt_oss"], indirect=True)
async def test_equality_when_the_decode_pool_is_so_small_that_sequences_are_preempted(checkpoint, references):
    path, prompts, _ = checkpoint
    # Short prompts with long answers: many are admitted, and then all of them grow.
    prompts = references.decided(path.name, [prompt for prompt in prompts if len(prompt) < 100], GROWING_TOKENS)
    expected = references.greedy(path.name, prompts, GROWING_TOKENS)
    async with LocalCluster(engine_config(path), decode_changes={"kv_blocks": 48}) as cluster:
        decode = cluster.decode[0]
        expect_short_outputs(decode.context.engine.core)
        results = await generate_all(cluster, decode, prompts, new_tokens=GROWING_TOKENS)
        assert [result.token_ids for result in results] == expected
        stats = await decode.context.engine.call(decode.context.engine.core.stats)
        assert stats.num_preemptions > 0
        await cluster.check_integrity()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("checkpoint", ["llama"], indirect=True)
async def test_equality_when_a_prefill_pool_is_smaller_than_the_work(checkpoint, order):
    path, prompts, expected = checkpoint
    prefill = engine_config(path, kv_blocks=50)
    config = WorkerConfig(unclaimed_share=1.0)
    async with LocalCluster(prefill, config, num_prefill=2, decode_changes={"kv_blocks": 700}) as cluster:
        results = await generate_all(cluster, cluster.decode[0], prompts, order=order)
        assert [result.token_ids for result in results] == expected
        await cluster.check_integrity()


@pytest.mark.parametrize("checkpoint", ["llama"], indirect=True)
async def test_equality_when_an_answer_is_continued_on_another_instance(checkpoint):
    """What the router does when a decode instance dies: prompt and tokens so far go to another one."""
    path, prompts, expected = checkpoint
    async with LocalCluster(engine_config(path), decode_pipes=(("shm",), ("tcp",))) as cluster:
        for cut in (1, 5, NEW_TOKENS - 1):
            sampling = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
            for prompt, tokens in list(zip(prompts, expected, strict=True))[:6]:
                if len(tokens) <= cut:
                    continue
                for decode in cluster.decode:
                    result = await cluster.generate(decode, prompt, sampling, output=tokens[:cut])
                    assert result.token_ids == tokens[cut:]
        await cluster.check_integrity()


@pytest.mark.parametrize("checkpoint", ["llama"], indirect=True)
async def test_seeded_sampling_is_the_same_whoever_prefills_and_whoever_goes_on(checkpoint):
    path, prompts, _ = checkpoint
    sampling = SamplingParams(temperature=1.3, top_p=0.9, seed=11, max_tokens=NEW_TOKENS, ignore_eos=True)
    async with LocalCluster(engine_config(path), decode_pipes=(("shm",), ("tcp",))) as cluster:
        first, second = cluster.decode
        for prompt in prompts[:6]:
            alone = await cluster.generate(first, prompt, sampling, candidates=())
            assert alone.trace.path == common_pb2.PREFILL_PATH_LOCAL
            assert alone.trace.local_reason == "no_candidates"
            assert alone.finish_reason is FinishReason.LENGTH
            remote = await cluster.generate(second, prompt, sampling)
            assert remote.token_ids == alone.token_ids
            resumed = await cluster.generate(second, prompt, sampling, output=alone.token_ids[:5])
            assert resumed.token_ids == alone.token_ids[5:]
        await cluster.check_integrity()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("checkpoint", ["llama", "gemma3"], indirect=True)
@pytest.mark.parametrize("sizes", [(16, 32), (32, 16), (16, 24)], ids=str)
async def test_equality_between_block_sizes(checkpoint, sizes, order):
    path, prompts, expected = checkpoint
    prefill = engine_config(path, block_size=sizes[0])
    kinds = ("shm", "tcp")
    pipes = [(kind,) for kind in kinds]
    async with LocalCluster(prefill, decode_pipes=pipes, decode_changes={"block_size": sizes[1]}) as cluster:
        for kind, decode in zip(kinds, cluster.decode, strict=True):
            results = await generate_all(cluster, decode, prompts, order=order)
            assert [result.token_ids for result in results] == expected
            assert_moved(results, prompts, order, {kind})
        await cluster.check_integrity()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.usefixtures("warm_followers")
@pytest.mark.parametrize(
    ("checkpoint", "prefill", "decode"),
    [
        ("llama", {"tp": 2}, {"tp": 1}),
        ("llama", {"tp": 1}, {"tp": 2}),
        ("llama", {"tp": 2}, {"tp": 2}),
        ("llama", {"pp": 2}, {"pp": 1}),
        ("gemma3", {"tp": 2, "block_size": 32}, {"tp": 1, "pp": 2}),
        ("gpt_oss", {"tp": 1, "pp": 2}, {"tp": 2, "pp": 1, "block_size": 32}),
    ],
    indirect=["checkpoint"],
)
async def test_equality_between_parallel_shapes(checkpoint, prefill, decode, order):
    path, prompts, expected = checkpoint
    prompts, expected = prompts[:12], expected[:12]
    shapes = {name: decode.get(name, value) for name, value in {"tp": 1, "pp": 1, "block_size": 16}.items()}
    pipes = [("shm",), ("tcp",)] if decode.get("tp", 1) * decode.get("pp", 1) == 1 else [("shm", "tcp")]
    async with LocalCluster(engine_config(path, **prefill), decode_pipes=pipes, decode_changes=shapes) as cluster:
        for kinds, instance in zip(pipes, cluster.decode, strict=True):
            results = await generate_all(cluster, instance, prompts, order=order)
            assert [result.token_ids for result in results] == expected
            assert_moved(results, prompts, order, {kinds[0]})
        await cluster.check_integrity()
