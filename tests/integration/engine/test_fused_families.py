"""The fused decoder runs the families it knows, token for token as ``generate`` and transformers' own modules do."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.equality import References, hf_greedy, mixed_prompts
from tests.support.models.checkpoints import ARCHITECTURES, make_checkpoint

from baton.config import EngineConfig
from baton.engine.llm import LLM
from baton.engine.models.quirks import FUSED_FAMILIES
from baton.types import SamplingParams

NEW_TOKENS = 16
FUSED = sorted(name for name, (model_type, _) in ARCHITECTURES.items() if model_type in FUSED_FAMILIES)
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)


def generated(
    references: References, name: str, prompts: list[list[int]], **options: object
) -> tuple[str, list[list[int]]]:
    """The path that was taken, and each prompt's tokens."""
    values = {"dtype": "float32", "kv_blocks": 256, "prefill_chunk": 64, **options}
    with LLM(EngineConfig(model=str(references.checkpoint(name)), **values)) as llm:  # type: ignore[arg-type]
        outputs = llm.generate(prompts, GREEDY)
        return llm.core.executor.description, [output.token_ids for output in outputs]


@pytest.mark.parametrize("name", FUSED)
def test_fused_families_equal_generate_and_the_generic_path(references: References, name: str) -> None:
    """Prompts longer than the windows, in chunks, side by side."""
    prompts = mixed_prompts(7, 512, count=8, longest=200)
    path, tokens = generated(references, name, prompts)
    assert path.startswith("fused decoder")
    assert tokens == references.greedy(name, prompts, NEW_TOKENS)
    path, generic = generated(references, name, prompts, packed_linears=False)
    assert path.startswith("transformers' modules")
    assert tokens == generic


def test_latent_attention_without_a_query_latent_and_with_halves_turned(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "deepseek_v3", q_lora_rank=None, rope_interleave=False)
    prompts = mixed_prompts(8, 512, count=4, longest=100)
    with LLM(EngineConfig(model=str(path), dtype="float32", kv_blocks=64, prefill_chunk=64)) as llm:
        assert llm.core.executor.description.startswith("fused decoder")
        outputs = llm.generate(prompts, GREEDY)
    assert [output.token_ids for output in outputs] == hf_greedy(path, prompts, NEW_TOKENS)
