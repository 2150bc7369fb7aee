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
"""By ``quant_method``."""
PLAIN_TYPES = {torch.float64, torch.float32, torch.bfloat16, torch.float16}


def quantization_config(config: dict[str, Any]) -> dict[str, Any] | None:
    """Return the quantization of a ``config.json``, or ``None``.

    Raises:
        ConfigError: It says two things.
    """
    found = [
        holder[key]
        for holder in (config, config.get("text_config"))
        if isinstance(holder, dict)
        for key in (CONFIG_NAME, "compression_config")
        if holder.get(key) is not None
    ]
    if not found:
        return None
    if any(each != found[0] for each in found):
        raise ConfigError(f"config.json: has more than one {CONFIG_NAME}, which differ", field="model")
    if not isinstance(found[0], dict):
        raise ConfigError(f"config.json: {CONFIG_NAME} must be a dict, got {found[0]!r}", field="model")
    return found[0]


def stored_weights(config: dict[str, Any], source: TensorSource) -> list[StoredWeight]:
    """Find the quantized weights of a checkpoint.

    Args:
        config: Its ``quantization_config``.
        source: Its tensors.

    Raises:
        ConfigError: A format that is not read, a configuration that contradicts itself or the tensors, or none of the
            weights that it promises.
    """
    method = config.get("quant_method")
    if not method and (config.get("load_in_4bit") or config.get("load_in_8bit")):
        method = "bitsandbytes"  # before it had a name
    name = str(method).lower()
    if name not in FORMATS:
        known = ", ".join(sorted(FORMATS))
        raise config_error("quant_method", f"{method!r} is not supported, only {known}; --quantization makes its own")
    found = FORMATS[name](config, source)
    consumed = {tensor for each in found for tensor in each.tensors}
    for tensor in source.names():
        if tensor not in consumed and tensor.endswith(".weight") and source.dtype(tensor) not in PLAIN_TYPES:
            kind = str(source.dtype(tensor)).removeprefix("torch.")
            raise tensor_error(source, tensor, f"is {kind}, but has no scales that {name} would have")
    if not found:
        raise config_error("quant_method", f"{method!r}, but no tensor of the checkpoint is quantized so")
    for each in found:
        if each.parameter in source and each.parameter not in each.tensors:
            text = f"{source.file_of(each.parameter)}: {each.parameter}: is there twice, plain and as {each.tensors[0]}"
            raise ConfigError(text, field="model")
    log.info("checkpoint quantized by %s: %d weights", name, len(found))
    return found


GROUPS = (64, 32, 16)
"""Inputs that share a scale with 4 bits: the first that divides a row."""
LOADABLE_TYPES = {torch.float32, torch.bfloat16, torch.float16}
METHODS = {"int8": "int8-channel", "int4": "int4-group64", "fp8": "fp8-channel", "nf4": "nf4-group64"}
"""What each is called in identities; changes with what it computes."""


def quantized_at_load(config: EngineConfig, source: TensorSource) -> list[StoredWeight]:
    """Return what ``quantization`` makes of a plain checkpoint's weights, for those that prove to be of linear layers.

    Raises:
        ConfigError: A pattern of ``quantization_ignore`` is no regular expression.
    """
    ignored = []
    for pattern in config.quantization_ignore:
        try:
            ignored.append(re.compile(pattern))
        except re.error as error:
            raise ConfigError(f"quantization_ignore: {pattern!r}: {error}", field="quantization_ignore") from error
    found = []
    for name in source.names():
        shape, module = source.shape(name), name.removesuffix(".weight")
        if source.dtype(name) not in LOADABLE_TYPES or len(shape) not in {2, 3} or 0 in shape:
            continue
        if any(pattern.search(module) for pattern in ignored):
            continue
        quantize = _choose_quantizer(config.quantization, shape[-1])
        if quantize is not None:
            experts = shape[0] if len(shape) == 3 else 0
            read = partial(_read_and_quantize, source, name, quantize, bool(experts))
            found.append(StoredWeight(name, (shape[-2], shape[-1]), (name,), read, experts=experts, optional=True))
    return found


def with_activations(stored: list[StoredWeight], choice: str) -> list[StoredWeight]:
    """Apply ``quantized_activations``."""
    if choice == "auto":
        return stored
    scheme = EXACT if choice == "none" else INT8_PER_TOKEN
    return [dataclasses.replace(weight, activations=scheme) for weight in stored]


def identity(config: EngineConfig) -> str:
    """Return what quantization at load and other activations add to a model's identity: 16 hex digits, or nothing."""
    parts = []
    if config.quantization != "none":
        parts += [METHODS[config.quantization], *config.quantization_ignore]
    if config.quantized_activations != "auto":
        parts.append(f"activations={config.quantized_activations}")
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16] if parts else ""


def _choose_quantizer(method: str, columns: int) -> Callable[[torch.Tensor], QuantizedWeight] | None:
    """Returns what quantizes rows of so many columns; ``None``: they do not divide into groups."""
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
