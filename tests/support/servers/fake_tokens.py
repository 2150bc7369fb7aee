"""The tokens of a worker without a model.

They are a function of everything that decides a real engine's next token: prompt, output so far, and the seed of the
sequence. A router that continues a request with a token missing, repeated or out of place, or with another seed, gets
other tokens; :func:`expected_tokens` says which ones are right.
"""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from baton.hashing import as_token_array
from baton.seeds import sequence_seed

VOCAB_SIZE = 1000
EOS = 999


def next_token(prompt: Sequence[int], output: Sequence[int], seed: int) -> int:
    """Return the token that follows; never EOS."""
    data = as_token_array([len(prompt), *prompt, *output]).tobytes()
    return int(xxhash.xxh3_64_intdigest(data, seed=seed % 2**64) % (VOCAB_SIZE - 1))


def expected_tokens(prompt: Sequence[int], num_tokens: int, *, seed: int = 0, index: int = 0) -> list[int]:
    """Return what sequence ``index`` of an uninterrupted request generates."""
    output: list[int] = []
    for _ in range(num_tokens):
        output.append(next_token(prompt, output, sequence_seed(seed, index)))
    return output
