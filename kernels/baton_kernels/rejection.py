"""Rejection sampling of drafted tokens: which are kept, and what follows the last one kept, without loss.

A drafted token t is kept with probability min(1, p(t) / q(t)), where p is the target's distribution and q the one it
was drawn from; the first one that is not is replaced by a draw from max(0, p - q), rescaled. If all are kept, one more
is drawn from the target's next distribution. Then every token is distributed as if the target had drawn it.

Source: Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding" (2023, algorithm 1);
Chen et al., "Accelerating Large Language Model Decoding with Speculative Sampling" (2023).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from baton_kernels.random_numbers import Uint64s, exponentials, uniforms

ACCEPT = 1 << 33
"""Which of a position's random numbers decides whether its draft is kept."""
TOKENS = 1 << 32
"""Those from here on are the tokens', for draws."""


def rejection_sample(
    target: npt.NDArray[np.float32],
    draft: npt.NDArray[np.float32] | None,
    drafts: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int64],
    keys: Uint64s,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the tokens of each row, and how many of them are drafts.

    A greedy row has probability 1 at one token: its draft is kept while it is that one.

    Args:
        target: [B, K + 1, vocab], probabilities at each drafted position and the one behind; rows need not sum to 1,
            what is filtered out is 0.
        draft: [B, K, vocab], what drafts were drawn from, rows that sum to 1; ``None``: nothing was drawn (n-grams), as
            if each draft had probability 1.
        drafts: [B, K] token ids.
        counts: [B], drafts of each row, the first ones; at most K.
        keys: [B, K + 1], what each position's random numbers come from.

    Returns:
        Tokens [B, K + 1], of which the first ``accepted + 1`` are meant and the others -1; accepted [B].
    """
    rows, width, vocab = target.shape
    tokens = np.full((rows, width), -1, np.int64)
    accepted = np.zeros(rows, np.int64)
    going = np.arange(rows)
    for at in range(width):
        p = target[going, at].astype(np.float64)
        p /= p.sum(-1, keepdims=True)
        kept = np.zeros(len(going), np.bool_)
        some = np.flatnonzero(counts[going] > at)
        if len(some):
            drafted = drafts[going[some], at]
            likely = p[some, drafted]
            numbers = uniforms(keys[going[some], at], np.array([ACCEPT], np.uint64))[:, 0]
            q = np.ones(len(some)) if draft is None else draft[going[some], at, drafted].astype(np.float64)
            right = (numbers * q <= likely) & (likely > 0)
            kept[some] = right
            tokens[going[some[right]], at] = drafted[right]
            refused = some[~right]
            if draft is None:
                p[refused, drafted[~right]] = np.maximum(likely[~right] - 1.0, 0.0)
            else:
                p[refused] = np.maximum(p[refused] - draft[going[refused], at].astype(np.float64), 0.0)
        last = going[~kept]
        times = exponentials(keys[last, at], np.arange(vocab, dtype=np.uint64) + np.uint64(TOKENS))
        tokens[last, at] = np.divide(times, p[~kept], out=np.full(times.shape, np.inf), where=p[~kept] > 0).argmin(-1)
        going = going[kept]
        accepted[going] += 1
    return tokens, accepted
