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
    for row in range(rows):
        for at in range(int(counts[row]) + 1):
            p, key = target[row, at].astype(np.float64), keys[row, at : at + 1]
            p /= p.sum()
            if at < counts[row]:
                token = int(drafts[row, at])
                q = np.eye(1, vocab, token)[0] if draft is None else draft[row, at].astype(np.float64)
                if uniforms(key, np.array([ACCEPT], np.uint64))[0, 0] * q[token] <= p[token] and p[token] > 0:
                    tokens[row, at] = token
                    accepted[row] += 1
                    continue
                p = np.maximum(p - q, 0.0)
            times = exponentials(key, np.arange(vocab, dtype=np.uint64) + np.uint64(TOKENS))[0]
            tokens[row, at] = int(np.divide(times, p, out=np.full(vocab, np.inf), where=p > 0).argmin())
            break
    return tokens, accepted
