"""Logits of an engine's executor, and of transformers' model of a plain checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from baton.config import EngineConfig
from baton.engine.build import make_arena
from baton.engine.executor.base import load_executor
from baton.engine.models.loader import quiet_transformers
from baton.engine.runner.input_batch import ForwardBatch


def engine_logits(config: EngineConfig, tokens: list[int]) -> tuple[torch.Tensor, str]:
    """Return an engine's logits [tokens, vocab] of one prompt in two chunks, and how it runs the model."""
    executor = load_executor(config)
    try:
        shards = make_arena(config, executor)
        try:
            middle = len(tokens) // 2
            parts = [_run(executor, tokens[:middle], 0), _run(executor, tokens[middle:], middle)]
            return torch.cat(parts), executor.description
        finally:
            shards.close()
    finally:
        executor.close()


def _run(executor: Any, tokens: list[int], done: int) -> torch.Tensor:
    blocks = -(-(done + len(tokens)) // executor.layout.block_size)
    batch = ForwardBatch(
        token_ids=np.array(tokens, dtype=np.int64),
        positions=np.arange(done, done + len(tokens)),
        query_starts=np.array([0, len(tokens)], dtype=np.int32),
        context_lens=np.array([done + len(tokens)], dtype=np.int32),
        block_tables=np.arange(1, blocks + 1, dtype=np.int32)[None],
        logit_rows=np.arange(len(tokens), dtype=np.int64),
    )
    return cast(torch.Tensor, executor.forward(batch).logits.float().clone())


def plain_logits(
    folder: Path,
    tokens: list[int],
    round_inputs: Callable[[torch.Tensor], torch.Tensor] | None = None,
    modules: frozenset[str] = frozenset(),
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return transformers' logits [tokens, vocab] of a plain checkpoint, inputs of some linear layers rounded."""
    with quiet_transformers(), torch.inference_mode():
        model: Any = cast(Any, AutoModelForCausalLM).from_pretrained(folder, dtype=dtype, attn_implementation="eager")

        def hook(_: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            assert round_inputs is not None
            return (round_inputs(args[0]), *args[1:])

        if round_inputs is not None:
            for name in modules:
                model.get_submodule(name).register_forward_pre_hook(hook)
        return cast(torch.Tensor, model(torch.tensor([tokens])).logits[0].float())
