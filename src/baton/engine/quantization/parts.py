"""Parts of quantized weights: what a rank keeps, and rows in another order, without the rest behind them."""

from __future__ import annotations

import dataclasses
import mmap
from collections.abc import Sequence
from typing import Any

import torch

from baton_kernels.quantized_weights import Fp8Weight, QuantizedWeight, TableWeight, join

MAPPED_BYTES = 1 << 16
"""Bytes of a weight from which on it gets a mapping of its own."""
ALIGNMENT = 64


def own(weight: QuantizedWeight) -> QuantizedWeight:
    """Return a copy of a weight in a mapping of its own, which goes back to the system when the copy is dropped.

    The allocator would keep what is dropped among what was allocated meanwhile: the memory of two copies of a model
    while its operators are made of it, and afterwards. On a GPU it is an ordinary copy.
    """
    if weight.values.device.type != "cpu":
        return to_device(weight, weight.values.device, copy=True)
    kept: dict[str, Any] = {field.name: getattr(weight, field.name) for field in dataclasses.fields(weight)}
    # One number that stands for all zeros takes no memory as it is.
    tensors = {
        name: tensor for name, tensor in kept.items() if isinstance(tensor, torch.Tensor) and any(tensor.stride())
    }
    sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors.values()]
    memory = torch.split(_memory(sum(sizes)), sizes)
    for (name, tensor), part in zip(tensors.items(), memory, strict=True):
        copy = part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        kept[name] = copy.copy_(tensor)
    return type(weight)(**kept)


def to_device(weight: QuantizedWeight, device: torch.device, *, copy: bool = False) -> QuantizedWeight:
    """Return a weight whose tensors lie on a device: itself, where they do already and no copy is wanted."""
    if weight.values.device == device and not copy:
        return weight
    kept = {field.name: getattr(weight, field.name) for field in dataclasses.fields(weight)}
    tensors = {name: each.to(device, copy=copy) for name, each in kept.items() if isinstance(each, torch.Tensor)}
    return type(weight)(**kept | tensors)


def _memory(size: int) -> torch.Tensor:
    if size < MAPPED_BYTES:
        return torch.empty(size, dtype=torch.uint8)
    return torch.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)


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
