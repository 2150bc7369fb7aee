"""Multi-head latent attention is recognised by what modules compute, and then its latents are what the pool holds."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.equality import References, mixed_prompts
from tests.support.models.checkpoints import MLA
from tests.support.preemption import expect_short_outputs

from baton.config import EngineConfig
from baton.engine.llm import LLM
from baton.engine.models import attention_hook
from baton.engine.models.attention_hook import use_latents
from baton.engine.models.loader import LoadedModel, load_model
from baton.kv_cache.layout import LayerShape
from baton.types import SamplingParams

NEW_TOKENS = 40
ROW = MLA["kv_lora_rank"] + MLA["qk_rope_head_dim"]
SAMPLING = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)


def engine_config(path: Path, **changes: Any) -> EngineConfig:
    values = {"dtype": "float32", "kv_blocks": 24, "max_model_len": 24 * 16, "prefill_chunk": 64, **changes}
    return EngineConfig(model=str(path), **values)


@pytest.mark.parametrize(
    ("name", "backend"),
    [("deepseek_v3", "torch"), ("deepseek_v2", "auto"), ("minicpm3", "auto"), ("longcat_flash", "auto")],
)
def test_equality_over_latents_with_preemption(references: References, name: str, backend: str) -> None:
    prompts = mixed_prompts(5, 512, count=8, longest=200)
    expected = references.greedy(name, prompts, NEW_TOKENS)
    with LLM(engine_config(references.checkpoint(name), attention_backend=backend)) as llm:
        assert llm.core.executor.geometry.layers == (LayerShape(1, ROW, 0),) * 4
        expect_short_outputs(llm.core)
        results = llm.generate(prompts, SAMPLING)
        assert [list(result.outputs[0].token_ids) for result in results] == expected
        assert llm.core.stats().num_preemptions > 0
        llm.core.check_integrity()


def test_packed_linears_leave_the_projection_of_latents_alone(references: References) -> None:
    with LLM(engine_config(references.checkpoint("deepseek_v2"), dtype="bfloat16")) as llm:
        assert llm.core.executor.description.startswith("transformers' modules")
        assert llm.core.executor.geometry.layers == (LayerShape(1, ROW, 0),) * 4
        assert "linears torch" not in llm.core.executor.description
        sampling = dataclasses.replace(SAMPLING, ignore_eos=True)
        assert len(llm.generate([[9, 10, 11]], sampling)[0].outputs[0].token_ids) == NEW_TOKENS


def loaded(references: References) -> tuple[LoadedModel, list[Any]]:
    model = load_model(engine_config(references.checkpoint("deepseek_v3")))
    return model, [module for module in model.module.modules() if hasattr(module, "kv_b_proj")]


@pytest.mark.parametrize("other", ["expansion", "bias", "none"])
def test_what_expands_in_another_way_keeps_its_heads(references: References, other: str) -> None:
    model, modules = loaded(references)
    module = modules[1]
    if other == "expansion":
        expand = module.expand_kv
        module.expand_kv = lambda latents, rotary: (expand(latents, rotary)[0] * 1.1, expand(latents, rotary)[1])
    elif other == "bias":
        module.kv_b_proj.bias = torch.nn.Parameter(torch.ones(module.kv_b_proj.out_features))
    heads, _ = attention_hook.probe(model, 256)
    found = list(use_latents(model, heads).values())
    plain = [spec for spec in found if not spec.latent]
    assert plain == ([] if other == "none" else [found[1]])
    assert all(spec == list(heads.values())[1] for spec in plain)
