"""Linear layers with quantized weights: ``round(x) dequantize(W)^T + bias + residual``, summed in float32.

Weights stay packed: the C++ operators unpack them in registers, or multiply their integers with inputs in int8;
Triton's (``gpu/quantized_linear.py``) unpack them in registers. The plain one, in torch, is the definition.
"""

from __future__ import annotations

import ctypes
from typing import Any, ClassVar, Protocol

import torch

from baton_kernels.cpu.calls import BoundCall
from baton_kernels.cpu.library import DTYPE_CODES, CpuLibrary
from baton_kernels.linear import PackedLinear
from baton_kernels.quantized_activations import EXACT, ActivationScheme, ActivationType
from baton_kernels.quantized_packing import PackedWeights, QuantizedShape, address
from baton_kernels.quantized_weights import Int4Weight, Int8Weight, QuantizedWeight

TILE_ELEMENTS = 1 << 17
"""Of the weight that the plain layer dequantizes at a time."""


class QuantizedLinear(PackedLinear, Protocol):
    """A linear layer with a quantized weight.

    Attributes:
        name: Which operator it is, for people.
        nbytes: Bytes of its weight.
    """

    name: str
    nbytes: int


def quantized_linear_reference(
    x: torch.Tensor,
    weight: QuantizedWeight,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    activations: ActivationScheme = EXACT,
) -> torch.Tensor:
    """Return the layer's output [tokens, rows] of x [tokens, columns], computed in float64, in x's dtype."""
    out = activations.round(x).double() @ weight.dequantize().double().T
    for each in (bias, residual):
        if each is not None:
            out = out + each.double()
    return out.to(x.dtype)


def make_quantized_linear(
    library: CpuLibrary | None,
    weight: QuantizedWeight,
    bias: torch.Tensor | None = None,
    activations: ActivationScheme = EXACT,
) -> QuantizedLinear:
    """Return the fastest layer of a CPU for a weight [rows, columns], bias [rows] and how inputs are rounded.

    It takes x in float32, bfloat16 or float16, and keeps no reference to ``weight`` where it packs it.

    Args:
        library: The C++ operators, or ``None``: the plain layer.
        weight: The weight.
        bias: Added to the outputs, or ``None``.
        activations: How inputs are rounded. For fp8 and table weights, and for scales of groups, inputs are rounded
            by torch and multiplied as they are then.
    """
    if library is None:
        return PlainQuantizedLinear(weight, bias, activations)
    return CpuQuantizedLinear(library, weight, bias, activations)


class PlainQuantizedLinear:
    """The definition in torch: dequantizes some rows at a time, in float32."""

    def __init__(
        self, weight: QuantizedWeight, bias: torch.Tensor | None = None, activations: ActivationScheme = EXACT
    ) -> None:
        self.name = "torch"
        self.out_features, self.in_features, self.nbytes = weight.rows, weight.columns, weight.nbytes
        self._weight, self._activations = weight, activations
        self._bias = None if bias is None else bias.detach().float()

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """See :class:`baton_kernels.linear.PackedLinear`."""
        rounded = self._activations.round(x)
        out = rounded.new_empty(len(x), self.out_features)
        rows = max(1, TILE_ELEMENTS // self.in_features)
        for start in range(0, self.out_features, rows):
            stop = min(start + rows, self.out_features)
            torch.mm(rounded, self._weight.cut_rows(start, stop).dequantize().T, out=out[:, start:stop])
        for each in (self._bias, residual):
            if each is not None:
                out += each
        return out.to(x.dtype)


class QuantizedCall(ctypes.Structure):
    """The C structure ``QuantizedLinear`` of ``csrc/operators.h``."""

    _fields_: ClassVar[list[Any]] = [
        ("shape", QuantizedShape),
        *((name, ctypes.c_void_p) for name in ("x", "packed", "table", "bias", "order", "residual", "out")),
        *((name, ctypes.c_int64) for name in ("rows", "x_stride", "residual_stride", "out_stride")),
        *((name, ctypes.c_int32) for name in ("dtype", "int8_inputs", "threads", "amx", "pairs")),
        ("scale", ctypes.c_float),
    ]


class CpuQuantizedLinear:
    """The C++ operator; see the module's docstring."""

    def __init__(
        self,
        library: CpuLibrary,
        weight: QuantizedWeight,
        bias: torch.Tensor | None = None,
        activations: ActivationScheme = EXACT,
    ) -> None:
        self.out_features, self.in_features = weight.rows, weight.columns
        self._run = library.quantized.run
        self._weights = PackedWeights(library, [weight])
        self.nbytes = self._weights.packed.numel()
        self._bias = None if bias is None else bias.detach().float().contiguous()
        integers = multiplies_integers(weight, activations)
        self._rounds_ahead = None if integers or activations.type is ActivationType.NONE else activations
        self.name = f"{library.instructions} {'int8' if integers else 'exact'}"
        self._call = QuantizedCall(
            shape=self._weights.shape,
            packed=self._weights.packed.data_ptr(),
            table=address(self._weights.table),
            order=address(self._weights.order),
            bias=address(self._bias),
            out_stride=self.out_features,
            int8_inputs=integers,
            amx=library.amx,
            pairs=library.pairs_are_faster,
            scale=activations.scale if integers and activations.scale is not None else 0.0,
        )

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """See :class:`baton_kernels.linear.PackedLinear`."""
        if self._rounds_ahead is not None:
            rounded = self._rounds_ahead.round(x)
            return self._multiply(rounded, None if residual is None else residual.float()).to(x.dtype)
        return self._multiply(x, residual)

    def _multiply(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        out = x.new_empty(x.shape[0], self.out_features)
        call = self._call
        call.x, call.out, call.rows, call.x_stride = x.data_ptr(), out.data_ptr(), x.shape[0], x.stride(0)
        call.dtype = DTYPE_CODES[x.dtype]
        if residual is None:
            call.residual = None
        else:
            call.residual, call.residual_stride = residual.data_ptr(), residual.stride(0)
        call.threads = torch.get_num_threads()
        self._run(ctypes.byref(call))
        return out

    def bind(self, x: torch.Tensor, out: torch.Tensor, residual: torch.Tensor | None = None) -> BoundCall | None:
        """See :class:`~baton_kernels.cpu.calls.BindableOperator`; inputs that torch rounds cannot be bound."""
        if self._rounds_ahead is not None:
            return None
        call = QuantizedCall.from_buffer_copy(self._call)
        call.x, call.out, call.x_stride = x.data_ptr(), out.data_ptr(), x.stride(0)
        call.dtype = DTYPE_CODES[x.dtype]
        call.residual = None
        if residual is not None:
            call.residual, call.residual_stride = residual.data_ptr(), residual.stride(0)
        return BoundCall(self._run, call, (x, out, residual, self._weights, self._bias))


def multiplies_integers(weight: QuantizedWeight, activations: ActivationScheme) -> bool:
    """Whether the C++ operators round inputs to int8 themselves, and multiply them with the weight's integers."""
    rounds = activations.type is ActivationType.INT8 and not activations.group
    return rounds and isinstance(weight, Int8Weight | Int4Weight)
