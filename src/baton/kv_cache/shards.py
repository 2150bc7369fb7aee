"""Division of an instance's KV among its ranks: heads over tensor parallelism, layers over pipeline stages.

Every rank has an arena of its own with the same number of blocks; a block id means the same tokens on all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.errors import ConfigError
from baton.kv_cache.arena import Arena
from baton.kv_cache.layout import KVLayout, LayerGroup, LayerShape, layer_types, type_name


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """One rank of an instance."""

    tp_size: int = 1
    tp_rank: int = 0
    pp_size: int = 1
    pp_rank: int = 0

    @property
    def index(self) -> int:
        """Index among the instance's ranks, stage by stage; 0 is the leader."""
        return self.pp_rank * self.tp_size + self.tp_rank


def shard_specs(tp_size: int, pp_size: int) -> tuple[ShardSpec, ...]:
    """Return an instance's ranks in the order of their index.

    Raises:
        ConfigError: A size is below 1; names it.
    """
    for name, size in (("tp", tp_size), ("pp", pp_size)):
        if size < 1:
            raise ConfigError(f"{name} must be at least 1, got {size}", field=name)
    return tuple(ShardSpec(tp_size, tp, pp_size, pp) for pp in range(pp_size) for tp in range(tp_size))


@dataclass(frozen=True)
class KVGeometry:
    """The KV of a whole model, undivided.

    Attributes:
        layers: Shape of every layer.
        dtype: KV type of all layers, see :func:`baton.kv_cache.layout.type_name`.
        unsplit: Layers whose heads are not divided over tensor parallelism: every rank holds all of them (an MLA latent
            belongs to all heads).
    """

    layers: tuple[LayerShape, ...]
    dtype: str
    unsplit: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if not self.layers:
            raise ConfigError("a KV geometry needs at least one layer", field="layers")
        if any(not 0 <= layer < len(self.layers) for layer in self.unsplit):
            raise ConfigError(f"unsplit names a layer beyond the {len(self.layers)}", field="unsplit")


def head_range(kv_heads: int, tp_size: int, tp_rank: int) -> range:
    """Return the KV heads of a layer that a rank holds.

    With more ranks than heads, neighbouring ranks hold the same head (GQA replication).

    Raises:
        ConfigError: Neither number divides the other; names ``tp``.
    """
    if kv_heads % tp_size == 0:
        count = kv_heads // tp_size
        return range(tp_rank * count, (tp_rank + 1) * count)
    if tp_size % kv_heads == 0:
        head = tp_rank * kv_heads // tp_size
        return range(head, head + 1)
    raise ConfigError(f"{kv_heads} KV heads cannot be divided over tp={tp_size}", field="tp")


def layer_range(num_layers: int, pp_size: int, pp_rank: int) -> range:
    """Return the layers of a stage: as even as possible, earlier stages get the remainder.

    Raises:
        ConfigError: More stages than layers; names ``pp``.
    """
    if pp_size > num_layers:
        raise ConfigError(f"{num_layers} layers cannot be divided into pp={pp_size} stages", field="pp")
    each, more = divmod(num_layers, pp_size)
    first = pp_rank * each + min(pp_rank, more)
    return range(first, first + each + (pp_rank < more))


def shard_heads(geometry: KVGeometry, spec: ShardSpec, layer: int) -> range:
    """Return the KV heads of a layer that a rank of its stage holds.

    Raises:
        ConfigError: The heads cannot be divided; names ``tp``.
    """
    heads = geometry.layers[layer].kv_heads
    return range(heads) if layer in geometry.unsplit else head_range(heads, spec.tp_size, spec.tp_rank)


def shard_layout(
    geometry: KVGeometry, spec: ShardSpec, block_size: int, groups: tuple[LayerGroup, ...] = ()
) -> KVLayout:
    """Return the layout of a rank's blocks.

    Args:
        geometry: The whole model's KV.
        spec: The rank.
        block_size: Tokens per block.
        groups: Layer groups, if a block does not hold all layers; only without pipeline stages.

    Raises:
        ConfigError: Layers or heads cannot be divided; names ``tp`` or ``pp``.
    """
    layers = layer_range(len(geometry.layers), spec.pp_size, spec.pp_rank)
    shapes = tuple(
        LayerShape(len(shard_heads(geometry, spec, layer)), geometry.layers[layer].k_dim, geometry.layers[layer].v_dim)
        for layer in layers
    )
    types = layer_types(geometry.dtype, len(geometry.layers))
    return KVLayout(shapes, block_size, type_name(types[layers.start : layers.stop]), groups)


class KVShards:
    """The arenas of an instance's ranks, by rank index. The first one's generations fence the blocks of all.

    Attributes:
        arenas: Arenas of the ranks, at least one, all with the same number of blocks.

    Raises:
        ConfigError: There is no arena, or their numbers of blocks differ.
    """

    def __init__(self, arenas: Sequence[Arena]) -> None:
        self.arenas = tuple(arenas)
        if len({arena.num_blocks for arena in self.arenas}) != 1:
            raise ConfigError("shards need arenas with the same number of blocks", field="kv_blocks")

    @property
    def primary(self) -> Arena:
        """Arena of the leader: epoch, generations and number of blocks of the instance."""
        return self.arenas[0]

    def touch(self) -> None:
        """Allocate all pages, so that no first transfer pays for it."""
        for arena in self.arenas:
            arena.touch()

    def close(self) -> None:
        """Close all arenas."""
        for arena in self.arenas:
            arena.close()
