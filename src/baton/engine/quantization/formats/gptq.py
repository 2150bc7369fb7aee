"""``quant_method: gptq``: 4- and 8-bit integers per group of columns, with act order (Frantar et al. 2022).

``qweight`` int32 [columns / 8, rows] holds consecutive columns of an output channel from the lowest bits on,
``qzeros`` int32 [groups, rows / 8] consecutive rows' zeros, ``scales`` [groups, rows] and ``g_idx`` [columns] each
column's group. Zeros of ``checkpoint_format: gptq`` (v1) are stored less 1, those of ``gptq_v2`` as they are.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from baton.engine.quantization.base import (
    StoredWeight,
    TensorSource,
    config_error,
    field_of,
    need_shape,
    need_tensor,
    read_scales,
    tensor_error,
)
from baton.engine.quantization.integers import packed_weight, unpack_int32
from baton_kernels.quantization import Int4Weight, Int8Weight

BITS = (4, 8)
OVERRIDES = {"bits", "group_size", "desc_act", "sym"}


@dataclass(frozen=True, slots=True)
class _Scheme:
    """Of one module: bits, columns of a group (-1: all), and what is added to stored zeros."""

    bits: int
    group: int
    zero_offset: int

    def check(self, field: str) -> _Scheme:
        """Return this, if it is one that there is a form for."""
        if self.bits not in BITS:
            raise config_error(f"{field}bits", f"GPTQ with {self.bits} bits is not supported, only with 4 or 8")
        if self.group != -1 and self.group < 1:
            raise config_error(f"{field}group_size", f"must be positive or -1, got {self.group}")
        return self


def read_gptq(config: dict[str, Any], source: TensorSource) -> list[StoredWeight]:
    """See the module's docstring.

    Raises:
        ConfigError: The configuration or a tensor is not as the format has it.
    """
    version = field_of(config, "checkpoint_format", str, "gptq")
    if version not in {"gptq", "gptq_v2"}:
        raise config_error("checkpoint_format", f"{version!r} is not supported, only gptq and gptq_v2")
    if field_of(config, "pack_dtype", str, "int32") != "int32":
        raise config_error("pack_dtype", f"{config['pack_dtype']!r} is not supported, only int32")
    whole = _Scheme(
        field_of(config, "bits", int, 4), field_of(config, "group_size", int, 128), 1 if version == "gptq" else 0
    ).check("")
    rules = field_of(config, "dynamic", dict, {})
    found = []
    for name in source.names():
        if not name.endswith(".qweight"):
            continue
        module = name.removesuffix(".qweight")
        scheme = _of_module(whole, rules, module)
        if scheme is None:
            raise tensor_error(source, name, "quantization_config.dynamic leaves this module out, but it is quantized")
        found.append(_stored(source, module, scheme))
    return found


def _of_module(whole: _Scheme, rules: dict[str, Any], module: str) -> _Scheme | None:
    """Apply GPTQModel's rules per module: ``-:pattern`` leaves it out, ``+:pattern`` or ``pattern`` changes fields."""
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
        if not isinstance(changes, dict) or not changes.keys() <= OVERRIDES:
            raise config_error("dynamic", f"{pattern!r} may change {', '.join(sorted(OVERRIDES))}, got {changes!r}")
        where = f"dynamic.{pattern}."
        bits = field_of(changes, "bits", int, whole.bits, f"{where}bits")
        group = field_of(changes, "group_size", int, whole.group, f"{where}group_size")
        return replace(whole, bits=bits, group=group).check(where)
    return whole


def _stored(source: TensorSource, module: str, scheme: _Scheme) -> StoredWeight:
    qweight, qzeros, scales, g_idx = (f"{module}.{part}" for part in ("qweight", "qzeros", "scales", "g_idx"))
    each = 32 // scheme.bits
    packed = need_tensor(source, qweight, qweight, torch.int32)
    if len(packed) != 2 or 0 in packed:
        raise tensor_error(source, qweight, f"must be [columns / {each}, rows], is {list(packed)}")
    columns, rows = packed[0] * each, packed[1]
    need_tensor(source, scales, qweight, torch.float16, torch.bfloat16, torch.float32)
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
    return StoredWeight(f"{module}.weight", (rows, columns), tensors, partial(_read, source, module, scheme, group))


def _read(source: TensorSource, module: str, scheme: _Scheme, group: int, _: int) -> Int4Weight | Int8Weight:
    scales = read_scales(source, f"{module}.scales").T.contiguous()
    zeros = unpack_int32(source.read(f"{module}.qzeros"), scheme.bits).T.float() + scheme.zero_offset
    zeros = zeros.remainder_(2**scheme.bits) if scheme.zero_offset else zeros  # 15 + 1 was stored as 0 - 1
    packed = source.read(f"{module}.qweight").T.contiguous()
    columns, index = packed.shape[1] * 32 // scheme.bits, f"{module}.g_idx"
    order = group_order(source, index, group, columns) if index in source else None
    return packed_weight(packed, columns, scheme.bits, scales, zeros.contiguous(), order)


def group_order(source: TensorSource, name: str, group: int, columns: int) -> torch.Tensor | None:
    """Return columns in the order of their groups, int64 [columns], from each column's group; ``None``: as they stand.

    Raises:
        ConfigError: A group is none of those that there are, or has more or fewer columns than others.
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
