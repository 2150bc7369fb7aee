"""Drafts on a GPU: the tokens of the engine without, in float32, whoever drafts, and behind a hand-over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.gpu.test_equality import on_gpu
from tests.integration.engine.speculation.test_draft_heads import tokens_of, write_head
from tests.support.equality import References, mixed_prompts
from tests.support.models.next_token import write_next_token
from tests.support.transport.device_pair import ask, device_pair

from baton.engine.llm import LLM
from baton.types import SamplingParams

VOCAB, NEW_TOKENS = 512, 16
SAMPLINGS = [
    SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS),
    SamplingParams(temperature=0.7, seed=3, max_tokens=NEW_TOKENS),
] * 4
METHODS = [("ngram", 1), ("suffix", 3), ("draft", 1), ("eagle", 1), ("eagle3", 1), ("eagle3", 3), ("medusa", 2)]


def with_drafts(references: References, folder: Path, method: str) -> tuple[Path, dict[str, Any]]:
    """Return a model, and the options by which it is drafted for."""
    if method == "mtp":
        return write_next_token(folder, "deepseek_v3").folder, {"speculative": method}
    model, options = references.checkpoint("llama"), {"speculative": method}
    if method == "draft":
        options["speculative_model"] = str(model)
    elif method not in {"ngram", "suffix"}:
        options["speculative_model"] = str(write_head(folder / "head", method, model))
    return model, options


@pytest.mark.parametrize(("method", "width"), [*METHODS, ("mtp", 1), ("mtp", 2)])
def test_answers_are_those_without_drafts(references: References, tmp_path: Path, method: str, width: int) -> None:
    model, options = with_drafts(references, tmp_path, method)
    prompts = mixed_prompts(1, VOCAB, count=len(SAMPLINGS), longest=120)
    with LLM(on_gpu(model)) as llm:
        plain = tokens_of(llm.generate(prompts, SAMPLINGS))
    with LLM(on_gpu(model, speculative_tokens=3, speculative_width=width, **options)) as llm:
        for _ in range(2):
            assert tokens_of(llm.generate(prompts, SAMPLINGS)) == plain
        assert llm.core.speculator is not None
        stats = llm.core.speculator.stats
        assert not stats.faults
        if method == "draft":
            assert stats.accepted.total() > 0.9 * stats.drafted.total() > 0
        llm.core.check_integrity()


@pytest.mark.timeout(900)
async def test_drafts_behind_a_hand_over(references: References, tmp_path: Path) -> None:
    model, options = with_drafts(references, tmp_path, "eagle3")
    prompts = mixed_prompts(2, VOCAB, count=8, longest=200)
    expected = references.greedy("llama", prompts, NEW_TOKENS)
    flags = ("--speculative", "eagle3", "--speculative-model", options["speculative_model"], "--kv-blocks", "1500")
    async with device_pair(model, "cuda:0", *flags) as supervisor:
        results = await ask(supervisor, prompts, NEW_TOKENS, 240.0)
    assert [each.token_ids for each in results] == expected
    assert "cuda_ipc" in {each.trace.pipe for each in results if each.trace is not None}
