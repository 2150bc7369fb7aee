"""The order of bytes inside a KV block.

A block holds ``block_size`` consecutive tokens of all layers, one layer after the other; within a layer first K,
then V; within each (kv_head, token, dim). So a block is one descriptor and one store value, one layer of it is
contiguous (layer-wise transfer), and so is one head's slice of it (tensor-parallel resharding). Layers may differ
in shape (some models vary heads per layer): each has its own offset. Where the KV is a latent that all query heads
share (MLA), its layer has one head whose K is the latent and the rotary key, and no V.

The KV type says how elements are stored: floats, int8 or fp8. int8 has a bfloat16 scale per token and KV head for K
and another for V, in the block itself, so that a block can be moved, stored and cut by heads without anything beside
it: behind K and V of each layer the scales of K (kv_head, token), then those of V. That is version 2 of the layout;
    without
scales the bytes of both versions are the same. A number is ``scale * q`` with q in -127 .. 127;
:mod:`baton_kernels.paged_attention.quantized` defines how scale and q are made. fp8_e4m3 (OCP 8-bit floating point,
E4M3 without infinities) has a scale per layer and KV head that belongs to the checkpoint.

Layers may be left out of quantization. The name of the type then lists them: ``int8;bfloat16@0,11`` is int8 with layers
0 and 11 in bfloat16.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from baton.errors import ConfigError

FLOAT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes per element of KV that is stored as it was computed."""
DTYPE_BYTES = {**FLOAT_BYTES, "int8": 1, "fp8_e4m3": 1}
"""Bytes per element."""
CODES = {"float32": 0, "bfloat16": 1, "float16": 2, "int8": 3}
"""Codes of the dtypes that can be converted, as in ``native/dtype_cast.c``."""
SCALED = frozenset({"int8"})
"""Dtypes with a scale per token and KV head in the block."""
SCALE_BYTES = 2
"""Bytes per scale, bfloat16."""
MOST_LAYERS = 4096
"""Largest number of layers in the name of a type."""


@functools.lru_cache(maxsize=256)
def layer_types(name: str, num_layers: int) -> tuple[str, ...]:
    """Return the dtype of each layer.

    Args:
        name: Name of the KV type, as :func:`type_name` writes it.
        num_layers: Number of layers.

    Raises:
        ConfigError: The name is malformed; names ``kv_dtype``.
    """
    base, _, rest = name.partition(";")
    kept, _, numbers = rest.partition("@")
    dtypes = [base] * num_layers
    if rest and num_layers <= MOST_LAYERS:
        for number in numbers.split(",", MOST_LAYERS):
            if number.isascii() and number.isdigit() and len(number) <= 4 and int(number) < num_layers:
                dtypes[int(number)] = kept
    types = tuple(dtypes)
    if not set(types) <= DTYPE_BYTES.keys() or type_name(types) != name:
        raise ConfigError(
            f"KV dtype must be one of {sorted(DTYPE_BYTES)}, or one with layers left out, got {name!r:.80}",
            field="kv_dtype",
        )
    return types


def type_name(types: Sequence[str]) -> str:
    """Return the name of KV whose layers have these dtypes: at most one that is quantized, and one float."""
    if len(set(types)) <= 1:
        return next(iter(types), "")
    base = next((each for each in types if each not in FLOAT_BYTES), types[0])
    kept = next(each for each in types if each != base)
    return f"{base};{kept}@{','.join(str(layer) for layer, each in enumerate(types) if each != base)}"


def is_quantized(name: str) -> bool:
    """Return whether a KV type stores some layers quantized."""
    return name.partition(";")[0] not in FLOAT_BYTES


def can_convert(source: str, target: str) -> bool:
    """Return whether KV types can be converted; fp8 cannot: its scales are not in the blocks."""
    return "fp8_e4m3" not in (source.partition(";")[0], target.partition(";")[0])


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
    """Layers whose KV is in blocks of their own.

    Attributes:
        layers: Indexes of the layers, rising.
        window: Number of tokens that a token attends to, itself included; 0: all before it.
    """

    layers: tuple[int, ...]
    window: int = 0


