"""The KV of a whole model, and a rank's blocks as a plain reshape of it."""

from __future__ import annotations

import itertools

import numpy as np

from baton.kv_cache.shards import KVGeometry, ShardSpec, layer_range, shard_heads, shard_layout


def whole_kv(geometry: KVGeometry, tokens: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Per layer K and V as [heads, tokens, dim], every element another number."""
    counter, out = itertools.count(1), []
    for shape in geometry.layers:
        pair = []
        for dim in (shape.k_dim, shape.v_dim):
            count = shape.kv_heads * tokens * dim
            values = np.fromiter(itertools.islice(counter, count), np.float32, count)
            pair.append(values.reshape(shape.kv_heads, tokens, dim))
        out.append((pair[0], pair[1]))
    return out


def pool_of(geometry: KVGeometry, spec: ShardSpec, size: int, kv: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """A rank's blocks [blocks, block_bytes] as a plain reshape of the whole KV, whose arrays have the dtype's size."""
    layout = shard_layout(geometry, spec, size)
    blocks = kv[0][0].shape[1] // size
    pool = np.zeros((blocks, layout.block_elements), kv[0][0].dtype)
    for local, layer in enumerate(layer_range(len(geometry.layers), spec.pp_size, spec.pp_rank)):
        heads = list(shard_heads(geometry, spec, layer))
        for values, at in zip(kv[layer], (layout.layer_offsets[local], layout.v_offset(local)), strict=True):
            part = values[heads].reshape(len(heads), blocks, size, -1).swapaxes(0, 1).reshape(blocks, -1)
            pool[:, at : at + part.shape[1]] = part
    return pool.view(np.uint8)
