"""Quantized weights: the forms that every format of checkpoints becomes, and what they mean.

A form's ``dequantize`` is its definition; operators (:mod:`baton_kernels.quantized_linear`) compute the same from the
packed values. A weight is [rows, columns], rows being output features. Scales and zeros belong to a group of
consecutive columns of one row (``scales`` [rows, columns // group]); a group as long as the row is a scale per channel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from baton_kernels.quantized_checks import check_group, check_order, check_tensor, cut_group, same_order


@dataclass(frozen=True, slots=True, eq=False)
class Int8Weight:
    """``scale * (value - zero)``.

    Attributes:
        values: int8 [rows, columns].
        scales: float32 [rows, columns // group].
        zeros: float32, shaped as ``scales``, or ``None``: 0.
        order: int32 [columns], or ``None``: column i of ``values`` multiplies column ``order[i]`` of the input, which
            is how groups of GPTQ's act order become consecutive.

    Raises:
        ValueError: Shapes or dtypes that do not fit each other, or an ``order`` that is no permutation.
    """

    values: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    order: torch.Tensor | None = None

    def __post_init__(self) -> None:
        check_tensor("values", self.values, torch.int8)
        check_group(self.values, self.columns, self.scales, self.zeros)
        check_order(self.order, self.columns)

    @property
    def rows(self) -> int:
        """Output features."""
        return self.values.shape[0]

    @property
    def columns(self) -> int:
        """Input features."""
        return self.values.shape[1]

    @property
    def group(self) -> int:
        """Columns that share a scale."""
        return self.columns // self.scales.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return _nbytes(self.values, self.scales, self.zeros, self.order)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the weight [rows, columns], computed in float32."""
        return _scaled(self.values, self.scales, self.zeros, self.order).to(dtype)

    def cut_rows(self, start: int, stop: int) -> Int8Weight:
        """Return rows ``start`` to ``stop``, as views."""
        zeros = None if self.zeros is None else self.zeros[start:stop]
        return replace(self, values=self.values[start:stop], scales=self.scales[start:stop], zeros=zeros)

    def cut_columns(self, start: int, stop: int) -> Int8Weight:
        """Return columns ``start`` to ``stop``, as views.

        Raises:
            ValueError: A group would be cut, or columns have an order of their own.
        """
        groups = cut_group(start, stop, self.columns, self.group, self.order)
        zeros = None if self.zeros is None else self.zeros[:, groups]
        return replace(self, values=self.values[:, start:stop], scales=self.scales[:, groups], zeros=zeros)


@dataclass(frozen=True, slots=True, eq=False)
class Int4Weight:
    """``scale * (value - zero)`` with values 0 to 15; symmetric formats have a zero of 8.

    Attributes:
        values: uint8 [rows, columns // 2], the even column in the low four bits.
        scales: float32 [rows, columns // group].
        zeros: float32, shaped as ``scales``.
        order: As :attr:`Int8Weight.order`.

    Raises:
        ValueError: As :class:`Int8Weight`.
    """

    values: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    order: torch.Tensor | None = None

    def __post_init__(self) -> None:
        check_tensor("values", self.values, torch.uint8)
        check_group(self.values, self.columns, self.scales, self.zeros)
        check_order(self.order, self.columns)

    @property
    def rows(self) -> int:
        """Output features."""
        return self.values.shape[0]

    @property
    def columns(self) -> int:
        """Input features."""
        return self.values.shape[1] * 2

    @property
    def group(self) -> int:
        """Columns that share a scale."""
        return self.columns // self.scales.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return _nbytes(self.values, self.scales, self.zeros, self.order)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the weight [rows, columns], computed in float32."""
        return _scaled(unpack_nibbles(self.values), self.scales, self.zeros, self.order).to(dtype)

    def cut_rows(self, start: int, stop: int) -> Int4Weight:
        """Return rows ``start`` to ``stop``, as views."""
        cut = slice(start, stop)
        return replace(self, values=self.values[cut], scales=self.scales[cut], zeros=self.zeros[cut])

    def cut_columns(self, start: int, stop: int) -> Int4Weight:
        """Return columns ``start`` to ``stop``, as views.

        Raises:
            ValueError: A group or a byte would be cut, or columns have an order of their own.
        """
        groups = cut_group(start, stop, self.columns, self.group, self.order, step=2)
        values = self.values[:, start // 2 : stop // 2]
        return replace(self, values=values, scales=self.scales[:, groups], zeros=self.zeros[:, groups])


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Weight:
    """``scale * value``.

    Attributes:
        values: float8_e4m3fn [rows, columns].
        scales: float32 [ceil(rows / block[0]), ceil(columns / block[1])].
        block: Rows and columns that share a scale: (128, 128) of DeepSeek, (1, columns) per channel, (rows, columns)
            per tensor.

    Raises:
        ValueError: Shapes or dtypes that do not fit each other.
    """

    values: torch.Tensor
    scales: torch.Tensor
    block: tuple[int, int]

    def __post_init__(self) -> None:
        check_tensor("values", self.values, torch.float8_e4m3fn)
        check_tensor("scales", self.scales, torch.float32)
        if min(self.block) < 1:
            raise ValueError(f"block {self.block} must be of 1 or more")
        blocks = tuple(-(-size // each) for size, each in zip(self.values.shape, self.block, strict=True))
        if self.scales.shape != blocks:
            raise ValueError(f"scales are {list(self.scales.shape)}, blocks of {self.block} make {list(blocks)}")

    @property
    def rows(self) -> int:
        """Output features."""
        return self.values.shape[0]

    @property
    def columns(self) -> int:
        """Input features."""
        return self.values.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return _nbytes(self.values, self.scales)

    @property
    def row_scales(self) -> torch.Tensor:
        """The scales of every row, float32 [rows, ceil(columns / block[1])]."""
        if self.block[0] == 1:
            return self.scales
        return self.scales.repeat_interleave(self.block[0], 0)[: self.rows]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the weight [rows, columns], computed in float32."""
        scales = self.row_scales
        if scales.shape[1] > 1:
            scales = scales.repeat_interleave(self.block[1], 1)[:, : self.columns]
        return self.values.float().mul_(scales).to(dtype)

    def cut_rows(self, start: int, stop: int) -> Fp8Weight:
        """Return rows ``start`` to ``stop``; where a block would be cut each row gets its scale."""
        height, values = self.block[0], self.values[start:stop]
        if start % height == 0 and (stop % height == 0 or stop == self.rows):
            return replace(self, values=values, scales=self.scales[start // height : -(-stop // height)])
        return Fp8Weight(values, self.row_scales[start:stop], (1, self.block[1]))

    def cut_columns(self, start: int, stop: int) -> Fp8Weight:
        """Return columns ``start`` to ``stop``, as views.

        Raises:
            ValueError: A block would be cut.
        """
        blocks = cut_group(start, stop, self.columns, min(self.block[1], self.columns), None)
        return replace(self, values=self.values[:, start:stop], scales=self.scales[:, blocks])


@dataclass(frozen=True, slots=True, eq=False)
class TableWeight:
    """``scale * table[value]``: NF4, FP4, MXFP4 and NVFP4, its global scale being part of its scales.

    Attributes:
        values: uint8 [rows, columns // 2], the even column in the low four bits.
        table: float32 [16].
        scales: float32 [rows, columns // group].

    Raises:
        ValueError: Shapes or dtypes that do not fit each other.
    """

    values: torch.Tensor
    table: torch.Tensor
    scales: torch.Tensor

    def __post_init__(self) -> None:
        check_tensor("values", self.values, torch.uint8)
        check_group(self.values, self.columns, self.scales, None)
        if self.table.dtype != torch.float32 or self.table.shape != (16,):
            raise ValueError(f"table must be float32 [16], got {self.table.dtype} {list(self.table.shape)}")

    @property
    def rows(self) -> int:
        """Output features."""
        return self.values.shape[0]

    @property
    def columns(self) -> int:
        """Input features."""
        return self.values.shape[1] * 2

    @property
    def group(self) -> int:
        """Columns that share a scale."""
        return self.columns // self.scales.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return _nbytes(self.values, self.table, self.scales)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the weight [rows, columns], computed in float32."""
        values = unpack_nibbles(self.values)
        # Other ways to look up make indices of 64 bits.
        floats = self.table.index_select(0, values.flatten().int()).view(values.shape)
        return _scaled(floats, self.scales, None, None).to(dtype)

    def cut_rows(self, start: int, stop: int) -> TableWeight:
        """Return rows ``start`` to ``stop``, as views."""
        return replace(self, values=self.values[start:stop], scales=self.scales[start:stop])

    def cut_columns(self, start: int, stop: int) -> TableWeight:
        """Return columns ``start`` to ``stop``, as views.

        Raises:
            ValueError: A group or a byte would be cut.
        """
        groups = cut_group(start, stop, self.columns, self.group, None, step=2)
        return replace(self, values=self.values[:, start // 2 : stop // 2], scales=self.scales[:, groups])


QuantizedWeight = Int8Weight | Int4Weight | Fp8Weight | TableWeight


def join(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Return the weights below each other: q, k and v, or gate and up, as one.

    Raises:
        ValueError: They are of different forms, columns, groups, tables or orders.
    """
    first = weights[0]
    if any(type(each) is not type(first) or each.columns != first.columns for each in weights):
        raise ValueError("weights of different forms or columns cannot be joined")
    if isinstance(first, Fp8Weight):
        return _join_fp8([each for each in weights if isinstance(each, Fp8Weight)])
    groups = [each for each in weights if not isinstance(each, Fp8Weight)]
    if any(each.group != first.group for each in groups):
        raise ValueError("weights of different groups cannot be joined")
    values, scales = torch.cat([each.values for each in groups]), torch.cat([each.scales for each in groups])
    if isinstance(first, TableWeight):
        if any(isinstance(each, TableWeight) and not torch.equal(each.table, first.table) for each in groups):
            raise ValueError("weights of different tables cannot be joined")
        return TableWeight(values, first.table, scales)
    integers = [each for each in groups if isinstance(each, Int8Weight | Int4Weight)]
    if not all(same_order(first.order, each.order) for each in integers):
        raise ValueError("weights of different orders of columns cannot be joined")
    if isinstance(first, Int8Weight) and all(each.zeros is None for each in integers):
        return Int8Weight(values, scales, None, first.order)
    zeros = torch.cat([torch.zeros_like(each.scales) if each.zeros is None else each.zeros for each in integers])
    return type(first)(values, scales, zeros, first.order)


def pack_nibbles(values: torch.Tensor) -> torch.Tensor:
    """Pack values of 0 to 15 [..., columns] as uint8 [..., columns // 2], the even column in the low four bits."""
    values = values.to(torch.uint8)
    return values[..., ::2] | (values[..., 1::2] << 4)


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Return uint8 [..., 2 * n] of uint8 [..., n]; the opposite of :func:`pack_nibbles`."""
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


def _join_fp8(weights: list[Fp8Weight]) -> Fp8Weight:
    heights, widths = ({min(each.block[side], each.values.shape[side]) for each in weights} for side in (0, 1))
    if len(widths) > 1:
        raise ValueError("weights of different blocks cannot be joined")
    height, values = min(heights), torch.cat([each.values for each in weights])
    if len(heights) == 1 and all(each.rows % height == 0 for each in weights):
        return Fp8Weight(values, torch.cat([each.scales for each in weights]), (height, min(widths)))
    return Fp8Weight(values, torch.cat([each.row_scales for each in weights]), (1, min(widths)))


def _scaled(
    values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, order: torch.Tensor | None
) -> torch.Tensor:
    grouped = values.float().view(*scales.shape, -1)  # a copy, which is changed in place
    if zeros is not None:
        grouped -= zeros[..., None]
    out = grouped.mul_(scales[..., None]).view(values.shape)
    if order is not None:
        out = torch.empty_like(out).index_copy_(1, order.long(), out)
    return out


def _nbytes(*tensors: torch.Tensor | None) -> int:
    return sum(each.numel() * each.element_size() for each in tensors if each is not None)
