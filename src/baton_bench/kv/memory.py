"""Where a side's blocks lie: in host memory, or in that of a device, which is reached by copies alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from baton.errors import ConfigError
from baton.kv_cache.arena import Arena, HostArena, whole_blocks
from baton.kv_cache.layout import FLOAT_BYTES, KVLayout
from baton.kv_cache.shards import KVShards, ShardSpec, layer_range, shard_heads, shard_layout, shard_specs
from baton.kv_transfer.native_copy import convert
from baton_bench.kv.plan import HOST, Ids, Shape

if TYPE_CHECKING:
    from baton.engine.device import ComputeDevice


Bytes = npt.NDArray[np.uint8]
_BATCH_BYTES = 32 << 20
"""Bytes of blocks copied at a time between a device and this process."""


def device_of(memory: str) -> ComputeDevice:
    """Return the device of a ``--memory`` name.

    Raises:
        ConfigError: There is none, or it cannot be used; names ``memory``.
    """
    try:
        from baton.engine.device import compute_device
    except ImportError as error:
        raise ConfigError(f"--memory {memory} needs torch: pip install 'baton-serve[gpu]'", field="memory") from error
    try:
        return compute_device(memory)
    except ConfigError as error:
        raise ConfigError(f"--memory: {error.message}", field="memory") from error


def new_shards(shape: Shape, memory: str, num_blocks: int) -> KVShards:
    """Allocate the arenas of all ranks.

    Raises:
        ConfigError: They do not fit the device, or there is none.
    """
    return KVShards([new_arena(memory, num_blocks, layout.block_bytes) for layout in shape.layouts()])


def new_arena(memory: str, num_blocks: int, block_bytes: int) -> Arena:
    """Allocate an arena; see :func:`new_shards`."""
    if memory == HOST:
        return HostArena(num_blocks, block_bytes)
    from baton.engine.device_memory import DeviceArena

    return DeviceArena(device_of(memory), num_blocks, block_bytes)


def fill(arena: Arena, write: Callable[[Bytes, int], None]) -> None:
    """Write all blocks.

    Args:
        arena: Arena to write to.
        write: Writes blocks, uint8 [n, block_bytes], given the id of the first.
    """
    if arena.mapped:
        write(arena.blocks, 0)
        return
    for ids in _batches(np.arange(arena.num_blocks), arena.block_bytes):
        rows = np.zeros((len(ids), arena.block_bytes), np.uint8)
        write(rows, int(ids[0]))
        arena.write_from(rows.reshape(-1), whole_blocks(ids, arena.block_bytes))


def wipe(arena: Arena, value: int) -> None:
    """Set every byte of the blocks."""

    def write(rows: Bytes, first: int) -> None:
        rows[:] = value

    fill(arena, write)


def blocks_of(arena: Arena, ids: Ids) -> Iterator[tuple[int, Bytes, Ids]]:
    """Yield blocks batch by batch: place of the first among ``ids``, an array that has them, and their rows in it."""
    if arena.mapped:
        yield 0, arena.blocks, ids
        return
    at = 0
    for some in _batches(ids, arena.block_bytes):
        rows = np.empty((len(some), arena.block_bytes), np.uint8)
        arena.read_into(rows.reshape(-1), whole_blocks(some, arena.block_bytes))
        yield at, rows, np.arange(len(some))
        at += len(some)


def _batches(ids: Ids, block_bytes: int) -> Iterator[Ids]:
    count = max(1, _BATCH_BYTES // block_bytes)
    for at in range(0, len(ids), count):
        yield ids[at : at + count]


Words = npt.NDArray[np.uint64]
WORD_BYTES = 8
WIPED = 0xA5
"""Byte that a target's blocks are set to before a verified run."""
_A = 0xD1B54A32D192ED03
_B = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_KEPT = {"float32": 0x87FFFFFF_87FFFFFF, "bfloat16": 0x87FF87FF_87FF87FF, "float16": 0xBFFFBFFF_BFFFBFFF}
_SET = {"float32": 0x38000000_38000000, "bfloat16": 0x38003800_38003800, "float16": 0}
"""Bits of a word's numbers that stay, and that are set, where they must be convertible: magnitudes are below 2 then."""


