"""``quant_method: torchao``: int8 and float8 weights as torchao writes its tensors into safetensors files.

A weight ``…q_proj.weight`` is stored as ``…q_proj._weight_qdata`` and ``…q_proj._weight_scale`` (and ``_zero_point``);
the files' metadata has, as JSON under the weight's name, its class and how inputs are quantized.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import torch

from baton.engine.quantization.base import (
    SCALE_TYPES,
    StoredWeight,
    TensorSource,
    need_matrix,
    need_tensor,
    read_scales,
    tensor_error,
)
from baton.engine.quantization.formats.floats import FP8, fp8_block, read_fp8_weight
from baton_kernels.quantization import EXACT, ActivationScheme, ActivationType, Int8Weight

DATA = "qdata"
SCALE = "scale"
ZERO = "zero_point"
INTEGERS = {"Int8Tensor", "IntxUnpackedToInt8Tensor"}
FLOATS = {"Float8Tensor"}


def read_torchao(_: dict[str, Any], source: TensorSource) -> list[StoredWeight]:
    """Find the weights of a torchao checkpoint.

    Raises:
        ConfigError: A tensor is not as the format has it, or of a class that is not supported.
    """
    weights = []
    for name in source.names():
        module, _dot, part = name.rpartition(".")
        if part.startswith("_") and part.endswith(f"_{DATA}"):
            leaf = part[1 : -len(DATA) - 1]
            weights.append(_find_weight(source, module, leaf, name))
    return weights


def _find_weight(source: TensorSource, module: str, leaf: str, data: str) -> StoredWeight:
    parameter = f"{module}.{leaf}"
    scale, zero = (f"{module}._{leaf}_{part}" for part in (SCALE, ZERO))
    kind, attributes = _read_metadata(source, parameter, data)
    tensors = tuple(name for name in (data, scale, zero) if name in source)
    activations = _input_scheme(source, data, attributes)
    if kind in FLOATS:
        shape = need_matrix(source, data, FP8)
        block = fp8_block(source, data, scale, None)
        read: Any = partial(read_fp8_weight, source, data, scale, block)
        return StoredWeight(parameter, shape, tensors, read, activations=activations)
    if kind not in INTEGERS:
        raise tensor_error(
            source, data, f"torchao's {kind} is not supported, only {', '.join(sorted(INTEGERS | FLOATS))}"
        )
    rows, columns = need_matrix(source, data, torch.int8)
    stored = need_tensor(source, scale, data, *SCALE_TYPES)
    groups = stored[1] if len(stored) == 2 else 1
    if stored not in {(), (1,), (1, 1), (rows,), (rows, groups)} or not groups or columns % groups:
        raise tensor_error(source, scale, f"is {list(stored)}, which does not fit {[rows, columns]}")
    if zero in source and source.shape(zero) != stored:
        raise tensor_error(source, zero, f"is {list(source.shape(zero))}, but the scales are {list(stored)}")
    read = partial(_read, source, data, scale, zero if zero in source else "", (rows, groups))
    return StoredWeight(parameter, (rows, columns), tensors, read, activations=activations)


def _read_metadata(source: TensorSource, parameter: str, data: str) -> tuple[str, dict[str, Any]]:
    """Return the class of a stored tensor and its attributes."""
    try:
        value = json.loads(source.metadata[parameter])
        kind = str(value["_type"])
        attributes = value.get("_data", {})
    except (KeyError, ValueError, TypeError) as error:
        raise tensor_error(source, data, f"the file's metadata do not say what {parameter} is") from error
    return kind, attributes if isinstance(attributes, dict) else {}


def _input_scheme(source: TensorSource, data: str, attributes: dict[str, Any]) -> ActivationScheme:
    """Return how inputs are rounded: as ``act_quant_kwargs`` says, per row."""
    kwargs = attributes.get("act_quant_kwargs")
    if kwargs is None:
        return EXACT
    kind = kwargs.get("_type") if isinstance(kwargs, dict) else None
    types = {
        "QuantizeTensorToInt8Kwargs": ActivationType.INT8,
        "QuantizeTensorToFloat8Kwargs": ActivationType.FP8,
    }
    values = kwargs.get("_data", {}) if isinstance(kwargs, dict) else {}
    if kind not in types or "PerRow" not in json.dumps(values.get("granularity", "PerRow")):
        raise tensor_error(source, data, f"inputs quantized by {json.dumps(kwargs)[:120]} are not supported")
    if "ASYMMETRIC" in json.dumps(values):
        raise tensor_error(source, data, "inputs with zeros (asymmetric) are not supported")
    return ActivationScheme(types[kind])


def _read(source: TensorSource, data: str, scale: str, zero: str, shape: tuple[int, int], _: int) -> Int8Weight:
    rows, groups = shape
    scales = read_scales(source, scale)
    scales = scales.reshape(-1, 1).expand(rows, groups) if scales.numel() == 1 else scales.reshape(rows, groups)
    zeros = None
    if zero:
        stored = source.read(zero).float()
        zeros = stored.reshape(-1, 1).expand(rows, groups) if stored.numel() == 1 else stored.reshape(rows, groups)
        zeros = zeros.contiguous() if bool(zeros.any()) else None
    return Int8Weight(source.read(data), scales.contiguous(), zeros)
