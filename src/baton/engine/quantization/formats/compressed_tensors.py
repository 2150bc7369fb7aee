"""``quant_method: compressed-tensors``: the formats of llm-compressor, which pick modules by targets.

A group of ``config_groups`` names modules (by path, ``re:`` pattern or class) and how their weights and inputs are
quantized. Compressed weights are ``weight`` (int8 or float8_e4m3fn) or ``weight_packed`` (int32 of 4- or 8-bit
integers; uint8 of two e2m1 values), with ``weight_scale``, ``weight_zero_point`` and, for act order, ``weight_g_idx``.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from baton.engine.quantization.base import (
    CONFIG_NAME,
    SCALE_TYPES,
    StoredWeight,
    TensorSource,
    config_error,
    expand_to_groups,
    field_of,
    names_field,
    need_group,
    need_matrix,
    need_shape,
    need_tensor,
    read_scales,
    tensor_error,
)
from baton.engine.quantization.formats.floats import (
    E2M1,
    FP8,
    decode_e8m0,
    fp8_block,
    read_fp8_weight,
    static_scale,
)
from baton.engine.quantization.formats.integers import group_order, integer_weight, packed_weight, unpack_int32
from baton_kernels.quantization import EXACT, ActivationScheme, ActivationType, Int4Weight, Int8Weight, TableWeight

log = logging.getLogger(__name__)

FORMATS = {
    "pack-quantized": "packed",
    "int-quantized": "plain",
    "float-quantized": "plain",
    "naive-quantized": "plain",
    "nvfp4-pack-quantized": "packed",
    "mxfp4-pack-quantized": "packed",
}
"""Formats, and whether the values of a module are in ``weight_packed`` or in ``weight``."""
MIXED = "mixed-precision"
DENSE = "dense"
SPARSE = {"sparse-24-bitmask", "marlin-24", "sparse-bitmask"}
CLASSES = {"Linear", "torch.nn.Linear"}
"""Names of classes that target linear layers."""
PARTS = ("weight_packed", "weight_scale", "weight")


@dataclass(frozen=True, slots=True)
class _Group:
    """A group of ``config_groups``."""

    name: str
    targets: list[str]
    args: WeightArgs
    inputs: dict[str, Any] | None


def read_compressed_tensors(config: dict[str, Any], source: TensorSource) -> list[StoredWeight]:
    """Find the weights of a compressed-tensors checkpoint.

    Raises:
        ConfigError: The configuration or a tensor is not as the format has it.
    """
    _refuse_unknown(config)
    groups = list(_read_groups(config))
    ignored = names_field(config, "ignore")
    weights = []
    seen = set()
    for name in source.names():
        module, _, part = name.rpartition(".")
        if part not in PARTS or module in seen or not module:
            continue
        if part == "weight" and (len(source.shape(name)) != 2 or f"{module}.weight_packed" in source):
            continue
        seen.add(module)
        quantized = f"{module}.weight_scale" in source or f"{module}.weight_packed" in source
        group = _group_of(groups, ignored, module)
        if quantized and group is None:
            raise tensor_error(source, name, f"is quantized, but no target of {CONFIG_NAME}.config_groups names it")
        if group is not None and (quantized or _is_targeted(group, module)):
            activations = input_scheme(group.inputs, source, module, f"config_groups.{group.name}.input_activations")
            weights.append(stored_weight(group.args, source, module, activations))
    return weights


def _refuse_unknown(config: dict[str, Any]) -> None:
    sparsity = field_of(config, "sparsity_config", dict, {})
    names = {str(config.get("format")), str(sparsity.get("format")), str(sparsity.get("sparsity_structure"))}
    if names & (SPARSE | {"2:4"}):
        raise config_error(
            "sparsity_config", f"2:4 sparsity ({', '.join(sorted(names & (SPARSE | {'2:4'})))}) is not supported"
        )
    transforms = field_of(config, "transform_config", dict, {})
    if transforms.get("config_groups"):
        raise config_error(
            "transform_config", "transforms of weights and inputs (Hadamard rotations) are not supported"
        )
    status = config.get("quantization_status")
    if status is not None and status != "compressed":
        raise config_error("quantization_status", f"must be 'compressed', got {status!r}")


def _read_groups(config: dict[str, Any]) -> Iterator[_Group]:
    whole = field_of(config, "format", str, DENSE)
    groups = field_of(config, "config_groups", dict, {})
    if not groups:
        raise config_error("config_groups", "is empty")
    for name, group in groups.items():
        field = f"config_groups.{name}"
        if not isinstance(group, dict):
            raise config_error(field, f"must be a dict, got {group!r}")
        targets = names_field({f"{field}.targets": group.get("targets")}, f"{field}.targets")
        weights = field_of(group, "weights", dict, None, f"{field}.weights")
        if weights is None:
            raise config_error(f"{field}.weights", "is missing")
        if group.get("output_activations"):
            raise config_error(f"{field}.output_activations", "quantized outputs are not supported")
        form = field_of(group, "format", str, whole, f"{field}.format")
        form = whole if form == MIXED else form
        if form not in FORMATS:
            raise config_error(f"{field}.format", f"{form!r} is not supported, only {', '.join(FORMATS)}")
        args = weight_args(weights, form, f"{field}.weights")
        inputs = field_of(group, "input_activations", dict, None, f"{field}.input_activations")
        if inputs is not None and inputs.get("num_bits") == 4:
            log.warning("%s: inputs are multiplied as they are, not rounded to 4 bits", field)
        yield _Group(name, targets, args, inputs)


def _matches(target: str, module: str) -> bool:
    if not target.startswith("re:"):
        return target == module
    try:
        return re.match(target[3:], module) is not None
    except re.error as error:
        raise config_error("config_groups", f"target {target!r} is no regular expression: {error}") from error


def _group_of(groups: list[_Group], ignored: list[str], module: str) -> _Group | None:
    """Return the group that targets a module; a target that matches its path precedes one that names its class."""
    if any(_matches(name, module) for name in ignored):
        return None
    for group in groups:
        if _is_targeted(group, module):
            return group
    return next((group for group in groups if CLASSES & set(group.targets)), None)


def _is_targeted(group: _Group, module: str) -> bool:
    return any(_matches(target, module) for target in group.targets if target not in CLASSES)


# One weight: its arguments, its tensors, its form


STRATEGIES = {"tensor", "channel", "group", "block", "tensor_group"}
COMPANIONS = (
    "weight_scale",
    "weight_zero_point",
    "weight_g_idx",
    "weight_shape",
    "weight_global_scale",
    "input_scale",
    "input_zero_point",
    "input_global_scale",
)
"""Tensors that a module may have beside its values."""


@dataclass(frozen=True, slots=True)
class WeightArgs:
    """How the weights of a group are quantized.

    Attributes:
        form: Name of the format, such as ``pack-quantized``.
        kind: ``int`` or ``float``.
        bits: Bits of a value.
        strategy: Values that share a scale: one of ``STRATEGIES``.
        group: Number of columns that share a scale with the strategies ``group`` and ``tensor_group``; else 0.
        block: Rows and columns that share a scale with the strategy ``block``; else ``None``.
        symmetric: Whether weights have no zeros.
        field: Name of the group's weights in errors.
    """

    form: str
    kind: str
    bits: int
    strategy: str
    group: int
    block: tuple[int, int] | None
    symmetric: bool
    field: str


def weight_args(weights: dict[str, Any], form: str, field: str) -> WeightArgs:
    """Read the arguments of a group's weights.

    Raises:
        ConfigError: An argument is not supported, or contradicts another one or the format.
    """
    kind = str(field_of(weights, "type", str, "int", f"{field}.type")).lower()
    bits = field_of(weights, "num_bits", int, 8, f"{field}.num_bits")
    size = field_of(weights, "group_size", int, None, f"{field}.group_size")
    default = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = field_of(weights, "strategy", str, default, f"{field}.strategy")
    if strategy not in STRATEGIES:
        raise config_error(f"{field}.strategy", f"must be one of {', '.join(sorted(STRATEGIES))}, got {strategy!r}")
    if weights.get("dynamic"):
        raise config_error(f"{field}.dynamic", "weights cannot be dynamic")
    in_groups = strategy in {"group", "tensor_group"}
    if in_groups and (size is None or size < 1):
        raise config_error(f"{field}.group_size", f"must be positive with strategy {strategy!r}, got {size}")
    block = field_of(weights, "block_structure", list, None, f"{field}.block_structure")
    if (strategy == "block") != (block is not None) or (
        block is not None and (len(block) != 2 or any(type(side) is not int or side < 1 for side in block))
    ):
        raise config_error(f"{field}.block_structure", f"strategy is {strategy!r}, got {block!r}")
    _check_format(form, kind, bits, strategy, size, field)
    symmetric = field_of(weights, "symmetric", bool, True, f"{field}.symmetric")
    if kind == "float" and not symmetric:
        raise config_error(f"{field}.symmetric", "floats have no zeros")
    sides = None if block is None else (block[0], block[1])
    return WeightArgs(form, kind, bits, strategy, size if in_groups and size else 0, sides, symmetric, field)


def _check_format(form: str, kind: str, bits: int, strategy: str, size: int | None, field: str) -> None:
    if form == "nvfp4-pack-quantized":
        fits = (kind, bits, strategy, size) == ("float", 4, "tensor_group", 16)
    elif form == "mxfp4-pack-quantized":
        fits = (kind, bits, strategy, size) == ("float", 4, "group", 32)
    elif form == "pack-quantized":
        fits = kind == "int" and bits in {4, 8} and strategy in {"tensor", "channel", "group"}
    elif kind == "float":
        fits = bits == 8 and form != "int-quantized" and strategy in {"tensor", "channel", "block"}
    else:
        fits = (
            kind == "int"
            and bits in {4, 8}
            and form != "float-quantized"
            and strategy in {"tensor", "channel", "group"}
        )
    if not fits:
        raise config_error(field, f"{bits}-bit {kind} weights by {strategy} are not supported in format {form!r}")


def input_scheme(inputs: dict[str, Any] | None, source: TensorSource, module: str, field: str) -> ActivationScheme:
    """Return how a module's inputs are rounded.

    Inputs are not rounded to the 4-bit floats of NVFP4 and MXFP4; such weights are multiplied with exact inputs.

    Raises:
        ConfigError: The scheme is not supported, or its static scale is missing.
    """
    if inputs is None:
        return EXACT
    kind = str(field_of(inputs, "type", str, "int", f"{field}.type")).lower()
    bits = field_of(inputs, "num_bits", int, 8, f"{field}.num_bits")
    if (kind, bits) == ("float", 4):
        return EXACT
    if bits != 8 or kind not in {"int", "float"}:
        raise config_error(field, f"{bits}-bit {kind} inputs are not supported, only 8-bit ones")
    if not field_of(inputs, "symmetric", bool, True, f"{field}.symmetric"):
        raise config_error(f"{field}.symmetric", "inputs with zeros (asymmetric) are not supported")
    rounded_type = ActivationType.INT8 if kind == "int" else ActivationType.FP8
    strategy = field_of(inputs, "strategy", str, "token" if inputs.get("dynamic") else "tensor", f"{field}.strategy")
    if not inputs.get("dynamic"):
        if strategy != "tensor":
            raise config_error(f"{field}.strategy", f"static inputs are scaled by 'tensor' only, got {strategy!r}")
        weight = next(name for part in ("weight", "weight_packed") if (name := f"{module}.{part}") in source)
        return ActivationScheme(rounded_type, static_scale(source, weight, f"{module}.input_scale"))
    if strategy == "group":
        return ActivationScheme(rounded_type, group=field_of(inputs, "group_size", int, 128, f"{field}.group_size"))
    if strategy != "token":
        raise config_error(f"{field}.strategy", f"dynamic inputs are scaled by 'token' or 'group', got {strategy!r}")
    return ActivationScheme(rounded_type)


def stored_weight(args: WeightArgs, source: TensorSource, module: str, activations: ActivationScheme) -> StoredWeight:
    """Return a module's weight, after checking its tensors' shapes and dtypes.

    Raises:
        ConfigError: A tensor is missing, or does not fit the arguments.
    """
    packed = args.form.endswith("pack-quantized")
    values = f"{module}.{'weight_packed' if packed else 'weight'}"
    other = f"{module}.{'weight' if packed else 'weight_packed'}"
    if values not in source:
        raise tensor_error(source, other, f"{CONFIG_NAME}.{args.field}: {args.form!r} has it as {values}")
    if args.kind == "float" and not packed:
        shape = need_matrix(source, values, FP8)
        block = fp8_block(source, values, f"{module}.weight_scale", args.block)
        read: Any = partial(read_fp8_weight, source, values, f"{module}.weight_scale", block)
    elif args.kind == "float":
        shape = _float4_shape(args, source, module, values)
        read = partial(_read_float4, args, source, module)
    else:
        shape = _integer_shape(args, source, module, values)
        read = partial(_read_integer, args, source, module, shape)
    tensors = (values, *(name for part in COMPANIONS if (name := f"{module}.{part}") in source))
    return StoredWeight(f"{module}.weight", shape, tensors, read, activations=activations)


def _count_groups(args: WeightArgs, source: TensorSource, values: str, columns: int) -> int:
    return need_group(source, values, args.group, columns, f"{args.field}.group_size") if args.group else 1


def _integer_shape(args: WeightArgs, source: TensorSource, module: str, values: str) -> tuple[int, int]:
    if args.form == "pack-quantized":
        packed = need_matrix(source, values, torch.int32)
        stated = f"{module}.weight_shape"
        need_tensor(source, stated, values, torch.int64, torch.int32)
        need_shape(source, stated, (2,))
        rows, columns = (int(side) for side in source.read(stated).tolist())
        if min(rows, columns) < 1 or packed != (rows, -(-columns * args.bits // 32)):
            raise tensor_error(source, values, f"is {list(packed)}, but {stated} says {[rows, columns]}")
    else:
        rows, columns = need_matrix(source, values, torch.int8)
    if args.bits == 4 and columns % 2:
        raise tensor_error(source, values, f"4-bit weights need an even number of columns, has {columns}")
    groups = _count_groups(args, source, values, columns)
    scale, zero, index = (f"{module}.weight_{part}" for part in ("scale", "zero_point", "g_idx"))
    need_tensor(source, scale, values, *SCALE_TYPES)
    whole = ((), (1,), (1, 1)) if args.strategy == "tensor" else ((rows,), (rows, 1)) if groups == 1 else ()
    need_shape(source, scale, *whole, *(((rows, groups),) if args.group else ()))
    if not args.symmetric:
        packs = args.form == "pack-quantized" and args.strategy != "tensor"
        need_tensor(source, zero, values, torch.int32 if packs else torch.int8)
        if packs:
            need_shape(source, zero, (-(-rows * args.bits // 32), groups))
        else:
            need_shape(source, zero, source.shape(scale))
    if index in source:
        need_tensor(source, index, values, torch.int32, torch.int64)
        need_shape(source, index, (columns,))
    return rows, columns


def _read_integer(
    args: WeightArgs, source: TensorSource, module: str, shape: tuple[int, int], _: int
) -> Int4Weight | Int8Weight:
    rows, columns = shape
    groups = columns // args.group if args.group else 1
    scales = expand_to_groups(read_scales(source, f"{module}.weight_scale"), rows, groups)
    middle = 1 << (args.bits - 1)
    zeros = None
    if not args.symmetric:
        stored = source.read(f"{module}.weight_zero_point")
        if stored.dtype is torch.int32:
            zeros = unpack_int32(stored.T.contiguous(), args.bits)[:, :rows].T.float().contiguous()
        else:
            zeros = expand_to_groups(stored.float() + middle, rows, groups)
    order = None
    index = f"{module}.weight_g_idx"
    if index in source and args.group and not bool((source.read(index) == -1).all()):
        order = group_order(source, index, args.group, columns)
    if args.form == "pack-quantized":
        return packed_weight(source.read(f"{module}.weight_packed"), columns, args.bits, scales, zeros, order)
    signed = source.read(f"{module}.weight")
    if args.bits == 4 and bool(((signed < -8) | (signed > 7)).any()):
        raise tensor_error(source, f"{module}.weight", "a value is beyond 4 bits")
    column_order = None
    if order is not None:
        signed = signed[:, order]
        column_order = order.int()
    if args.bits == 4:
        return integer_weight((signed + middle).view(torch.uint8), 4, scales, zeros, column_order)
    return Int8Weight(signed, scales, None if zeros is None else zeros - middle, column_order)


def _float4_shape(args: WeightArgs, source: TensorSource, module: str, values: str) -> tuple[int, int]:
    rows, width = need_matrix(source, values, torch.uint8, sides="[rows, columns / 2]")
    columns = width * 2
    groups = _count_groups(args, source, values, columns)
    scale = f"{module}.weight_scale"
    whole = f"{module}.weight_global_scale"
    if args.form == "nvfp4-pack-quantized":
        need_tensor(source, scale, values, FP8)
        need_tensor(source, whole, values, torch.float32)
        need_shape(source, whole, (), (1,))
    else:
        need_tensor(source, scale, values, torch.uint8, torch.float8_e8m0fnu)
    need_shape(source, scale, (rows, groups))
    return rows, columns


def _read_float4(args: WeightArgs, source: TensorSource, module: str, _: int) -> TableWeight:
    name = f"{module}.weight_scale"
    whole = f"{module}.weight_global_scale"
    stored = source.read(name)
    if args.form == "nvfp4-pack-quantized":
        # Values were multiplied by this factor before they were rounded, so that scales fit float8.
        factor = read_scales(source, whole).reshape(())
        scales = stored.float()
        if not bool(torch.isfinite(scales).all()) or bool((scales < 0).any()):
            raise tensor_error(source, name, "a scale is negative or no number")
        scales = scales / factor  # a scale of 0 is that of a group that rounds to nothing
    else:
        scales = decode_e8m0(source, name, stored.view(torch.uint8))
    return TableWeight(source.read(f"{module}.weight_packed"), scales, torch.tensor(E2M1))
