"""Plain weights into the quantized forms, rounded to nearest."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch

from baton_kernels.quantized_weights import Fp8Weight, Int4Weight, Int8Weight, TableWeight, pack_nibbles

Tensors = dict[str, torch.Tensor]

INT4_GROUP = 64
NF4_GROUP = 64
_TILE_ELEMENTS = 1 << 17
"""Of a weight that are float32 at a time."""

NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""The values of NormalFloat4 (Dettmers et al., QLoRA, 2023, appendix E)."""


def quantize_int8(weight: torch.Tensor) -> Int8Weight:
    """Quantize a weight [rows, columns] with a scale per row: its largest magnitude becomes 127."""

    def tile(part: torch.Tensor) -> Tensors:
        scales = _or_one(part.abs().amax(1, keepdim=True) / 127)
        return {"values": (part / scales).round_().clamp_(-127, 127).to(torch.int8), "scales": scales}

    return Int8Weight(**_by_tiles(weight, tile))


def quantize_int4(weight: torch.Tensor, group: int = INT4_GROUP) -> Int4Weight:
    """Quantize a weight [rows, columns] with a scale per group: what is largest in magnitude becomes -8.

    Scales are rounded to float16. A group that does not divide the columns becomes the largest divisor of both.

    Raises:
        ValueError: An odd number of columns.
    """
    group = _fitting(weight, group)

    def tile(part: torch.Tensor) -> Tensors:
        grouped = part.view(len(part), -1, group)
        largest = grouped.gather(-1, grouped.abs().argmax(-1, keepdim=True))[..., 0]
        scales = _short(largest / -8)
        values = (grouped / scales[..., None]).round_().add_(8).clamp_(0, 15)
        return {"values": pack_nibbles(values.view(part.shape)), "scales": scales}

    made = _by_tiles(weight, tile)
    return Int4Weight(**made, zeros=torch.tensor(8.0).expand_as(made["scales"]))


def quantize_fp8(weight: torch.Tensor) -> Fp8Weight:
    """Quantize a weight [rows, columns] to e4m3 with a scale per row: its largest magnitude becomes 448."""

    def tile(part: torch.Tensor) -> Tensors:
        scales = _or_one(part.abs().amax(1, keepdim=True) / 448)
        return {"values": (part / scales).clamp_(-448, 448).to(torch.float8_e4m3fn), "scales": scales}

    return Fp8Weight(**_by_tiles(weight, tile), block=(1, weight.shape[1]))


def quantize_nf4(weight: torch.Tensor, group: int = NF4_GROUP) -> TableWeight:
    """Quantize a weight [rows, columns] to NormalFloat4 with a scale per group, as :func:`quantize_int4` else."""
    group, table = _fitting(weight, group), torch.tensor(NF4)
    bounds = (table[1:] + table[:-1]) / 2

    def tile(part: torch.Tensor) -> Tensors:
        grouped = part.view(len(part), -1, group)
        scales = _short(grouped.abs().amax(-1))
        values = torch.bucketize(grouped / scales[..., None], bounds, out_int32=True)
        return {"values": pack_nibbles(values.view(part.shape)), "scales": scales}

    return TableWeight(**_by_tiles(weight, tile), table=table)


def _by_tiles(weight: torch.Tensor, tile: Callable[[torch.Tensor], Tensors]) -> Tensors:
    """Return what a function makes of some rows at a time, of all rows."""
    whole: Tensors = {}
    start = 0
    for part in _tiles(weight):
        stop = start + len(part)
        for name, made in tile(part).items():
            if name not in whole:
                whole[name] = made.new_empty(len(weight), made.shape[1])
            whole[name][start:stop] = made
        start = stop
    return whole


def _tiles(weight: torch.Tensor) -> Iterator[torch.Tensor]:
    """Some rows at a time, float32."""
    rows = max(1, _TILE_ELEMENTS // weight.shape[1])
    for start in range(0, len(weight), rows):
        yield weight[start : start + rows].detach().float()


def _fitting(weight: torch.Tensor, group: int) -> int:
    if weight.shape[1] % 2:
        raise ValueError(f"{weight.shape[1]} columns cannot be packed in pairs")
    return math.gcd(group, weight.shape[1])


def _or_one(scales: torch.Tensor) -> torch.Tensor:
    return torch.where(scales == 0, 1.0, scales)


def _short(scales: torch.Tensor) -> torch.Tensor:
    """Rounded to float16 where that has all of its bits; 1 for 0."""
    short = scales.half().float()
    magnitude = scales.abs()
    return _or_one(torch.where((magnitude >= 2**-14) & (magnitude < 65504), short, scales))