def groups_of(numbers: Sequence[int]) -> tuple[LayerGroup, ...]:
    """Return the layer groups, given each layer's group number; empty: there are no groups."""
    return tuple(
        LayerGroup(tuple(layer for layer, number in enumerate(numbers) if number == group))
        for group in range(max(numbers, default=-1) + 1)
    )


def layout_name(dtype: str) -> str:
    """Return the name of the byte order in blocks of a KV type."""
    return SCALED_LAYOUT_NAME if dtype.partition(";")[0] in SCALED else LAYOUT_NAME


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """Byte offsets of a layer's parts within a block.

    Attributes:
        dtype: Dtype of K and V.
        k: Offset of K.
        v: Offset of V.
        k_scales: Offset of the scales of K; -1: there are none.
        v_scales: Offset of the scales of V; -1: there are none.
        end: Offset of the first byte after the layer.
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
        dtype: KV type of all layers, as :func:`type_name` writes it.
        layers: Shape of each layer.
        block_size: Tokens per block.
        groups: Layer groups that have blocks of their own, of layers with one shape; a group with fewer layers than the
            largest leaves the end of its blocks empty. Empty: a block holds all layers.
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
        """Offsets of each layer's parts."""
        types = layer_types(self.dtype, len(self.layers))
        if self.groups:
            by_layer: dict[int, LayerPlace] = {}
            for group in self.groups:
                end = 0
                for layer in group.layers:
                    by_layer[layer] = self._place(layer, types[layer], end)
                    end = by_layer[layer].end
            return tuple(by_layer[layer] for layer in range(len(self.layers)))
        places: list[LayerPlace] = []
        for layer, dtype in enumerate(types):
            places.append(self._place(layer, dtype, places[-1].end if places else 0))
        return tuple(places)

    def _place(self, layer: int, dtype: str, at: int) -> LayerPlace:
        """Place a layer at offset ``at`` or after it; its parts are aligned to the size of their elements."""
        shape = self.layers[layer]
        unit = DTYPE_BYTES[dtype]
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
        """Number of blocks that ``block_size`` tokens occupy while all layers need them."""
        return max(1, len(self.groups))

    @cached_property
    def group_of(self) -> tuple[int, ...]:
        """Group number of each layer."""
        groups = {layer: i for i, group in enumerate(self.groups) for layer in group.layers}
        return tuple(groups.get(layer, 0) for layer in range(len(self.layers)))

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
        """Return the number of blocks that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)


MAX_GROUPS = 8
"""Largest number of layer groups; each costs every sequence a block table."""
LONG = 8
"""Assumed ratio of sequence length to window: so much more an unused place of full attention costs."""


def group_layers(windows: Sequence[int], shapes: Sequence[LayerShape]) -> tuple[LayerGroup, ...]:
    """Divide a model's layers into groups, those of full attention first.

    Layers that see the same part of a sequence share blocks. Without groups a block holds all layers of its tokens, so
    it is kept for as long as any layer needs it. With groups a block holds one group's layers: blocks of a window's
    group are released when no later token will see them. All groups use one pool, so their blocks have one size: as
    many places for layers as the largest group has.

    The number of layers per group is the one with which long sequences take the least memory, empty places included:
    Gemma 3's 5 : 1 gives 6 groups, or 7 where some places stay empty.

    Args:
        windows: Attention window of each layer in tokens; 0: full attention.
        shapes: Shape of each layer's KV.

    Returns:
        At least two groups; empty if all layers see the same, or differ in shape.
    """
    kinds: dict[int, list[int]] = {0: []}
    for layer, window in enumerate(windows):
        kinds.setdefault(window, []).append(layer)
    if not kinds[0] or len(kinds) == 1 or len(set(shapes)) > 1:
        return ()

    def counts(size: int) -> tuple[int, int]:
        """Return the number of groups of full attention and of windows."""
        each = [-(-len(layers) // size) for layers in kinds.values()]
        return each[0], sum(each[1:])

    def cost(size: int) -> tuple[int, int]:
        full, others = counts(size)
        return size * (LONG * full + others), -size

    sizes = [size for size in range(1, len(windows) + 1) if sum(counts(size)) <= MAX_GROUPS]
    if not sizes:
        return ()
    size = min(sizes, key=cost)
    return tuple(
        LayerGroup(tuple(layers[at : at + size]), window)
        for window, layers in kinds.items()
        for at in range(0, len(layers), size)
    )
