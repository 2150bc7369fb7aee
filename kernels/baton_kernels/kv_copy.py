"""Copies of KV blocks: parts of blocks into one contiguous buffer and back, with a cast on the way, and block to block.

KV is transferred, stored and resharded as a list of *spans*, runs of elements within blocks: whole blocks, one layer of
them, or some heads' slices of it. Gathered in one buffer they need one transfer instead of thousands.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

CopySpans = npt.NDArray[np.int64]
"""int64 [n, 3]: block, first element within the block, number of elements."""


def check_spans(pool: torch.Tensor, spans: CopySpans, buffer: torch.Tensor) -> None:
    """Refuse copies that would read or write outside of the pool or the buffer.

    Raises:
        ValueError: A span is not within a block, or the buffer's size is not the sum of all spans.
    """
    blocks = spans[:, 0]
    firsts = spans[:, 1]
    counts = spans[:, 2]
    inside = (blocks >= 0) & (blocks < pool.shape[0]) & (firsts >= 0) & (counts >= 0)
    if not (inside & (firsts + counts <= pool.shape[1])).all():
        raise ValueError(f"a span is not within the blocks of a pool {list(pool.shape)}")
    if int(counts.sum()) != buffer.numel() or not buffer.is_contiguous():
        raise ValueError(f"spans of {int(counts.sum())} elements and a buffer of {buffer.numel()}")


def gather_spans(pool: torch.Tensor, spans: CopySpans, buffer: torch.Tensor) -> None:
    """The definition: copy spans of pool [blocks, elements] one after the other to ``buffer``, cast to its dtype."""
    check_spans(pool, spans, buffer)
    offset = 0
    for block, first, count in spans.tolist():
        buffer[offset : offset + count] = pool[block, first : first + count]
        offset += count


def scatter_spans(pool: torch.Tensor, spans: CopySpans, buffer: torch.Tensor) -> None:
    """The definition: copy ``buffer`` back to the spans of :func:`gather_spans`; spans must not overlap."""
    check_spans(pool, spans, buffer)
    offset = 0
    for block, first, count in spans.tolist():
        pool[block, first : first + count] = buffer[offset : offset + count]
        offset += count


def copy_blocks(pool: torch.Tensor, pairs: npt.NDArray[np.int64]) -> None:
    """The definition: copy blocks within pool [blocks, elements], pairs int64 [n, 2] of source and target.

    No target is a source, or occurs twice.
    """
    for source, target in pairs.tolist():
        pool[target] = pool[source]
