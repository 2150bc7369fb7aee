"""Attention within chunks, by backends that are given each chunk as a sequence of its own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from baton_kernels.cpu import load_library, runnable_variants
from baton_kernels.paged_attention import (
    AttentionSpec,
    ChunkedAttention,
    CpuPagedAttention,
    LayerPool,
    PagedAttention,
    RaggedBatch,
    TorchPagedAttention,
    paged_attention_reference,
)

BLOCK = 4
HEADS, KV_HEADS, DIM = 4, 2, 16


def backend(name: str) -> PagedAttention:
    return TorchPagedAttention() if name == "torch" else CpuPagedAttention(load_library(runnable_variants()[0]))


def pool(blocks: int) -> LayerPool:
    torch.manual_seed(1)
    memory = torch.randn(blocks, 2, KV_HEADS, BLOCK, DIM)
    return LayerPool(memory[:, 0], memory[:, 1])


@pytest.mark.parametrize("name", ["torch", "cpp"])
@pytest.mark.parametrize("chunk", [4, 8, 20])
def test_chunks_of_ragged_batches_are_those_of_the_definition(name: str, chunk: int) -> None:
    spec = AttentionSpec(HEADS, KV_HEADS, DIM, DIM, DIM**-0.5, chunk=chunk)
    whole = AttentionSpec(HEADS, KV_HEADS, DIM, DIM, DIM**-0.5)
    attention = ChunkedAttention(backend(name), [spec, whole])
    rng = np.random.default_rng(chunk)
    for _ in range(20):
        contexts = rng.integers(1, 60, 3)
        counts = [int(rng.integers(1, context + 1)) for context in contexts]
        width = 15
        batch = RaggedBatch(
            positions=np.concatenate([np.arange(c - n, c) for c, n in zip(contexts, counts, strict=True)]),
            query_starts=np.array([0, *np.cumsum(counts)], np.int32),
            context_lens=contexts.astype(np.int32),
            block_tables=rng.permutation(3 * width).astype(np.int32).reshape(3, width),
            block_size=BLOCK,
        )
        torch.manual_seed(int(contexts.sum()))
        q, k, v = (torch.randn(sum(counts), heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
        for layer in (spec, whole):
            mine, theirs = pool(3 * width), pool(3 * width)
            got = attention.run(attention.prepare(batch), layer, mine, q.clone(), k, v)
            want = paged_attention_reference(batch, layer, theirs, q, k, v)
            assert torch.allclose(got.double(), want, atol=1e-5)
            assert torch.equal(mine.k, theirs.k)
            assert torch.equal(mine.v, theirs.v)
