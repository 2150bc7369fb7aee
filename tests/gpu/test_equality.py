"""An engine on a GPU, in float32: the tokens of ``generate`` for every architecture and path, graphs on and off."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support.equality import ARCHITECTURES, References, mixed_prompts
from tests.support.models.checkpoints import make_checkpoint
from tests.support.models.stored_kv import add_tensors, kv_scales

from baton.config import EngineConfig
from baton.engine.llm import LLM
from baton.errors import ConfigError
from baton.types import SamplingParams

VOCAB, NEW_TOKENS = 512, 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)


def on_gpu(path: object, **changes: object) -> EngineConfig:
    values = {"device": "cuda:0", "dtype": "float32", "kv_blocks": 2000, "prefill_chunk": 64, **changes}
    return EngineConfig(model=str(path), **values)


@pytest.mark.parametrize("graphs", ["on", "off"])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "modules"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_tokens_are_those_of_generate(references: References, architecture: str, fused: bool, graphs: str) -> None:
    prompts = mixed_prompts(1, VOCAB, count=24, longest=400)
    expected = references.greedy(architecture, prompts, NEW_TOKENS)
    config = on_gpu(references.checkpoint(architecture), packed_linears=fused, cuda_graphs=(graphs,))
    with LLM(config) as llm:
        for _ in range(2):  # the second time from the prefix cache
            outputs = llm.generate(prompts, GREEDY)
            assert [each.token_ids for each in outputs] == expected
        description = llm.core.executor.description
        assert ("fused decoder" in description) is fused
        # Mixtures of transformers' own modules choose rows by what the host learns of the device.
        assert ("graphs of" in description) is (graphs == "on") or "no graphs (" in description
        llm.core.check_integrity()


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8_e4m3"])
def test_kv_of_8_bits_gives_the_tokens_of_the_cpu(tmp_path: Path, kv_dtype: str) -> None:
    path = make_checkpoint(tmp_path, "llama")
    if kv_dtype == "fp8_e4m3":
        add_tensors(path, kv_scales(4, [0.06, 0.05], 0.03))
    prompts = mixed_prompts(6, VOCAB, count=12, longest=300)
    tokens = []
    for device in ("cpu", "cuda:0"):
        with LLM(on_gpu(path, device=device, kv_dtype=kv_dtype)) as llm:
            tokens.append([each.token_ids for each in llm.generate(prompts, GREEDY)])
    same = sum(a == b for a, b in zip(*tokens, strict=True))  # a number may round to the next one
    assert same >= len(prompts) - 1


def test_steps_launched_ahead_give_the_tokens_of_the_plain_order(references: References) -> None:
    prompts = mixed_prompts(2, VOCAB, count=24, longest=300)
    kinds = [
        GREEDY,
        SamplingParams(seed=4, max_tokens=16, n=2),
        SamplingParams(seed=5, max_tokens=9, stop_token_ids=tuple(range(8, 60)), logprobs=2),
        GREEDY.replace(max_tokens=5, logit_bias={9: 2.0}),
    ]
    sampling = [kinds[i % len(kinds)] for i in range(len(prompts))]
    found = []
    for way in ("on", "off"):
        with LLM(on_gpu(references.checkpoint("llama"), async_scheduling=way)) as llm:
            assert llm.core.steps.ahead == (way == "on")
            outputs = llm.generate(prompts, sampling)
            found.append([[one.token_ids for one in each.outputs] for each in outputs])
            llm.core.check_integrity()
    # Batches differ between the two, and with them the rounding of logits, which hardly ever changes a draw.
    same = sum(a == b for a, b in zip(*found, strict=True))
    assert same >= len(prompts) - 1


def test_the_pool_is_sized_by_what_is_left_after_graphs(references: References) -> None:
    config = on_gpu(references.checkpoint("llama"), kv_blocks=None, kv_memory_fraction=0.5, max_num_seqs=512)
    with LLM(config) as llm:
        free, total = torch.cuda.mem_get_info(0)
        assert 0 < free < total
        assert llm.core.arena.num_blocks > 100


def test_too_many_blocks_are_refused_with_how_many_would_fit(references: References) -> None:
    with pytest.raises(ConfigError, match="would fit") as caught:
        LLM(on_gpu(references.checkpoint("llama"), kv_blocks=10**9))
    assert caught.value.field == "kv_blocks"


def test_sampled_tokens_are_those_of_the_cpu(references: References) -> None:
    """The random numbers are the same; logits differ by rounding alone, which hardly ever changes a draw."""
    prompts = mixed_prompts(3, VOCAB, count=12, longest=100)
    sampling = SamplingParams(temperature=0.8, top_k=40, top_p=0.9, seed=11, max_tokens=16)
    path = references.checkpoint("llama")
    tokens = []
    for device in ("cuda:0", "cpu"):
        with LLM(on_gpu(path, device=device)) as llm:
            tokens.append([each.token_ids for each in llm.generate(prompts, sampling)])
    same = sum(a == b for a, b in zip(*tokens, strict=True))
    assert same >= len(prompts) - 1


def test_bfloat16_runs_with_graphs(references: References) -> None:
    prompts = mixed_prompts(5, VOCAB, count=9, longest=200)
    with LLM(on_gpu(references.checkpoint("llama"), dtype="bfloat16")) as llm:
        outputs = llm.generate(prompts, GREEDY)
        assert all(len(each.token_ids) for each in outputs)
        assert "graphs of" in llm.core.executor.description
