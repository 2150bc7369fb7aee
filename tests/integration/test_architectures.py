"""Every causal language model of the installed transformers: the tokens of ``generate``, or refused with the reason."""

from __future__ import annotations

from pathlib import Path

from tests.support.architectures import ORIGINAL_LEN, VOCAB, make_model, save
from tests.support.equality import hf_greedy, mixed_prompts

from baton.config import EngineConfig
from baton.engine.llm import LLM
from baton.types import SamplingParams

NEW_TOKENS = 12


def test_a_type_with_the_parts_of_llama_that_is_not_listed_is_not_fused(tmp_path: Path) -> None:
    """Ministral 3 scales its queries by their positions, which only transformers' own modules do."""
    rope = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL_LEN,
        "llama_4_scaling_beta": 2.0,
    }
    path = save(make_model("ministral3", rope_parameters=rope), tmp_path)
    prompts = mixed_prompts(5, VOCAB, count=8, longest=3 * ORIGINAL_LEN)
    with LLM(EngineConfig(model=str(path), dtype="float32", kv_blocks=256, prefill_chunk=64)) as llm:
        assert llm.core.executor.description.startswith("transformers' modules")
        outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS))
    assert [output.token_ids for output in outputs] == hf_greedy(path, prompts, NEW_TOKENS)
