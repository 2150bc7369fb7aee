"""Random numbers without state: each depends on a key and its index alone, so the order of draws does not matter.

The function is SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014): the i-th
number of a key is ``mix(key + (i + 1) * GOLDEN)``, its upper 53 bits. C++ and Triton compute the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MIX1 = np.uint64(0xBF58476D1CE4E5B9)
MIX2 = np.uint64(0x94D049BB133111EB)

_NEXT = np.uint64(((1 << 63) + 1) * int(GOLDEN) % (1 << 64))
"""Offset of number 2^63 of a key."""

Uint64s = npt.NDArray[np.uint64]


def mix(state: Uint64s) -> Uint64s:
    """Return SplitMix64's finalizer of each number; wraps modulo 2^64."""
    state = (state ^ (state >> np.uint64(30))) * MIX1
    state = (state ^ (state >> np.uint64(27))) * MIX2
    return state ^ (state >> np.uint64(31))


def draw_keys(seeds: Uint64s, positions: Uint64s) -> Uint64s:
    """Return the keys of the random numbers of tokens' draws, one per (seed, output position).

    Args:
        seeds: Seeds of the sequences, uint64 [R].
        positions: Numbers of output tokens before the sampled one, resumed ones included, uint64 [R].
    """
    return mix(seeds + (positions + np.uint64(1)) * GOLDEN)


def next_keys(keys: Uint64s) -> Uint64s:
    """Return the keys of second draws after rejected ones: an otherwise unused number of each draw's key."""
    return mix(keys + _NEXT)


class Draws(NamedTuple):
    """The draws of R tokens.

    Attributes:
        seeds: Seeds of the R sequences, from 0 to 2^64 - 1.
        positions: Per sequence, the number of output tokens before the drawn one, resumed ones included.
    """

    seeds: Sequence[int]
    positions: Sequence[int]

    def keys(self, at: Sequence[int] | None = None, again: Sequence[bool] = ()) -> Uint64s:
        """Return the keys of the draws' random numbers, uint64 [R], or one for each index in ``at``.

        Args:
            at: Indices of the wanted draws; default: all draws.
            again: Whether each token was rejected and is drawn a second time, one for each key; default: no token.
        """
        keys = draw_keys(np.array(self.seeds, np.uint64), np.array(self.positions, np.uint64))
        if at is not None:
            keys = keys[np.array(at, np.int64)]
        return np.where(again, next_keys(keys), keys) if len(again) else keys


def uniforms(keys: Uint64s, numbers: Uint64s) -> npt.NDArray[np.float64]:
    """Return numbers between 0 and 1, both excluded.

    Args:
        keys: Keys, uint64 [R].
        numbers: Indices of a key's numbers, uint64 [n] or [R, n].

    Returns:
        float64 [R, n].
    """
    bits = mix(keys[:, None] + (numbers + np.uint64(1)) * GOLDEN) >> np.uint64(11)
    return (bits.astype(np.float64) + 0.5) * 2.0**-53


def exponentials(keys: Uint64s, numbers: Uint64s) -> npt.NDArray[np.float64]:
    """Return numbers above 0, exponentially distributed with mean 1; arguments as in :func:`uniforms`."""
    return -np.log(uniforms(keys, numbers))
