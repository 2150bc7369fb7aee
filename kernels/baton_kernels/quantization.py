"""Quantized weights and activations: the forms that every checkpoint format becomes, and what they mean.

A form's ``dequantize`` is its definition; operators (:mod:`baton_kernels.quantized_linear`) compute the same from the
packed values. A weight is [rows, columns], rows being output features. Scales and zeros belong to a group of
consecutive columns of one row (``scales`` [rows, columns // group]); a group as long as the row is a scale per channel.
The ``quantize_*`` functions round plain weights to these forms; :class:`ActivationScheme` says how a layer's inputs are
rounded before they are multiplied.
"""

from __future__ import annotations

import enum
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

import torch


class Form(enum.IntEnum):
    """The forms of weights, as operators number them."""

    INT8 = 0
    INT4 = 1
    FP8 = 2
    TABLE = 3


class ActivationType(enum.Enum):
    """Number type that inputs are rounded to."""

    NONE = "none"
    INT8 = "int8"
    FP8 = "fp8"


_LIMITS = {ActivationType.INT8: 127.0, ActivationType.FP8: 448.0}


@dataclass(frozen=True, slots=True)
class ActivationScheme:
    """How inputs are rounded: to int8, or to fp8 (e4m3), symmetric.

    Attributes:
        type: Number type that inputs are rounded to.
        scale: Static scale of all inputs, from the checkpoint; ``None``: dynamic, each token's largest magnitude
            becomes the type's largest value.
        group: Number of consecutive inputs that share a dynamic scale; 0: all inputs of a token.

    Raises:
        ValueError: A scale that is not positive and finite, or a scale or group that the type cannot have.
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
            The values, and float32 scales [tokens, groups], where groups is 1 or ``inputs // group``.
        """
        limit = _LIMITS[self.type]
        grouped = x.float().view(len(x), -1, self.group or x.shape[1])
        scales = torch.full(grouped.shape[:2], self.scale or 0.0, device=x.device)
        if self.scale is None:
            scales = grouped.abs().amax(-1) / limit
        inverse = torch.where(scales > 0, 1 / scales, 0.0)
        scaled = (grouped * inverse[..., None]).clamp(-limit, limit).view(x.shape)
        if self.type is ActivationType.INT8:
            return scaled.round().to(torch.int8), scales
        return scaled.to(torch.float8_e4m3fn), scales

    def round(self, x: torch.Tensor) -> torch.Tensor:
        """Return the float32 values that the rounded inputs x [tokens, inputs] stand for: the definition."""
        if self.type is ActivationType.NONE:
            return x.float()
        values, scales = self.quantize(x)
        return (values.float().view(*scales.shape, -1) * scales[..., None]).view(x.shape)


EXACT = ActivationScheme()
"""Inputs as they are."""
INT8_PER_TOKEN = ActivationScheme(ActivationType.INT8)
"""int8 with a scale per token."""


