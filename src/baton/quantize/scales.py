"""Weights into quantized forms, with scales that lose least of what calibration saw.

Without calibration a scale follows from a group's largest magnitude, and values are rounded to nearest. With it, scales
that are some smaller are tried as well: the largest values are cut off then, and all others are finer. What counts is
the squared error of each weight times the mean square of the input that it multiplies (the clipping of Lin et al., AWQ,
2023).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from baton_kernels.quantization import (
    NF4,
    Fp8Weight,
    Int4Weight,
    Int8Weight,
    QuantizedWeight,
    TableWeight,
    pack_nibbles,
)

FACTORS = tuple(1 - step / 20 for step in range(9))
"""Of the largest magnitude: what a scale is made of, with calibration."""
_TILE_ELEMENTS = 1 << 21
"""Of a weight that are worked on at a time."""
_FP8_LARGEST = 448.0
_TABLE = torch.tensor(NF4)
_BOUNDS = (_TABLE[1:] + _TABLE[:-1]) / 2

Rounded = tuple[torch.Tensor, torch.Tensor]
"""Values as they are stored, and what they stand for before the scale; both shaped as what was rounded."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """A way of quantizing.

    Attributes:
        name: As ``--scheme`` has it.
        largest: What a group's largest magnitude becomes.
        grouped: Whether groups of columns have a scale, or whole rows.
        round: From weights over their scales to values.
        make: From values [rows, columns] and scales [rows, groups] to the form.
        factors: Tried with calibration.
    """

    name: str
    largest: float
    grouped: bool
    round: Callable[[torch.Tensor], Rounded]
    make: Callable[[torch.Tensor, torch.Tensor], QuantizedWeight]
    factors: tuple[float, ...] = FACTORS


def quantize(
    weight: torch.Tensor, scheme: Scheme, group: int, dtype: torch.dtype, energy: torch.Tensor | None = None
) -> QuantizedWeight:
    """Quantize a weight.

    Args:
        weight: float32 [rows, columns].
        scheme: How.
        group: Columns that share a scale, where the scheme has groups; divides the columns.
        dtype: To which scales are rounded before they are used: that in which they will be stored.
        energy: float32 [columns], mean square of the inputs; ``None``: without calibration.
    """
    columns = weight.shape[1]
    size = group if scheme.grouped else columns
    importance = None if energy is None else energy.view(1, -1, size)
    values, scales = [], []
    step = max(1, _TILE_ELEMENTS // columns)
    for at in range(0, len(weight), step):
        part = weight[at : at + step]
        found = _best(part.view(len(part), -1, size), scheme, dtype, importance)
        values.append(found[0].view(part.shape))
        scales.append(found[1])
    return scheme.make(torch.cat(values), torch.cat(scales))


def _best(
    grouped: torch.Tensor, scheme: Scheme, dtype: torch.dtype, importance: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values of weights [rows, groups, group], and the scale of each group."""
    base = grouped.abs().amax(-1) / scheme.largest
    best: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    for factor in scheme.factors if importance is not None else (1.0,):
        scales = (base * factor).to(dtype).float()
        scales = torch.where(scales == 0, 1.0, scales)
        values, meant = scheme.round(grouped / scales[..., None])
        if importance is None:
            return values, scales
        error = ((meant * scales[..., None] - grouped).square_() * importance).sum(-1)
        if best is None:
            best = values, scales, error
            continue
        better = error < best[2]
        best = (
            torch.where(better[..., None], values.view(torch.uint8), best[0].view(torch.uint8)).view(values.dtype),
            torch.where(better, scales, best[1]),
            torch.where(better, error, best[2]),
        )
    assert best is not None
    return best[0], best[1]


def _round_int8(x: torch.Tensor) -> Rounded:
    values = x.round().clamp_(-127, 127)
    return values.to(torch.int8), values


def _round_int4(x: torch.Tensor) -> Rounded:
    values = x.round().clamp_(-8, 7)
    return (values + 8).to(torch.uint8), values


def _round_fp8(x: torch.Tensor) -> Rounded:
    values = x.clamp(-_FP8_LARGEST, _FP8_LARGEST).to(torch.float8_e4m3fn)
    return values, values.float()


def _round_nf4(x: torch.Tensor) -> Rounded:
    values = torch.bucketize(x, _BOUNDS)
    return values.to(torch.uint8), _TABLE[values]


def _int4(values: torch.Tensor, scales: torch.Tensor) -> Int4Weight:
    return Int4Weight(pack_nibbles(values), scales, torch.full_like(scales, 8.0))


def _fp8(values: torch.Tensor, scales: torch.Tensor) -> Fp8Weight:
    return Fp8Weight(values, scales, (1, values.shape[1]))


def _nf4(values: torch.Tensor, scales: torch.Tensor) -> TableWeight:
    return TableWeight(pack_nibbles(values), scales, _TABLE)


SCHEMES: Mapping[str, Scheme] = {
    "int8": Scheme("int8", 127.0, False, _round_int8, Int8Weight),
    "int4": Scheme("int4", 7.5, True, _round_int4, _int4),
    "fp8": Scheme("fp8", _FP8_LARGEST, False, _round_fp8, _fp8, (1.0,)),  # a smaller scale makes no value finer
    "nf4": Scheme("nf4", 1.0, True, _round_nf4, _nf4),
}
"""By their names."""
