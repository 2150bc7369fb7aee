"""Mixtures of experts with quantized weights; as :mod:`baton_kernels.experts`, the weights staying packed."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch

from baton_kernels.cpu.library import CpuLibrary, address
from baton_kernels.experts import NativeExperts
from baton_kernels.quantization import EXACT, ActivationScheme, ActivationType, QuantizedWeight
from baton_kernels.quantized_linear import AnyDtypeCall, PackedWeights, QuantizedShape, multiplies_integers
from baton_kernels.row_wise import Activation, gated_reference


@dataclass(frozen=True, slots=True)
class QuantizedExpertWeights:
    """The gated MLPs of E experts.

    Attributes:
        gate_up: E weights [2 * inner, hidden], gates first.
        down: E weights [hidden, inner].
        gate_up_bias: [E, 2 * inner], gates first, or ``None``.
        down_bias: [E, hidden], or ``None``.

    Raises:
        ValueError: Numbers of experts or shapes do not fit each other, or one bias is missing.
    """

    gate_up: Sequence[QuantizedWeight]
    down: Sequence[QuantizedWeight]
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if not self.gate_up or len(self.gate_up) != len(self.down):
            raise ValueError(f"{len(self.gate_up)} gate_up and {len(self.down)} down make no experts")
        if (self.gate_up_bias is None) != (self.down_bias is None):
            raise ValueError("one of both products has a bias")
        for gate_up, down in zip(self.gate_up, self.down, strict=True):
            if (gate_up.rows, gate_up.columns) != (2 * down.columns, down.rows):
                raise ValueError(
                    f"gate_up [{gate_up.rows}, {gate_up.columns}] does not fit down [{down.rows}, {down.columns}]"
                )


def quantized_experts_reference(
    experts: QuantizedExpertWeights,
    activation: Activation,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    residual: torch.Tensor | None = None,
    activations: ActivationScheme | tuple[ActivationScheme, ActivationScheme] = EXACT,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Return the weighted sum of the chosen experts' outputs [T, hidden], and ``residual``, in ``dtype``.

    Arguments as :func:`baton_kernels.experts.experts_reference`; ``activations`` is how the inputs of both products are
    rounded, one scheme for both or one for each.
    """
    first, second = activations if isinstance(activations, tuple) else (activations, activations)
    out = torch.zeros(x.shape, dtype=dtype) if residual is None else residual.to(dtype)
    for index in sorted(set(ids.flatten().tolist())):
        if not 0 <= index < len(experts.gate_up):
            continue
        tokens, choices = torch.where(ids == index)
        gate_up, down = (each[index].dequantize().to(dtype) for each in (experts.gate_up, experts.down))
        inner = first.round(x[tokens]).to(dtype) @ gate_up.T
        if experts.gate_up_bias is not None:
            inner = inner + experts.gate_up_bias[index].to(dtype)
        outputs = second.round(gated_reference(inner, activation)).to(dtype) @ down.T
        if experts.down_bias is not None:
            outputs = outputs + experts.down_bias[index].to(dtype)
        out = out.index_add(0, tokens, outputs * weights[tokens, choices, None].to(dtype))
    return out


class QuantizedExperts(Protocol):
    """The experts of one layer.

    Attributes:
        name: Name of the operator, for logs.
        hidden: Number of elements of a token.
    """

    name: str
    hidden: int

    def __call__(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See :class:`baton_kernels.experts.CpuExperts`."""


class PlainQuantizedExperts:
    """The definition in torch, in float32."""

    def __init__(
        self, experts: QuantizedExpertWeights, activation: Activation, activations: ActivationScheme = EXACT
    ) -> None:
        self.name = "torch"
        self.hidden = experts.down[0].rows
        self._experts = experts
        self._activation = activation
        self._activations = activations

    def __call__(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        arguments = (self._experts, self._activation, x, ids, weights, residual, self._activations)
        return quantized_experts_reference(*arguments, dtype=torch.float32).to(x.dtype)


class QuantizedExpertsCall(AnyDtypeCall):
    """The C structure ``QuantizedExperts`` of ``csrc/operators.h``."""

    _fields_: ClassVar[list[Any]] = [
        *((name, QuantizedShape) for name in ("gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("x", "ids", "weights", "packed_gate_up", "packed_down")),
        *((name, ctypes.c_void_p) for name in ("gate_up_table", "down_table", "gate_up_order", "down_order")),
        *((name, ctypes.c_void_p) for name in ("gate_up_bias", "down_bias", "residual", "out")),
        *((name, ctypes.c_int64) for name in ("tokens", "x_stride", "residual_stride")),
        *((name, ctypes.c_int32) for name in ("top_k", "experts", "dtype", "activation", "int8_inputs", "threads")),
        *((name, ctypes.c_int32) for name in ("amx", "pairs")),
        *((name, ctypes.c_float) for name in ("alpha", "limit")),
    ]


class CpuQuantizedExperts(NativeExperts):
    """The C++ operator for the experts of one layer, in any of the float types; sums in float32, rounded once.

    Raises:
        ValueError: The operator does not support this rounding of inputs (see :func:`make_quantized_experts`), or
            experts differ in form.
    """

    def __init__(
        self,
        library: CpuLibrary,
        experts: QuantizedExpertWeights,
        activation: Activation,
        activations: ActivationScheme = EXACT,
    ) -> None:
        if not _is_native(experts, activations):
            raise ValueError("the operator rounds inputs to int8 by the token, or not at all")
        integers = activations.type is ActivationType.INT8
        self._run = library.quantized.experts
        self._gate_up = PackedWeights(library, experts.gate_up, gated=True)
        self._down = PackedWeights(library, experts.down)
        self.hidden = experts.down[0].rows
        self.nbytes = self._gate_up.packed.numel() + self._down.packed.numel()
        self.name = f"{library.instructions} {'int8' if integers else 'exact'}"
        self._biases = [
            None if bias is None else bias.detach().float().contiguous()
            for bias in (experts.gate_up_bias, experts.down_bias)
        ]
        self._call = QuantizedExpertsCall(
            gate_up=self._gate_up.shape,
            down=self._down.shape,
            packed_gate_up=self._gate_up.packed.data_ptr(),
            packed_down=self._down.packed.data_ptr(),
            gate_up_table=address(self._gate_up.table),
            down_table=address(self._down.table),
            gate_up_order=address(self._gate_up.order),
            down_order=address(self._down.order),
            gate_up_bias=address(self._biases[0]),
            down_bias=address(self._biases[1]),
            experts=len(experts.down),
            activation=activation.kind,
            int8_inputs=integers,
            amx=library.amx,
            pairs=library.pairs_are_faster,
            alpha=activation.alpha,
            limit=activation.limit,
        )


def make_quantized_experts(
    library: CpuLibrary | None,
    experts: QuantizedExpertWeights,
    activation: Activation,
    activations: ActivationScheme = EXACT,
) -> QuantizedExperts:
    """Return the fastest operator of a CPU for experts; the plain one where it alone supports ``activations``."""
    if library is None or not _is_native(experts, activations):
        return PlainQuantizedExperts(experts, activation, activations)
    return CpuQuantizedExperts(library, experts, activation, activations)


def _is_native(experts: QuantizedExpertWeights, activations: ActivationScheme) -> bool:
    if activations.type is ActivationType.NONE:
        return True
    both = (experts.gate_up[0], experts.down[0])
    return activations.scale is None and all(multiplies_integers(each, activations) for each in both)
