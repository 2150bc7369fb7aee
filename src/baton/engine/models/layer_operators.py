"""What a model's layers are made of where it runs: C++ operators on a CPU, Triton's on a GPU, under one interface."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import nn

from baton.engine.models.experts import (
    CPU_DTYPES,
    Route,
    RunExperts,
    expert_weights,
    gated_activation,
    pack_experts,
    pack_quantized_experts,
)
from baton.engine.quantization.modules import QuantizedExpertsModule
from baton_kernels.cpu import CpuLibrary
from baton_kernels.experts import CpuRouting, Routing, routing_reference
from baton_kernels.linear import PackedLinear, PlainLinear
from baton_kernels.quantization import ActivationScheme, QuantizedWeight
from baton_kernels.quantized_linear import make_quantized_linear
from baton_kernels.row_wise import Activation, CpuGatedMul, CpuRmsNorm

MakeLinear = Callable[[torch.Tensor, torch.Tensor | None], PackedLinear]
"""Makes a layer of weight [out, in] and bias [out] or ``None``."""
GatedProduct = Callable[[torch.Tensor], torch.Tensor]
"""Takes [rows, 2 dim], gates first, returns [rows, dim]; see :func:`baton_kernels.row_wise.gated_reference`."""


class RowNorm(Protocol):
    """An RMS norm with its weight."""

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Norm x [rows, dim], rows of any stride, and add a contiguous residual [rows, dim] -> contiguous."""


class LayerOperators(Protocol):
    """Makes operators out of weights.

    Attributes:
        linear: Makes linear layers.
        quantized: What multiplies by quantized weights as they are, for people; empty: nothing does, only their
            definition.
    """

    linear: MakeLinear
    quantized: str

    def quantized_linear(
        self, weight: QuantizedWeight, bias: torch.Tensor | None, activations: ActivationScheme
    ) -> PackedLinear:
        """Make a layer of a quantized weight [out, in], bias [out] or ``None``, and how inputs are rounded."""

    def rms_norm(self, weight: torch.Tensor, eps: float, offset: float) -> RowNorm:
        """Make an RMS norm of a weight [dim] in the model's dtype."""

    def gated_product(self, dtype: torch.dtype, activation: Activation) -> GatedProduct:
        """Make the product between the linears of a gated MLP."""

    def routing(self, routing: Routing, experts: int) -> Route:
        """Make the operator of a router.

        Raises:
            ValueError: Its numbers contradict each other.
        """

    def takes_experts(self, module: nn.Module) -> bool:
        """Whether a module is one of plain experts that :meth:`experts` can run."""

    def experts(self, module: nn.Module) -> RunExperts | None:
        """Make the operator of a module of experts; ``None``: it is none that there is an operator for."""


class CpuOperators:
    """Of a CPU; the fused decoder needs the library.

    Args:
        library: The C++ operators.
        linear: Makes linear layers.
    """

    def __init__(self, library: CpuLibrary | None, linear: MakeLinear) -> None:
        self._library, self.linear = library, linear
        self.quantized = "" if library is None else library.instructions

    def quantized_linear(
        self, weight: QuantizedWeight, bias: torch.Tensor | None, activations: ActivationScheme
    ) -> PackedLinear:
        """See :class:`LayerOperators`."""
        return make_quantized_linear(self._library, weight, bias, activations)

    def rms_norm(self, weight: torch.Tensor, eps: float, offset: float) -> RowNorm:
        """See :class:`LayerOperators`."""
        return CpuRmsNorm(self._required, weight, eps, offset)

    def gated_product(self, dtype: torch.dtype, activation: Activation) -> GatedProduct:
        """See :class:`LayerOperators`."""
        return CpuGatedMul(self._required, dtype, activation)

    def routing(self, routing: Routing, experts: int) -> Route:
        """See :class:`LayerOperators`."""
        return CpuRouting(self._required, routing, experts)

    def takes_experts(self, module: nn.Module) -> bool:
        """See :class:`LayerOperators`."""
        weights = None if self._library is None else expert_weights(module)
        return weights is not None and weights.gate_up.dtype in CPU_DTYPES

    def experts(self, module: nn.Module) -> RunExperts | None:
        """See :class:`LayerOperators`."""
        return None if self._library is None else pack_experts(module, self._library)

    @property
    def _required(self) -> CpuLibrary:
        if self._library is None:
            raise ValueError("no C++ operators")
        return self._library


class GpuOperators:
    """Of a GPU, or of Triton's interpreter. Weights are used as they lie; products with plain ones are torch's."""

    def __init__(self) -> None:
        self.linear: MakeLinear = PlainLinear
        self.quantized = "triton"

    def quantized_linear(
        self, weight: QuantizedWeight, bias: torch.Tensor | None, activations: ActivationScheme
    ) -> PackedLinear:
        """See :class:`LayerOperators`."""
        from baton_kernels.gpu.eight_bit_linear import TritonEightBitLinear, takes_eight_bits
        from baton_kernels.gpu.quantized_linear import TritonQuantizedLinear

        if takes_eight_bits(weight, activations):
            return TritonEightBitLinear(weight, bias, activations)
        return TritonQuantizedLinear(weight, bias, activations)

    def rms_norm(self, weight: torch.Tensor, eps: float, offset: float) -> RowNorm:
        """See :class:`LayerOperators`."""
        from baton_kernels.gpu.row_wise import TritonRmsNorm

        return TritonRmsNorm(weight, eps, offset)

    def gated_product(self, dtype: torch.dtype, activation: Activation) -> GatedProduct:
        """See :class:`LayerOperators`."""
        from baton_kernels.gpu.row_wise import TritonGatedMul

        return TritonGatedMul(activation)

    def routing(self, routing: Routing, experts: int) -> Route:
        """See :class:`LayerOperators`; torch's operators, none of which waits for the device."""
        routing.check(experts)
        return partial(routing_reference, routing)

    def takes_experts(self, module: nn.Module) -> bool:
        """See :class:`LayerOperators`."""
        return expert_weights(module) is not None and gated_activation(module) is not None

    def experts(self, module: nn.Module) -> RunExperts | None:
        """See :class:`LayerOperators`."""
        from baton_kernels.gpu.experts import TritonExperts
        from baton_kernels.gpu.quantized_experts import TritonQuantizedExperts

        if isinstance(module, QuantizedExpertsModule):
            return pack_quantized_experts(module, TritonQuantizedExperts)
        weights, activation = expert_weights(module), gated_activation(module)
        return None if weights is None or activation is None else TritonExperts(weights, activation)
