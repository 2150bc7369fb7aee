"""``quant_method: bitsandbytes``: NF4 and FP4 with scales of blocks (QLoRA, Dettmers et al. 2023), LLM.int8's int8.

A 4-bit ``weight`` holds the flattened matrix, the first of two values in the high four bits of a byte, with
``weight.absmax`` (scales of blocks), ``weight.quant_map`` (the table) and ``weight.quant_state.bitsandbytes__nf4`` or
``__fp4`` (JSON as bytes). With double quantization ``absmax`` is uint8: indices into ``nested_quant_map``, times
``nested_absmax``, plus ``nested_offset``. An int8 ``weight`` has ``SCB``, the largest magnitude of each row.

LLM.int8's rounding of activations, with outliers apart, is not imitated: int8 weights are multiplied exactly.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from baton.engine.quantization.base import (
    CONFIG_NAME,
    SCALE_TYPES,
    StoredWeight,
    TensorSource,
    check_scales,
    config_error,
    field_of,
    need_matrix,
    need_shape,
    need_tensor,
    tensor_error,
)
from baton_kernels.quantization import Int8Weight, TableWeight

STATE = ".quant_state.bitsandbytes__"
KINDS = ("nf4", "fp4")
ROW_FORMAT = 0
"""Value of ``weight_format`` for rows one after the other; others are layouts of GPU generations."""


@dataclass(frozen=True, slots=True)
class _State:
    """The quantization state of a 4-bit weight, from its JSON.

    Attributes:
        shape: Rows and columns of the weight.
        block: Number of values that share a scale.
        nested_block: Number of scales that share a scale, with double quantization.
        nested_offset: Added to the scales, with double quantization.
    """

    shape: tuple[int, int]
    block: int
    nested_block: int
    nested_offset: float


def read_bitsandbytes(config: dict[str, Any], source: TensorSource) -> list[StoredWeight]:
    """Find the weights of a bitsandbytes checkpoint.

    Raises:
        ConfigError: The configuration or a tensor is not as the format has it.
    """
    four = field_of(config, "load_in_4bit", bool, field_of(config, "_load_in_4bit", bool, False))
    eight = field_of(config, "load_in_8bit", bool, field_of(config, "_load_in_8bit", bool, False))
    if four == eight:
        raise config_error("load_in_4bit", f"either it or load_in_8bit must be true, both are {four}")
    names = list(source.names())
    if eight:
        weights = [name for name in names if name.endswith(".weight") and source.dtype(name) is torch.int8]
        return [_find_int8_weight(source, name.removesuffix(".weight")) for name in weights]
    kind = field_of(config, "bnb_4bit_quant_type", str, "fp4")
    if kind not in KINDS:
        raise config_error("bnb_4bit_quant_type", f"must be nf4 or fp4, got {kind!r}")
    weights_4bit = []
    for name in names:
        weight, marked, stated = name.partition(STATE)
        if marked and stated != kind:
            raise tensor_error(source, name, f"{CONFIG_NAME}.bnb_4bit_quant_type is {kind!r}")
        if marked:
            weights_4bit.append(_find_4bit_weight(source, weight, name))
    for name in names:
        if name.endswith(".weight.absmax") and f"{name.removesuffix('.absmax')}{STATE}{kind}" not in source:
            raise tensor_error(source, name, f"{STATE[1:]}{kind} of its weight is missing")
    return weights_4bit


def _find_int8_weight(source: TensorSource, module: str) -> StoredWeight:
    weight = f"{module}.weight"
    scb = f"{module}.SCB"
    layout = f"{module}.weight_format"
    shape = need_matrix(source, weight)
    need_tensor(source, scb, weight, *SCALE_TYPES)
    need_shape(source, scb, (shape[0],))
    if layout in source and int(source.read(layout).item()) != ROW_FORMAT:
        raise tensor_error(source, layout, f"must be {ROW_FORMAT} (rows), is {int(source.read(layout).item())}")
    tensors = tuple(name for name in (weight, scb, layout) if name in source)
    return StoredWeight(weight, shape, tensors, partial(_read_int8, source, weight, scb))


def _read_int8(source: TensorSource, weight: str, scb: str, _: int) -> Int8Weight:
    largest = source.read(scb).float()
    if not bool(torch.isfinite(largest).all()) or bool((largest < 0).any()):
        raise tensor_error(source, scb, "a scale is negative, infinite or no number")
    values = source.read(weight)
    if bool(values[largest == 0].any()):
        raise tensor_error(source, scb, "a scale is 0, of a row that is not")
    return Int8Weight(values, (largest / 127.0).clamp_min(torch.finfo(torch.float32).tiny)[:, None])


def _find_4bit_weight(source: TensorSource, weight: str, state_name: str) -> StoredWeight:
    if weight not in source:
        raise tensor_error(source, state_name, f"no tensor {weight}")
    state = _read_state(source, state_name)
    rows, columns = state.shape
    packed = source.shape(weight)
    if math.prod(packed) * source.dtype(weight).itemsize * 2 != rows * columns:
        raise tensor_error(source, weight, f"is {list(packed)}, but the shape in {STATE[1:]}… is {[rows, columns]}")
    if columns % 2 or rows * columns % state.block:
        raise tensor_error(source, state_name, f"blocksize {state.block} does not divide {rows} rows of {columns}")
    blocks = rows * columns // state.block
    absmax = f"{weight}.absmax"
    table = f"{weight}.quant_map"
    need_tensor(source, absmax, weight, torch.float32, torch.uint8)
    need_shape(source, absmax, (blocks,))
    need_tensor(source, table, weight, torch.float32)
    need_shape(source, table, (16,))
    nested = (f"{weight}.nested_absmax", f"{weight}.nested_quant_map")
    if source.dtype(absmax) is torch.uint8:
        if state.nested_block < 1:
            raise tensor_error(source, state_name, "has no nested_blocksize, but absmax is quantized itself")
        for name, shape in zip(nested, ((-(-blocks // state.nested_block),), (256,)), strict=True):
            need_tensor(source, name, weight, torch.float32)
            need_shape(source, name, shape)
    tensors = tuple(name for name in (weight, state_name, absmax, table, *nested) if name in source)
    return StoredWeight(weight, state.shape, tensors, partial(_read_4bit, source, weight, state))


def _read_state(source: TensorSource, name: str) -> _State:
    try:
        values = json.loads(bytes(source.read(name).view(torch.uint8).flatten().tolist()))
        shape = values["shape"]
        block = values["blocksize"]
        nested_block = values.get("nested_blocksize") or 0
        offset = values.get("nested_offset") or 0.0
        rows, columns = (int(side) for side in shape)
        state = _State((rows, columns), int(block), int(nested_block), float(offset))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise tensor_error(source, name, f"is no state of a 4-bit weight ({type(error).__name__})") from error
    if min(rows, columns, state.block) < 1 or not math.isfinite(state.nested_offset):
        raise tensor_error(source, name, f"shape {list(state.shape)}, blocksize {state.block} cannot be")
    return state


def _read_4bit(source: TensorSource, weight: str, state: _State, _: int) -> TableWeight:
    rows, columns = state.shape
    name = f"{weight}.absmax"
    scales = source.read(name)
    if scales.dtype is torch.uint8:
        nested = check_scales(source, f"{weight}.nested_absmax", source.read(f"{weight}.nested_absmax"))
        blocks = torch.arange(len(scales)) // state.nested_block
        table = source.read(f"{weight}.nested_quant_map")
        scales = table[scales.int()] * nested[blocks] + state.nested_offset
    # A block of zeros alone has a scale of 0, which is harmless here.
    if not bool(torch.isfinite(scales).all()) or bool((scales < 0).any()):
        raise tensor_error(source, name, "a scale is negative, infinite or no number")
    group = math.gcd(columns, state.block)  # blocks may go on from row to row; parts of them do not
    grouped = scales.repeat_interleave(state.block // group).view(rows, columns // group)
    packed = source.read(weight).view(torch.uint8).reshape(rows, columns // 2)
    low_first = (packed >> 4) | (packed << 4)
    return TableWeight(low_first, grouped.contiguous(), source.read(f"{weight}.quant_map"))