# The forms of weights


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight(ABC):
    """A quantized weight [rows, columns].

    Attributes:
        values: The stored values, one row per output feature, of the form's ``VALUE_DTYPE``.
        scales: float32 [rows, columns // group], unless the form says otherwise.

    Raises:
        ValueError: Shapes or dtypes that do not fit each other.
    """

    FORM: ClassVar[Form]
    VALUE_DTYPE: ClassVar[torch.dtype]
    VALUES_PER_ELEMENT: ClassVar[int] = 1
    """Values that share one element of ``values``: 2 where a byte holds two of 4 bits, the even column in the low
    bits."""

    values: torch.Tensor
    scales: torch.Tensor

    def __post_init__(self) -> None:
        _check_matrix("values", self.values, self.VALUE_DTYPE)
        _check_matrix("scales", self.scales, torch.float32)
        self._check_fields()

    @property
    def rows(self) -> int:
        """Number of output features."""
        return self.values.shape[0]

    @property
    def columns(self) -> int:
        """Number of input features."""
        return self.values.shape[1] * self.VALUES_PER_ELEMENT

    @property
    def group(self) -> int:
        """Number of consecutive columns that share a scale."""
        return self.columns // self.scales.shape[1]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors that the weight consists of, by the names of its fields."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors().values())

    @abstractmethod
    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the weight [rows, columns], computed in float32."""

    def cut_rows(self, start: int, stop: int) -> Self:
        """Return rows ``start`` to ``stop``, as views."""
        return self._cut(slice(start, stop), slice(None), slice(None))

    def every_other_row(self, first: int) -> Self:
        """Return the even rows (``first`` = 0) or the odd ones (1), as views."""
        return self._cut(slice(first, None, 2), slice(None), slice(None))

    def cut_columns(self, start: int, stop: int) -> Self:
        """Return columns ``start`` to ``stop``, as views.

        Raises:
            ValueError: A group, or values that share a byte, would be cut, or columns have an order of their own.
        """
        groups = self._groups_between(start, stop)
        each = self.VALUES_PER_ELEMENT
        return self._cut(slice(None), slice(start // each, stop // each), groups)

    def join(self, others: Sequence[Self]) -> Self:
        """Return this weight with others of its form and columns below it; see :func:`join_weights`."""
        return replace(self, **self._join_fields((self, *others)))

    def _check_fields(self) -> None:
        """Raise :class:`ValueError` unless the fields fit each other; dtypes of values and scales are checked."""
        rows, groups = self.scales.shape
        if rows != self.rows or not groups or self.columns % groups:
            raise ValueError(f"scales {list(self.scales.shape)} do not fit {self.rows} rows of {self.columns} columns")

    def _join_fields(self, parts: Sequence[Self]) -> dict[str, Any]:
        """Return the fields in which joined weights differ from the first of them."""
        if any(each.group != self.group for each in parts):
            raise ValueError("weights of different groups cannot be joined")
        return {name: torch.cat([getattr(each, name) for each in parts]) for name in ("values", "scales")}

    def _cut(self, rows: slice, elements: slice, groups: slice) -> Self:
        """Return some rows, elements of ``values`` in each, and the groups that these belong to."""
        return replace(self, values=self.values[rows, elements], scales=self.scales[rows, groups])

    def _groups_between(self, start: int, stop: int) -> slice:
        """Return the groups of columns ``start`` to ``stop``; a group of all columns goes with every part."""
        if (start, stop) == (0, self.columns):
            return slice(None)
        each = self.VALUES_PER_ELEMENT
        group = self.group
        if start % each or stop % each:
            raise ValueError(f"columns {start} to {stop} cut a byte of {each} values")
        if group == self.columns:
            return slice(None)
        if start % group or (stop % group and stop != self.columns):
            raise ValueError(f"columns {start} to {stop} cut a group of {group}")
        return slice(start // group, -(-stop // group))


@dataclass(frozen=True, slots=True, eq=False)
class IntegerWeight(QuantizedWeight):
    """``scale * (value - zero)``.

    Attributes:
        zeros: float32, shaped as ``scales``, or ``None``: 0.
        order: int32 [columns], or ``None``: column i of ``values`` multiplies column ``order[i]`` of the input. So
            groups of GPTQ's act order become consecutive.

    Raises:
        ValueError: As :class:`QuantizedWeight`, or an ``order`` that is no permutation.
    """

    zeros: torch.Tensor | None = None
    order: torch.Tensor | None = None

    def _check_fields(self) -> None:
        QuantizedWeight._check_fields(self)  # super() does not work in dataclasses with slots
        if self.zeros is not None:
            _check_matrix("zeros", self.zeros, torch.float32)
            if self.zeros.shape != self.scales.shape:
                raise ValueError(f"zeros are {list(self.zeros.shape)}, scales {list(self.scales.shape)}")
        if self.order is not None:
            _check_order(self.order, self.columns)

    @abstractmethod
    def unpack(self) -> torch.Tensor:
        """Return the integers [rows, columns], one in each element."""

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        weight = _scale_groups(self.unpack(), self.scales, self.zeros)
        if self.order is not None:
            weight = torch.empty_like(weight).index_copy_(1, self.order.long(), weight)
        return weight.to(dtype)

    def _join_fields(self, parts: Sequence[Self]) -> dict[str, Any]:
        joined = QuantizedWeight._join_fields(self, parts)
        if not all(same_order(self.order, each.order) for each in parts):
            raise ValueError("weights of different orders of columns cannot be joined")
        if any(each.zeros is not None for each in parts):
            zeros = [torch.zeros_like(each.scales) if each.zeros is None else each.zeros for each in parts]
            joined["zeros"] = torch.cat(zeros)
        return joined

    def _cut(self, rows: slice, elements: slice, groups: slice) -> Self:
        zeros = None if self.zeros is None else self.zeros[rows, groups]
        return replace(self, values=self.values[rows, elements], scales=self.scales[rows, groups], zeros=zeros)

    def _groups_between(self, start: int, stop: int) -> slice:
        if self.order is not None and (start, stop) != (0, self.columns):
            raise ValueError("columns with an order of their own (act order) cannot be cut")
        return QuantizedWeight._groups_between(self, start, stop)


@dataclass(frozen=True, slots=True, eq=False)
class Int8Weight(IntegerWeight):
    """``scale * (value - zero)`` with values -128 to 127, int8 [rows, columns]."""

    FORM: ClassVar[Form] = Form.INT8
    VALUE_DTYPE: ClassVar[torch.dtype] = torch.int8

    def unpack(self) -> torch.Tensor:
        return self.values


@dataclass(frozen=True, slots=True, eq=False)
class Int4Weight(IntegerWeight):
    """``scale * (value - zero)`` with values 0 to 15, uint8 [rows, columns // 2]; symmetric formats have a zero of 8.

    Attributes:
        zeros: float32, shaped as ``scales``.
    """

    FORM: ClassVar[Form] = Form.INT4
    VALUE_DTYPE: ClassVar[torch.dtype] = torch.uint8
    VALUES_PER_ELEMENT: ClassVar[int] = 2

    zeros: torch.Tensor

    def unpack(self) -> torch.Tensor:
        return unpack_nibbles(self.values)


@dataclass(frozen=True, slots=True, eq=False)
class TableWeight(QuantizedWeight):
    """``scale * table[value]``, uint8 [rows, columns // 2]: NF4, FP4, MXFP4 and NVFP4.

    NVFP4's global scale is part of its scales.

    Attributes:
        table: float32 [16].
    """

    FORM: ClassVar[Form] = Form.TABLE
    VALUE_DTYPE: ClassVar[torch.dtype] = torch.uint8
    VALUES_PER_ELEMENT: ClassVar[int] = 2

    table: torch.Tensor

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        values = unpack_nibbles(self.values)
        # Other ways to look values up make indices of 64 bits.
        floats = self.table.index_select(0, values.flatten().int()).view(values.shape)
        return _scale_groups(floats, self.scales, None).to(dtype)

    def _check_fields(self) -> None:
        QuantizedWeight._check_fields(self)
        if self.table.dtype != torch.float32 or self.table.shape != (16,):
            raise ValueError(f"table must be float32 [16], got {self.table.dtype} {list(self.table.shape)}")

    def _join_fields(self, parts: Sequence[Self]) -> dict[str, Any]:
        joined = QuantizedWeight._join_fields(self, parts)
        if not all(torch.equal(each.table, self.table) for each in parts):
            raise ValueError("weights of different tables cannot be joined")
        return joined


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Weight(QuantizedWeight):
    """``scale * value``, float8_e4m3fn [rows, columns], with a scale per block of rows and columns.

    Attributes:
        scales: float32 [ceil(rows / block[0]), ceil(columns / block[1])].
        block: Numbers of rows and columns that share a scale: (128, 128) for DeepSeek, (1, columns) per channel, (rows,
            columns) per tensor.
    """

    FORM: ClassVar[Form] = Form.FP8
    VALUE_DTYPE: ClassVar[torch.dtype] = torch.float8_e4m3fn

    block: tuple[int, int]

    @property
    def group(self) -> int:
        return min(self.block[1], self.columns)

    @property
    def row_scales(self) -> torch.Tensor:
        """The scales of every row, float32 [rows, ceil(columns / block[1])]."""
        if self.block[0] == 1:
            return self.scales
        return self.scales.repeat_interleave(self.block[0], 0)[: self.rows]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        scales = self.row_scales
        if scales.shape[1] > 1:
            scales = scales.repeat_interleave(self.block[1], 1)[:, : self.columns]
        return self.values.float().mul_(scales).to(dtype)

    def cut_rows(self, start: int, stop: int) -> Self:
        """Return rows ``start`` to ``stop``; where a block would be cut each row gets its scale."""
        height = self.block[0]
        if start % height == 0 and (stop % height == 0 or stop == self.rows):
            scales = self.scales[start // height : -(-stop // height)]
            return replace(self, values=self.values[start:stop], scales=scales)
        return self._with_row_scales()._cut(slice(start, stop), slice(None), slice(None))

    def every_other_row(self, first: int) -> Self:
        return self._with_row_scales()._cut(slice(first, None, 2), slice(None), slice(None))

    def _with_row_scales(self) -> Self:
        return replace(self, scales=self.row_scales, block=(1, self.block[1]))

    def _check_fields(self) -> None:
        if min(self.block) < 1:
            raise ValueError(f"block {self.block} must be of 1 or more")
        blocks = tuple(-(-size // side) for size, side in zip(self.values.shape, self.block, strict=True))
        if self.scales.shape != blocks:
            raise ValueError(f"scales are {list(self.scales.shape)}, blocks of {self.block} make {list(blocks)}")

    def _join_fields(self, parts: Sequence[Self]) -> dict[str, Any]:
        if any(each.group != self.group for each in parts):
            raise ValueError("weights of different blocks cannot be joined")
        heights = {min(each.block[0], each.rows) for each in parts}
        height = min(heights)
        whole_blocks = len(heights) == 1 and all(each.rows % height == 0 for each in parts)
        return {
            "values": torch.cat([each.values for each in parts]),
            "scales": torch.cat([each.scales if whole_blocks else each.row_scales for each in parts]),
            "block": (height if whole_blocks else 1, self.group),
        }


def join_weights(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Return the weights below each other: q, k and v, or gate and up, as one.

    Raises:
        ValueError: They are of different forms, columns, groups, tables or orders.
    """
    first = weights[0]
    if any(type(each) is not type(first) or each.columns != first.columns for each in weights):
        raise ValueError("weights of different forms or columns cannot be joined")
    return first.join(weights[1:])


def same_order(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Whether both are the same permutation of columns, or both ``None``."""
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


def pack_nibbles(values: torch.Tensor) -> torch.Tensor:
    """Pack values of 0 to 15 [..., columns] as uint8 [..., columns // 2], the even column in the low four bits."""
    values = values.to(torch.uint8)
    return values[..., ::2] | (values[..., 1::2] << 4)


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Return uint8 [..., 2 * n] of uint8 [..., n]; the opposite of :func:`pack_nibbles`."""
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


def _scale_groups(values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> torch.Tensor:
    """Return ``scale * (value - zero)``; floats are changed in place."""
    grouped = values.float().view(*scales.shape, -1)
    if zeros is not None:
        grouped -= zeros[..., None]
    return grouped.mul_(scales[..., None]).view(values.shape)


def _check_matrix(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype != dtype or tensor.dim() != 2:
        raise ValueError(f"{name} must be {dtype} [rows, columns], got {tensor.dtype} {list(tensor.shape)}")


def _check_order(order: torch.Tensor, columns: int) -> None:
    """Raise :class:`ValueError` unless ``order`` is a permutation of ``columns`` columns."""
    if order.dtype != torch.int32 or order.shape != (columns,):
        raise ValueError(f"order must be int32 [{columns}], got {order.dtype} {list(order.shape)}")
    every = torch.arange(columns, dtype=torch.int32, device=order.device)
    if not order.is_meta and not torch.equal(order.sort().values, every):
        raise ValueError(f"order must name each of {columns} columns once")


# Plain weights into these forms, rounded to nearest

INT4_GROUP = 64
NF4_GROUP = 64
_TILE_ELEMENTS = 1 << 17
"""Elements of a weight that are in float32 at a time."""
_Tensors = dict[str, torch.Tensor]

NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""The values of NormalFloat4 (Dettmers et al., QLoRA, 2023, appendix E)."""


def quantize_int8(weight: torch.Tensor) -> Int8Weight:
    """Quantize a weight [rows, columns] with a scale per row: its largest magnitude becomes 127."""

    def quantize_tile(tile: torch.Tensor) -> _Tensors:
        scales = _replace_zeros(tile.abs().amax(1, keepdim=True) / 127)
        return {"values": (tile / scales).round_().clamp_(-127, 127).to(torch.int8), "scales": scales}

    return Int8Weight(**_by_tiles(weight, quantize_tile))


def quantize_int4(weight: torch.Tensor, group: int = INT4_GROUP) -> Int4Weight:
    """Quantize a weight [rows, columns] with a scale per group: its value of largest magnitude becomes -8.

    Scales are rounded to float16. A group that does not divide the columns becomes the largest divisor of both.

    Raises:
        ValueError: An odd number of columns.
    """
    group = _common_group(weight, group)

    def quantize_tile(tile: torch.Tensor) -> _Tensors:
        grouped = tile.view(len(tile), -1, group)
        largest = grouped.gather(-1, grouped.abs().argmax(-1, keepdim=True))[..., 0]
        scales = _round_to_float16(largest / -8)
        values = (grouped / scales[..., None]).round_().add_(8).clamp_(0, 15)
        return {"values": pack_nibbles(values.view(tile.shape)), "scales": scales}

    tensors = _by_tiles(weight, quantize_tile)
    return Int4Weight(**tensors, zeros=torch.tensor(8.0).expand_as(tensors["scales"]))


def quantize_fp8(weight: torch.Tensor) -> Fp8Weight:
    """Quantize a weight [rows, columns] to e4m3 with a scale per row: its largest magnitude becomes 448."""

    def quantize_tile(tile: torch.Tensor) -> _Tensors:
        scales = _replace_zeros(tile.abs().amax(1, keepdim=True) / 448)
        return {"values": (tile / scales).clamp_(-448, 448).to(torch.float8_e4m3fn), "scales": scales}

    return Fp8Weight(**_by_tiles(weight, quantize_tile), block=(1, weight.shape[1]))


def quantize_nf4(weight: torch.Tensor, group: int = NF4_GROUP) -> TableWeight:
    """Quantize a weight [rows, columns] to NormalFloat4 with a scale per group, else as :func:`quantize_int4`."""
    group = _common_group(weight, group)
    table = torch.tensor(NF4)
    bounds = (table[1:] + table[:-1]) / 2

    def quantize_tile(tile: torch.Tensor) -> _Tensors:
        grouped = tile.view(len(tile), -1, group)
        scales = _round_to_float16(grouped.abs().amax(-1))
        values = torch.bucketize(grouped / scales[..., None], bounds, out_int32=True)
        return {"values": pack_nibbles(values.view(tile.shape)), "scales": scales}

    return TableWeight(**_by_tiles(weight, quantize_tile), table=table)


def _by_tiles(weight: torch.Tensor, quantize_tile: Callable[[torch.Tensor], _Tensors]) -> _Tensors:
    """Return what a function makes of a few rows at a time, for all rows."""
    whole: _Tensors = {}
    start = 0
    for tile in _tiles(weight):
        stop = start + len(tile)
        for name, part in quantize_tile(tile).items():
            if name not in whole:
                whole[name] = part.new_empty(len(weight), part.shape[1])
            whole[name][start:stop] = part
        start = stop
    return whole


def _tiles(weight: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield a few rows at a time, in float32."""
    rows = max(1, _TILE_ELEMENTS // weight.shape[1])
    for start in range(0, len(weight), rows):
        yield weight[start : start + rows].detach().float()


def _common_group(weight: torch.Tensor, group: int) -> int:
    if weight.shape[1] % 2:
        raise ValueError(f"{weight.shape[1]} columns cannot be packed in pairs")
    return math.gcd(group, weight.shape[1])


def _replace_zeros(scales: torch.Tensor) -> torch.Tensor:
    """Return scales with 1 for 0."""
    return torch.where(scales == 0, 1.0, scales)


def _round_to_float16(scales: torch.Tensor) -> torch.Tensor:
    """Return scales, rounded to float16 where that has all of its bits, with 1 for 0."""
    magnitude = scales.abs()
    has_all_bits = (magnitude >= 2**-14) & (magnitude < 65504)
    return _replace_zeros(torch.where(has_all_bits, scales.half().float(), scales))
