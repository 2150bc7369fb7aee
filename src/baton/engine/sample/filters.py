"""Temperature, top-k, top-p and min-p: which tokens may be drawn, and with what probability.

Tokens equal to the last one kept are kept too. This is the definition, in plain torch, with sorts over whole rows. On a
CPU an operator does the same: there, sorting a vocabulary for each row would cost more than a small model's whole step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from baton.types import SamplingParams

LEAST_TEMPERATURE = 1e-30
"""Below it a row's greatest logit wins as it does here."""


def filtered_probs(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Return probabilities; what is filtered out is 0, the rest is not rescaled.

    Args:
        logits: float32 [R, vocab], not changed.
        params: R parameters with temperatures above 0.
    """
    if any(p.temperature != 1.0 for p in params):
        # From the maximum down: a temperature next to 0 gives 0 and -inf, not inf.
        temperature = [max(p.temperature, LEAST_TEMPERATURE) for p in params]
        scale = torch.tensor(temperature, dtype=torch.float32, device=logits.device)[:, None]
        logits = (logits - logits.amax(dim=-1, keepdim=True)).div_(scale)
    if all(p.top_k <= 0 and p.top_p >= 1.0 and p.min_p <= 0.0 for p in params):
        return torch.softmax(logits, dim=-1)
    return filter_batch(logits, params)


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
