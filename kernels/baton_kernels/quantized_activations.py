"""Quantized activations: how the inputs of a linear layer are rounded before they are multiplied."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch


class ActivationType(enum.Enum):
    """What inputs are rounded to."""

    NONE = "none"
    INT8 = "int8"
    FP8 = "fp8"


_LIMITS = {ActivationType.INT8: 127.0, ActivationType.FP8: 448.0}


@dataclass(frozen=True, slots=True)
class ActivationScheme:
    """How inputs are rounded: to int8, or to fp8 (e4m3), symmetric.

    Attributes:
        type: What to.
        scale: A scale of the checkpoint's for all inputs (static), or ``None``: each token's largest magnitude becomes
            the type's largest (dynamic).
        group: Inputs that share a dynamic scale; 0: all of a token.

    Raises:
        ValueError: A scale that is not positive and finite, or of a type that has none.
    """

    type: ActivationType = ActivationType.NONE
    scale: float | None = None
    group: int = 0

    def __post_init__(self) -> None:
        if self.scale is not None and (self.type is ActivationType.NONE or not 0 < self.scale < float("inf")):
            raise ValueError(f"scale {self.scale} of {self.type.value} activations must be positive and finite")
        if self.group and (self.scale is not None or self.type is ActivationType.NONE):
            raise ValueError("only dynamic scales have groups")

    def quantize(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return x [tokens, inputs] as int8 or float8_e4m3fn [tokens, inputs], and its scales.

        Values beyond the type's range saturate.

        Returns:
            The values, and float32 scales [tokens, groups], groups being 1 or ``inputs // group``.
        """
        limit, values = _LIMITS[self.type], x.float()
        grouped = values.view(len(x), -1, self.group or x.shape[1])
        scales = torch.full(grouped.shape[:2], self.scale or 0.0, device=x.device)
        if self.scale is None:
            scales = grouped.abs().amax(-1) / limit
        inverse = torch.where(scales > 0, 1 / scales, 0.0)
        scaled = (grouped * inverse[..., None]).clamp(-limit, limit).view(x.shape)
        if self.type is ActivationType.INT8:
            return scaled.round().to(torch.int8), scales
        return scaled.to(torch.float8_e4m3fn), scales

    def round(self, x: torch.Tensor) -> torch.Tensor:
        """Return what x [tokens, inputs] is taken for, float32: the definition."""
        if self.type is ActivationType.NONE:
            return x.float()
        values, scales = self.quantize(x)
        return (values.float().view(*scales.shape, -1) * scales[..., None]).view(x.shape)


EXACT = ActivationScheme()
"""Inputs as they are."""
INT8_PER_TOKEN = ActivationScheme(ActivationType.INT8)
"""int8 with a scale per token."""
