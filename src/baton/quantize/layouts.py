"""How quantized weights lie in a checkpoint: as compressed-tensors has them; NF4, which that has not, as bitsandbytes.

compressed-tensors (https://github.com/vllm-project/compressed-tensors): ``pack-quantized`` for integers, eight values
of 4 bits or four of 8 in an int32, from the low bits on, with their offset of half the range; ``float-quantized`` for
fp8. bitsandbytes (https://github.com/bitsandbytes-foundation/bitsandbytes): two values a byte, the first in the high
bits.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch

from baton.quantize.scales import Scheme
from baton_kernels.quantization import (
    Fp8Weight,
    Int4Weight,
    QuantizedWeight,
    TableWeight,
)

Entry = tuple[str, torch.Tensor]


def stored_tensors(name: str, weight: QuantizedWeight, dtype: torch.dtype) -> list[Entry]:
    """Return the tensors of a quantized weight.

    Args:
        name: Of the plain parameter, ``...weight``.
        weight: The weight.
        dtype: Of its scales, where the format leaves that open.
    """
    module = name.removesuffix(".weight")
    scales = weight.scales.to(dtype)
    if isinstance(weight, Fp8Weight):
        return [(name, weight.values), (f"{module}.weight_scale", scales)]
    if isinstance(weight, TableWeight):
        return _bitsandbytes(name, weight, dtype)
    shape = torch.tensor([weight.rows, weight.columns])
    packed = weight.values if isinstance(weight, Int4Weight) else (weight.values.view(torch.uint8) ^ 128)
    words = packed.contiguous().view(torch.int32)
    return [(f"{module}.weight_packed", words), (f"{module}.weight_scale", scales), (f"{module}.weight_shape", shape)]


def check_columns(name: str, columns: int, scheme: Scheme, group: int) -> str:
    """Return why a weight of so many columns cannot be stored, or an empty text."""
    if scheme.grouped and columns % group:
        return f"--group {group} does not divide the {columns} columns of {name}"
    whole = {"int8": 4, "int4": 8, "nf4": 2}.get(scheme.name, 1)
    return f"the {columns} columns of {name} are no multiple of {whole}" if columns % whole else ""


def quantization_config(scheme: Scheme, group: int, dtype: torch.dtype, ignored: Sequence[str]) -> dict[str, Any]:
    """Return ``quantization_config`` of ``config.json``.

    Args:
        scheme: Of all weights.
        group: Columns that share a scale, where the scheme has groups.
        dtype: Of the model.
        ignored: Names of linear modules that stay plain.
    """
    if scheme.name == "nf4":
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "load_in_8bit": False,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": False,
            "bnb_4bit_compute_dtype": str(dtype).removeprefix("torch."),
            "bnb_4bit_quant_storage": "uint8",
            "llm_int8_skip_modules": list(ignored),
        }
    weights: dict[str, Any] = {
        "num_bits": 4 if scheme.name == "int4" else 8,
        "type": "float" if scheme.name == "fp8" else "int",
        "symmetric": True,
        "strategy": "group" if scheme.grouped else "channel",
        "group_size": group if scheme.grouped else None,
        "dynamic": False,
    }
    layout = "float-quantized" if scheme.name == "fp8" else "pack-quantized"
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": None,
                "output_activations": None,
                "format": layout,
            }
        },
        "ignore": list(ignored),
        "kv_cache_scheme": None,
    }


def _bitsandbytes(name: str, weight: TableWeight, dtype: torch.dtype) -> list[Entry]:
    state = {
        "quant_type": "nf4",
        "blocksize": weight.group,
        "dtype": str(dtype).removeprefix("torch."),
        "shape": [weight.rows, weight.columns],
    }
    swapped = (weight.values << 4) | (weight.values >> 4)
    return [
        (name, swapped.reshape(-1, 1)),
        (f"{name}.absmax", weight.scales.flatten()),
        (f"{name}.quant_map", weight.table),
        (f"{name}.quant_state.bitsandbytes__nf4", torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)),
    ]
