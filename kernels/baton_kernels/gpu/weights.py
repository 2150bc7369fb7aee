"""Quantized weights as Triton's kernels read them, and the product of rows with them that these kernels share.

Weights stay in their form's bytes (:mod:`baton_kernels.quantization`), those of several experts in one tensor. Where
all columns of a tile share a scale, its integers are multiplied first and scaled afterwards, so nothing is rounded in
between; a zero z is then subtracted as ``scale * z * sum(x)``.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from baton_kernels.gpu import PRECISION, converts_fp8
from baton_kernels.gpu.tuning import Tuning
from baton_kernels.quantization import (
    ActivationScheme,
    ActivationType,
    Form,
    Fp8Weight,
    IntegerWeight,
    QuantizedWeight,
    TableWeight,
)

E2M1 = tl.constexpr(5)
"""Form, for kernels alone, of the table of e2m1 numbers, which are computed."""
_E2M1_TABLE = torch.tensor([sign * size for sign in (1.0, -1.0) for size in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)])
INPUT_FACTOR = 2.0**-7
"""Factor of rounded inputs: sums of values up to 448 would exceed the range of float16."""


class Scales(enum.IntEnum):
    """The scales of a tile of ``tile_k`` columns."""

    ROW = 0
    """One per row, for all columns of the weight."""
    TILE = 1
    """One per row, for all columns of the tile."""
    SPREAD = 2
    """Several per row, each for a power of two of columns."""
    ANY = 3
    """One per value, which is looked up."""


@dataclass(frozen=True, slots=True)
class DeviceWeights:
    """The weights [rows, columns] of E experts, or of one linear layer (E = 1).

    Attributes:
        form: Form of the weights.
        rows: Number of rows (output features).
        columns: Number of columns (input features).
        group: Number of columns that share a scale.
        height: Number of rows that share a scale.
        values: [E, rows, bytes of a row], contiguous; fp8 is uint8 where Triton does not support float8_e4m3fn.
        scales: float32 [E, ceil(rows / height), groups].
        zeros: float32, shaped as ``scales``, or ``None``.
        table: float32 [E, 16], or ``None``: none is read.
        order: int32 [E, columns], or ``None``.
    """

    form: Form
    rows: int
    columns: int
    group: int
    height: int
    values: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    table: torch.Tensor | None = None
    order: torch.Tensor | None = None

    @property
    def kernel_form(self) -> int:
        """The form as kernels number it: a table that is not read is that of e2m1 numbers."""
        return int(E2M1.value) if self.form is Form.TABLE and self.table is None else int(self.form)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        tensors = (self.values, self.scales, self.zeros, self.table, self.order)
        return sum(each.numel() * each.element_size() for each in tensors if each is not None)

    def scales_of(self, tile_k: int) -> tuple[Scales, int]:
        """Return the scales of a tile, and ``tile_k``, reduced if all columns of a smaller tile share a scale."""
        groups = self.scales.shape[2]
        if groups == 1:
            return Scales.ROW, tile_k
        if 64 <= self.group < tile_k and self.group & (self.group - 1) == 0:
            tile_k = self.group
        if self.group % tile_k == 0:
            return Scales.TILE, tile_k
        power = self.group & (self.group - 1) == 0 and self.group > 1
        return (Scales.SPREAD if power and tile_k % self.group == 0 else Scales.ANY), tile_k

    def fitted(self, chosen: Tuning) -> Tuning:
        """Return a configuration; where scales are looked up, no more loads in flight than shared memory has room for.

        Scales and zeros of such a tile are as many as its values, in float32.
        """
        looked_up = self.scales_of(chosen.tile_k)[0] is Scales.ANY
        return dataclasses.replace(chosen, stages=min(chosen.stages, 2)) if looked_up else chosen

    def arguments(self) -> tuple[torch.Tensor | int, ...]:
        """Return the kernels' arguments for a weight: five tensors, and :meth:`sizes`."""
        optional = (self.values if each is None else each for each in (self.zeros, self.table, self.order))
        return (self.values, self.scales, *optional, *self.sizes())

    def sizes(self) -> tuple[int, int, int, int]:
        """Return bytes of a row, groups, ``group`` and ``height``."""
        return self.values.shape[2], self.scales.shape[2], self.group, self.height

    def constants(self, tile_k: int) -> dict[str, int | bool]:
        """Return the kernels' constants for a weight."""
        scales, tile_k = self.scales_of(tile_k)
        return {
            "FORM": self.kernel_form,
            "SCALES": int(scales),
            "ZEROS": self.zeros is not None,
            "ORDER": self.order is not None,
            "GROUP": self.group if scales is Scales.SPREAD else 1,
            "TILE_K": tile_k,
        }


