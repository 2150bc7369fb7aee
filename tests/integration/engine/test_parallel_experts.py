"""Experts whose share of a rank is no multiple of what torch's grouped products take."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.equality import hf_greedy, mixed_prompts
from tests.support.models.checkpoints import make_checkpoint

from baton.config import EngineConfig
from baton.engine.llm import LLM
from baton.types import SamplingParams

NEW_TOKENS = 4


@pytest.mark.parametrize(
    ("architecture", "sizes"),
    [("mixtral", {"intermediate_size": 36}), ("gpt_oss", {"intermediate_size": 36})],
)
def test_tokens_are_those_of_generate(tmp_path: Path, architecture: str, sizes: dict[str, int]) -> None:
    """18 floats of a rank are 72 bytes, and rows have to be multiples of 16: the share is padded with zeros."""
    folder = make_checkpoint(tmp_path, architecture, num_hidden_layers=2, **sizes)
    prompts = mixed_prompts(4, 512, count=3, longest=18)
    config = EngineConfig(model=str(folder), dtype="float32", tp=2, kv_blocks=24, max_model_len=48, max_num_seqs=4)
    with LLM(config) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS))
        assert [each.token_ids for each in outputs] == hf_greedy(folder, prompts, NEW_TOKENS)
        llm.core.check_integrity()
