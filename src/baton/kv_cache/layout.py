"""The order of bytes inside a KV block.

A block holds ``block_size`` consecutive tokens of all layers, one layer after the other; within a layer first K,
then V; within each (kv_head, token, dim). So a block is one descriptor and one store value, one layer of it is
contiguous (layer-wise transfer), and so is one head's slice of it (tensor-parallel resharding). Layers may differ
in shape (some models vary heads per layer): each has its own offset. Where the KV is a latent that all query heads
share (MLA), its layer has one head whose K is the latent and the rotary key, and no V.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from baton.errors import ConfigError

LAYOUT_NAME = "block-layer-kv-head-token-dim-v1"
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
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


@dataclass(frozen=True)
class KVLayout:
    """Geometry of a block: sizes in elements unless a name says bytes.

    Attributes:
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
        if self.dtype not in DTYPE_BYTES:
            raise ConfigError(f"KV dtype must be one of {sorted(DTYPE_BYTES)}, got {self.dtype!r}", field="kv_dtype")
        if not self.layers:
            raise ConfigError("a KV layout needs at least one layer", field="layers")
        if self.groups and (
            sorted(layer for group in self.groups for layer in group.layers) != list(range(len(self.layers)))
            or len(set(self.layers)) > 1
        ):
            raise ConfigError("layer groups must name every layer once, and all of one shape", field="layer_groups")

    @property
    def dtype_bytes(self) -> int:
        """Bytes per element."""
        return DTYPE_BYTES[self.dtype]

    @cached_property
    def layer_offsets(self) -> tuple[int, ...]:
        """Per layer, the element at which its K begins within a block; V follows K."""
        offsets, at = [], 0
        if self.groups:
            each = self.layers[0].elements_per_token * self.block_size
            place = {layer: i for group in self.groups for i, layer in enumerate(group.layers)}
            return tuple(place[layer] * each for layer in range(len(self.layers)))
        for layer in self.layers:
            offsets.append(at)
            at += layer.elements_per_token * self.block_size
        return tuple(offsets)

    def v_offset(self, layer: int) -> int:
        """Element at which a layer's V begins within a block."""
        shape = self.layers[layer]
        return self.layer_offsets[layer] + shape.kv_heads * shape.k_dim * self.block_size

    @cached_property
    def block_elements(self) -> int:
        """Elements from one block to the next, padding included."""
        layers = self.layers[: max(len(group.layers) for group in self.groups)] if self.groups else self.layers
        used = sum(layer.elements_per_token for layer in layers) * self.block_size
        unit = max(1, BLOCK_ALIGNMENT // self.dtype_bytes)
        return -(-used // unit) * unit

    @property
    def num_groups(self) -> int:
        """Blocks that ``block_size`` tokens take while all layers need them."""
        return max(1, len(self.groups))

    @cached_property
    def group_of(self) -> tuple[int, ...]:
        """Per layer the group whose blocks it lies in."""
        found = {layer: i for i, group in enumerate(self.groups) for layer in group.layers}
        return tuple(found.get(layer, 0) for layer in range(len(self.layers)))

    @property
    def block_bytes(self) -> int:
        """Bytes from one block to the next, padding included."""
        return self.block_elements * self.dtype_bytes

    @property
    def bytes_per_token(self) -> int:
        """KV bytes of one token without padding (kappa in the sizing rules)."""
        return sum(layer.elements_per_token for layer in self.layers) * self.dtype_bytes

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)
