"""The mapping between two parallel shapes: which bytes of one instance's blocks become which of another's.

A pure function of the model's geometry and both sides' tensor and pipeline parallelism and block sizes. Heads are split
and merged, replicated heads are read from one of their holders, stages exchange the layers they have in common, and
blocks of unequal size are aligned at their common multiple. Scales are copied with their head and tokens.

If the KV types differ, the mapping is one of rows (K or V of one head and token) instead of bytes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from baton.errors import FingerprintMismatchError
from baton.kv_cache.layout import CODES, DTYPE_BYTES, SCALE_BYTES, LayerPlace, groups_of, layer_types
from baton.kv_cache.shards import KVGeometry, ShardSpec, layer_range, shard_heads, shard_layout, shard_specs

MAX_TP = 256
MAX_PIECES = 4096
"""Largest number of pieces in a period: block sizes without a common divisor would have millions."""

Segments = npt.NDArray[np.int64]
"""int64 [m, 3]: offset in the source's block, offset in the target's block, bytes."""
Casts = npt.NDArray[np.int64]
"""int64 [m, 8], conversions of rows of numbers: offsets of the numbers and of their scales (-1: none) in the source's
block, the same two in the target's block, number of rows, numbers per row, codes of the source's and the target's
dtype."""
Spans = npt.NDArray[np.int64]
"""int64 [m, 2]: first byte within a block, number of bytes."""
_PART = ("layer", "from", "from_scales", "to", "to_scales", "rows", "dim", "from_code", "to_code", "from_bytes")
"""Columns of a copy from one rank to another; :data:`Casts` are the ones between the first and the last."""
CODE_BYTES = np.array([DTYPE_BYTES[name] for name in CODES])
"""Bytes per element by code."""


@dataclass(frozen=True, slots=True)
class ShardGrid:
    """Parallel shape of an instance and its tokens per block; ``layer_groups`` as in the fingerprint."""

    tp_size: int
    pp_size: int
    block_size: int
    layer_groups: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenPiece:
    """Tokens that one source block and one target block have in common, within a period of ``lcm`` tokens.

    Blocks are counted within the period, tokens within their block.
    """

    source_block: int
    source_token: int
    target_block: int
    target_token: int
    num_tokens: int


@dataclass(frozen=True, eq=False)
class ShardCopy:
    """Copy from one rank's blocks to another's, for one piece: the same segments for every pair of blocks."""

    source: ShardSpec
    target: ShardSpec
    piece: TokenPiece
    segments: Segments
    layers: npt.NDArray[np.int64]
    """Layer of the whole model of each segment or conversion."""
    group: int = 0
    """Index of the target's layer group that the blocks belong to."""
    casts: Casts | None = None
    """Conversions, if the KV types differ; ``segments`` is empty then."""


@dataclass(frozen=True, eq=False)
class ReshardPlan:
    """All copies from one instance's blocks to another's.

    Attributes:
        source_period: Number of source blocks after which the pieces repeat.
        target_period: Number of target blocks after which the pieces repeat.
        pieces: Pieces of a period.
        copies: Copies between ranks.
        num_layers: Number of layers that are copied, the first ones on both sides.
        trivial: Whether blocks are the same on both sides, so that whole blocks are copied rank by rank.
    """

    source_period: int
    target_period: int
    pieces: tuple[TokenPiece, ...]
    copies: tuple[ShardCopy, ...]
    num_layers: int
    trivial: bool


def token_pieces(source_size: int, target_size: int) -> tuple[TokenPiece, ...]:
    """Cut a period, the common multiple of both block sizes, at the borders of both sides' blocks."""
    period = math.lcm(source_size, target_size)
    cuts = sorted({*range(0, period + 1, source_size), *range(0, period + 1, target_size)})
    pieces = []
    for begin, end in itertools.pairwise(cuts):
        source_block, source_token = divmod(begin, source_size)
        target_block, target_token = divmod(begin, target_size)
        pieces.append(TokenPiece(source_block, source_token, target_block, target_token, end - begin))
    return tuple(pieces)


