"""Parts of quantized weights: what a rank keeps, and rows in another order, without the rest behind them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from baton_kernels.quantized_weights import Fp8Weight, QuantizedWeight, TableWeight, join


def to_device(weight: QuantizedWeight, device: torch.device) -> QuantizedWeight:
    """Return a weight whose tensors lie on a device: itself, where they do already."""
    if weight.values.device == device:
        return weight
    kept = {field.name: getattr(weight, field.name) for field in dataclasses.fields(weight)}
    tensors = {name: each.to(device) for name, each in kept.items() if isinstance(each, torch.Tensor)}
    return type(weight)(**kept | tensors)


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
