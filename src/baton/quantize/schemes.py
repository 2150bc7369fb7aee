"""Quantization schemes: weights into quantized forms, and these as tensors of a checkpoint.

Without calibration a scale follows from a group's largest magnitude, and values are rounded to nearest. With it, some
smaller scales are tried as well: the largest values are cut off then, and all others are finer. The error of each
weight is squared and weighted by the mean square of the input that it multiplies (the clipping of Lin et al., AWQ,
2023).

compressed-tensors (https://github.com/vllm-project/compressed-tensors): ``pack-quantized`` for integers, eight values
of 4 bits or four of 8 in an int32, from the low bits on, with their offset of half the range; ``float-quantized`` for
fp8. bitsandbytes (https://github.com/bitsandbytes-foundation/bitsandbytes) for NF4, which that has not: two values a
byte, the first in the high bits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
"""Factors of the largest magnitude that are tried as scales, with calibration."""
_TILE_ELEMENTS = 1 << 21
"""Elements of a weight that are quantized at a time."""
_FP8_LARGEST = 448.0
_TABLE = torch.tensor(NF4)
_BOUNDS = (_TABLE[1:] + _TABLE[:-1]) / 2

Rounded = tuple[torch.Tensor, torch.Tensor]
"""Stored values, and the numbers they stand for before the scale; both shaped as the unrounded ones."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """A way of quantizing.

    Attributes:
        name: Value of ``--scheme``.
        largest: Value that a group's largest magnitude becomes.
        grouped: Whether groups of columns have a scale; else whole rows have one.
        round: Rounds weights that were divided by their scales.
        make: Makes the form: (values [rows, columns], scales [rows, groups]).
        factors: Factors of the largest magnitude that are tried with calibration.
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
        scheme: The way of quantizing.
        group: Number of columns that share a scale, where the scheme has groups; it divides the columns.
        dtype: Dtype in which scales will be stored; they are rounded to it before they are used.
        energy: Mean squares of the inputs, float32 [columns]; ``None``: no calibration.
    """
    columns = weight.shape[1]
    size = group if scheme.grouped else columns
    importance = None if energy is None else energy.view(1, -1, size)
    values = []
    scales = []
    step = max(1, _TILE_ELEMENTS // columns)
    for start in range(0, len(weight), step):
        part = weight[start : start + step]
        part_values, part_scales = _quantize_groups(part.view(len(part), -1, size), scheme, dtype, importance)
        values.append(part_values.view(part.shape))
        scales.append(part_scales)
    return scheme.make(torch.cat(values), torch.cat(scales))


def _quantize_groups(
    grouped: torch.Tensor, scheme: Scheme, dtype: torch.dtype, importance: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values of weights [rows, groups, group], and the scale of each group."""
    base = grouped.abs().amax(-1) / scheme.largest
    best: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    for factor in scheme.factors if importance is not None else (1.0,):
        scales = (base * factor).to(dtype).float()
        scales = torch.where(scales == 0, 1.0, scales)
        values, rounded = scheme.round(grouped / scales[..., None])
        if importance is None:
            return values, scales
        error = ((rounded * scales[..., None] - grouped).square_() * importance).sum(-1)
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
"""Schemes by name."""


# Tensors of a checkpoint


Entry = tuple[str, torch.Tensor]


def stored_tensors(name: str, weight: QuantizedWeight, dtype: torch.dtype) -> list[Entry]:
    """Return the tensors of a quantized weight.

    Args:
        name: Name of the plain parameter, ``...weight``.
        weight: The weight.
        dtype: Dtype of the scales, where the format leaves that open.
    """
    module = name.removesuffix(".weight")
    scales = weight.scales.to(dtype)
    if isinstance(weight, Fp8Weight):
        return [(name, weight.values), (f"{module}.weight_scale", scales)]
    if isinstance(weight, TableWeight):
        return _bitsandbytes(name, weight, dtype)
    shape = torch.tensor([weight.rows, weight.columns])
    packed = weight.values if isinstance(weight, Int4Weight) else (weight.values.view(torch.uint8) ^ 128)
    words = packed.contiguous().view(torch.int32)
    return [(f"{module}.weight_packed", words), (f"{module}.weight_scale", scales), (f"{module}.weight_shape", shape)]


def check_columns(name: str, columns: int, scheme: Scheme, group: int) -> str:
    """Return why a weight of so many columns cannot be stored; empty: it can."""
    if scheme.grouped and columns % group:
        return f"--group {group} does not divide the {columns} columns of {name}"
    whole = {"int8": 4, "int4": 8, "nf4": 2}.get(scheme.name, 1)
    return f"the {columns} columns of {name} are no multiple of {whole}" if columns % whole else ""


def quantization_config(scheme: Scheme, group: int, dtype: torch.dtype, ignored: Sequence[str]) -> dict[str, Any]:
    """Return ``quantization_config`` of ``config.json``.

    Args:
        scheme: Scheme of all weights.
        group: Number of columns that share a scale, where the scheme has groups.
        dtype: The model's dtype.
        ignored: Names of linear modules that stay plain.
    """
    if scheme.name == "nf4":
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "load_in_8bit": False,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": False,
            "bnb_4bit_compute_dtype": str(dtype).removeprefix("torch."),
            "bnb_4bit_quant_storage": "uint8",
            "llm_int8_skip_modules": list(ignored),
        }
    weights: dict[str, Any] = {
        "num_bits": 4 if scheme.name == "int4" else 8,
        "type": "float" if scheme.name == "fp8" else "int",
        "symmetric": True,
        "strategy": "group" if scheme.grouped else "channel",
        "group_size": group if scheme.grouped else None,
        "dynamic": False,
    }
    layout = "float-quantized" if scheme.name == "fp8" else "pack-quantized"
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": None,
                "output_activations": None,
                "format": layout,
            }
        },
        "ignore": list(ignored),
        "kv_cache_scheme": None,
    }


def _bitsandbytes(name: str, weight: TableWeight, dtype: torch.dtype) -> list[Entry]:
    state = {
        "quant_type": "nf4",
        "blocksize": weight.group,
        "dtype": str(dtype).removeprefix("torch."),
        "shape": [weight.rows, weight.columns],
    }
    swapped = (weight.values << 4) | (weight.values >> 4)
    return [
        (name, swapped.reshape(-1, 1)),
        (f"{name}.absmax", weight.scales.flatten()),
        (f"{name}.quant_map", weight.table),
        (f"{name}.quant_state.bitsandbytes__nf4", torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)),
    ]
