"""``quant_method: mxfp4``: experts of GPT-OSS in MXFP4 (OCP Microscaling Formats, 2023).

``…_blocks`` uint8 [experts, rows, columns / 32, 16] holds two e2m1 values a byte, the first in the low four bits, and
``…_scales`` uint8 [experts, rows, columns / 32] exponents with bias 127.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from baton.engine.quantization.base import StoredWeight, TensorSource, need_shape, need_tensor, tensor_error
from baton_kernels.quantization import TableWeight

BLOCKS, SCALES = "_blocks", "_scales"
GROUP = 32
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Values of 4-bit floats by their bits: sign, two of exponent, one of mantissa."""


def read_mxfp4(_: dict[str, Any], source: TensorSource) -> list[StoredWeight]:
    """See the module's docstring.

    Raises:
        ConfigError: A tensor is not as the format has it.
    """
    found = []
    for name in source.names():
        if name.endswith(BLOCKS) and source.dtype(name) is torch.uint8:
            found.append(_stored(source, name.removesuffix(BLOCKS)))
        elif name.endswith(SCALES) and f"{name.removesuffix(SCALES)}{BLOCKS}" not in source:
            raise tensor_error(source, name, f"no tensor {name.removesuffix(SCALES)}{BLOCKS}")
    return found


def e8m0(source: TensorSource, name: str, exponents: torch.Tensor) -> torch.Tensor:
    """Return powers of two float32 of biased exponents uint8.

    Raises:
        ConfigError: One of them is 255, which stands for no number.
    """
    if bool((exponents == 255).any()):
        raise tensor_error(source, name, "a scale is no number (exponent 255)")
    # As bits of a float32, but for 2**-127, which is below its smallest normal number.
    bits = exponents.int() << 23
    return torch.where(exponents == 0, torch.tensor(1 << 22, dtype=torch.int32), bits).view(torch.float32)


def _stored(source: TensorSource, parameter: str) -> StoredWeight:
    blocks, scales = parameter + BLOCKS, parameter + SCALES
    shape = source.shape(blocks)
    if len(shape) != 4 or shape[3] != GROUP // 2:
        raise tensor_error(source, blocks, f"must be [experts, rows, columns / 32, 16], is {list(shape)}")
    need_tensor(source, scales, blocks, torch.uint8)
    need_shape(source, scales, shape[:3])
    experts, rows, groups, _ = shape
    read = partial(_read, source, blocks, scales)
    return StoredWeight(parameter, (rows, groups * GROUP), (blocks, scales), read, experts=experts)


def _read(source: TensorSource, blocks: str, scales: str, expert: int) -> TableWeight:
    values = source.read(blocks, expert).flatten(1)
    return TableWeight(values, e8m0(source, scales, source.read(scales, expert)), torch.tensor(E2M1))