@lru_cache(maxsize=64)
def reshard(
    geometry: KVGeometry,
    source: ShardGrid,
    target: ShardGrid,
    wanted: KVGeometry | None = None,
    num_layers: int | None = None,
) -> ReshardPlan:
    """Map an instance's blocks to another's.

    Args:
        geometry: The whole model's KV at the source.
        source: Parallel shape of the source.
        target: Parallel shape of the target.
        wanted: The whole model's KV at the target; ``None``: as at the source.
        num_layers: Number of leading layers that both have in common; ``None``: all.

    Raises:
        FingerprintMismatchError: One of the shapes does not fit the model, the block sizes do not fit each other, or
            the source's blocks hold groups of layers; names ``tp_size``, ``pp_size``, ``block_size`` or
            ``layer_groups``.
    """
    if source.layer_groups:
        raise FingerprintMismatchError("blocks of layer groups are not read by others", field="layer_groups")
    wanted = wanted or geometry
    common = len(geometry.layers) if num_layers is None else num_layers
    for each, grid in ((geometry, source), (wanted, target)):
        _check(each, grid)
    if (source.block_size + target.block_size) // math.gcd(source.block_size, target.block_size) > MAX_PIECES:
        raise FingerprintMismatchError(
            f"blocks of {source.block_size} and {target.block_size} tokens have no small common multiple",
            field="block_size",
        )
    pieces = token_pieces(source.block_size, target.block_size)
    types = [layer_types(each.dtype, len(each.layers))[:common] for each in (geometry, wanted)]
    casts = types[0] != types[1]
    copies = []
    for to in shard_specs(target.tp_size, target.pp_size):
        for by in shard_specs(source.tp_size, source.pp_size):
            for piece in pieces:
                parts = list(_parts((geometry, by, source), (wanted, to, target), piece, common))
                rows = np.array(parts, dtype=np.int64).reshape(-1, len(_PART))
                groups = np.array(target.layer_groups)[rows[:, 0]] if target.layer_groups else np.zeros(len(rows))
                for group in np.unique(groups):
                    some = rows[groups == group]
                    if casts:
                        nothing = np.empty((0, 3), np.int64)
                        mapped = some[:, 1:-1].copy()
                        copies.append(ShardCopy(by, to, piece, nothing, some[:, 0].copy(), int(group), mapped))
                    else:
                        segments = _segments(some)
                        copies.append(
                            ShardCopy(by, to, piece, segments[:, :3].copy(), segments[:, 3].copy(), int(group))
                        )
    return ReshardPlan(
        source_period=math.lcm(source.block_size, target.block_size) // source.block_size,
        target_period=math.lcm(source.block_size, target.block_size) // target.block_size,
        pieces=pieces,
        copies=tuple(copies),
        num_layers=common,
        trivial=source == target and not casts and len(geometry.layers) == len(wanted.layers) == common,
    )


def merge_segments(segments: Segments) -> Segments:
    """Join segments that continue the one before on both sides, and are equal in a fourth column, if any."""
    if len(segments) < 2:
        return segments
    ends = segments[:-1, :2] + segments[:-1, 2:3]
    breaks = (segments[1:, :2] != ends).any(axis=1) | (segments[1:, 3:] != segments[:-1, 3:]).any(axis=1)
    first = np.flatnonzero(np.concatenate(([True], breaks)))
    merged = segments[first]
    merged[:, 2] = np.add.reduceat(segments[:, 2], first)
    return merged


def merge_casts(casts: Casts) -> Casts:
    """Join conversions that continue the one before on both sides."""
    if len(casts) < 2:
        return casts
    ends = casts[:-1, :4].copy()
    for column, code in ((0, 6), (2, 7)):
        ends[:, column] += casts[:-1, 4] * casts[:-1, 5] * CODE_BYTES[casts[:-1, code]]
    for column in (1, 3):
        ends[:, column] += np.where(ends[:, column] < 0, 0, casts[:-1, 4] * SCALE_BYTES)
    breaks = (casts[1:, :4] != ends).any(axis=1) | (casts[1:, 5:] != casts[:-1, 5:]).any(axis=1)
    first = np.flatnonzero(np.concatenate(([True], breaks)))
    merged = casts[first]
    merged[:, 4] = np.add.reduceat(casts[:, 4], first)
    return merged


def cast_rows(cast: npt.NDArray[np.int64], first: int, count: int) -> npt.NDArray[np.int64]:
    """Return the part of one conversion, [8], with ``count`` rows from ``first`` on."""
    part = cast.copy()
    for column, code in ((0, 6), (2, 7)):
        part[column] += first * cast[5] * CODE_BYTES[cast[code]]
        if cast[column + 1] >= 0:
            part[column + 1] += first * SCALE_BYTES
    part[4] = count
    return part


def cast_spans(casts: Casts, *, target: bool) -> Spans:
    """Return the bytes of a block that conversions read, or write, in rising order.

    Args:
        casts: Conversions in any order that neither read nor write the same bytes twice.
        target: Return the bytes written at the target, instead of those read at the source.
    """
    at, code = (2, 7) if target else (0, 6)
    values = np.stack((casts[:, at], casts[:, 4] * casts[:, 5] * CODE_BYTES[casts[:, code]]), axis=1)
    scales = np.stack((casts[:, at + 1], casts[:, 4] * SCALE_BYTES), axis=1)[casts[:, at + 1] >= 0]
    spans = np.concatenate((values, scales))
    spans = spans[spans[:, 0].argsort()]
    if len(spans) < 2:
        return spans
    first = np.flatnonzero(np.concatenate(([True], spans[1:, 0] != spans[:-1].sum(axis=1))))
    return np.stack((spans[first, 0], np.add.reduceat(spans[:, 1], first)), axis=1)


