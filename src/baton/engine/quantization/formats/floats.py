"""8- and 4-bit floats: ``quant_method: fp8``, ``fbgemm_fp8`` and ``mxfp4``.

fp8: float8_e4m3fn weights with scales per tensor, output channel or block. Three conventions are in use: DeepSeek-V3's
(``weight_block_size``, and ``weight_scale_inv``, which despite its name values are multiplied by), that of per-tensor
checkpoints (``weight_scale``, with ``input_scale`` where ``activation_scheme`` is static), and ``fbgemm_fp8``
(``weight_scale`` per output channel). A weight is quantized if its dtype is float8_e4m3fn.

mxfp4: experts of GPT-OSS in MXFP4 (OCP Microscaling Formats, 2023). ``…_blocks`` uint8 [experts, rows, columns / 32,
16] holds two e2m1 values a byte, the first in the low four bits, and ``…_scales`` uint8 [experts, rows, columns / 32]
exponents with bias 127.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from baton.engine.quantization.base import (
    SCALE_TYPES,
    StoredWeight,
    TensorSource,
    config_error,
    field_of,
    need_matrix,
    need_shape,
    need_tensor,
    read_scales,
    tensor_error,
)
from baton_kernels.quantization import ActivationScheme, ActivationType, Fp8Weight, TableWeight

FP8 = torch.float8_e4m3fn
SCALE_SUFFIXES = ("_scale_inv", "_scale")


def read_fp8(config: dict[str, Any], source: TensorSource) -> list[StoredWeight]:
    """Find the weights of an fp8 checkpoint.

    Raises:
        ConfigError: The configuration or a tensor is not as the format has it.
    """
    scheme = field_of(config, "activation_scheme", str, "dynamic")
    if scheme not in {"dynamic", "static"}:
        raise config_error("activation_scheme", f"must be dynamic or static, got {scheme!r}")
    size = field_of(config, "weight_block_size", list, None)
    if size is not None and (len(size) != 2 or any(type(side) is not int or side < 1 for side in size)):
        raise config_error("weight_block_size", f"must be two sizes, got {size!r}")
    if size is not None and scheme == "static":
        raise config_error("activation_scheme", "blocks have dynamic activation scales only, got 'static'")
    weights = []
    for name in source.names():
        if not name.endswith(".weight") or source.dtype(name) is not FP8:
            continue
        shape = need_matrix(source, name)
        scale = next((name + suffix for suffix in SCALE_SUFFIXES if name + suffix in source), name + SCALE_SUFFIXES[-1])
        inputs = name.removesuffix("weight") + "input_scale"
        block = fp8_block(source, name, scale, None if size is None else (size[0], size[1]))
        activations = ActivationScheme(ActivationType.FP8, group=_input_group(size, shape))
        if scheme == "static":
            activations = ActivationScheme(ActivationType.FP8, static_scale(source, name, inputs))
        tensors = tuple(tensor for tensor in (name, scale, inputs) if tensor in source)
        read = partial(read_fp8_weight, source, name, scale, block)
        weights.append(StoredWeight(name, shape, tensors, read, activations=activations))
    return weights


def fp8_block(source: TensorSource, name: str, scale: str, size: tuple[int, int] | None) -> tuple[int, int]:
    """Return the numbers of rows and columns that share a scale.

    Args:
        source: The checkpoint.
        name: Name of the weight.
        scale: Name of its scales.
        size: Rows and columns of a block, if the configuration names it; ``None``: scales are per tensor or output
            channel.

    Raises:
        ConfigError: The scales are missing, or of another shape.
    """
    need_tensor(source, scale, name, *SCALE_TYPES)
    rows, columns = need_matrix(source, name)
    if size is not None:
        height = min(size[0], rows)
        width = min(size[1], columns)
        need_shape(source, scale, (-(-rows // height), -(-columns // width)))
        return height, width
    # For a tensor with one row both are the same.
    if need_shape(source, scale, (), (1,), (1, 1), (rows,), (rows, 1)) in {(rows,), (rows, 1)}:
        return 1, columns
    return rows, columns


def read_fp8_weight(source: TensorSource, name: str, scale: str, block: tuple[int, int], _: int = 0) -> Fp8Weight:
    """Read a weight.

    Raises:
        ConfigError: A value is NaN, or a scale is 0, infinite or NaN.
    """
    values = source.read(name)
    if bool((values.view(torch.uint8) & 127 == 127).any()):
        raise tensor_error(source, name, "a value is no number")
    rows, columns = values.shape
    blocks = (-(-rows // block[0]), -(-columns // block[1]))
    return Fp8Weight(values, read_scales(source, scale).reshape(blocks), block)


def static_scale(source: TensorSource, owner: str, name: str) -> float:
    """Return the scale of a layer's inputs.

    Raises:
        ConfigError: The scale is missing, 0, negative, infinite or NaN.
    """
    need_tensor(source, name, owner, *SCALE_TYPES)
    need_shape(source, name, (), (1,))
    scale = float(read_scales(source, name).item())
    if scale < 0:
        raise tensor_error(source, name, f"a scale of inputs is {scale}")
    return scale


def _input_group(size: list[int] | None, shape: tuple[int, int]) -> int:
    """Return the number of inputs that share a dynamic scale: the columns of a block, where these divide the row."""
    if size is None or shape[1] % size[1]:
        return 0
    return 0 if size[1] == shape[1] else int(size[1])


# MXFP4


MXFP4_BLOCKS = "_blocks"
MXFP4_SCALES = "_scales"
MXFP4_GROUP = 32
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Values of 4-bit floats by their bits: sign, two of exponent, one of mantissa."""


