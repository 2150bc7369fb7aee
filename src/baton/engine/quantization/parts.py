"""Parts of quantized weights: what a rank keeps, and rows in another order, without the rest behind them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from baton_kernels.quantization import QuantizedWeight, join_weights


def to_device(weight: QuantizedWeight, device: torch.device) -> QuantizedWeight:
    """Return a weight whose tensors lie on a device: itself, where they do already."""
    if weight.values.device == device:
        return weight
    return dataclasses.replace(weight, **{name: tensor.to(device) for name, tensor in weight.tensors().items()})


def pick_rows(weight: QuantizedWeight, ranges: Sequence[range]) -> QuantizedWeight:
    """Return some ranges of rows below each other, as views where there is one range."""
    parts = [weight.cut_rows(each.start, each.stop) for each in ranges]
    return parts[0] if len(parts) == 1 else join_weights(parts)


def deinterleaved(weight: QuantizedWeight) -> QuantizedWeight:
    """Return even rows above odd ones: gates and ups that alternate, as GPT-OSS has them."""
    return join_weights([weight.every_other_row(0), weight.every_other_row(1)])
