"""Quantized weights in the order in which the C++ operators read them; see ``csrc/quantized/quantized.h``."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from baton_kernels.cpu.library import DTYPE_CODES, CpuLibrary
from baton_kernels.quantized_checks import same_order
from baton_kernels.quantized_weights import Fp8Weight, Int4Weight, Int8Weight, QuantizedWeight, TableWeight

_FORMS: dict[type[Any], int] = {Int8Weight: 0, Int4Weight: 1, Fp8Weight: 2, TableWeight: 3}
_NARROW = (torch.bfloat16, torch.float16)
_INT8_BASE = 128
"""What is added to values of int8 and their zeros: packed ones are unsigned."""


class QuantizedShape(ctypes.Structure):
    """The C structure of that name in ``csrc/operators.h``."""

    _fields_: ClassVar[list[Any]] = [
        *((name, ctypes.c_int64) for name in ("in_features", "out_features", "group")),
        *((name, ctypes.c_int32) for name in ("form", "narrow", "own_zeros", "zero", "gated", "unused")),
    ]


class PackedWeights:
    """Weights of one shape and form, packed one behind the other.

    Scales and zeros are stored in 16 bits where that holds all of them exactly, and one zero for all where they are
    the same.

    Args:
        library: The operators.
        weights: One or more.
        gated: Each has as many rows of gates as, behind them, rows of ups, which are multiplied with each other.

    Attributes:
        shape: Of each of them.
        packed: uint8, all of them.
        each_bytes: Bytes of one.
        table: float32 [16], or ``None``.
        order: int32 [columns], or ``None``; see :attr:`.Int8Weight.order`.

    Raises:
        ValueError: They differ in shape, group, table or order.
    """

    def __init__(self, library: CpuLibrary, weights: Sequence[QuantizedWeight], *, gated: bool = False) -> None:
        first = weights[0]
        numbers = [_numbers(each) for each in weights]
        zero = _common_zero(first, [zeros for _, zeros in numbers])
        narrow = _narrow_code([scales for scales, _ in numbers], [zeros for _, zeros in numbers if zero is None])
        self.shape = QuantizedShape(
            in_features=first.columns,
            out_features=first.rows,
            group=_group(first),
            form=_FORMS[type(first)],
            narrow=narrow,
            own_zeros=zero is None,
            zero=zero or 0,
            gated=gated,
        )
        # Copies: as parts of a weight's memory they would keep all of it.
        self.table = first.table.clone() if isinstance(first, TableWeight) else None
        order: torch.Tensor | None = getattr(first, "order", None)
        self.order = None if order is None else order.clone()
        at = ctypes.byref(self.shape)
        self.each_bytes = int(library.quantized.packed_size(at))
        self.packed = library.weights.empty(self.each_bytes * len(weights), torch.uint8)
        for index, (weight, (scales, zeros)) in enumerate(zip(weights, numbers, strict=True)):
            if not self._fits(weight):
                raise ValueError("weights that are packed together differ in shape, group, table or order")
            values = weight.values.view(torch.uint8).contiguous()
            to = self.packed.data_ptr() + index * self.each_bytes
            zeros_at = zeros.data_ptr() if zero is None and zeros is not None else None
            library.quantized.pack(at, values.data_ptr(), scales.data_ptr(), zeros_at, to)

    def _fits(self, weight: QuantizedWeight) -> bool:
        shape = (weight.columns, weight.rows, _group(weight), _FORMS[type(weight)])
        if shape != (self.shape.in_features, self.shape.out_features, self.shape.group, self.shape.form):
            return False
        if isinstance(weight, TableWeight):
            return self.table is not None and torch.equal(weight.table, self.table)
        return same_order(getattr(weight, "order", None), self.order)


def address(tensor: torch.Tensor | None) -> int | None:
    """Return where a tensor's elements are."""
    return None if tensor is None else tensor.data_ptr()


def _group(weight: QuantizedWeight) -> int:
    return min(weight.block[1], weight.columns) if isinstance(weight, Fp8Weight) else weight.group


def _numbers(weight: QuantizedWeight) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scales and zeros of every row and group, contiguous; zeros as packed values have them."""
    if isinstance(weight, Fp8Weight):
        return weight.row_scales.contiguous(), None
    if isinstance(weight, TableWeight):
        return weight.scales.contiguous(), None
    zeros = weight.zeros
    if isinstance(weight, Int8Weight) and zeros is not None:
        zeros = zeros + _INT8_BASE
    return weight.scales.contiguous(), None if zeros is None else zeros.contiguous()


def _common_zero(first: QuantizedWeight, zeros: list[torch.Tensor | None]) -> int | None:
    """The integer that all zeros are, or ``None``."""
    present = [each for each in zeros if each is not None]
    if not present:
        return _INT8_BASE if isinstance(first, Int8Weight) else 0
    value = float(present[0].flatten()[0])
    same = len(present) == len(zeros) and all(bool((each == value).all()) for each in present)
    return int(value) if same and value.is_integer() and abs(value) <= 2 * _INT8_BASE else None


def _narrow_code(scales: list[torch.Tensor], zeros: list[torch.Tensor | None]) -> int:
    """The type that holds all of them exactly, as the C interface numbers it."""
    numbers = [*scales, *(each for each in zeros if each is not None)]
    for dtype in _NARROW:
        if all(torch.equal(each.to(dtype).float(), each) for each in numbers):
            return DTYPE_CODES[dtype]
    return DTYPE_CODES[torch.float32]
