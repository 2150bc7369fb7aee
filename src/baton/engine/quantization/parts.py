"""Parts of quantized weights: what a rank keeps, and rows in another order, without the rest behind them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from baton_kernels.quantized_weights import Fp8Weight, QuantizedWeight, TableWeight, join


def own(weight: QuantizedWeight) -> QuantizedWeight:
    """Return a weight with memory of its own, so that the one that it is a view of can go."""
    kept: dict[str, Any] = {field.name: getattr(weight, field.name) for field in dataclasses.fields(weight)}
    copies: dict[str, Any] = {
        name: tensor.clone(memory_format=torch.contiguous_format)
        for name, tensor in kept.items()
        if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().nbytes() != tensor.nbytes
    }
    return type(weight)(**kept | copies) if copies else weight


def pick_rows(weight: QuantizedWeight, ranges: Sequence[range]) -> QuantizedWeight:
    """Return some ranges of rows below each other, as views where there is one range."""
    parts = [weight.cut_rows(each.start, each.stop) for each in ranges]
    return parts[0] if len(parts) == 1 else join(parts)


def deinterleaved(weight: QuantizedWeight) -> QuantizedWeight:
    """Return even rows above odd ones: gates and ups that stand in turns, as GPT-OSS has them."""
    if isinstance(weight, Fp8Weight):
        weight = Fp8Weight(weight.values, weight.row_scales, (1, weight.block[1]))
        return dataclasses.replace(weight, values=_halves(weight.values), scales=_halves(weight.scales))
    changed = dataclasses.replace(weight, values=_halves(weight.values), scales=_halves(weight.scales))
    if isinstance(changed, TableWeight) or changed.zeros is None:
        return changed
    return dataclasses.replace(changed, zeros=_halves(changed.zeros))


def _halves(tensor: torch.Tensor) -> torch.Tensor:
    raw = tensor.view(torch.uint8) if tensor.dtype is torch.float8_e4m3fn else tensor
    return torch.cat([raw[::2], raw[1::2]]).view(tensor.dtype)
