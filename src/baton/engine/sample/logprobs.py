"""Log probabilities as clients want them: of the chosen token, its rank, and the most probable ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from baton.types import TokenLogprob

_ROWS_AT_ONCE = 256
"""Rows of one pass: bounds the float32 copy that a long prompt chunk would need."""


def token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprob]:
    """Return the log probability (natural log), rank (1: most probable) and alternatives of one token per row.

    Args:
        logits: [R, vocab], any float dtype; computed in float32.
        token_ids: R tokens.
        num_top: R numbers of alternatives, each at most ``MAX_LOGPROBS``.
    """
    found: list[TokenLogprob] = []
    for at in range(0, len(token_ids), _ROWS_AT_ONCE):
        end = at + _ROWS_AT_ONCE
        found += _some(logits[at:end], token_ids[at:end], num_top[at:end])
    return found


def _some(logits: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprob]:
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    chosen = logprobs.gather(1, torch.tensor(token_ids, dtype=torch.int64, device=logits.device)[:, None])
    ranks = (logprobs > chosen).sum(dim=-1) + 1
    most = min(max(num_top), logprobs.shape[-1])
    top = torch.topk(logprobs, most, dim=-1)
    top_ids, top_values = top.indices.tolist(), top.values.tolist()
    return [
        TokenLogprob(token, value, rank, tuple(zip(ids[:count], values[:count], strict=True)))
        for token, value, rank, ids, values, count in zip(
            token_ids, chosen[:, 0].tolist(), ranks.tolist(), top_ids, top_values, num_top, strict=True
        )
    ]