def device_weights(weights: Sequence[QuantizedWeight]) -> DeviceWeights:
    """Stack weights of one form and shape.

    Raises:
        ValueError: The weights differ in form, shape or group, or only some have an order of columns.
    """
    first = weights[0]
    shape = _shape(first)
    if any(_shape(each) != shape for each in weights):
        raise ValueError("experts differ in form, shape, group or order of columns")
    zeros: torch.Tensor | None = None
    table: torch.Tensor | None = None
    order: torch.Tensor | None = None
    integers = [each for each in weights if isinstance(each, IntegerWeight)]
    if any(each.zeros is not None for each in integers):
        zeros = _stack([torch.zeros_like(each.scales) if each.zeros is None else each.zeros for each in integers])
    if isinstance(first, IntegerWeight) and first.order is not None:
        order = _stack([each.order for each in integers if each.order is not None])
    if isinstance(first, TableWeight):
        tables = [each.table for each in weights if isinstance(each, TableWeight)]
        if not all(torch.equal(each.cpu(), _E2M1_TABLE) for each in tables):
            table = _stack(tables)
    values = _stack([each.values for each in weights])
    if isinstance(first, Fp8Weight) and not converts_fp8(values.device):
        values = values.view(torch.uint8)
    form, rows, columns, group, height = shape[:5]
    return DeviceWeights(
        form, rows, columns, group, height, values, _stack([each.scales for each in weights]), zeros, table, order
    )


def rounded_inputs(x: torch.Tensor, activations: ActivationScheme) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Round inputs x [tokens, columns] for a product.

    Returns:
        The inputs of the product, and factors of the product's rows, float32 [tokens], or ``None``. Where a row has one
        scale, the inputs are the values of 8 bits, which are exact in x's dtype; with scales of groups they are the
        rounded inputs in float32, without factors.
    """
    if activations.type is ActivationType.NONE:
        return x, None
    if activations.group not in (0, x.shape[1]):
        return activations.round(x), None
    values, scales = activations.quantize(x)
    return values.to(x.dtype) * INPUT_FACTOR, scales[:, 0] / INPUT_FACTOR


def _shape(weight: QuantizedWeight) -> tuple[Form, int, int, int, int, bool]:
    ordered = isinstance(weight, IntegerWeight) and weight.order is not None
    height = min(weight.block[0], weight.rows) if isinstance(weight, Fp8Weight) else 1
    return weight.FORM, weight.rows, weight.columns, weight.group, height, ordered


def _stack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return one tensor of all; a single tensor is not copied."""
    return tensors[0].contiguous()[None] if len(tensors) == 1 else torch.stack(list(tensors))


