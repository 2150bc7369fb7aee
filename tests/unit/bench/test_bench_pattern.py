"""The pattern finds every kind of wrong byte, and does so without the transfer's own map between shapes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from baton.errors import ConfigError
from baton.kv_cache.shards import shard_specs
from baton.kv_transfer.wire import BadFrameError
from baton_bench.geometries import named_geometry
from baton_bench.kv.memory import ShardPattern, shard_patterns, source_tokens
from baton_bench.kv.plan import RunSpec, Shape, chosen, round_up_block

SHAPE = Shape.of(named_geometry("baton-tiny", "bfloat16"), 4)


def filled(shape: Shape, num_blocks: int, owner: int = 3) -> list[np.ndarray]:
    out = []
    for pattern, layout in zip(shard_patterns(1, shape), shape.layouts(), strict=True):
        blocks = np.zeros((num_blocks, layout.block_bytes), dtype=np.uint8)
        pattern.fill(blocks, owner)
        out.append(blocks)
    return out


def test_what_was_filled_is_right():
    (blocks,) = filled(SHAPE, 6)
    (pattern,) = shard_patterns(1, SHAPE)
    remote, local = np.array([4, 0, 5]), np.array([1, 2, 3])
    target = np.zeros_like(blocks)
    target[local] = blocks[remote]
    assert pattern.wrong(target, local, 3, source_tokens(SHAPE, remote)) == []
    assert pattern.wrong(target, local[::-1], 3, source_tokens(SHAPE, remote)) == [3, 1]
    assert pattern.wrong(target, local, 2, source_tokens(SHAPE, remote)) == [1, 2, 3]
    assert shard_patterns(2, SHAPE)[0].wrong(target, local, 3, source_tokens(SHAPE, remote)) == [1, 2, 3]


def test_every_byte_counts():
    (blocks,) = filled(SHAPE, 2)
    (pattern,) = shard_patterns(1, SHAPE)
    ids = np.array([0, 1])
    rng = np.random.default_rng(0)
    used = 4 * SHAPE.bytes_per_token
    for at in [0, used - 1, *rng.integers(0, used, 50).tolist()]:
        blocks[1, at] ^= 1
        assert pattern.wrong(blocks, ids, 3, source_tokens(SHAPE, ids)) == [1]
        blocks[1, at] ^= 1
    assert pattern.wrong(blocks, ids, 3, source_tokens(SHAPE, ids)) == []


def test_a_run_shifted_by_one_word_is_wrong():
    (blocks,) = filled(SHAPE, 2)
    ids = np.array([0, 1])
    blocks[:] = np.roll(blocks.reshape(-1), 8).reshape(blocks.shape)
    assert shard_patterns(1, SHAPE)[0].wrong(blocks, ids, 3, source_tokens(SHAPE, ids)) == [0, 1]


def test_ranks_hold_their_heads_and_layers_of_the_same_pattern():
    (whole,) = filled(SHAPE, 2)
    split = dataclasses.replace(SHAPE, tp=2, pp=3)
    shards = filled(split, 2)
    geometry, layout = SHAPE.geometry, SHAPE.layouts()[0]
    by_layer = whole.view(np.uint16).reshape(2, len(geometry.layers), 2, 2, 4, 32)
    for spec, blocks in zip(shard_specs(2, 3), shards, strict=True):
        mine = blocks.view(np.uint16).reshape(2, 2, 2, 1, 4, 32)
        layers = slice(2 * spec.pp_rank, 2 * spec.pp_rank + 2)
        assert (mine == by_layer[:, layers, :, spec.tp_rank : spec.tp_rank + 1]).all()
    assert layout.block_bytes == sum(s.shape[1] for s in shards)


def test_replicated_heads_are_equal_on_their_holders():
    shards = filled(dataclasses.replace(SHAPE, tp=4), 2)
    assert (shards[0] == shards[1]).all()
    assert (shards[2] == shards[3]).all()
    assert (shards[1] != shards[2]).any()


def test_a_last_block_filled_in_part():
    (blocks,) = filled(SHAPE, 3)
    wide = dataclasses.replace(SHAPE, block_size=8)
    pattern = shard_patterns(1, wide)[0]
    tokens = source_tokens(SHAPE, np.array([2, 0, 1]))
    target = np.full((2, wide.layouts()[0].block_bytes), 0xA5, dtype=np.uint8)
    narrow, out = blocks.view(np.uint16).reshape(3, 6, 2, 2, 4, 32), target.view(np.uint16).reshape(2, 6, 2, 2, 8, 32)
    for place, block in enumerate((2, 0, 1)):
        out[place // 2, ..., 4 * (place % 2) : 4 * (place % 2) + 4, :] = narrow[block]
    assert pattern.wrong(target, np.array([0, 1]), 3, tokens) == []
    out[1, 0, 0, 0, 3, 0] ^= 1
    assert pattern.wrong(target, np.array([0, 1]), 3, tokens) == [1]
    out[1, 0, 0, 0, 3, 0] ^= 1
    out[1, 0, 0, 0, 4, 0] ^= 1  # beyond the sequence's end
    assert pattern.wrong(target, np.array([0, 1]), 3, tokens) == []


@pytest.mark.parametrize("source", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("target", ["float32", "bfloat16", "float16"])
def test_a_target_of_another_dtype_knows_every_number(source: str, target: str) -> None:
    shape = Shape.of(named_geometry("baton-tiny", source), 4, cast=True)
    (blocks,) = filled(shape, 3)
    numbers = torch.from_numpy(blocks).view(getattr(torch, source))
    assert (numbers.abs() < 2).all()
    assert numbers.unique().numel() > 1000
    assert numbers.half().unique().numel() > 1000  # in the narrowest range too
    made = numbers.to(getattr(torch, target)).view(torch.uint8).numpy().copy()
    (pattern,) = shard_patterns(1, dataclasses.replace(shape, dtype=target), source)
    ids = np.arange(3)
    assert pattern.wrong(made, ids, 3, source_tokens(shape, ids)) == []
    made[1, made.shape[1] // 2] ^= 1
    assert pattern.wrong(made, ids, 3, source_tokens(shape, ids)) == [1]


@pytest.mark.parametrize("size", [64, 192, 4096, 32 << 10, 1 << 20, 65 * 64])
def test_raw_blocks_have_the_size_asked_for_and_no_gap(size):
    shape = Shape.raw(size)
    (layout,) = shape.layouts()
    assert layout.block_bytes == size == shape.bytes_per_token
    blocks = np.zeros((2, size), dtype=np.uint8)
    pattern = ShardPattern(0, shape, shard_specs(1, 1)[0])
    pattern.fill(blocks, 0)
    assert (blocks.view(np.uint64) != 0).all()


def test_sizes_are_rounded_up_to_blocks():
    assert [round_up_block(size) for size in (1, 64, 65)] == [64, 64, 128]


def test_both_sides_choose_the_same_blocks():
    spec = RunSpec("tcp", 1, 50, True)
    assert (chosen(spec, 100, 7, 1) == chosen(spec, 100, 7, 1)).all()
    assert (chosen(spec, 100, 7, 1) != chosen(spec, 100, 7, 2)).any()
    assert len(np.unique(chosen(spec, 100, 7, 1))) == 50
    assert chosen(RunSpec("tcp", 1, 5, False), 100, 7, 1).tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(BadFrameError):
        chosen(spec, 49, 7, 1)


def test_odd_heads_are_refused():
    with pytest.raises(ConfigError, match="8-byte"):
        Shape(((1, 3, 3),), "float16", False, 16)
