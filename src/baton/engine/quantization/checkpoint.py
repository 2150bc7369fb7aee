"""The quantized weights of a checkpoint: as its ``quantization_config`` says, or plain ones quantized at load."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from baton.config import EngineConfig
from baton.engine.quantization.base import (
    CONFIG_NAME,
    ReadFormat,
    StoredWeight,
    TensorSource,
    config_error,
    tensor_error,
)
from baton.engine.quantization.formats.bitsandbytes import read_bitsandbytes
from baton.engine.quantization.formats.compressed_tensors import read_compressed_tensors
from baton.engine.quantization.formats.floats import read_fp8, read_mxfp4
from baton.engine.quantization.formats.integers import read_awq, read_gptq
from baton.engine.quantization.formats.torchao import read_torchao
from baton.errors import ConfigError
from baton_kernels.quantization import (
    EXACT,
    INT8_PER_TOKEN,
    QuantizedWeight,
    quantize_fp8,
    quantize_int4,
    quantize_int8,
    quantize_nf4,
)

log = logging.getLogger(__name__)

FORMATS: dict[str, ReadFormat] = {
    "awq": read_awq,
    "bitsandbytes": read_bitsandbytes,
    "compressed-tensors": read_compressed_tensors,
    "fbgemm_fp8": read_fp8,
    "fp8": read_fp8,
    "gptq": read_gptq,
    "mxfp4": read_mxfp4,
    "torchao": read_torchao,
}
"""Readers by ``quant_method``."""
PLAIN_TYPES = {torch.float64, torch.float32, torch.bfloat16, torch.float16}
GROUPS = (64, 32, 16)
"""Sizes of groups for 4 bits: the first one that divides a row is used."""
LOADABLE_TYPES = {torch.float32, torch.bfloat16, torch.float16}
METHODS = {"int8": "int8-channel", "int4": "int4-group64", "fp8": "fp8-channel", "nf4": "nf4-group64"}
"""Names of the methods in identities; a name changes with the numbers that its method computes."""


def quantization_config(config: dict[str, Any]) -> dict[str, Any] | None:
    """Return the ``quantization_config`` of a ``config.json``; ``None``: it has none.

    Raises:
        ConfigError: It has several that differ, or one that is no dict.
    """
    configs = [
        holder[key]
        for holder in (config, config.get("text_config"))
        if isinstance(holder, dict)
        for key in (CONFIG_NAME, "compression_config")
        if holder.get(key) is not None
    ]
    if not configs:
        return None
    if any(each != configs[0] for each in configs):
        raise ConfigError(f"config.json: has more than one {CONFIG_NAME}, which differ", field="model")
    if not isinstance(configs[0], dict):
        raise ConfigError(f"config.json: {CONFIG_NAME} must be a dict, got {configs[0]!r}", field="model")
    return configs[0]


def find_quantized_weights(
    config: EngineConfig, quantized: dict[str, Any] | None, source: TensorSource
) -> list[StoredWeight]:
    """Return the weights of a checkpoint that are quantized, or that are to be quantized at load.

    Args:
        config: The engine's configuration.
        quantized: The checkpoint's ``quantization_config``; ``None``: it is plain.
        source: The checkpoint's tensors.

    Raises:
        ConfigError: As :func:`stored_weights`, or a pattern of ``quantization_ignore`` is no regular expression.
    """
    if quantized is not None:
        weights = stored_weights(quantized, source)
    else:
        weights = [] if config.quantization == "none" else _weights_to_quantize(config, source)
    return apply_activations(weights, config.quantized_activations)


def stored_weights(config: dict[str, Any], source: TensorSource) -> list[StoredWeight]:
    """Find the quantized weights of a checkpoint.

    Args:
        config: The checkpoint's ``quantization_config``.
        source: The checkpoint's tensors.

    Raises:
        ConfigError: The format is not supported, the configuration contradicts itself or the tensors, or no weight is
            quantized.
    """
    method = config.get("quant_method")
    if not method and (config.get("load_in_4bit") or config.get("load_in_8bit")):
        method = "bitsandbytes"  # before it had a name
    name = str(method).lower()
    if name not in FORMATS:
        known = ", ".join(sorted(FORMATS))
        raise config_error("quant_method", f"{method!r} is not supported, only {known}; --quantization makes its own")
    weights = FORMATS[name](config, source)
    consumed = {tensor for weight in weights for tensor in weight.tensors}
    for tensor in source.names():
        if tensor not in consumed and tensor.endswith(".weight") and source.dtype(tensor) not in PLAIN_TYPES:
            kind = str(source.dtype(tensor)).removeprefix("torch.")
            raise tensor_error(source, tensor, f"is {kind}, but has no scales that {name} would have")
    if not weights:
        raise config_error("quant_method", f"{method!r}, but no tensor of the checkpoint is quantized so")
    for weight in weights:
        name_of_plain = weight.parameter
        if name_of_plain in source and name_of_plain not in weight.tensors:
            raise tensor_error(source, name_of_plain, f"is there twice, plain and as {weight.tensors[0]}")
    log.info("checkpoint quantized by %s: %d weights", name, len(weights))
    return weights


def _weights_to_quantize(config: EngineConfig, source: TensorSource) -> list[StoredWeight]:
    """Return a plain checkpoint's matrices as weights quantized at load; only those of linear layers are used."""
    ignored = []
    for pattern in config.quantization_ignore:
        try:
            ignored.append(re.compile(pattern))
        except re.error as error:
            raise ConfigError(f"quantization_ignore: {pattern!r}: {error}", field="quantization_ignore") from error
    weights = []
    for name in source.names():
        shape = source.shape(name)
        module = name.removesuffix(".weight")
        if source.dtype(name) not in LOADABLE_TYPES or len(shape) not in {2, 3} or 0 in shape:
            continue
        if any(pattern.search(module) for pattern in ignored):
            continue
        quantize = _choose_quantizer(config.quantization, shape[-1])
        if quantize is not None:
            experts = shape[0] if len(shape) == 3 else 0
            read = partial(_read_and_quantize, source, name, quantize, bool(experts))
            weights.append(StoredWeight(name, (shape[-2], shape[-1]), (name,), read, experts=experts, optional=True))
    return weights


