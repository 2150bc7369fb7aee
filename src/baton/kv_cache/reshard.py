"""Which bytes of which rank's blocks become which bytes of another instance's: the map between two parallel shapes.

A pure function of the model's geometry and both sides' tensor and pipeline parallelism and block sizes. Heads are split
and merged, replicated heads are read from one of their holders, stages exchange the layers they have in common, and
blocks of unequal size meet at their common multiple.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from baton.errors import FingerprintMismatchError
from baton.kv_cache.layout import groups_of
from baton.kv_cache.shards import KVGeometry, ShardSpec, layer_range, shard_heads, shard_layout, shard_specs

MAX_TP = 256
MAX_PIECES = 4096
"""Pieces of a period: block sizes without a common measure would have millions."""

Segments = npt.NDArray[np.int64]
"""int64 [m, 3]: offset in the source's block, offset in the target's block, bytes."""


@dataclass(frozen=True, slots=True)
class ShardGrid:
    """The shape of an instance: ranks and tokens per block; ``layer_groups`` as in the fingerprint."""

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
    """What one rank's blocks give to another's, for one piece: the same segments for every pair of blocks."""

    source: ShardSpec
    target: ShardSpec
    piece: TokenPiece
    segments: Segments
    layers: npt.NDArray[np.int64]
    """Per segment the layer of the whole model that it ends in."""
    group: int = 0
    """Whose blocks these are at the target, of its layer groups."""


@dataclass(frozen=True, eq=False)
class ReshardPlan:
    """All copies from one instance's blocks to another's.

    Attributes:
        source_period: Source blocks per period; after so many blocks the pieces repeat.
        target_period: Target blocks per period.
        trivial: Whether blocks are the same thing on both sides: every copy takes whole blocks, rank by rank.
    """

    source_period: int
    target_period: int
    pieces: tuple[TokenPiece, ...]
    copies: tuple[ShardCopy, ...]
    trivial: bool


def token_pieces(source_size: int, target_size: int) -> tuple[TokenPiece, ...]:
    """Cut a period of both block sizes' common multiple at the borders of either's blocks."""
    period = math.lcm(source_size, target_size)
    cuts = sorted({*range(0, period + 1, source_size), *range(0, period + 1, target_size)})
    pieces = []
    for begin, end in itertools.pairwise(cuts):
        source_block, source_token = divmod(begin, source_size)
        target_block, target_token = divmod(begin, target_size)
        pieces.append(TokenPiece(source_block, source_token, target_block, target_token, end - begin))
    return tuple(pieces)


@lru_cache(maxsize=64)
def reshard(geometry: KVGeometry, source: ShardGrid, target: ShardGrid) -> ReshardPlan:
    """Map an instance's blocks to another's.

    Raises:
        FingerprintMismatchError: One of the shapes does not fit the model, the block sizes do not fit each other, or
            the source's blocks hold groups of layers; names ``tp_size``, ``pp_size``, ``block_size`` or
            ``layer_groups``.
    """
    if source.layer_groups:
        raise FingerprintMismatchError("blocks of layer groups are not read by others", field="layer_groups")
    for grid in (source, target):
        _check(geometry, grid)
    if (source.block_size + target.block_size) // math.gcd(source.block_size, target.block_size) > MAX_PIECES:
        raise FingerprintMismatchError(
            f"blocks of {source.block_size} and {target.block_size} tokens have no small common multiple",
            field="block_size",
        )
    pieces = token_pieces(source.block_size, target.block_size)
    copies = []
    for to in shard_specs(target.tp_size, target.pp_size):
        for by in shard_specs(source.tp_size, source.pp_size):
            for piece in pieces:
                rows = _segments(geometry, (by, source), (to, target), piece)
                groups = np.array(target.layer_groups)[rows[:, 3]] if target.layer_groups else np.zeros(len(rows))
                for group in np.unique(groups):
                    some = rows[groups == group]
                    copies.append(ShardCopy(by, to, piece, some[:, :3].copy(), some[:, 3].copy(), int(group)))
    return ReshardPlan(
        source_period=math.lcm(source.block_size, target.block_size) // source.block_size,
        target_period=math.lcm(source.block_size, target.block_size) // target.block_size,
        pieces=pieces,
        copies=tuple(copies),
        trivial=source == target,
    )


def merge_segments(segments: Segments) -> Segments:
    """Join segments that go on where the one before ended, on both sides; and are equal in a fourth column, if any."""
    if len(segments) < 2:
        return segments
    ends = segments[:-1, :2] + segments[:-1, 2:3]
    breaks = (segments[1:, :2] != ends).any(axis=1) | (segments[1:, 3:] != segments[:-1, 3:]).any(axis=1)
    first = np.flatnonzero(np.concatenate(([True], breaks)))
    merged = segments[first]
    merged[:, 2] = np.add.reduceat(segments[:, 2], first)
    return merged


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
        heads, tp = shape.kv_heads, grid.tp_size
        if layer not in geometry.unsplit and heads % tp and tp % heads:
            raise FingerprintMismatchError(f"{heads} KV heads have no tp_size of {tp}", field="tp_size")


def _segments(
    geometry: KVGeometry, source: tuple[ShardSpec, ShardGrid], target: tuple[ShardSpec, ShardGrid], piece: TokenPiece
) -> Segments:
    """Segments with the layer as a fourth column, in the order of both sides' memory; joined within a layer."""
    (by, by_size), (to, to_size) = (source[0], source[1].block_size), (target[0], target[1].block_size)
    by_layers = layer_range(len(geometry.layers), by.pp_size, by.pp_rank)
    to_layers = layer_range(len(geometry.layers), to.pp_size, to.pp_rank)
    by_layout = shard_layout(geometry, by, by_size)
    to_layout = shard_layout(geometry, to, to_size, groups_of(target[1].layer_groups))
    size, rows = by_layout.dtype_bytes, []
    for layer in range(max(by_layers.start, to_layers.start), min(by_layers.stop, to_layers.stop)):
        mine, yours = shard_heads(geometry, to, layer), shard_heads(geometry, by, layer)
        shape = geometry.layers[layer]
        here, there = layer - to_layers.start, layer - by_layers.start
        for dim, by_at, to_at in (
            (shape.k_dim, by_layout.layer_offsets[there], to_layout.layer_offsets[here]),
            (shape.v_dim, by_layout.v_offset(there), to_layout.v_offset(here)),
        ):
            rows += [
                (
                    (by_at + (yours.index(head) * by_size + piece.source_token) * dim) * size,
                    (to_at + (mine.index(head) * to_size + piece.target_token) * dim) * size,
                    piece.num_tokens * dim * size,
                    layer,
                )
                for head in mine
                if dim and head in yours and _holder(geometry, layer, head, by, to) == by.tp_rank
            ]
    return merge_segments(np.array(rows, dtype=np.int64).reshape(-1, 4))


def _holder(geometry: KVGeometry, layer: int, head: int, source: ShardSpec, target: ShardSpec) -> int:
    """Which of a source stage's ranks that hold a head gives it to a target rank: the target ranks take turns."""
    if layer in geometry.unsplit:
        return target.tp_rank % source.tp_size
    holders = [
        rank
        for rank in range(source.tp_size)
        if head in shard_heads(geometry, ShardSpec(source.tp_size, rank, source.pp_size, source.pp_rank), layer)
    ]
    return holders[target.tp_rank % len(holders)]
