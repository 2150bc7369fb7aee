"""Sampling that is queued on a device, behind the forward pass: the host reads the tokens when it wants them.

What it reads then is on its way since it was queued, so that work that was queued later is not waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from baton.engine.sample.native import ChooseOnDevice
from baton.engine.sample.row import SamplerRow
from baton.engine.sample.sampler import (
    SamplerOutput,
    edit_logits,
    join_figures,
    logprob_figures,
    row_draws,
)
from baton.types import TokenLogprob
from baton_kernels.token_mask import mask_tokens


class HostLink(Protocol):
    """Takes numbers to a device and back, without that the host waits."""

    def upload(self, *arrays: npt.NDArray[Any]) -> list[torch.Tensor]:
        """Return arrays as tensors on the device; they may be changed at once."""

    def download(self, *tensors: torch.Tensor) -> Callable[[], list[npt.NDArray[Any]]]:
        """Queue copies to the host; returns what waits for them."""


@dataclass(frozen=True, slots=True)
class QueuedSample:
    """One token per row, chosen as soon as the device gets there.

    Attributes:
        token_ids: int64 [R], where the logits are; of bad rows any number.
        read: Waits for the tokens.
    """

    token_ids: torch.Tensor
    read: Callable[[], SamplerOutput]


@torch.inference_mode()
def queue_sample(
    logits: torch.Tensor, rows: Sequence[SamplerRow], operator: ChooseOnDevice, link: HostLink
) -> QueuedSample:
    """Have one token per row chosen, as :func:`~baton.engine.sample.sampler.sample` does.

    Args:
        logits: [R, vocab] in any float dtype; may be changed. Not needed any more by what is queued later.
        rows: R rows.
        operator: Of the device.
        link: To it.
    """
    logits, draws = edit_logits(logits.detach(), rows, link.upload), row_draws(rows)
    filters = [row.filter for row in rows]
    masks = [None if row.unfiltered else row.mask for row in rows]
    tokens = operator(logits, filters, draws.keys(), masks, upload=link.upload)
    again = [i for i, row in enumerate(rows) if row.mask is not None and row.unfiltered]
    shown = [i for i, row in enumerate(rows) if row.mask is not None and row.params.logprobs is not None]
    if forbidden := sorted({*again, *shown}):
        mask_tokens(logits, forbidden, [mask for i in forbidden if (mask := rows[i].mask) is not None], link.upload)
    if again:
        (at,) = link.upload(np.array(again, np.int64))
        masked, first = logits[at], tokens[at]
        keys = draws.keys(again, [True] * len(again))
        second = operator(masked, [filters[i] for i in again], keys, upload=link.upload)
        allowed = masked.gather(1, first.clamp(min=0)[:, None])[:, 0] > float("-inf")
        tokens[at] = torch.where((first >= 0) & allowed, first, second)
    scored = [(i, count) for i, row in enumerate(rows) if (count := row.params.logprobs) is not None]
    index, num_top = [i for i, _ in scored], [count for _, count in scored]
    figures: tuple[torch.Tensor, ...] = ()
    if scored:
        chosen = tokens.clamp(min=0)
        if len(index) < len(rows):
            (at,) = link.upload(np.array(index, np.int64))
            logits, chosen = logits[at], chosen[at]
        figures = logprob_figures(logits, chosen, max(num_top))
    read = link.download(tokens, *figures)

    def finish() -> SamplerOutput:
        found, *parts = read()
        bad = tuple(np.flatnonzero(found < 0).tolist())
        token_ids: list[int] = found.tolist()
        if not scored:
            return SamplerOutput(token_ids, None, bad)
        logprobs: list[TokenLogprob | None] = [None] * len(rows)
        for i, one in zip(index, join_figures([token_ids[i] for i in index], num_top, *parts), strict=True):
            logprobs[i] = None if i in bad else one
        return SamplerOutput(token_ids, logprobs, bad)

    return QueuedSample(tokens, finish)
