"""Acceptance by rejection sampling: tokens are distributed as the model says, but are not those without drafts.

A sequence that draws keeps more of what a draft model drew than acceptance by equality does, and gives up the promise
that its tokens do not depend on who drafts. What was not drawn from a known distribution (look-ups; drafts of which a
grammar took only what it allows) is kept with the probability that the model gives it, without loss too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from baton.engine.sampler import filtered_probs
from baton.engine.sampler_row import SamplerRow
from baton_kernels.random_numbers import Uint64s, draw_keys, mix
from baton_kernels.rejection import rejection_sample

Probabilities = torch.Tensor | npt.NDArray[np.float32]
"""On the device that computes them, or from elsewhere."""
_OWN_NUMBERS = np.uint64(0x5851F42D4C957F2D)
"""Draws of drafts take a position's own random numbers: what decides on them must be independent of those."""
_Decide = Callable[
    [torch.Tensor, torch.Tensor | None, npt.NDArray[np.int64], Uint64s], tuple[torch.Tensor, torch.Tensor]
]
"""Takes what is drawn from and what drafts were drawn from, drafts [B, K], keys; see :func:`rejection_sample`."""


@dataclass(frozen=True, slots=True)
class DrawnDraft:
    """A draft of a sequence that draws.

    Attributes:
        logits: [n + 1, vocab], behind the token before the draft and behind each of its tokens; edited and masked.
        rows: Parallel to ``logits``; none is greedy.
        draft: n tokens.
        drawn_from: [n or more, vocab], distributions that the tokens were drawn from, rows that sum to 1; ``None``: not
            drawn.
    """

    logits: torch.Tensor
    rows: SequenceOf[SamplerRow]
    draft: SequenceOf[int]
    drawn_from: Probabilities | None


def keep_or_replace(drafts: SequenceOf[DrawnDraft], *, on_gpu: bool = False) -> list[list[int]]:
    """Return, per draft, the accepted tokens and the one that follows them.

    Args:
        drafts: Drafts of different sequences.
        on_gpu: Whether the operator of a GPU decides, wherever the logits are.
    """
    alike: dict[tuple[int, bool], list[int]] = {}
    for i, each in enumerate(drafts):
        alike.setdefault((len(each.draft), each.drawn_from is not None), []).append(i)
    decided = []
    for members in alike.values():
        chosen = [drafts[i] for i in members]
        device = chosen[0].logits.device
        decide = _gpu_operator(device) if on_gpu or device.type != "cpu" else _definition
        decided.append((members, *_decide(chosen, decide)))
    token_ids: list[list[int]] = [[] for _ in drafts]
    for members, tokens, accepted in decided:  # the device has all of them to do before one is waited for
        for i, own, count in zip(members, tokens.tolist(), accepted.tolist(), strict=True):
            token_ids[i] = own[: count + 1]
    return token_ids


def _decide(drafts: list[DrawnDraft], decide: _Decide) -> tuple[torch.Tensor, torch.Tensor]:
    """Decide on drafts of n tokens each, all drawn or none: tokens [B, n + 1] and how many are kept [B]."""
    rows = [row for each in drafts for row in each.rows]
    logits = torch.cat([each.logits for each in drafts]).float()
    length = len(drafts[0].draft)
    vocab = logits.shape[-1]
    target = filtered_probs(logits, [row.params for row in rows]).view(len(drafts), length + 1, vocab)
    sources = [each.drawn_from[:length] for each in drafts if each.drawn_from is not None]
    drawn = [torch.as_tensor(each, dtype=torch.float32, device=target.device) for each in sources]
    seeds, positions = (np.array(each, np.uint64) for each in zip(*((r.seed, r.position) for r in rows), strict=True))
    keys = mix(draw_keys(seeds, positions) ^ _OWN_NUMBERS).reshape(len(drafts), length + 1)
    tokens = np.array([list(each.draft) for each in drafts], np.int64).reshape(len(drafts), length)
    return decide(target, torch.stack(drawn) if drawn else None, tokens, keys)


def _definition(
    target: torch.Tensor, drawn: torch.Tensor | None, tokens: npt.NDArray[np.int64], keys: Uint64s
) -> tuple[torch.Tensor, torch.Tensor]:
    counts = np.full(len(tokens), tokens.shape[1])
    decided = rejection_sample(target.numpy(), None if drawn is None else drawn.numpy(), tokens, counts, keys)
    return torch.from_numpy(decided[0]), torch.from_numpy(decided[1])


@functools.cache
def _gpu_operator(device: torch.device) -> _Decide:
    from baton_kernels.gpu.rejection import TritonRejectionSampler

    operator = TritonRejectionSampler(device)

    def decide(
        target: torch.Tensor, drawn: torch.Tensor | None, tokens: npt.NDArray[np.int64], keys: Uint64s
    ) -> tuple[torch.Tensor, torch.Tensor]:
        counts = torch.full((len(tokens),), tokens.shape[1], dtype=torch.int64, device=device)
        return operator(target.contiguous(), drawn, torch.from_numpy(tokens).to(device), counts, keys)

    return decide


def probabilities(logits: torch.Tensor, row: SamplerRow) -> torch.Tensor:
    """Return what a row draws from, float32 [vocab] with sum 1; ``logits``: [vocab], edited and masked."""
    probs = filtered_probs(logits.float()[None], [row.params])[0]
    return probs / probs.sum()
