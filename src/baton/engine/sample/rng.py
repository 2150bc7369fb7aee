"""Drawing tokens by random numbers without state: an output position's uniform depends on seed and position alone.

So a sequence that is preempted, handed over or moved to another instance goes on with the numbers it would have had,
and nothing but the seed has to travel. The function is SplitMix64: the ``position``-th output of the generator seeded
with ``seed`` is ``mix(seed + (position + 1) * 0x9E3779B97F4A7C15)``, of which the upper 40 bits are used. 40 bits,
because ``u * total`` then rounds to something below ``total`` in float64 whatever the total.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import xxhash

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)
_BITS = 40
_CHUNK = 128


def _mix(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's finalizer; wraps modulo 2^64."""
    state = (state ^ (state >> np.uint64(30))) * _MIX1
    state = (state ^ (state >> np.uint64(27))) * _MIX2
    return state ^ (state >> np.uint64(31))


def uniforms(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Return numbers in [0, 1), one per (seed, output position).

    Args:
        seeds: uint64 [R].
        positions: uint64 [R], output tokens before the one to be sampled, resumed ones included.
    """
    bits = _mix(seeds + (positions + np.uint64(1)) * _GOLDEN)
    return (bits >> np.uint64(64 - _BITS)).astype(np.float64) * 2.0**-_BITS


def request_seed(engine_seed: int, request_id: str) -> int:
    """Return the seed of a request that brought none: the same on every instance with the same ``--seed``."""
    return xxhash.xxh3_64_intdigest(request_id.encode(), seed=engine_seed % 2**64)


def draw(probs: torch.Tensor, uniforms: npt.NDArray[np.float64]) -> list[int]:
    """Return per row the token at which the cumulated probability exceeds ``uniform * total``.

    In two levels, chunks and then tokens of one chunk: a float64 sum over the whole vocabulary is not needed. A token
    of probability 0 is never returned (unless all are).

    Args:
        probs: float32 [R, vocab], rows need not sum to 1.
        uniforms: float64 [R] in [0, 1).
    """
    count, vocab = probs.shape
    if vocab % _CHUNK:
        probs = torch.nn.functional.pad(probs, (0, _CHUNK - vocab % _CHUNK))
    chunked = probs.view(count, -1, _CHUNK)
    sums = chunked.sum(dim=-1).cpu().numpy().astype(np.float64)
    upto = sums.cumsum(axis=-1)
    target = uniforms * upto[:, -1]
    rows = np.arange(count)
    chunk = np.minimum((upto <= target[:, None]).sum(axis=-1), sums.shape[1] - 1)
    size = sums[rows, chunk]
    inside = np.clip((target - (upto[rows, chunk] - size)) / np.where(size > 0, size, 1.0), 0.0, 1.0 - 2.0**-40)
    device = probs.device
    tokens = chunked[torch.from_numpy(rows).to(device), torch.from_numpy(chunk).to(device)].cpu().numpy()
    within = tokens.astype(np.float64).cumsum(axis=-1)
    at = (within <= (inside * within[:, -1])[:, None]).sum(axis=-1)
    found: list[int] = np.minimum(chunk * _CHUNK + at, vocab - 1).tolist()
    return found
