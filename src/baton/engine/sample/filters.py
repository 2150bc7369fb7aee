"""Temperature, top-k, top-p and min-p: which tokens may be drawn, and with what probability.

Tokens equal to the last one kept are kept too. On a CPU, sorting the vocabulary for every row would cost more than a
small model's whole step, so each row's threshold is found among few candidates, exactly:

* top-k: of the maxima of V/128 chunks, the k-th greatest is a lower bound of the k-th greatest logit;
* top-p: tokens below (1 - p) / V have less than 1 - p together, so none of them is needed to reach p.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from baton.types import SamplingParams

CHUNK = 128
_LEAST_TEMPERATURE = 1e-30
Row = npt.NDArray[np.float32]


def filtered_probs(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Return probabilities; what is filtered out is 0, the rest is not rescaled.

    Args:
        logits: float32 [R, vocab], not changed.
        params: R parameters with temperatures above 0.
    """
    if any(p.temperature != 1.0 for p in params):
        # From the maximum down: a temperature next to 0 gives 0 and -inf, not inf.
        temperature = [max(p.temperature, _LEAST_TEMPERATURE) for p in params]
        scale = torch.tensor(temperature, dtype=torch.float32, device=logits.device)[:, None]
        logits = (logits - logits.amax(dim=-1, keepdim=True)).div_(scale)
    if all(p.top_k <= 0 and p.top_p >= 1.0 and p.min_p <= 0.0 for p in params):
        return torch.softmax(logits, dim=-1)
    return _by_row(logits, params) if logits.device.type == "cpu" else filter_batch(logits, params)


# Row by row, on a CPU


def _by_row(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    vocab = logits.shape[-1]
    if any(0 < p.top_k < vocab for p in params):
        logits = logits.clone()
        for row, p in zip(logits.numpy(), params, strict=True):
            if 0 < p.top_k < vocab:
                row[row < kth_greatest(row, p.top_k)] = -np.inf
    probs = torch.softmax(logits, dim=-1)
    for row, p in zip(probs.numpy(), params, strict=True):
        if p.top_p < 1.0:
            row[row < nucleus_threshold(row, p.top_p)] = 0.0
        if p.min_p > 0.0:
            row[row < row.max() * np.float32(p.min_p)] = 0.0
    return probs


def kth_greatest(row: Row, k: int) -> np.float32:
    """Return the k-th greatest value of a row, k from 1 to its length."""
    chunks = len(row) // CHUNK
    candidates = row
    if k <= chunks:
        maxima = row[: chunks * CHUNK].reshape(chunks, CHUNK).max(axis=1)
        candidates = row[row >= np.partition(maxima, chunks - k)[chunks - k]]
    value: np.float32 = np.partition(candidates, len(candidates) - k)[len(candidates) - k]
    return value


def nucleus_threshold(probs: Row, top_p: float) -> np.float32:
    """Return the least probability among the fewest greatest ones whose sum reaches ``top_p``."""
    # Half the bound: the probabilities' sum is 1 but for rounding.
    candidates = probs[probs >= 0.5 * (1.0 - top_p) / len(probs)]
    candidates.sort()
    descending = candidates[::-1]
    before = np.cumsum(descending, dtype=np.float64) - descending
    kept = max(1, int(np.searchsorted(before, top_p, side="left")))
    value: np.float32 = descending[kept - 1]
    return value


# All rows at once, on other devices


def filter_batch(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Filter scaled logits [R, vocab] and return probabilities, with sorts over whole rows."""
    device, vocab = logits.device, logits.shape[-1]
    top_k = [p.top_k if 0 < p.top_k < vocab else vocab for p in params]
    rows = [i for i, k in enumerate(top_k) if k < vocab]
    if rows:
        values = torch.topk(logits[rows], max(top_k[i] for i in rows), dim=-1).values
        last = torch.tensor([top_k[i] - 1 for i in rows], device=device)[:, None]
        logits = logits.clone()
        logits[rows] = logits[rows].masked_fill(logits[rows] < values.gather(1, last), float("-inf"))
    probs = torch.softmax(logits, dim=-1)
    rows = [i for i, p in enumerate(params) if p.top_p < 1.0]
    if rows:
        limits = torch.tensor([params[i].top_p for i in rows], dtype=torch.float64, device=device)[:, None]
        descending = torch.sort(probs[rows], dim=-1, descending=True).values
        before = descending.double().cumsum(dim=-1) - descending
        kept = (before < limits).sum(dim=-1, keepdim=True).clamp_(min=1)
        probs[rows] = probs[rows].masked_fill(probs[rows] < descending.gather(1, kept - 1), 0.0)
    if any(p.min_p > 0.0 for p in params):
        min_p = torch.tensor([p.min_p for p in params], dtype=torch.float32, device=device)
        probs.masked_fill_(probs < probs.amax(dim=-1, keepdim=True) * min_p[:, None], 0.0)
    return probs
