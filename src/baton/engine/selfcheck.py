"""Compares a runner with the model's own attention at load: a model that would be served wrongly is refused.

Some architectures take another attention function and still compute something else (ALiBi added elsewhere, state
kept between calls, positions counted by the model itself). Two short sequences, computed in two steps each over a
paged pool, must give the logits of transformers' own eager attention.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from baton.engine.batch import ForwardBatch
from baton.engine.loader import LoadedModel, quiet_transformers
from baton.errors import ConfigError

LENGTHS = (37, 9)
SPLITS = (21, 8)
TOLERANCE = {"float32": 1e-3, "float16": 5e-2, "bfloat16": 2e-1}
"""Largest median over tokens of |difference| / |logits|; a wrong attention gives about 1."""


def check_tokens(vocab_size: int) -> list[np.ndarray]:
    """Return the token ids of the check's sequences."""
    generator = np.random.default_rng(0)
    return [generator.integers(0, vocab_size, length) for length in LENGTHS]


def check_batches(block_size: int, vocab_size: int) -> tuple[list[ForwardBatch], int]:
    """Return the check's two steps (prompt chunks, then a chunk beside a decode) and the blocks they need."""
    tokens = check_tokens(vocab_size)
    widths = [-(-length // block_size) for length in LENGTHS]
    tables = np.zeros((len(LENGTHS), max(widths)), dtype=np.int32)
    blocks = list(range(sum(widths)))[::-1]
    for row, width in enumerate(widths):
        tables[row, :width] = [blocks.pop() for _ in range(width)][::-1]
    steps = []
    for begins, ends in (((0, 0), SPLITS), (SPLITS, LENGTHS)):
        counts = np.subtract(ends, begins)
        total = int(counts.sum())
        steps.append(
            ForwardBatch(
                token_ids=np.concatenate([t[a:b] for t, a, b in zip(tokens, begins, ends, strict=True)]),
                positions=np.concatenate([np.arange(a, b) for a, b in zip(begins, ends, strict=True)]),
                query_starts=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
                context_lens=np.array(ends, dtype=np.int32),
                block_tables=tables,
                logit_rows=np.arange(total),
            )
        )
    return steps, sum(widths)


def eager_logits(model: LoadedModel) -> list[torch.Tensor]:
    """Return the logits [length, vocab] of the check's sequences by the model's own attention."""
    found = []
    for tokens in check_tokens(model.text_config.vocab_size):
        with quiet_transformers(), torch.inference_mode():
            ids = torch.from_numpy(tokens)[None].to(model.device)
            found.append(model.module(input_ids=ids, use_cache=False).logits[0].float().cpu())
    return found


def compare(
    model: LoadedModel, expected: list[torch.Tensor], forward: Callable[[ForwardBatch], torch.Tensor], block_size: int
) -> None:
    """Run the check's steps and compare their logits with the expected ones.

    Raises:
        ConfigError: They differ.
    """
    steps, _ = check_batches(block_size, model.text_config.vocab_size)
    parts: list[list[torch.Tensor]] = [[] for _ in LENGTHS]
    for step in steps:
        logits = forward(step).float().cpu()
        for row in range(len(LENGTHS)):
            parts[row].append(logits[step.query_starts[row] : step.query_starts[row + 1]])
    got, want = torch.cat([torch.cat(rows) for rows in parts]), torch.cat(expected)
    error = (got - want).norm(dim=-1) / want.norm(dim=-1).clamp_min(1e-6)
    median = float(error.nan_to_num(float("inf")).median())
    if not median < TOLERANCE[model.dtype]:
        raise ConfigError(
            f"{model.architecture} cannot be served: over a paged KV cache its logits differ from its own "
            f"(relative error {median:.2g})",
            field="model",
        )
