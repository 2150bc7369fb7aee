"""What ``quantization_config`` of a checkpoint's ``config.json`` says: the format that reads it, or why none does."""

from __future__ import annotations

import logging
from typing import Any

import torch

from baton.engine.quantization.base import (
    CONFIG_NAME,
    ReadFormat,
    StoredWeight,
    TensorSource,
    config_error,
    tensor_error,
)
from baton.engine.quantization.formats.awq import read_awq
from baton.engine.quantization.formats.bitsandbytes import read_bitsandbytes
from baton.engine.quantization.formats.compressed_tensors import read_compressed_tensors
from baton.engine.quantization.formats.fp8 import read_fp8
from baton.engine.quantization.formats.gptq import read_gptq
from baton.engine.quantization.formats.mxfp4 import read_mxfp4
from baton.engine.quantization.formats.torchao import read_torchao
from baton.errors import ConfigError

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
