"""Prefill and decode instances with quantized weights: the dequantized model's tokens; no KV of other weights."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.support.equality import hf_greedy, mixed_prompts
from tests.support.models.checkpoints import make_checkpoint
from tests.support.models.quantized_checkpoints import quantize_checkpoint
from tests.support.servers.cluster import LocalCluster

from baton.config import EngineConfig
from baton.types import SamplingParams

NEW_TOKENS = 12
BLOCK = 16
SAMPLING = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)


def config(path: Path, **changes: object) -> EngineConfig:
    return EngineConfig(model=str(path), dtype="float32", kv_blocks=200, **changes)  # type: ignore[arg-type]


@pytest.mark.usefixtures("warm_followers")
async def test_two_ranks_hand_over_to_one(tmp_path: Path) -> None:
    """Inputs are not rounded, so that tokens are those of ``generate`` on the dequantized checkpoint."""
    plain = make_checkpoint(tmp_path / "source", "llama")
    made = quantize_checkpoint(plain, tmp_path, "ct-w8a16")
    prompts = [prompt for prompt in mixed_prompts(13, 512, count=10, longest=200) if len(prompt) > BLOCK]
    async with LocalCluster(config(made.folder, tp=2), decode_changes={"tp": 1}) as cluster:
        results = await asyncio.gather(*(cluster.generate(cluster.decode[0], prompt, SAMPLING) for prompt in prompts))
        assert all(result.trace.kv_bytes for result in results)
        await cluster.check_integrity()
    assert [result.token_ids for result in results] == hf_greedy(made.plain, prompts, NEW_TOKENS)


@pytest.mark.parametrize("quantization", ["none", "int4"])
async def test_kv_of_weights_that_were_quantized_otherwise_is_refused(tmp_path: Path, quantization: str) -> None:
    path = make_checkpoint(tmp_path, "llama")
    prompt = list(range(10, 80))
    changes = {"quantization": quantization}
    async with LocalCluster(config(path, quantization="int8"), decode_changes=changes) as cluster:
        result = await cluster.generate(cluster.decode[0], prompt, SAMPLING)
        (failure,) = result.trace.failed_prefills
        assert "model_digest" in failure
        assert (result.trace.local_reason, result.trace.kv_bytes) == ("prefill_failed", 0)
        await cluster.check_integrity()