def read_mxfp4(_: dict[str, Any], source: TensorSource) -> list[StoredWeight]:
    """Find the weights of an MXFP4 checkpoint.

    Raises:
        ConfigError: A tensor is not as the format has it.
    """
    weights = []
    for name in source.names():
        if name.endswith(MXFP4_BLOCKS) and source.dtype(name) is torch.uint8:
            weights.append(_find_mxfp4_weight(source, name.removesuffix(MXFP4_BLOCKS)))
        elif name.endswith(MXFP4_SCALES) and f"{name.removesuffix(MXFP4_SCALES)}{MXFP4_BLOCKS}" not in source:
            raise tensor_error(source, name, f"no tensor {name.removesuffix(MXFP4_SCALES)}{MXFP4_BLOCKS}")
    return weights


def decode_e8m0(source: TensorSource, name: str, exponents: torch.Tensor) -> torch.Tensor:
    """Return the powers of two, float32, of biased exponents uint8.

    Raises:
        ConfigError: An exponent is 255, which means NaN.
    """
    if bool((exponents == 255).any()):
        raise tensor_error(source, name, "a scale is no number (exponent 255)")
    # The bits of a float32, except for 2**-127, which is below its smallest normal number.
    bits = exponents.int() << 23
    return torch.where(exponents == 0, torch.tensor(1 << 22, dtype=torch.int32), bits).view(torch.float32)


def _find_mxfp4_weight(source: TensorSource, parameter: str) -> StoredWeight:
    blocks = parameter + MXFP4_BLOCKS
    scales = parameter + MXFP4_SCALES
    shape = source.shape(blocks)
    if len(shape) != 4 or shape[3] != MXFP4_GROUP // 2:
        raise tensor_error(source, blocks, f"must be [experts, rows, columns / 32, 16], is {list(shape)}")
    need_tensor(source, scales, blocks, torch.uint8)
    need_shape(source, scales, shape[:3])
    experts, rows, groups, _ = shape
    read = partial(_read_mxfp4_weight, source, blocks, scales)
    return StoredWeight(parameter, (rows, groups * MXFP4_GROUP), (blocks, scales), read, experts=experts)


def _read_mxfp4_weight(source: TensorSource, blocks: str, scales: str, expert: int) -> TableWeight:
    values = source.read(blocks, expert).flatten(1)
    return TableWeight(values, decode_e8m0(source, scales, source.read(scales, expert)), torch.tensor(E2M1))
