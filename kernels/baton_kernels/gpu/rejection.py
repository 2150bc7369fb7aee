"""Rejection sampling of drafted tokens by Triton; definition in ``baton_kernels.rejection``."""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from baton_kernels.gpu.sampling import RandomConstants, exponential, uniform
from baton_kernels.random_numbers import Uint64s
from baton_kernels.rejection import ACCEPT, TOKENS

TILE = 4096


@triton.jit
def _total(p, vocab, TILE: tl.constexpr):
    """Sum a row in float64."""
    total = tl.zeros([], tl.float64)
    for at in range(0, vocab, TILE):
        i = at + tl.arange(0, TILE)
        total += tl.sum(tl.load(p + i, mask=i < vocab, other=0.0).to(tl.float64), axis=0)
    return total


@triton.jit(do_not_specialize=["width"])
def _rejection_kernel(
    target, draft, drafts, counts, keys, constants, tokens, accepted, vocab, width,
    accept_number, first_token_number, DRAWN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid: (rows,). ``DRAWN``: drafts were drawn from ``draft``, else each had probability 1."""
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(counts + row)
    kept, going = 0, 1
    while going > 0:
        p = target + (row * width + kept) * vocab
        q = draft + (row * (width - 1) + kept) * vocab
        key = tl.load(keys + row * width + kept)
        total = _total(p, vocab, TILE)
        token = tl.load(drafts + row * (width - 1) + kept, mask=kept < count, other=-1)
        likely = tl.load(p + token, mask=kept < count, other=0.0).to(tl.float64) / total
        drawn = tl.full([], 1.0, tl.float64)
        if DRAWN:
            drawn = tl.load(q + token, mask=kept < count, other=1.0).to(tl.float64)
        keep = (kept < count) & (likely > 0.0) & (uniform(key, accept_number, constants) * drawn <= likely)
        if keep:
            tl.store(tokens + row * width + kept, token)
            kept += 1
        else:
            soonest, winner = tl.full([], float("inf"), tl.float64), 0
            for at in range(0, vocab, TILE):
                i = at + tl.arange(0, TILE)
                w = tl.load(p + i, mask=i < vocab, other=0.0).to(tl.float64) / total
                if kept < count:
                    if DRAWN:
                        w -= tl.load(q + i, mask=i < vocab, other=0.0).to(tl.float64)
                    else:
                        w = tl.where(i == token, w - 1.0, w)
                time = exponential(key, i.to(tl.int64) + first_token_number, constants)
                arrival = tl.where(w > 0.0, time / tl.where(w > 0.0, w, 1.0), float("inf"))
                first = tl.min(arrival, axis=0)
                if first < soonest:
                    soonest = first
                    winner = at + tl.argmin(arrival, axis=0)
            tl.store(tokens + row * width + kept, winner)
            going = 0
    tl.store(accepted + row, kept)


class TritonRejectionSampler:
    """Rejection sampling on a GPU; probabilities and tokens stay on the device.

    Args:
        device: Device of the probabilities.
    """

    def __init__(self, device: torch.device) -> None:
        self._constants = RandomConstants(device)

    def __call__(
        self,
        target: torch.Tensor,
        draft: torch.Tensor | None,
        drafts: torch.Tensor,
        counts: torch.Tensor,
        keys: Uint64s,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :func:`baton_kernels.rejection.rejection_sample`; all arguments except the keys are on the device.

        Args:
            target: Target probabilities, float32, contiguous [B, K + 1, vocab].
            draft: Draft probabilities, float32, contiguous [B, K, vocab], or ``None``.
            drafts: Drafted tokens, int64, contiguous [B, K].
            counts: Number of drafts of each row, int64 [B].
            keys: Keys of each position's random numbers, uint64 [B, K + 1], on the host.

        Returns:
            Tokens int64 [B, K + 1], -1 behind the first ``accepted + 1`` of each row; accepted int64 [B].
        """
        rows, width, vocab = target.shape
        tokens = torch.full((rows, width), -1, dtype=torch.int64, device=target.device)
        accepted = torch.zeros(rows, dtype=torch.int64, device=target.device)
        on_device = self._constants.upload(np.ascontiguousarray(keys))
        _rejection_kernel[rows,](
            *(target, target if draft is None else draft, drafts, counts, on_device, self._constants.tensor),
            *(tokens, accepted, vocab, width, ACCEPT, TOKENS),
            DRAWN=draft is not None,
            TILE=TILE,
        )
        return tokens, accepted
