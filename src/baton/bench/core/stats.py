"""Medians, percentiles and ratios of samples that were taken in turns."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles of a list of samples, in the samples' unit."""

    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        """Compute them.

        Raises:
            ValueError: No sample.
        """
        return cls(*(percentile(samples, q) for q in (50, 95, 99)))


def percentile(samples: Sequence[float], q: float) -> float:
    """Return the ``q``-th percentile (0 to 100), interpolated between the two samples next to it.

    Raises:
        ValueError: No sample, or ``q`` out of range.
    """
    if not samples or not 0 <= q <= 100:
        raise ValueError(f"no {q}th percentile of {len(samples)} samples")
    ordered = sorted(samples)
    place = (len(ordered) - 1) * q / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Return the median of the quotients of samples taken next to each other: a machine's drift cancels out.

    Raises:
        ValueError: Different numbers of samples, or none.
    """
    if len(numerators) != len(denominators) or not numerators:
        raise ValueError(f"{len(numerators)} and {len(denominators)} samples cannot be paired")
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))
