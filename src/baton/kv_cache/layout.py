"""The order of bytes inside a KV block.

A block holds ``block_size`` consecutive tokens of all layers, one layer after the other; within a layer first K,
then V; within each (kv_head, token, dim). So a block is one descriptor and one store value, one layer of it is
contiguous (layer-wise transfer), and so is one head's slice of it (tensor-parallel resharding). Layers may differ
in shape (some models vary heads per layer): each has its own offset. Where the KV is a latent that all query heads
share (MLA), its layer has one head whose K is the latent and the rotary key, and no V.

int8 KV has scales behind K and V of each layer: those of K (kv_head, token), then those of V, bfloat16. That is version
2; without them the bytes of both versions are the same ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from baton.errors import ConfigError
from baton.kv_cache.kv_types import DTYPE_BYTES, SCALE_BYTES, SCALED, layer_types

LAYOUT_NAME = "block-layer-kv-head-token-dim-v1"
SCALED_LAYOUT_NAME = "block-layer-kv-head-token-dim-scales-v2"
BLOCK_ALIGNMENT = 64
"""Blocks begin at multiples of a cache line (bytes)."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """KV of one layer: ``kv_heads`` heads with ``k_dim`` and ``v_dim`` elements per token; ``v_dim`` 0: a latent."""

    kv_heads: int
    k_dim: int
    v_dim: int

    @property
    def elements_per_token(self) -> int:
        """Elements of K and V together for one token."""
        return self.kv_heads * (self.k_dim + self.v_dim)


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers whose KV lies in blocks of their own.

    Attributes:
        layers: Their numbers, in rising order.
        window: Tokens that a token sees, itself included; 0: all before it.
    """

    layers: tuple[int, ...]
    window: int = 0


def groups_of(numbers: Sequence[int]) -> tuple[LayerGroup, ...]:
    """Return the groups that layers lie in, given the number of each layer's; none: there are no groups."""
    return tuple(
        LayerGroup(tuple(layer for layer, number in enumerate(numbers) if number == group))
        for group in range(max(numbers, default=-1) + 1)
    )


def layout_name(dtype: str) -> str:
    """Return the name of the order of bytes in blocks of a KV type."""
    return SCALED_LAYOUT_NAME if dtype.partition(";")[0] in SCALED else LAYOUT_NAME


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """Where the parts of a layer begin within a block, in bytes.

    Attributes:
        dtype: Of K and V.
        k_scales: -1: there are none; so for ``v_scales``.
        end: Behind the last part.
    """

    dtype: str
    k: int
    v: int
    k_scales: int
    v_scales: int
    end: int


@dataclass(frozen=True)
class KVLayout:
    """Geometry of a block.

    Attributes:
        dtype: KV type of all layers, see :mod:`baton.kv_cache.kv_types`.
        groups: Empty: a block holds all layers. Otherwise one group's, all of which have one shape; a group with fewer
            layers than the largest leaves the end of its blocks empty.
    """

    layers: tuple[LayerShape, ...]
    block_size: int
    dtype: str
    groups: tuple[LayerGroup, ...] = ()

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ConfigError(f"block_size must be at least 1, got {self.block_size}", field="block_size")
        if not self.layers:
            raise ConfigError("a KV layout needs at least one layer", field="layers")
        types = layer_types(self.dtype, len(self.layers))
        if self.groups and (
            sorted(layer for group in self.groups for layer in group.layers) != list(range(len(self.layers)))
            or len(set(self.layers)) > 1
            or len(set(types)) > 1
        ):
            raise ConfigError("layer groups must name every layer once, and all of one shape", field="layer_groups")

    @cached_property
    def places(self) -> tuple[LayerPlace, ...]:
        """Where each layer lies."""
        types = layer_types(self.dtype, len(self.layers))
        if self.groups:
            found: dict[int, LayerPlace] = {}
            for group in self.groups:
                at = 0
                for layer in group.layers:
                    found[layer] = self._place(layer, types[layer], at)
                    at = found[layer].end
            return tuple(found[layer] for layer in range(len(self.layers)))
        places, at = [], 0
        for layer, dtype in enumerate(types):
            places.append(self._place(layer, dtype, at))
            at = places[-1].end
        return tuple(places)

    def _place(self, layer: int, dtype: str, at: int) -> LayerPlace:
        """Put a layer behind what ends at ``at``; what it consists of is aligned to its own size."""
        shape, unit = self.layers[layer], DTYPE_BYTES[dtype]
        tokens = shape.kv_heads * self.block_size
        begin = -(-at // unit) * unit
        v = begin + tokens * shape.k_dim * unit
        end = v + tokens * shape.v_dim * unit
        if dtype not in SCALED:
            return LayerPlace(dtype, begin, v, -1, -1, end)
        k_scales = -(-end // SCALE_BYTES) * SCALE_BYTES
        v_scales = k_scales + tokens * SCALE_BYTES
        return LayerPlace(dtype, begin, v, k_scales, v_scales, v_scales + (tokens * SCALE_BYTES if shape.v_dim else 0))

    @property
    def num_groups(self) -> int:
        """Blocks that ``block_size`` tokens take while all layers need them."""
        return max(1, len(self.groups))

    @cached_property
    def group_of(self) -> tuple[int, ...]:
        """Per layer the group whose blocks it lies in."""
        found = {layer: i for i, group in enumerate(self.groups) for layer in group.layers}
        return tuple(found.get(layer, 0) for layer in range(len(self.layers)))

    @cached_property
    def block_bytes(self) -> int:
        """Bytes from one block to the next, padding included."""
        return -(-max(place.end for place in self.places) // BLOCK_ALIGNMENT) * BLOCK_ALIGNMENT

    @property
    def bytes_per_token(self) -> int:
        """KV bytes of one token without padding, scales included (kappa in the sizing rules)."""
        total = 0
        for shape, place in zip(self.layers, self.places, strict=True):
            total += shape.elements_per_token * DTYPE_BYTES[place.dtype]
            if place.dtype in SCALED:
                total += shape.kv_heads * SCALE_BYTES * (2 if shape.v_dim else 1)
        return total

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)
