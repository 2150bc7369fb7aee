"""``quant_method: awq``: 4-bit integers per group of columns (Lin et al. 2023), in AutoAWQ's layout ``gemm``.

``qweight`` int32 [columns, rows / 8] holds eight consecutive rows (output channels) in an order of its own, ``qzeros``
int32 [groups, rows / 8] their zeros alike, ``scales`` [groups, rows].
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from baton.engine.quantization.base import (
    StoredWeight,
    TensorSource,
    config_error,
    field_of,
    need_group,
    need_shape,
    need_tensor,
    read_scales,
    tensor_error,
)
from baton.engine.quantization.integers import AWQ_ORDER, integer_weight, unpack_int32
from baton_kernels.quantization import Int4Weight, Int8Weight

PARTS = ("qweight", "qzeros", "scales")


def read_awq(config: dict[str, Any], source: TensorSource) -> list[StoredWeight]:
    """See the module's docstring.

    Raises:
        ConfigError: The configuration or a tensor is not as the format has it.
    """
    version = str(field_of(config, "version", str, "gemm")).lower()
    if version != "gemm":
        raise config_error("version", f"AWQ's layout {version!r} is not supported, only gemm")
    bits = field_of(config, "bits", int, field_of(config, "w_bit", int, 4))
    if bits != 4:
        raise config_error("bits", f"AWQ with {bits} bits is not supported, only with 4")
    group = field_of(config, "group_size", int, field_of(config, "q_group_size", int, 128))
    zero_point = field_of(config, "zero_point", bool, True)
    found = []
    for name in source.names():
        if name.endswith(".qweight"):
            found.append(_stored(source, name.removesuffix(".qweight"), group, zero_point=zero_point))
    return found


def _stored(source: TensorSource, module: str, group: int, *, zero_point: bool) -> StoredWeight:
    qweight, qzeros, scales = (f"{module}.{part}" for part in PARTS)
    packed = need_tensor(source, qweight, qweight, torch.int32)
    if len(packed) != 2 or 0 in packed:
        raise tensor_error(source, qweight, f"must be [columns, rows / 8], is {list(packed)}")
    columns, rows = packed[0], packed[1] * 8
    groups = need_group(source, qweight, columns if group == -1 else group, columns, "group_size")
    need_tensor(source, scales, qweight, torch.float16, torch.bfloat16, torch.float32)
    need_shape(source, scales, (groups, rows))
    if zero_point:
        need_tensor(source, qzeros, qweight, torch.int32)
        need_shape(source, qzeros, (groups, rows // 8))
    tensors = tuple(f"{module}.{part}" for part in PARTS if f"{module}.{part}" in source)
    read = partial(_read, source, module, zero_point)
    return StoredWeight(f"{module}.weight", (rows, columns), tensors, read)


def _read(source: TensorSource, module: str, zero_point: bool, _: int) -> Int4Weight | Int8Weight:
    scales = read_scales(source, f"{module}.scales").T.contiguous()
    zeros = None
    if zero_point:
        zeros = unpack_int32(source.read(f"{module}.qzeros"), 4, AWQ_ORDER).T.float().contiguous()
    values = unpack_int32(source.read(f"{module}.qweight"), 4, AWQ_ORDER).T.contiguous()
    return integer_weight(values, 4, scales, zeros)
