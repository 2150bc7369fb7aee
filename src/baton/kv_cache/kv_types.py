"""How the elements of KV are kept: floats, int8 with scales inside the block, fp8 with the checkpoint's scales.

int8 has a scale per token and KV head for K and another for V, bfloat16, in the block itself: a block can be moved,
stored and cut by heads without anything beside it. A number is ``scale * q`` with q in -127 .. 127;
:mod:`baton_kernels.paged_attention.quantized` defines how scale and q are made. fp8_e4m3 (OCP 8-bit floating point,
E4M3 without infinities) has a scale per layer and KV head that belongs to the checkpoint.

Layers may be left out of quantization. Then the type has a name that says which: ``int8;bfloat16@0,11`` is int8 with
layers 0 and 11 in bfloat16.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from baton.errors import ConfigError

FLOAT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes per element of what is kept as it was computed."""
DTYPE_BYTES = {**FLOAT_BYTES, "int8": 1, "fp8_e4m3": 1}
"""Bytes per element."""
CODES = {"float32": 0, "bfloat16": 1, "float16": 2, "int8": 3}
"""Of those that can be converted, as ``native/dtype_cast.c`` numbers them."""
SCALED = frozenset({"int8"})
"""What has a scale per token and KV head in the block."""
SCALE_BYTES = 2
"""Of a scale, bfloat16."""
MOST_LAYERS = 4096
"""A name that tells of more is malformed."""


@functools.lru_cache(maxsize=256)
def layer_types(name: str, num_layers: int) -> tuple[str, ...]:
    """Return the dtype of each layer.

    Args:
        name: Of the type, as :func:`type_name` makes it.
        num_layers: Layers that there are.

    Raises:
        ConfigError: It is no such name; names ``kv_dtype``.
    """
    base, _, rest = name.partition(";")
    kept, _, numbers = rest.partition("@")
    found = [base] * num_layers
    if rest and num_layers <= MOST_LAYERS:
        for number in numbers.split(",", MOST_LAYERS):
            if number.isascii() and number.isdigit() and len(number) <= 4 and int(number) < num_layers:
                found[int(number)] = kept
    types = tuple(found)
    if not set(types) <= DTYPE_BYTES.keys() or type_name(types) != name:
        raise ConfigError(
            f"KV dtype must be one of {sorted(DTYPE_BYTES)}, or one with layers left out, got {name!r:.80}",
            field="kv_dtype",
        )
    return types


def type_name(types: Sequence[str]) -> str:
    """Return the name of KV whose layers have these dtypes: at most one that is quantized, and one float."""
    if len(set(types)) <= 1:
        return next(iter(types), "")
    base = next((each for each in types if each not in FLOAT_BYTES), types[0])
    kept = next(each for each in types if each != base)
    return f"{base};{kept}@{','.join(str(layer) for layer, each in enumerate(types) if each != base)}"


def is_quantized(name: str) -> bool:
    """Whether some of a type's layers are not kept as they were computed."""
    return name.partition(";")[0] not in FLOAT_BYTES


def can_convert(source: str, target: str) -> bool:
    """Whether KV of one type can be made of another's blocks alone; fp8 needs the checkpoint's scales beside them."""
    return "fp8_e4m3" not in (source.partition(";")[0], target.partition(";")[0])
