"""KV of 8 bits in the pool: how a token's keys and values are written and read. The definition.

int8: a scale per token and KV head, for K and for V, beside them in the block:
``scale = bfloat16(max |x| / 127)`` and ``q = round(x / scale)``, ties to even; read as ``scale * q``. Below the least
normal number of float32 the scale and q are 0. Where x has an infinite number or NaN, the scale is NaN, and so are the
numbers that are read.

fp8_e4m3 (OCP 8-bit Floating Point Specification, E4M3): a scale per KV head, which belongs to the checkpoint:
``q = e4m3(x / scale)``, rounded to nearest, ties to even; beyond 448 it saturates, and an infinite number becomes
NaN.
"""

from __future__ import annotations

import torch

LARGEST_INT8 = 127
LARGEST_FP8 = 448.0
LEAST_NORMAL = 2.0**-126


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 q [..., dim] and bfloat16 scales [...] of x [..., dim], any float dtype."""
    x = x.float()
    largest = x.abs().amax(dim=-1)
    wanted = largest / LARGEST_INT8
    scales = torch.where(wanted < LEAST_NORMAL, 0.0, wanted).to(torch.bfloat16)
    scales = torch.where(largest.isfinite(), scales, torch.nan)
    each = scales.float()[..., None]
    return torch.where(each > 0, (x / each).round(), 0.0).to(torch.int8), scales


def to_fp8(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return float8_e4m3fn of x [tokens, heads, dim], any float dtype; scales float32 [heads]."""
    x = x.float() / scales[:, None]
    return torch.where(x.isinf(), torch.nan, x).clamp(-LARGEST_FP8, LARGEST_FP8).to(torch.float8_e4m3fn)


def write_rows(
    cache: torch.Tensor, scales: torch.Tensor | None, where: tuple[torch.Tensor, torch.Tensor], rows: torch.Tensor
) -> None:
    """Write new tokens' keys, or values.

    Args:
        cache: [blocks, heads, block_size, dim].
        scales: Scales as in :class:`~baton_kernels.paged_attention.definition.LayerPool`, or ``None``.
        where: Each token's block and slot in the block, int64 [T] each.
        rows: New keys or values [T, heads, dim].
    """
    blocks, offsets = where
    rows = rows.to(cache.device)
    if scales is None:
        cache[blocks, :, offsets] = rows.to(cache.dtype)
    elif cache.dtype is torch.int8:
        cache[blocks, :, offsets], scales[blocks, :, offsets] = quantize_rows(rows)
    else:
        cache.view(torch.uint8)[blocks, :, offsets] = to_fp8(rows, scales).view(torch.uint8)


def read_blocks(cache: torch.Tensor, scales: torch.Tensor | None, blocks: torch.Tensor) -> torch.Tensor:
    """Return some blocks' keys, or values, [..., heads, block_size, dim] for blocks [...]; float32 where quantized."""
    if scales is None:
        return cache[blocks]
    if cache.dtype is torch.int8:
        return cache[blocks].float() * scales[blocks].float()[..., None]
    return cache.view(torch.uint8)[blocks].view(cache.dtype).float() * scales[:, None, None]
