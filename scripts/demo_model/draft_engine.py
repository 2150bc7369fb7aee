"""What training of drafts needs of the engine: the demo model's own answers, and how many drafts come true."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from baton.config import EngineConfig
from baton.engine.llm import LLM
from baton.types import SamplingParams

from .batches import Dataset, RowSource

OWN_PROMPT_TOKENS = 64
PROMPTS, PROMPT_TOKENS, NEW_TOKENS, DRAFT_TOKENS = 8, 256, 96, 4
"""Of the measurement."""


def own_rows(target: Path, dataset: Dataset, count: int, context: int, threads: int, seed: int) -> torch.Tensor:
    """Return rows int64 [count, context] that the demo model continues behind 64 tokens of its training text.

    Of two in turn one is greedy, one drawn at temperature 0.7.
    """
    tokens, _ = RowSource(dataset, seed + 1).batch(count, OWN_PROMPT_TOKENS)
    prompts = tokens.tolist()
    greedy = SamplingParams(temperature=0.0, max_tokens=context - OWN_PROMPT_TOKENS, ignore_eos=True)
    samplings = [greedy.replace(temperature=0.7, seed=at) if at % 2 else greedy for at in range(count)]
    config = EngineConfig(model=str(target), dtype="float32", threads=threads, kv_blocks=2048, max_num_seqs=64)
    with LLM(config) as llm:
        outputs = llm.generate(prompts, samplings)
    rows = [[*prompt, *output.token_ids] for prompt, output in zip(prompts, outputs, strict=True)]
    return torch.tensor(rows, dtype=torch.int64)


def measure(target: Path, draft: Path, method: str, dataset: Dataset, threads: int) -> dict[str, Any]:
    """Return what becomes of drafts, greedy, behind the beginnings of held-out modules, one after the other."""
    config = EngineConfig(
        model=str(target), dtype="float32", threads=threads, kv_blocks=256, speculative=method,
        speculative_model=str(draft), speculative_tokens=DRAFT_TOKENS,
    )  # fmt: skip
    long = [document for document in dataset.held_out_documents if len(document) >= PROMPT_TOKENS]
    prompts = [[dataset.tokenizer.bos_token_id, *map(int, tokens[: PROMPT_TOKENS - 1])] for tokens in long[:PROMPTS]]
    sampling = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    with LLM(config) as llm:
        count = sum(len(llm.generate([prompt], sampling)[0].token_ids) for prompt in prompts)
        speculator = llm.core.speculator
        assert speculator is not None
        drafted, accepted = speculator.stats.drafted, speculator.stats.accepted
    return {
        "prompts": len(prompts), "prompt_tokens": PROMPT_TOKENS, "new_tokens": NEW_TOKENS, "draft_tokens": DRAFT_TOKENS,
        "tokens_per_step": round(count / (count - accepted.total()), 3),
        "accepted_of_drafted": round(accepted.total() / drafted.total(), 4),
        "accepted_at_position": [round(accepted[i] / drafted[i], 4) for i in range(DRAFT_TOKENS) if drafted[i]],
    }  # fmt: skip
