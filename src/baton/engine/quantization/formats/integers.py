"""Packed 4- and 8-bit integers with scales and zeros per group of columns: ``quant_method: awq`` and ``gptq``.

AWQ (Lin et al. 2023), in AutoAWQ's layout ``gemm``: ``qweight`` int32 [columns, rows / 8] holds eight consecutive rows
(output channels) in an order of its own, ``qzeros`` int32 [groups, rows / 8] their zeros alike, ``scales``
[groups, rows].

GPTQ (Frantar et al. 2022), with act order: ``qweight`` int32 [columns / 8, rows] holds consecutive columns of an output
channel from the lowest bits on, ``qzeros`` int32 [groups, rows / 8] consecutive rows' zeros, ``scales`` [groups, rows]
and ``g_idx`` [columns] each column's group. Zeros of ``checkpoint_format: gptq`` (v1) are stored less 1, those of
``gptq_v2`` as they are.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from baton.engine.quantization.base import (
    SCALE_TYPES,
    StoredWeight,
    TensorSource,
    config_error,
    field_of,
    need_group,
    need_matrix,
    need_shape,
    need_tensor,
    read_scales,
    tensor_error,
)
from baton_kernels.quantization import Int4Weight, Int8Weight, pack_nibbles, unpack_nibbles

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Index, among eight consecutive columns, of the value in each four bits of AWQ's int32, the lowest bits first."""


