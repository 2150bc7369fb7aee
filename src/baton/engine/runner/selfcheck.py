"""Compares an execution path of a model with the model's own attention, at load.

Some architectures take another attention function and still compute something else (ALiBi added elsewhere, state
kept between calls, positions counted by the model itself): they are refused. The fast path is used only if it is as
close as transformers' own modules are. Two short sequences are computed in two steps each over a paged pool.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from baton.engine.models.loader import LoadedModel, quiet_transformers
from baton.engine.runner.input_batch import ForwardBatch, ForwardOutput

LENGTHS = (37, 9)
SPLITS = (21, 8)
TOLERANCE = {"float32": 1e-3, "float16": 5e-2, "bfloat16": 2e-1}
"""Largest median over tokens of |difference| / |logits|; a wrong attention gives about 1."""
SLACK = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}
"""How much more than twice the generic path's error the fast path may have."""


class SelfCheck:
    """The check of one model; its own attention is run when this is made."""

    def __init__(self, model: LoadedModel, block_size: int) -> None:
        vocab_size = int(model.text_config.vocab_size)
        self.dtype = model.dtype
        self.tokens = _check_tokens(vocab_size)
        self.steps, self.num_blocks = _check_batches(self.tokens, block_size)
        self._expected = torch.cat([_eager_logits(model, tokens) for tokens in self.tokens])

    def error(self, forward: Callable[[ForwardBatch], ForwardOutput]) -> float:
        """Run the steps and return the median over tokens of |difference| / |logits|; infinite if there are NaNs."""
        parts: list[list[torch.Tensor]] = [[] for _ in LENGTHS]
        for step in self.steps:
            logits = forward(step).logits.float().cpu()
            for row in range(len(LENGTHS)):
                parts[row].append(logits[step.query_starts[row] : step.query_starts[row + 1]])
        got = torch.cat([torch.cat(rows) for rows in parts])
        error = (got - self._expected).norm(dim=-1) / self._expected.norm(dim=-1).clamp_min(1e-6)
        return float(error.nan_to_num(float("inf")).median())


def _check_tokens(vocab_size: int) -> list[npt.NDArray[np.int64]]:
    generator = np.random.default_rng(0)
    return [generator.integers(0, vocab_size, length) for length in LENGTHS]


def _check_batches(tokens: list[npt.NDArray[np.int64]], block_size: int) -> tuple[list[ForwardBatch], int]:
    """Return two steps (prompt chunks, then a chunk beside a decode) and the number of blocks they need."""
    widths = [-(-length // block_size) for length in LENGTHS]
    tables = np.zeros((len(LENGTHS), max(widths)), dtype=np.int32)
    blocks = iter(reversed(range(sum(widths))))
    for row, width in enumerate(widths):
        tables[row, :width] = [next(blocks) for _ in range(width)]
    steps = []
    for begins, ends in (((0, 0), SPLITS), (SPLITS, LENGTHS)):
        counts = np.subtract(ends, begins)
        steps.append(
            ForwardBatch(
                token_ids=np.concatenate([t[a:b] for t, a, b in zip(tokens, begins, ends, strict=True)]),
                positions=np.concatenate([np.arange(a, b) for a, b in zip(begins, ends, strict=True)]),
                query_starts=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
                context_lens=np.array(ends, dtype=np.int32),
                block_tables=tables,
                logit_rows=np.arange(int(counts.sum())),
            )
        )
    return steps, sum(widths)


def _eager_logits(model: LoadedModel, tokens: npt.NDArray[np.int64]) -> torch.Tensor:
    """Return the logits [length, vocab] of a sequence by the model's own attention."""
    with quiet_transformers(), torch.inference_mode():
        ids = torch.from_numpy(tokens)[None].to(model.device)
        logits: torch.Tensor = model.module(input_ids=ids, use_cache=False).logits[0]
    return logits.float().cpu()
