"""Fits of a profile's lines to measured steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from baton.errors import ConfigError
from baton.planner.profile import DecodeCost, FitQuality, PrefillCost

FloatArray = npt.NDArray[np.float64]
Point = tuple[float, float, float]
"""Seconds, and what the step computed: two amounts."""


def fit_prefill(points: Sequence[Point]) -> tuple[PrefillCost, FitQuality]:
    """Fit steps of prompts: (seconds, tokens, pairs of a token and one it attends to).

    Raises:
        ConfigError: There are too few points.
    """
    weights, quality = _fit(points, "prefill")
    return PrefillCost(*weights), quality


def fit_decode(points: Sequence[Point]) -> tuple[DecodeCost, FitQuality]:
    """Fit steps of decodes: (seconds, tokens of all contexts, sequences).

    Raises:
        ConfigError: There are too few points.
    """
    weights, quality = _fit(points, "decode")
    return DecodeCost(*weights), quality


def fit_transfer(points: Sequence[tuple[float, float]]) -> tuple[float, float, FitQuality]:
    """Fit transfers: (seconds, bytes); returns latency in seconds and bytes per second.

    Raises:
        ConfigError: There are too few points.
    """
    (latency, per_byte, _), quality = _fit([(seconds, size, 0.0) for seconds, size in points], "transfer")
    return latency, 1.0 / per_byte if per_byte > 0 else 1e15, quality


def _fit(points: Sequence[Point], what: str) -> tuple[tuple[float, float, float], FitQuality]:
    """Fit a constant and two slopes, none below 0, by least squares of relative errors."""
    if len(points) < 3:
        raise ConfigError(f"{len(points)} measurements of {what} are too few for a line", field="isl")
    seconds = np.array([point[0] for point in points])
    features = np.array([(1.0, point[1], point[2]) for point in points])
    weights = nonnegative_least_squares(features / seconds[:, None], np.ones(len(points)))
    errors = np.abs(features @ weights / seconds - 1)
    quality = FitQuality(len(points), round(float(np.median(errors)), 4), round(float(errors.max()), 4))
    fixed, first, second = (float(x) for x in weights)
    return (fixed, first, second), quality


def nonnegative_least_squares(matrix: FloatArray, target: FloatArray) -> FloatArray:
    """Return the weights, none below 0, with the least squares of ``matrix @ weights - target``.

    All subsets of the columns are tried: there are three.
    """
    columns = matrix.shape[1]
    best, least = np.zeros(columns), float(target @ target)
    for subset in range(1, 1 << columns):
        used = [i for i in range(columns) if subset >> i & 1]
        norms = np.linalg.norm(matrix[:, used], axis=0)
        if not norms.all():
            continue
        found = np.linalg.lstsq(matrix[:, used] / norms, target, rcond=None)[0] / norms
        if (found < 0).any():
            continue
        error = float(((matrix[:, used] @ found - target) ** 2).sum())
        if error < least - 1e-12:
            best, least = np.zeros(columns), error
            best[used] = found
    return best