def unpack_int32(packed: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Return the unsigned values uint8 [rows, n * 32 / bits] of int32 [rows, n].

    Args:
        packed: int32 [rows, n], values from the lowest bits on.
        bits: Bits of a value, 4 or 8.
        order: Indices of the consecutive values of an int32 in the order of their bits; default: ascending.
    """
    each = 32 // bits
    mask = (1 << bits) - 1
    places = order or tuple(range(each))
    out = torch.empty(*packed.shape, each, dtype=torch.uint8)
    for place, value in enumerate(places):
        out[..., value] = (packed >> (bits * place)).bitwise_and_(mask).to(torch.uint8)
    return out.flatten(-2)


def packed_weight(
    packed: torch.Tensor,
    columns: int,
    bits: int,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    order: torch.Tensor | None = None,
) -> Int4Weight | Int8Weight:
    """Return the weight packed in int32 [rows, ...], consecutive columns from the lowest bits on.

    Args:
        packed: int32 [rows, at least columns * bits / 32], contiguous.
        columns: Number of columns of the weight.
        bits: Bits of a value, 4 or 8.
        scales: float32 [rows, groups].
        zeros: As in :func:`integer_weight`.
        order: int64 [columns], the order that the columns are brought into, or ``None``.
    """
    values = packed.view(torch.uint8)  # little end first, as the forms have it
    if bits == 4 and order is None:
        return Int4Weight(values[:, : columns // 2].contiguous(), scales, _zeros_or_middle(zeros, scales))
    values = (values if bits == 8 else unpack_nibbles(values))[:, :columns]
    if order is None:
        return integer_weight(values, bits, scales, zeros)
    return integer_weight(values[:, order], bits, scales, zeros, order.int())


def integer_weight(
    values: torch.Tensor,
    bits: int,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    order: torch.Tensor | None = None,
) -> Int4Weight | Int8Weight:
    """Return the weight of unsigned values.

    Args:
        values: uint8 [rows, columns], from 0 to ``2 ** bits - 1``.
        bits: Bits of a value, 4 or 8.
        scales: float32 [rows, groups].
        zeros: float32 [rows, groups], unsigned as the values are; ``None``: the middle of their range.
        order: int32 [columns] as :attr:`.IntegerWeight.order`, or ``None``.
    """
    if bits == 4:
        return Int4Weight(pack_nibbles(values), scales, _zeros_or_middle(zeros, scales), order)
    signed = (values ^ 128).view(torch.int8)
    return Int8Weight(signed, scales, None if zeros is None else zeros - 128.0, order)


def _zeros_or_middle(zeros: torch.Tensor | None, scales: torch.Tensor) -> torch.Tensor:
    """Return zeros, or one for all groups that takes no memory."""
    return scales.new_full((1, 1), 8.0).expand_as(scales) if zeros is None else zeros


# AWQ


AWQ_PARTS = ("qweight", "qzeros", "scales")


def read_awq(config: dict[str, Any], source: TensorSource) -> list[StoredWeight]:
    """Find the weights of an AWQ checkpoint.

    Raises:
        ConfigError: The configuration or a tensor is not as the format has it.
    """
    version = str(field_of(config, "version", str, "gemm")).lower()
    if version != "gemm":
        raise config_error("version", f"AWQ's layout {version!r} is not supported, only gemm")
    bits = field_of(config, "bits", int, field_of(config, "w_bit", int, 4))
    if bits != 4:
        raise config_error("bits", f"AWQ with {bits} bits is not supported, only with 4")
    group = field_of(config, "group_size", int, field_of(config, "q_group_size", int, 128))
    zero_point = field_of(config, "zero_point", bool, True)
    modules = [name.removesuffix(".qweight") for name in source.names() if name.endswith(".qweight")]
    return [_find_awq_weight(source, module, group, zero_point=zero_point) for module in modules]


def _find_awq_weight(source: TensorSource, module: str, group: int, *, zero_point: bool) -> StoredWeight:
    qweight, qzeros, scales = (f"{module}.{part}" for part in AWQ_PARTS)
    columns, width = need_matrix(source, qweight, torch.int32, sides="[columns, rows / 8]")
    rows = width * 8
    groups = need_group(source, qweight, columns if group == -1 else group, columns, "group_size")
    need_tensor(source, scales, qweight, *SCALE_TYPES)
    need_shape(source, scales, (groups, rows))
    if zero_point:
        need_tensor(source, qzeros, qweight, torch.int32)
        need_shape(source, qzeros, (groups, rows // 8))
    tensors = tuple(f"{module}.{part}" for part in AWQ_PARTS if f"{module}.{part}" in source)
    read = partial(_read_awq_weight, source, module, zero_point)
    return StoredWeight(f"{module}.weight", (rows, columns), tensors, read)


def _read_awq_weight(source: TensorSource, module: str, zero_point: bool, _: int) -> Int4Weight | Int8Weight:
    scales = read_scales(source, f"{module}.scales").T.contiguous()
    zeros = None
    if zero_point:
        zeros = unpack_int32(source.read(f"{module}.qzeros"), 4, AWQ_ORDER).T.float().contiguous()
    values = unpack_int32(source.read(f"{module}.qweight"), 4, AWQ_ORDER).T.contiguous()
    return integer_weight(values, 4, scales, zeros)


# GPTQ


GPTQ_BITS = (4, 8)
GPTQ_OVERRIDES = {"bits", "group_size", "desc_act", "sym"}


@dataclass(frozen=True, slots=True)
class _GptqScheme:
    """How the weights of one module are quantized.

    Attributes:
        bits: Bits of a value.
        group: Number of columns that share a scale; -1: all.
        zero_offset: Added to stored zeros.
    """

    bits: int
    group: int
    zero_offset: int

    def check(self, field: str) -> _GptqScheme:
        """Return this scheme, or raise :class:`ConfigError` if there is no form for it."""
        if self.bits not in GPTQ_BITS:
            raise config_error(f"{field}bits", f"GPTQ with {self.bits} bits is not supported, only with 4 or 8")
        if self.group != -1 and self.group < 1:
            raise config_error(f"{field}group_size", f"must be positive or -1, got {self.group}")
        return self


def read_gptq(config: dict[str, Any], source: TensorSource) -> list[StoredWeight]:
    """Find the weights of a GPTQ checkpoint.

    Raises:
        ConfigError: The configuration or a tensor is not as the format has it.
    """
    version = field_of(config, "checkpoint_format", str, "gptq")
    if version not in {"gptq", "gptq_v2"}:
        raise config_error("checkpoint_format", f"{version!r} is not supported, only gptq and gptq_v2")
    if field_of(config, "pack_dtype", str, "int32") != "int32":
        raise config_error("pack_dtype", f"{config['pack_dtype']!r} is not supported, only int32")
    whole = _GptqScheme(
        field_of(config, "bits", int, 4), field_of(config, "group_size", int, 128), 1 if version == "gptq" else 0
    ).check("")
    rules = field_of(config, "dynamic", dict, {})
    weights = []
    for name in source.names():
        if not name.endswith(".qweight"):
            continue
        module = name.removesuffix(".qweight")
        scheme = _scheme_of_module(whole, rules, module)
        if scheme is None:
            raise tensor_error(source, name, "quantization_config.dynamic leaves this module out, but it is quantized")
        weights.append(_find_gptq_weight(source, module, scheme))
    return weights


def _scheme_of_module(whole: _GptqScheme, rules: dict[str, Any], module: str) -> _GptqScheme | None:
    """Apply GPTQModel's rules per module: ``-:pattern`` skips it, ``+:pattern`` or ``pattern`` changes fields."""
    for pattern, changes in rules.items():
        skip = pattern.startswith("-:")
        text = pattern[2:] if pattern[:2] in {"-:", "+:"} else pattern
        try:
            matches = re.match(text, module)
        except re.error as error:
            raise config_error("dynamic", f"{pattern!r} is no regular expression: {error}") from error
        if not matches:
            continue
        if skip:
            return None
        if not isinstance(changes, dict) or not changes.keys() <= GPTQ_OVERRIDES:
            raise config_error(
                "dynamic", f"{pattern!r} may change {', '.join(sorted(GPTQ_OVERRIDES))}, got {changes!r}"
            )
        where = f"dynamic.{pattern}."
        bits = field_of(changes, "bits", int, whole.bits, f"{where}bits")
        group = field_of(changes, "group_size", int, whole.group, f"{where}group_size")
        return replace(whole, bits=bits, group=group).check(where)
    return whole


def _find_gptq_weight(source: TensorSource, module: str, scheme: _GptqScheme) -> StoredWeight:
    qweight, qzeros, scales, g_idx = (f"{module}.{part}" for part in ("qweight", "qzeros", "scales", "g_idx"))
    each = 32 // scheme.bits
    height, rows = need_matrix(source, qweight, torch.int32, sides=f"[columns / {each}, rows]")
    columns = height * each
    need_tensor(source, scales, qweight, *SCALE_TYPES)
    need_tensor(source, qzeros, qweight, torch.int32)
    group = columns if scheme.group == -1 else scheme.group
    groups = -(-columns // group)
    if columns % group:
        raise tensor_error(source, qweight, f"quantization_config.group_size {group} does not divide {columns} columns")
    need_shape(source, scales, (groups, rows))
    if rows % each:
        raise tensor_error(source, qzeros, f"{rows} rows do not fill int32 of {each}")
    need_shape(source, qzeros, (groups, rows // each))
    if g_idx in source:
        need_tensor(source, g_idx, qweight, torch.int32, torch.int64)
        need_shape(source, g_idx, (columns,))
    tensors = tuple(name for name in (qweight, qzeros, scales, g_idx) if name in source)
    return StoredWeight(
        f"{module}.weight", (rows, columns), tensors, partial(_read_gptq_weight, source, module, scheme, group)
    )


def _read_gptq_weight(
    source: TensorSource, module: str, scheme: _GptqScheme, group: int, _: int
) -> Int4Weight | Int8Weight:
    scales = read_scales(source, f"{module}.scales").T.contiguous()
    zeros = unpack_int32(source.read(f"{module}.qzeros"), scheme.bits).T.float() + scheme.zero_offset
    zeros = zeros.remainder_(2**scheme.bits) if scheme.zero_offset else zeros  # 15 + 1 was stored as 0 - 1
    packed = source.read(f"{module}.qweight").T.contiguous()
    columns = packed.shape[1] * 32 // scheme.bits
    index = f"{module}.g_idx"
    order = group_order(source, index, group, columns) if index in source else None
    return packed_weight(packed, columns, scheme.bits, scales, zeros.contiguous(), order)


def group_order(source: TensorSource, name: str, group: int, columns: int) -> torch.Tensor | None:
    """Return the columns sorted by group, int64 [columns], from each column's group; ``None``: they are sorted.

    Raises:
        ConfigError: The index of a group is out of range, or groups differ in size.
    """
    index = source.read(name).long()
    groups = columns // group
    if bool(((index < 0) | (index >= groups)).any()):
        raise tensor_error(source, name, f"an index is out of range: there are {groups} groups of {group} columns")
    counts = torch.bincount(index, minlength=groups)
    if not bool((counts == group).all()):
        raise tensor_error(source, name, f"a group has {int(counts[counts != group][0])} columns, not {group}")
    order = torch.argsort(index, stable=True)
    return None if torch.equal(order, torch.arange(columns)) else order
