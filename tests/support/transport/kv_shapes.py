"""The KV of a whole model, and a rank's blocks as a plain reshape of it."""

from __future__ import annotations

import itertools
import math

import numpy as np

from baton.kv_cache.layout import DTYPE_BYTES, SCALED, layer_types
from baton.kv_cache.shards import KVGeometry, ShardSpec, layer_range, shard_heads, shard_layout


def whole_kv(geometry: KVGeometry, tokens: int) -> list[tuple[np.ndarray, ...]]:
    """Per layer K and V as [heads, tokens, dim], and scales of both [heads, tokens] where it has them.

    Every element is another number, in 8 and 16 bits as far as there are such.
    """
    counter, out = itertools.count(1), []
    for shape, kind in zip(geometry.layers, layer_types(geometry.dtype, len(geometry.layers)), strict=True):
        dims: list[tuple[int, ...]] = [(shape.k_dim,), (shape.v_dim,)]
        dims += [(), ()] if kind in SCALED else []
        parts = []
        for at, dim in enumerate(dims):
            count = shape.kv_heads * tokens * math.prod(dim)
            values = np.fromiter(itertools.islice(counter, count), np.int64, count)
            number = np.uint16 if at >= 2 else {1: np.uint8, 2: np.uint16, 4: np.float32}[DTYPE_BYTES[kind]]
            parts.append(
                (values % {np.uint8: 251, np.uint16: 65521, np.float32: 1 << 24}[number])
                .astype(number)
                .reshape(-1, tokens, *dim)
            )
        out.append(tuple(parts))
    return out


def pool_of(geometry: KVGeometry, spec: ShardSpec, size: int, kv: list[tuple[np.ndarray, ...]]) -> np.ndarray:
    """A rank's blocks [blocks, block_bytes] as a plain reshape of the whole KV, whose arrays have the dtype's size."""
    layout = shard_layout(geometry, spec, size)
    blocks = kv[0][0].shape[1] // size
    pool = np.zeros((blocks, layout.block_bytes), np.uint8)
    for local, layer in enumerate(layer_range(len(geometry.layers), spec.pp_size, spec.pp_rank)):
        heads = list(shard_heads(geometry, spec, layer))
        place = layout.places[local]
        # Scales, where there are some, come as two more arrays.
        for values, at in zip(kv[layer], (place.k, place.v, place.k_scales, place.v_scales), strict=False):
            part = values[heads].reshape(len(heads), blocks, size, -1).swapaxes(0, 1).reshape(blocks, -1)
            part = np.ascontiguousarray(part).view(np.uint8)
            pool[:, at : at + part.shape[1]] = part
    return pool
