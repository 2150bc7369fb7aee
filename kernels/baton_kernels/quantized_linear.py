"""Linear layers with quantized weights: ``round(x) dequantize(W)^T + bias + residual``, summed in float32.

Weights stay packed: the C++ operators unpack them in registers, or multiply their integers with inputs in int8;
Triton's (``gpu/quantized_linear.py``) unpack them in registers. The plain one, in torch, is the definition.
:class:`PackedWeights` has the order in which the C++ operators read weights; see ``csrc/quantized/quantized.h``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import torch

from baton_kernels.cpu.library import DTYPE_CODES, BoundCall, CpuLibrary, RowsCall, address
from baton_kernels.linear import PackedLinear
from baton_kernels.quantization import (
    EXACT,
    ActivationScheme,
    ActivationType,
    Fp8Weight,
    Int8Weight,
    IntegerWeight,
    QuantizedWeight,
    TableWeight,
    same_order,
)

TILE_ELEMENTS = 1 << 17
"""Elements of the weight that the plain layer dequantizes at a time."""
_NARROW = (torch.bfloat16, torch.float16)
_INT8_BASE = 128
"""Added to values of int8 and to their zeros: packed ones are unsigned."""


class QuantizedLinear(PackedLinear, Protocol):
    """A linear layer with a quantized weight.

    Attributes:
        name: Name of the operator, for logs.
        nbytes: Bytes of the packed weight.
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
        self.out_features = weight.rows
        self.in_features = weight.columns
        self.nbytes = weight.nbytes
        self._weight = weight
        self._activations = activations
        self._bias = None if bias is None else bias.detach().float()

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
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


class QuantizedShape(ctypes.Structure):
    """The C structure ``QuantizedShape`` of ``csrc/operators.h``."""

    _fields_: ClassVar[list[Any]] = [
        *((name, ctypes.c_int64) for name in ("in_features", "out_features", "group")),
        *((name, ctypes.c_int32) for name in ("form", "narrow", "own_zeros", "zero", "gated", "unused")),
    ]


class PackedWeights:
    """Weights of one shape and form, packed one behind the other.

    Scales and zeros are stored in 16 bits where that holds all of them exactly. A zero that all groups share is stored
    once.

    Args:
        library: The C++ operators.
        weights: One or more weights.
        gated: Whether each weight is the gates' rows and behind them as many rows of ups, whose products are
            multiplied with each other.

    Attributes:
        shape: Shape and form of each weight.
        packed: uint8, the packed bytes of all weights.
        each_bytes: Bytes of one packed weight.
        table: float32 [16], or ``None``.
        order: int32 [columns], or ``None``; see :attr:`.IntegerWeight.order`.

    Raises:
        ValueError: The weights differ in shape, group, table or order.
    """

    def __init__(self, library: CpuLibrary, weights: Sequence[QuantizedWeight], *, gated: bool = False) -> None:
        first = weights[0]
        numbers = [_scales_and_zeros(each) for each in weights]
        zero = _common_zero(first, [zeros for _, zeros in numbers])
        narrow = _narrow_code([scales for scales, _ in numbers], [zeros for _, zeros in numbers if zero is None])
        self.shape = QuantizedShape(
            in_features=first.columns,
            out_features=first.rows,
            group=first.group,
            form=first.FORM,
            narrow=narrow,
            own_zeros=zero is None,
            zero=zero or 0,
            gated=gated,
        )
        # Copies: as parts of a weight's memory they would keep all of it.
        self.table = first.table.clone() if isinstance(first, TableWeight) else None
        order = first.order if isinstance(first, IntegerWeight) else None
        self.order = None if order is None else order.clone()
        shape = ctypes.byref(self.shape)
        self.each_bytes = int(library.quantized.packed_size(shape))
        self.packed = library.weights.empty(self.each_bytes * len(weights), torch.uint8)
        for index, (weight, (scales, zeros)) in enumerate(zip(weights, numbers, strict=True)):
            if not self._fits(weight):
                raise ValueError("weights that are packed together differ in shape, group, table or order")
            values = weight.values.view(torch.uint8).contiguous()
            target = self.packed.data_ptr() + index * self.each_bytes
            zeros_address = zeros.data_ptr() if zero is None and zeros is not None else None
            library.quantized.pack(shape, values.data_ptr(), scales.data_ptr(), zeros_address, target)

    def _fits(self, weight: QuantizedWeight) -> bool:
        shape = (weight.columns, weight.rows, weight.group, weight.FORM)
        if shape != (self.shape.in_features, self.shape.out_features, self.shape.group, self.shape.form):
            return False
        if isinstance(weight, TableWeight):
            return self.table is not None and torch.equal(weight.table, self.table)
        return not isinstance(weight, IntegerWeight) or same_order(weight.order, self.order)


