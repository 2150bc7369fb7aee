"""KV pools in the memory of a device, which the host reaches by copies alone.

Without a GPU, memory of the CPU takes its place, and the Triton kernels run under the interpreter.
"""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from tests.support.equality import References, mixed_prompts
from tests.support.servers.cluster import LocalCluster

from baton.api.v1 import common_pb2
from baton.config import EngineConfig
from baton.engine import build, sampler
from baton.engine import device_memory as device_arena
from baton.engine.device import ComputeDevice
from baton.engine.device_memory import DeviceArena, arena_memory
from baton.engine.llm import LLM
from baton.engine.sampler import token_sampler
from baton.engine.sampler_row import SamplerRow
from baton.errors import ConfigError, InternalError
from baton.kv_cache.arena import Arena
from baton.types import SamplingParams

VOCAB, NEW_TOKENS, FEW_TOKENS = 512, 12, 4
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda:0" if CUDA else "cpu")
DEFINED = ComputeDevice(DEVICE, on_gpu=CUDA)
"""Where there is no GPU, copies are those of the definitions."""


@pytest.fixture
def device_pools(monkeypatch: pytest.MonkeyPatch) -> list[Arena]:
    """Have engines keep their pools in device memory; returns the arenas."""
    made: list[Arena] = []

    def new_arena(_: ComputeDevice, blocks: int, block_bytes: int, **__: object) -> Arena:
        made.append(DeviceArena(DEFINED, blocks, block_bytes))
        return made[-1]

    monkeypatch.setattr(build, "new_arena", new_arena)
    return made


def engine_config(path: object, **changes: object) -> EngineConfig:
    values = {"dtype": "float32", "kv_blocks": 400, "prefill_chunk": 64, "max_num_batched_tokens": 256, **changes}
    return EngineConfig(model=str(path), device=str(DEVICE), **values)


@pytest.mark.parametrize("kernels", [False, True], ids=["definition", "triton"])
def test_spans_go_in_and_out_in_parts(kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_arena, "STAGING_BYTES", 700)
    arena, rng = DeviceArena(DEFINED, 9, 640), np.random.default_rng(1)
    if kernels:
        arena._copies = device_arena._copies(on_gpu=True)
    content = rng.integers(0, 256, (9, 640), np.uint8)
    whole = np.array([[block, 0, 640] for block in range(9)])
    arena.write_from(content.reshape(-1), whole)
    assert np.array_equal(arena.memory.cpu().numpy(), content)
    spans = np.array([[8, 3, 17], [0, 0, 640], [4, 600, 40], [4, 0, 600], [7, 639, 1], [2, 9, 0]])
    target = np.zeros(int(spans[:, 2].sum()), np.uint8)
    arena.read_into(target, spans)
    assert np.array_equal(target, np.concatenate([content[b, first : first + n] for b, first, n in spans]))
    for bad in ([9, 0, 1], [0, 640, 1], [0, -1, 2]):
        with pytest.raises(InternalError, match="span"):
            arena.read_into(np.zeros(abs(bad[2]), np.uint8), np.array([bad]))
    with pytest.raises(InternalError, match="device memory"):
        _ = arena.blocks
    assert arena_memory(arena).data_ptr() == arena.memory.data_ptr()


def test_one_engine_equals_generate(references: References, device_pools: list[Arena]) -> None:
    architecture, backend = "llama", "torch"
    prompts = mixed_prompts(4, VOCAB, count=3, longest=24)
    expected = references.greedy(architecture, prompts, FEW_TOKENS)
    path = references.checkpoint(architecture)
    config = engine_config(path, attention_backend=backend, kv_blocks=32, max_num_batched_tokens=64)
    with LLM(config) as llm:
        for _ in range(2):  # the second time mostly from the prefix cache
            outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=FEW_TOKENS))
            assert [each.token_ids for each in outputs] == expected
        assert llm.core.executor.attention_backend == backend
        llm.core.check_integrity()
    assert len(device_pools) == 1


@pytest.mark.parametrize(("architecture", "ahead"), [("llama", "on"), ("deepseek_v3", "auto")])
async def test_hand_over_from_device_to_device(
    references: References, device_pools: list[Arena], architecture: str, ahead: str
) -> None:
    prompts = mixed_prompts(7, VOCAB, count=8, longest=200)
    expected = references.greedy(architecture, prompts, NEW_TOKENS)
    sampling = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
    config = engine_config(references.checkpoint(architecture), async_scheduling=ahead)
    async with LocalCluster(config, decode_pipes=[("memory",), ("tcp",)]) as cluster:
        for kind, decode in zip(("memory", "tcp"), cluster.decode, strict=True):
            assert decode.context.engine.core.steps.ahead == (CUDA or ahead == "on")
            results = await asyncio.gather(*(cluster.generate(decode, prompt, sampling) for prompt in prompts))
            assert [result.token_ids for result in results] == expected
            moved = [r.trace for r in results if r.trace.path == common_pb2.PREFILL_PATH_REMOTE]
            assert {trace.pipe for trace in moved} == {kind}
            assert not any(trace.failed_prefills for trace in moved)
        await cluster.check_integrity()
    assert len(device_pools) == 3


def test_a_pool_that_does_not_fit_says_how_many_blocks_would(
    references: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "free_bytes", lambda _: 1 << 20)
    with pytest.raises(ConfigError, match=r"only 1 MiB are free: \d+ would fit") as caught:
        LLM(engine_config(references.checkpoint("llama")))
    assert caught.value.field == "kv_blocks"


def test_tokens_are_chosen_on_the_device_as_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(2)
    logits = torch.randn(5, 600) * 3
    logits[3, 7] = float("nan")
    params = [SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_k=9, top_p=0.8)]
    rows = [
        SamplerRow(one, 5 + i, stop_ids=(), prompt=(), output=(1, 2)) for i, one in enumerate([*params, *params[1:]])
    ]
    want = sampler.sample(logits.clone(), rows)
    monkeypatch.setattr(sampler, "token_sampler", lambda *_, **__: token_sampler(DEVICE, on_gpu=True))
    got = sampler.sample(logits.to(DEVICE), rows)
    assert (got.token_ids, got.bad_rows) == (want.token_ids, (3,))