def apply_activations(weights: list[StoredWeight], choice: str) -> list[StoredWeight]:
    """Return weights with the inputs that ``quantized_activations`` asks for."""
    if choice == "auto":
        return weights
    scheme = EXACT if choice == "none" else INT8_PER_TOKEN
    return [dataclasses.replace(weight, activations=scheme) for weight in weights]


def quantization_identity(config: EngineConfig) -> str:
    """Return the part of a model's identity for quantization at load and its activations: 16 hex digits, or empty."""
    parts = []
    if config.quantization != "none":
        parts += [METHODS[config.quantization], *config.quantization_ignore]
    if config.quantized_activations != "auto":
        parts.append(f"activations={config.quantized_activations}")
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16] if parts else ""


def _choose_quantizer(method: str, columns: int) -> Callable[[torch.Tensor], QuantizedWeight] | None:
    """Return the function that quantizes rows of so many columns; ``None``: they do not divide into groups."""
    if method == "int8":
        return quantize_int8
    if method == "fp8":
        return quantize_fp8
    group = next((group for group in GROUPS if columns % group == 0), None)
    if group is None:
        return None
    return partial(quantize_int4 if method == "int4" else quantize_nf4, group=group)


def _read_and_quantize(
    source: TensorSource,
    name: str,
    quantize: Callable[[torch.Tensor], QuantizedWeight],
    stacked: bool,
    expert: int,
) -> QuantizedWeight:
    return quantize(source.read(name, expert if stacked else None))
