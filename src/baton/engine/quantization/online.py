"""Quantization of plain checkpoints while they are loaded, by rounding to nearest, and what it is called."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Callable
from functools import partial

import torch

from baton.config import EngineConfig
from baton.engine.quantization.base import StoredWeight, TensorSource
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

GROUPS = (64, 32, 16)
"""Inputs that share a scale with 4 bits: the first that divides a row."""
PLAIN_TYPES = {torch.float32, torch.bfloat16, torch.float16}
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
        if source.dtype(name) not in PLAIN_TYPES or len(shape) not in {2, 3} or 0 in shape:
            continue
        if any(pattern.search(module) for pattern in ignored):
            continue
        quantize = _quantizer(config.quantization, shape[-1])
        if quantize is not None:
            experts = shape[0] if len(shape) == 3 else 0
            read = partial(_read, source, name, quantize, bool(experts))
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


def _quantizer(method: str, columns: int) -> Callable[[torch.Tensor], QuantizedWeight] | None:
    """Returns what quantizes rows of so many columns; ``None``: they do not divide into groups."""
    if method == "int8":
        return quantize_int8
    if method == "fp8":
        return quantize_fp8
    group = next((group for group in GROUPS if columns % group == 0), None)
    if group is None:
        return None
    return partial(quantize_int4 if method == "int4" else quantize_nf4, group=group)


def _read(
    source: TensorSource,
    name: str,
    quantize: Callable[[torch.Tensor], QuantizedWeight],
    stacked: bool,
    expert: int,
) -> QuantizedWeight:
    return quantize(source.read(name, expert if stacked else None))
