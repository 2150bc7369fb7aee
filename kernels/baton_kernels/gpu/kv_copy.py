"""Copies of KV blocks in device memory by Triton; definitions in ``baton_kernels.kv_copy``."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from baton_kernels.kv_copy import CopySpans, check_spans

TILE = 2048
"""Number of elements that one program copies."""
_WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))


@triton.jit(do_not_specialize_on_alignment=["pool", "buffer", "spans", "ends", "tile_spans", "tile_firsts"])
def _copy_kernel(
    pool, buffer, spans, ends, tile_spans, tile_firsts, block_stride, T: tl.constexpr, GATHER: tl.constexpr
):
    """Copy up to ``T`` elements of one span. Grid: (tiles,); ``ends``: offsets of the spans' ends in the buffer."""
    span = tl.load(tile_spans + tl.program_id(0))
    first = tl.load(tile_firsts + tl.program_id(0))
    block, begin, count = tl.load(spans + span * 3), tl.load(spans + span * 3 + 1), tl.load(spans + span * 3 + 2)
    i = first + tl.arange(0, T)
    in_pool = pool + block * block_stride + begin + i
    in_buffer = buffer + tl.load(ends + span) - count + i
    if GATHER:
        tl.store(in_buffer, tl.load(in_pool, mask=i < count).to(buffer.dtype.element_ty), mask=i < count)
    else:
        tl.store(in_pool, tl.load(in_buffer, mask=i < count).to(pool.dtype.element_ty), mask=i < count)


@triton.jit
def _copy_blocks_kernel(pool, pairs, block_stride, elements, T: tl.constexpr):
    """Copy ``T`` elements of a block to another one. Grid: (pairs, ceil(elements / T))."""
    source, target = tl.load(pairs + tl.program_id(0) * 2), tl.load(pairs + tl.program_id(0) * 2 + 1)
    i = tl.program_id(1) * T + tl.arange(0, T)
    x = tl.load(pool + source * block_stride + i, mask=i < elements)
    tl.store(pool + target * block_stride + i, x, mask=i < elements)


def gather_spans(pool: torch.Tensor, spans: CopySpans, buffer: torch.Tensor) -> None:
    """See :func:`baton_kernels.kv_copy.gather_spans`; spans are on the host.

    The copy runs on the buffer's device, which may access the pool in another GPU's memory.
    """
    _copy(pool, spans, buffer, gather=True)


def scatter_spans(pool: torch.Tensor, spans: CopySpans, buffer: torch.Tensor) -> None:
    _copy(pool, spans, buffer, gather=False)


def copy_blocks(pool: torch.Tensor, pairs: npt.NDArray[np.int64]) -> None:
    if not len(pairs):
        return
    words, _ = _as_words(pool, math.gcd(pool.shape[1], pool.stride(0)))
    on_device = _upload(np.ascontiguousarray(pairs), pool.device)
    grid = (len(pairs), triton.cdiv(words.shape[1], TILE))
    _copy_blocks_kernel[grid](words, on_device, words.stride(0), words.shape[1], T=TILE)


def _copy(pool: torch.Tensor, spans: CopySpans, buffer: torch.Tensor, *, gather: bool) -> None:
    check_spans(pool, spans, buffer)
    spans = spans[spans[:, 2] > 0]
    if not len(spans):
        return
    if pool.dtype == buffer.dtype:
        # In the widest words that everything is aligned to, so that bytes are copied eight at a time.
        unit = math.gcd(int(np.gcd.reduce(spans[:, 1:], axis=None)), math.gcd(pool.shape[1], pool.stride(0)))
        pool, factor = _as_words(pool, unit)
        buffer = buffer.view(pool.dtype)
        spans = np.column_stack([spans[:, 0], spans[:, 1:] // factor])
    tiles = -(-spans[:, 2] // TILE)
    owner = np.repeat(np.arange(len(spans)), tiles)
    firsts = (np.arange(len(owner)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * TILE
    parts = (spans.reshape(-1), np.cumsum(spans[:, 2]), owner, firsts)
    flat = _upload(np.concatenate(parts), buffer.device)
    _copy_kernel[len(owner),](
        pool, buffer, *flat.split([len(part) for part in parts]), pool.stride(0), T=TILE, GATHER=gather
    )


def _upload(array: npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
    """Copy an array to the device without waiting for the device."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _as_words(pool: torch.Tensor, unit: int) -> tuple[torch.Tensor, int]:
    """View a pool as the widest integers that ``unit`` elements and the address are multiples of."""
    size = pool.element_size()
    for width, dtype in _WORDS:
        if width >= size and unit * size % width == 0 and pool.data_ptr() % width == 0:
            return pool.view(dtype), width // size
    return pool, 1
