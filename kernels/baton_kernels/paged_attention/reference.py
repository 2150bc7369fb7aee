"""The definition, token by token in float64: what every backend is tested against."""

from __future__ import annotations

import torch

from baton_kernels.paged_attention.types import AttentionSpec, LayerPool, RaggedBatch


def paged_attention_reference(
    batch: RaggedBatch, spec: AttentionSpec, pool: LayerPool, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """Write k and v into the pool and return ``softmax(cap(scale * q k^T) | sink) v`` per token, float64.

    Slow on purpose. Arguments as in :meth:`PagedAttention.run`; returns float64 [T, num_heads, v_dim].
    """
    group = spec.num_heads // spec.kv_heads
    out = torch.zeros(q.shape[0], spec.num_heads, spec.v_dim, dtype=torch.float64)
    for seq, context in enumerate(batch.context_lens.tolist()):
        first, last = int(batch.query_starts[seq]), int(batch.query_starts[seq + 1])
        table = batch.block_tables[seq]
        for row in range(first, last):
            position = int(batch.positions[row])
            block, offset = int(table[position // batch.block_size]), position % batch.block_size
            pool.k[block, :, offset] = k[row].to(pool.k.dtype)
            pool.v[block, :, offset] = v[row].to(pool.v.dtype)
        slots = [(int(table[p // batch.block_size]), p % batch.block_size) for p in range(context)]
        keys = torch.stack([pool.k[b, :, o] for b, o in slots]).double()
        values = torch.stack([pool.v[b, :, o] for b, o in slots]).double()
        for row in range(first, last):
            position = int(batch.positions[row])
            begin = max(0, position + 1 - spec.window) if spec.window else 0
            for head in range(spec.num_heads):
                scores = keys[begin : position + 1, head // group] @ q[row, head].double() * spec.scale
                if spec.softcap:
                    scores = spec.softcap * torch.tanh(scores / spec.softcap)
                if spec.sinks is not None:
                    scores = torch.cat([scores, spec.sinks[head : head + 1].double()])
                weights = torch.softmax(scores, dim=0)[: position + 1 - begin]
                out[row, head] = weights @ values[begin : position + 1, head // group]
    return out
