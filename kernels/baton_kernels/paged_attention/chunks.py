"""Attention within chunks of a sequence (Llama 4), by backends that know nothing of them.

A layer whose queries see the keys of their own chunk is given each chunk as a sequence of its own: its part of the
block table, lengths and positions counted from its first token. Tokens stay in their order.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from baton_kernels.paged_attention.definition import AttentionSpec, LayerPool, PagedAttention, RaggedBatch


def cut_into_chunks(batch: RaggedBatch, chunk: int) -> RaggedBatch:
    """Return a batch with a sequence per chunk of ``chunk`` tokens in which a sequence has new ones.

    Args:
        batch: Whose sequences' new tokens are their last ones; with one block table each (no layer groups).
        chunk: A multiple of the block size.
    """
    blocks = chunk // batch.block_size
    starts = [0]
    lens = []
    tables = []
    for row, context in enumerate(batch.context_lens.tolist()):
        first = context - int(batch.query_starts[row + 1] - batch.query_starts[row])
        for index in range(first // chunk, -(-context // chunk)):
            begin = index * chunk
            end = min((index + 1) * chunk, context)
            starts.append(starts[-1] + end - max(begin, first))
            lens.append(end - begin)
            tables.append(batch.block_tables[row, index * blocks : (index + 1) * blocks])
    width = max(map(len, tables), default=0)
    cut = np.zeros((len(tables), width), dtype=np.int32)
    for row, table in enumerate(tables):
        cut[row, : len(table)] = table
    return RaggedBatch(
        positions=batch.positions % chunk,
        query_starts=np.array(starts, dtype=np.int32),
        context_lens=np.array(lens, dtype=np.int32),
        block_tables=cut,
        block_size=batch.block_size,
    )


class ChunkedAttention:
    """A backend for layers with and without chunks, over another one."""

    def __init__(self, inner: PagedAttention, specs: Iterable[AttentionSpec]) -> None:
        self.name = inner.name
        self.trees = False  # which would be cut at a chunk's border
        self.stores = getattr(inner, "stores", frozenset[torch.dtype]())
        self._inner = inner
        self._chunks = {spec.chunk for spec in specs}

    def prepare(self, batch: RaggedBatch) -> dict[int, Any]:
        """Return a plan per length of chunks; 0: whole sequences."""
        return {chunk: self._inner.prepare(cut_into_chunks(batch, chunk) if chunk else batch) for chunk in self._chunks}

    def run(
        self,
        plan: dict[int, Any],
        spec: AttentionSpec,
        pool: LayerPool,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> torch.Tensor:
        return self._inner.run(plan[spec.chunk], spec, pool, q, k, v)
