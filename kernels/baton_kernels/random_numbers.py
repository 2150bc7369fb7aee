"""Random numbers without state: each follows from a key and its number alone, so any order of drawing gives the same.

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
"""Leads to number 2^63 of a key."""

Uint64s = npt.NDArray[np.uint64]


def mix(state: Uint64s) -> Uint64s:
    """Return SplitMix64's finalizer of each number; wraps modulo 2^64."""
    state = (state ^ (state >> np.uint64(30))) * MIX1
    state = (state ^ (state >> np.uint64(27))) * MIX2
    return state ^ (state >> np.uint64(31))


def draw_keys(seeds: Uint64s, positions: Uint64s) -> Uint64s:
    """Return what all random numbers of a token's draw come from, one per (seed, output position).

    Args:
        seeds: uint64 [R].
        positions: uint64 [R], output tokens before the one to be sampled, resumed ones included.
    """
    return mix(seeds + (positions + np.uint64(1)) * GOLDEN)


def next_keys(keys: Uint64s) -> Uint64s:
    """Return the keys of draws that follow refused ones: a number of each draw's key that it does not use itself."""
    return mix(keys + _NEXT)


class Draws(NamedTuple):
    """Of which draw each token of R comes.

    Attributes:
        seeds: R seeds of sequences, from 0 to 2^64 - 1.
        positions: Of each, the output tokens before the one that is drawn, resumed ones included.
    """

    seeds: Sequence[int]
    positions: Sequence[int]

    def keys(self, at: Sequence[int] | None = None, again: Sequence[bool] = ()) -> Uint64s:
        """Return what the random numbers of draws come from, uint64 [R, or as many as ``at`` has].

        Args:
            at: Which draws; default: all.
            again: Parallel to them, which tokens were refused and are drawn a second time; default: none.
        """
        keys = draw_keys(np.array(self.seeds, np.uint64), np.array(self.positions, np.uint64))
        if at is not None:
            keys = keys[np.array(at, np.int64)]
        return np.where(again, next_keys(keys), keys) if len(again) else keys


def uniforms(keys: Uint64s, numbers: Uint64s) -> npt.NDArray[np.float64]:
    """Return numbers between 0 and 1, both excluded.

    Args:
        keys: uint64 [R].
        numbers: uint64 [n] or [R, n], which of a key's numbers.

    Returns:
        float64 [R, n].
    """
    bits = mix(keys[:, None] + (numbers + np.uint64(1)) * GOLDEN) >> np.uint64(11)
    return (bits.astype(np.float64) + 0.5) * 2.0**-53


def exponentials(keys: Uint64s, numbers: Uint64s) -> npt.NDArray[np.float64]:
    """Return numbers above 0, exponentially distributed with mean 1; arguments as in :func:`uniforms`."""
    return -np.log(uniforms(keys, numbers))
