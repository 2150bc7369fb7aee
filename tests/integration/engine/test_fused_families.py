"""The fused decoder runs the families it knows, token for token as ``generate`` and transformers' own modules do."""

from __future__ import annotations

import pytest
from tests.support.checkpoints import ARCHITECTURES
from tests.support.equality import References, mixed_prompts

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