class ShardPattern:
    """The pattern as one rank holds it.

    Args:
        seed: Seed of the run.
        shape: Shape of the instance's blocks.
        spec: Rank of the shard.
        source_dtype: Dtype of the sources; empty: the same as the instance's.
    """

    def __init__(self, seed: int, shape: Shape, spec: ShardSpec, source_dtype: str = "") -> None:
        self._seed = seed
        self._cast = shape.cast
        self._origin = self
        if source_dtype not in ("", shape.dtype):
            self._origin = ShardPattern(seed, dataclasses.replace(shape, dtype=source_dtype), spec)
        self._layout: KVLayout = shard_layout(shape.geometry, spec, shape.block_size)
        layers = layer_range(len(shape.layers), spec.pp_size, spec.pp_rank)
        self._heads = [np.array(shard_heads(shape.geometry, spec, layer)) for layer in layers]
        self._first_layer = layers.start
        most = max(max(layer.k_dim, layer.v_dim) for layer in self._layout.layers)
        count = most * FLOAT_BYTES[shape.dtype] // WORD_BYTES
        self._ramp: Words = np.arange(count, dtype=np.uint64) * np.uint64(_B)
        self._bases: dict[int, list[Words]] = {}

    def fill(self, blocks: Bytes, owner: int, first: int = 0) -> None:
        """Write blocks of a source's rank, uint8 [blocks, block_bytes], from the ``first`` on."""
        size = self._layout.block_size
        for block, out in enumerate(blocks, first):
            self._write(out, owner, np.arange(block * size, (block + 1) * size, dtype=np.uint64))

    def wrong(self, blocks: Bytes, local_ids: Ids, owner: int, tokens: Words) -> list[int]:
        """Return the blocks that are not what a source gave.

        Args:
            blocks: uint8 [blocks, block_bytes], this rank's.
            local_ids: A sequence's blocks, [w].
            owner: Number of the source.
            tokens: uint64 [t], the source's token at each place of the sequence; the last block may be filled in part.
        """
        size = self._layout.block_size
        bad = []
        origin = self._origin
        expected = np.empty(origin._layout.block_bytes, dtype=np.uint8)
        for place, block in enumerate(local_ids.tolist()):
            want = tokens[place * size : (place + 1) * size]
            origin._write(expected, owner, want)
            if any(
                not np.array_equal(row, self._as_here(origin_row))
                for (row, _), (origin_row, _) in zip(
                    self._rows(blocks[block], len(want)), origin._rows(expected, len(want)), strict=True
                )
            ):
                bad.append(block)
        return bad

    def _as_here(self, words: Words) -> Words:
        """Return a source's numbers as this instance has them."""
        if self._origin is self:
            return words
        rows = np.ascontiguousarray(words).view(np.uint8).reshape(-1, words.shape[2] * WORD_BYTES)
        made, _ = convert(rows, self._origin._layout.dtype, self._layout.dtype)
        return made.view(np.uint64).reshape(*words.shape[:2], -1)

    def _write(self, out: Bytes, owner: int, tokens: Words) -> None:
        bases = self._bases_of(owner)
        shift = tokens * np.uint64(_A)
        for index, (rows, words) in enumerate(self._rows(out, len(tokens))):
            np.add((bases[index][:, None] + shift)[:, :, None], self._ramp[:words], out=rows)
            if self._cast:
                rows &= np.uint64(_KEPT[self._layout.dtype])
                rows |= np.uint64(_SET[self._layout.dtype])

    def _rows(self, block: Bytes, num_tokens: int) -> Iterator[tuple[Words, int]]:
        """Yield K and V of every layer of a block, uint64 [heads, num_tokens, words], and the words."""
        layout = self._layout
        unit = FLOAT_BYTES[self._layout.dtype]
        for shape, where in zip(layout.layers, layout.places, strict=True):
            for at, dim in ((where.k, shape.k_dim), (where.v, shape.v_dim)):
                if not dim:
                    continue
                words = dim * unit // WORD_BYTES
                count = shape.kv_heads * layout.block_size
                flat = block[at : at + count * words * WORD_BYTES].view(np.uint64)
                yield flat.reshape(shape.kv_heads, layout.block_size, words)[:, :num_tokens], words

    def _bases_of(self, owner: int) -> list[Words]:
        """Return the start values per layer and K or V, uint64 [heads] each."""
        if owner not in self._bases:
            self._bases[owner] = [
                np.array(
                    [_mix(self._seed, owner, self._first_layer + layer, kind, head) for head in heads.tolist()], "u8"
                )
                for layer, heads in enumerate(self._heads)
                for kind in ((0, 1) if self._layout.layers[layer].v_dim else (0,))
            ]
        return self._bases[owner]


def shard_patterns(seed: int, shape: Shape, source_dtype: str = "") -> list[ShardPattern]:
    """Return the pattern of every rank of an instance, by rank index; see :class:`ShardPattern`."""
    return [ShardPattern(seed, shape, spec, source_dtype) for spec in shard_specs(shape.tp, shape.pp)]


def source_tokens(shape: Shape, remote_ids: Ids) -> Words:
    """Return the tokens that a source's blocks hold, in the order of the blocks given, uint64 [blocks * block_size]."""
    tokens = remote_ids[:, None] * shape.block_size + np.arange(shape.block_size, dtype=np.int64)
    return tokens.reshape(-1).astype(np.uint64)


def _mix(*values: int) -> int:
    """Spread numbers over 64 bits (splitmix64's finalizer after each)."""
    state = 0
    for value in values:
        state = (state ^ value) + _B & _MASK
        state = ((state ^ state >> 30) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ state >> 27) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state
