"""Acceptance by rejection sampling: tokens are distributed as the model says, but are not those without drafts.

A sequence that draws keeps more of what a draft model drew than acceptance by equality does, and gives up the promise
that its tokens do not depend on who drafts. What was not drawn from a known distribution (look-ups; drafts of which a
grammar took only what it allows) is kept with the probability that the model gives it, without loss too.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np
import numpy.typing as npt
import torch

from baton.engine.sample.filters import filtered_probs
from baton.engine.sample.sampler import SamplerRow, draw_keys
from baton_kernels.random_numbers import mix
from baton_kernels.rejection import rejection_sample

Probabilities = npt.NDArray[np.float32]
_OWN_NUMBERS = np.uint64(0x5851F42D4C957F2D)
"""Draws of drafts take a position's own random numbers: what decides on them must be independent of those."""


def keep_or_replace(
    logits: torch.Tensor, rows: SequenceOf[SamplerRow], draft: SequenceOf[int], drawn_from: Probabilities | None
) -> list[int]:
    """Return the draft tokens that are kept, and the one that follows them.

    Args:
        logits: [n + 1, vocab], behind the token before the draft and behind each of its tokens; edited and masked.
        rows: Parallel to ``logits``; they draw, and are not greedy.
        draft: n tokens.
        drawn_from: [n, vocab], what they were drawn from, rows that sum to 1; ``None``: they were not drawn.
    """
    target = filtered_probs(logits.float(), [row.params for row in rows]).cpu().numpy()
    seeds, positions = (np.array(each, np.uint64) for each in zip(*((r.seed, r.position) for r in rows), strict=True))
    keys = mix(draw_keys(seeds, positions) ^ _OWN_NUMBERS)
    tokens, accepted = rejection_sample(
        target[None],
        None if drawn_from is None else drawn_from[None, : len(draft)],
        np.array([draft], np.int64).reshape(1, -1),
        np.array([len(draft)]),
        keys[None],
    )
    found: list[int] = tokens[0, : accepted[0] + 1].tolist()
    return found


def probabilities(logits: torch.Tensor, row: SamplerRow) -> Probabilities:
    """Return what a row draws from, float32 [vocab] with sum 1; ``logits``: [vocab], edited and masked."""
    found = filtered_probs(logits.float()[None], [row.params])[0]
    probs: Probabilities = (found / found.sum()).cpu().numpy()
    return probs