@triton.jit
def _from_fp8(bits):
    """Return float16 of the bits of e4m3 numbers, uint8, exactly: its exponent has a bit more, and bias 15."""
    wide = bits.to(tl.uint16)
    return (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0


@triton.jit
def _from_e2m1(nibbles):
    """Return float16 of the bits of e2m1 numbers, uint8 below 16, exactly: its exponent has three bits more."""
    wide = nibbles.to(tl.uint16)
    return (((wide & 8) << 12) | ((wide & 7) << 9)).to(tl.float16, bitcast=True) * 16384.0


@triton.jit
def _looked_up(table, nibbles):
    """Return the table's float32 numbers of nibbles, uint8 [K, N], from registers."""
    found = tl.full(nibbles.shape, 0.0, tl.float32)
    for value in tl.static_range(16):
        found = tl.where(nibbles == value, tl.load(table + value), found)
    return found


@triton.jit
def _scaled_product(
    acc, sums, a, raw, k, at, from_scales, from_zeros, there, stop, group,
    SCALES: tl.constexpr, ZEROS: tl.constexpr, EACH: tl.constexpr, PARTS: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """Add the product of ``a`` [TILE_M, columns] with values ``raw`` [columns, TILE_N]; return ``acc`` and ``sums``.

    ``k`` are the columns' numbers. With ``SCALES`` 2, ``EACH`` consecutive values of a row share a scale, and there are
    ``PARTS`` scales.
    """
    if SCALES <= 1:
        part = tl.dot(a, raw.to(a.dtype), input_precision=PRECISION)
        if ZEROS:
            sum_a = tl.sum(a.to(tl.float32), axis=1)
        if SCALES == 1:
            number = at // group
            if ZEROS:
                part -= sum_a[:, None] * tl.load(from_zeros + number, mask=there, other=0.0)[None, :]
            acc += part * tl.load(from_scales + number, mask=there, other=0.0)[None, :]
        else:
            acc += part
            if ZEROS:
                sums += sum_a
    else:
        w = raw.to(tl.float32)
        if SCALES == 2:
            number = at // group + tl.arange(0, PARTS)
            known = there[None, :] & (number[:, None] * group < stop)
            if ZEROS:
                zero = tl.load(from_zeros[None, :] + number[:, None], mask=known, other=0.0)
                w -= tl.reshape(tl.broadcast_to(zero[:, None, :], [PARTS, EACH, TILE_N]), [PARTS * EACH, TILE_N])
            scale = tl.load(from_scales[None, :] + number[:, None], mask=known, other=0.0)
            w *= tl.reshape(tl.broadcast_to(scale[:, None, :], [PARTS, EACH, TILE_N]), [PARTS * EACH, TILE_N])
        else:
            number = k // group
            known = there[None, :] & (k[:, None] < stop)
            if ZEROS:
                w -= tl.load(from_zeros[None, :] + number[:, None], mask=known, other=0.0)
            w *= tl.load(from_scales[None, :] + number[:, None], mask=known, other=0.0)
        acc += tl.dot(a, w.to(a.dtype), input_precision=PRECISION)
    return acc, sums


@triton.jit
def _inputs(x_rows, order, k, live, stop, ORDER: tl.constexpr):
    """Load the columns ``k`` of rows of x, or those that ``order`` names."""
    column = k
    if ORDER:
        column = tl.load(order + k, mask=k < stop, other=0)
    return tl.load(x_rows[:, None] + column[None, :], mask=live[:, None] & (k[None, :] < stop), other=0.0)


@triton.jit
def product(
    x_rows, live, values, scales, zeros, table, order, row_bytes, groups, group, height, n, there, first, stop,
    FORM: tl.constexpr, SCALES: tl.constexpr, ZEROS: tl.constexpr, ORDER: tl.constexpr, GROUP: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """Return ``x W^T`` [TILE_M, TILE_N] in float32, over columns ``first``, a multiple of TILE_K, to ``stop``.

    ``x_rows`` [TILE_M] are pointers to rows of x, ``live`` whether they exist; ``values`` to ``height`` are of one
    expert, as in :meth:`DeviceWeights.arguments`; ``n`` [TILE_N] are rows of the weight, ``there`` whether they exist.
    """
    acc = tl.zeros([TILE_M, TILE_N], tl.float32)
    sums = tl.zeros([TILE_M], tl.float32)
    from_values = values + n.to(tl.int64) * row_bytes
    from_scales = scales + (n // height).to(tl.int64) * groups
    from_zeros = zeros
    if ZEROS:
        from_zeros = zeros + (n // height).to(tl.int64) * groups
    PARTS: tl.constexpr = TILE_K // GROUP
    for at in range(first, stop, TILE_K):
        k = at + tl.arange(0, TILE_K)
        a = _inputs(x_rows, order, k, live, stop, ORDER)
        if FORM % 2 == 0:
            inside = there[None, :] & (k[:, None] < stop)
            raw = tl.load(from_values[None, :] + k[:, None], mask=inside, other=0.0)
            if FORM == 2 and values.dtype.element_ty == tl.uint8:
                raw = _from_fp8(raw)
            acc, sums = _scaled_product(
                acc, sums, a, raw, k, at, from_scales, from_zeros, there, stop, group,
                SCALES, ZEROS, GROUP, PARTS, TILE_N,
            )  # fmt: skip
        else:
            byte = at // 2 + tl.arange(0, TILE_K // 2)
            # Of the byte's number alone: a load of several bytes is one where the mask is seen to be the same for them.
            inside = there[None, :] & (byte[:, None] < stop // 2)
            pair = tl.load(from_values[None, :] + byte[:, None], mask=inside, other=0)
            even, odd = tl.split(tl.reshape(a, [TILE_M, TILE_K // 2, 2]))
            for half in tl.static_range(2):
                raw = (pair >> (4 * half)) & 15
                if FORM == 3:
                    raw = _looked_up(table, raw)
                if FORM == E2M1:
                    raw = _from_e2m1(raw)
                acc, sums = _scaled_product(
                    acc, sums, odd if half else even, raw, byte * 2 + half, at, from_scales, from_zeros, there, stop,
                    group, SCALES, ZEROS, GROUP // 2, PARTS, TILE_N,
                )  # fmt: skip
    if SCALES == 0:
        if ZEROS:
            acc -= sums[:, None] * tl.load(from_zeros, mask=there, other=0.0)[None, :]
        acc *= tl.load(from_scales, mask=there, other=0.0)[None, :]
    return acc


@triton.jit
def dequantize_kernel(
    values, scales, zeros, table, order, row_bytes, groups, group, height, out, rows, columns, first_row,
    FORM: tl.constexpr, ZEROS: tl.constexpr, ORDER: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """Write the weight's rows from ``first_row`` on to ``out`` [rows, columns].

    Grid: (ceil(rows / TILE_N), ceil(columns / TILE_K)).
    """
    n = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    k = tl.program_id(1) * TILE_K + tl.arange(0, TILE_K)
    source = (first_row + n).to(tl.int64)
    inside = (n[:, None] < rows) & (k[None, :] < columns)
    if FORM % 2 == 0:
        raw = tl.load(values + source[:, None] * row_bytes + k[None, :], mask=inside, other=0.0)
        if FORM == 2 and values.dtype.element_ty == tl.uint8:
            raw = _from_fp8(raw)
    else:
        byte = tl.program_id(1) * (TILE_K // 2) + tl.arange(0, TILE_K // 2)
        there = (n[:, None] < rows) & (byte[None, :] < columns // 2)
        pair = tl.load(values + source[:, None] * row_bytes + byte[None, :], mask=there, other=0)
        raw = tl.interleave(pair & 15, pair >> 4)
        if FORM == 3:
            raw = _looked_up(table, raw)
        if FORM == E2M1:
            raw = _from_e2m1(raw)
    raw = raw.to(tl.float32)
    number = (source // height)[:, None] * groups + k[None, :] // group
    if ZEROS:
        raw -= tl.load(zeros + number, mask=inside, other=0.0)
    raw *= tl.load(scales + number, mask=inside, other=0.0)
    column = k
    if ORDER:
        column = tl.load(order + k, mask=k < columns, other=0)
    tl.store(out + n.to(tl.int64)[:, None] * columns + column[None, :], raw.to(out.dtype.element_ty), mask=inside)