class AnyDtypeCall(RowsCall):
    """Base of the C structures of operators whose inputs and results are of any of the float types."""

    def set_tensors(self, x: torch.Tensor, out: torch.Tensor, residual: torch.Tensor | None) -> None:
        super().set_tensors(x, out, residual)
        self.dtype = DTYPE_CODES[x.dtype]


class QuantizedCall(AnyDtypeCall):
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
        self.out_features = weight.rows
        self.in_features = weight.columns
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
        if self._rounds_ahead is not None:
            rounded = self._rounds_ahead.round(x)
            return self._multiply(rounded, None if residual is None else residual.float()).to(x.dtype)
        return self._multiply(x, residual)

    def _multiply(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        out = x.new_empty(x.shape[0], self.out_features)
        call = self._call
        call.set_tensors(x, out, residual)
        call.rows = len(x)
        self._run(ctypes.byref(call))
        return out

    def bind(self, x: torch.Tensor, out: torch.Tensor, residual: torch.Tensor | None = None) -> BoundCall | None:
        """See :class:`~baton_kernels.cpu.library.BindableOperator`; inputs that torch rounds cannot be bound."""
        if self._rounds_ahead is not None:
            return None
        return self._call.bind(self._run, x, out, residual, self._weights, self._bias)


def _scales_and_zeros(weight: QuantizedWeight) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the scales and zeros of every row and group, contiguous; zeros as packed values have them."""
    if isinstance(weight, Fp8Weight):
        return weight.row_scales.contiguous(), None
    zeros = weight.zeros if isinstance(weight, IntegerWeight) else None
    if isinstance(weight, Int8Weight) and zeros is not None:
        zeros = zeros + _INT8_BASE
    return weight.scales.contiguous(), None if zeros is None else zeros.contiguous()


def _common_zero(first: QuantizedWeight, zeros: list[torch.Tensor | None]) -> int | None:
    """Return the integer that all zeros are equal to, or ``None``."""
    present = [each for each in zeros if each is not None]
    if not present:
        return _INT8_BASE if isinstance(first, Int8Weight) else 0
    value = float(present[0].flatten()[0])
    same = len(present) == len(zeros) and all(bool((each == value).all()) for each in present)
    return int(value) if same and value.is_integer() and abs(value) <= 2 * _INT8_BASE else None


def _narrow_code(scales: list[torch.Tensor], zeros: list[torch.Tensor | None]) -> int:
    """Return the code of the narrowest type that holds all numbers exactly."""
    numbers = [*scales, *(each for each in zeros if each is not None)]
    for dtype in _NARROW:
        if all(torch.equal(each.to(dtype).float(), each) for each in numbers):
            return DTYPE_CODES[dtype]
    return DTYPE_CODES[torch.float32]


def multiplies_integers(weight: QuantizedWeight, activations: ActivationScheme) -> bool:
    """Whether the C++ operators round the inputs to int8 and multiply them with the weight's integers."""
    rounds = activations.type is ActivationType.INT8 and not activations.group
    return rounds and isinstance(weight, IntegerWeight)