def _check(geometry: KVGeometry, grid: ShardGrid) -> None:
    if grid.layer_groups and (
        len(grid.layer_groups) != len(geometry.layers) or min(grid.layer_groups) < 0 or grid.pp_size > 1
    ):
        raise FingerprintMismatchError("layer_groups must name a group per layer, of one stage", field="layer_groups")
    for field, size in (("tp_size", grid.tp_size), ("pp_size", grid.pp_size), ("block_size", grid.block_size)):
        if size < 1:
            raise FingerprintMismatchError(f"{field} must be at least 1, got {size}", field=field)
    if grid.tp_size > MAX_TP:
        raise FingerprintMismatchError(f"tp_size must be at most {MAX_TP}, got {grid.tp_size}", field="tp_size")
    if grid.pp_size > len(geometry.layers):
        raise FingerprintMismatchError(
            f"{len(geometry.layers)} layers have no pp_size of {grid.pp_size}", field="pp_size"
        )
    for layer, shape in enumerate(geometry.layers):
        heads = shape.kv_heads
        tp = grid.tp_size
        if layer not in geometry.unsplit and heads % tp and tp % heads:
            raise FingerprintMismatchError(f"{heads} KV heads have no tp_size of {tp}", field="tp_size")


def _parts(
    source: tuple[KVGeometry, ShardSpec, ShardGrid],
    target: tuple[KVGeometry, ShardSpec, ShardGrid],
    piece: TokenPiece,
    common: int,
) -> Iterator[tuple[int, ...]]:
    """Yield the copies of the common layers' K and V from one rank to another, with the columns of ``_PART``."""
    geometry, by, by_grid = source
    wanted, to, to_grid = target
    by_layers = layer_range(len(geometry.layers), by.pp_size, by.pp_rank)
    to_layers = layer_range(len(wanted.layers), to.pp_size, to.pp_rank)
    by_layout = shard_layout(geometry, by, by_grid.block_size)
    to_layout = shard_layout(wanted, to, to_grid.block_size, groups_of(to_grid.layer_groups))
    for layer in range(max(by_layers.start, to_layers.start), min(by_layers.stop, to_layers.stop, common)):
        target_heads = shard_heads(geometry, to, layer)
        source_heads = shard_heads(geometry, by, layer)
        heads = [h for h in target_heads if h in source_heads and _holder(geometry, layer, h, by, to) == by.tp_rank]
        source_place = by_layout.places[layer - by_layers.start]
        target_place = to_layout.places[layer - to_layers.start]
        shape = geometry.layers[layer]
        for values, dim in (("k", shape.k_dim), ("v", shape.v_dim)):
            for head in heads if dim else ():
                token = source_heads.index(head) * by_layout.block_size + piece.source_token
                into = target_heads.index(head) * to_layout.block_size + piece.target_token
                yield (
                    layer,
                    *_row(source_place, values, token, dim),
                    *_row(target_place, values, into, dim),
                    piece.num_tokens,
                    dim,
                    # Dtypes that cannot be converted have no code, and need none: both sides have the same one.
                    CODES.get(source_place.dtype, -1),
                    CODES.get(target_place.dtype, -1),
                    DTYPE_BYTES[source_place.dtype],
                )


def _row(place: LayerPlace, values: str, row: int, dim: int) -> tuple[int, int]:
    """Return the byte offsets of a row of a layer's K or V and of its scale (-1: none)."""
    first, scales = (place.k, place.k_scales) if values == "k" else (place.v, place.v_scales)
    return first + row * dim * DTYPE_BYTES[place.dtype], -1 if scales < 0 else scales + row * SCALE_BYTES


def _segments(parts: npt.NDArray[np.int64]) -> Segments:
    """Return parts as segments in memory order, joined within a layer; the layer is a fourth column."""
    layer, source, source_scales, target, target_scales, rows, dim, _, _, unit = parts.T
    values = np.stack((source, target, rows * dim * unit, layer), axis=1)
    scales = np.stack((source_scales, target_scales, rows * SCALE_BYTES, layer), axis=1)[source_scales >= 0]
    segments = np.concatenate((values, scales))
    # By layer, then by offset: within a rank's layer, offsets rise in the same order on both sides.
    return merge_segments(segments[np.lexsort((segments[:, 0], segments[:, 3]))])


def _holder(geometry: KVGeometry, layer: int, head: int, source: ShardSpec, target: ShardSpec) -> int:
    """Return the source rank that a target rank reads a head from: target ranks take turns among its holders."""
    if layer in geometry.unsplit:
        return target.tp_rank % source.tp_size
    holders = [
        rank
        for rank in range(source.tp_size)
        if head in shard_heads(geometry, ShardSpec(source.tp_size, rank, source.pp_size, source.pp_rank), layer)
    ]
    return holders[target.tp_rank % len(holders)]
