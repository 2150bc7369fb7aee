"""Rejection sampling of drafted tokens: which are accepted, and the token that follows them, without loss.

A drafted token t is accepted with probability min(1, p(t) / q(t)), where p is the target's distribution and q the one
it was drawn from; the first rejected one is replaced by a draw from max(0, p - q), rescaled. If all are accepted, one
more is drawn from the target's next distribution. Then every token is distributed as if the target had drawn it.

Source: Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding" (2023, algorithm 1);
Chen et al., "Accelerating Large Language Model Decoding with Speculative Sampling" (2023).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from baton_kernels.random_numbers import Uint64s, exponentials, uniforms

ACCEPT = 1 << 33
"""Index of the random number of a position that decides whether its draft is accepted."""
TOKENS = 1 << 32
"""Index of the first of the tokens' random numbers, for draws."""


def rejection_sample(
    target: npt.NDArray[np.float32],
    draft: npt.NDArray[np.float32] | None,
    drafts: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int64],
    keys: Uint64s,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the tokens of each row, and how many of them are drafts.

    A greedy row has probability 1 at one token: its draft is accepted if it is that token.

    Args:
        target: Probabilities at each drafted position and the one behind, [B, K + 1, vocab]; rows need not sum to 1,
            filtered tokens have 0.
        draft: Distributions that drafts were drawn from, [B, K, vocab], rows that sum to 1; ``None``: drafts were not
            drawn (n-grams), each counts as having probability 1.
        drafts: Token ids [B, K].
        counts: Number of drafts of each row, which are its first ones, at most K, [B].
        keys: Keys of each position's random numbers, [B, K + 1].

    Returns:
        Tokens [B, K + 1], the first ``accepted + 1`` of each row and then -1; accepted [B].
    """
    rows, width, vocab = target.shape
    tokens = np.full((rows, width), -1, np.int64)
    accepted = np.zeros(rows, np.int64)
    active = np.arange(rows)
    for at in range(width):
        p = target[active, at].astype(np.float64)
        p /= p.sum(-1, keepdims=True)
        is_accepted = np.zeros(len(active), np.bool_)
        some = np.flatnonzero(counts[active] > at)
        if len(some):
            drafted = drafts[active[some], at]
            likely = p[some, drafted]
            numbers = uniforms(keys[active[some], at], np.array([ACCEPT], np.uint64))[:, 0]
            q = np.ones(len(some)) if draft is None else draft[active[some], at, drafted].astype(np.float64)
            right = (numbers * q <= likely) & (likely > 0)
            is_accepted[some] = right
            tokens[active[some[right]], at] = drafted[right]
            rejected = some[~right]
            if draft is None:
                p[rejected, drafted[~right]] = np.maximum(likely[~right] - 1.0, 0.0)
            else:
                p[rejected] = np.maximum(p[rejected] - draft[active[rejected], at].astype(np.float64), 0.0)
        last = active[~is_accepted]
        times = exponentials(keys[last, at], np.arange(vocab, dtype=np.uint64) + np.uint64(TOKENS))
        weights = p[~is_accepted]
        arrivals = np.divide(times, weights, out=np.full(times.shape, np.inf), where=weights > 0)
        tokens[last, at] = arrivals.argmin(-1)
        active = active[is_accepted]
        accepted[active] += 1
    return tokens, accepted
