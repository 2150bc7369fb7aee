"""The map between two parallel shapes, against a plain reshape of the whole KV."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.transport.kv_shapes import pool_of, whole_kv

from baton.errors import ConfigError, FingerprintMismatchError
from baton.kv_cache.layout import CODES, LayerShape
from baton.kv_cache.reshard import (
    ShardGrid,
    cast_rows,
    cast_spans,
    merge_casts,
    merge_segments,
    reshard,
    token_pieces,
)
from baton.kv_cache.shards import KVGeometry, ShardSpec, head_range, layer_range, shard_layout, shard_specs

SIZES = (1, 2, 3, 4, 6, 8)


def divides(heads: int, tp: int) -> bool:
    return heads % tp == 0 or tp % heads == 0


def check(geometry: KVGeometry, source: ShardGrid, target: ShardGrid) -> None:
    plan = reshard(geometry, source, target)
    period = source.block_size * plan.source_period
    kv = whole_kv(geometry, 2 * period)
    sources = [pool_of(geometry, s, source.block_size, kv) for s in shard_specs(source.tp_size, source.pp_size)]
    wanted = [pool_of(geometry, s, target.block_size, kv) for s in shard_specs(target.tp_size, target.pp_size)]
    got = [np.zeros_like(pool) for pool in wanted]
    written = [np.zeros(pool.shape, np.int64) for pool in wanted]
    for copy in plan.copies:
        for turn in range(2):
            block = turn * plan.source_period + copy.piece.source_block
            into = turn * plan.target_period + copy.piece.target_block
            for begin, to, size in copy.segments.tolist():
                data = sources[copy.source.index][block, begin : begin + size]
                got[copy.target.index][into, to : to + size] = data
                written[copy.target.index][into, to : to + size] += 1
    for have, want, count in zip(got, wanted, written, strict=True):
        np.testing.assert_array_equal(have, want)
        assert count.max() <= 1, "a byte is copied twice"


@pytest.mark.parametrize("target_tp", SIZES)
@pytest.mark.parametrize("source_tp", SIZES)
def test_every_pair_equals_a_plain_reshape(source_tp: int, target_tp: int) -> None:
    for heads in (1, 2, 4, 6, 8, 24):
        if divides(heads, source_tp) and divides(heads, target_tp):
            geometry = KVGeometry((LayerShape(heads, 2, 3),) * 8, "float32")
            for source_pp, target_pp in ((1, 1), (2, 1), (1, 4), (3, 2), (8, 6)):
                check(geometry, ShardGrid(source_tp, source_pp, 2), ShardGrid(target_tp, target_pp, 2))


@settings(max_examples=60, deadline=None)
@given(
    tps=st.tuples(st.sampled_from(SIZES), st.sampled_from(SIZES)),
    pps=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    sizes=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    shapes=st.lists(
        st.tuples(st.sampled_from((1, 2, 3, 4, 8, 24)), st.integers(1, 3), st.integers(1, 3)), min_size=4, max_size=5
    ),
    latent=st.booleans(),
    dtype=st.sampled_from(("float32", "int8", "fp8_e4m3", "int8;float32@0,2")),
)
def test_any_shapes_and_block_sizes(
    tps: tuple[int, int],
    pps: tuple[int, int],
    sizes: tuple[int, int],
    shapes: list[tuple[int, int, int]],
    latent: bool,
    dtype: str,
) -> None:
    layers = tuple(LayerShape(*shape) for shape in shapes)
    unsplit = frozenset({0, 3}) if latent else frozenset[int]()
    geometry = KVGeometry(layers, dtype, unsplit)
    grids = [ShardGrid(tp, pp, size) for tp, pp, size in zip(tps, pps, sizes, strict=True)]
    if all(i in unsplit or divides(layer.kv_heads, tp) for tp in tps for i, layer in enumerate(layers)):
        check(geometry, grids[0], grids[1])
    else:
        with pytest.raises(FingerprintMismatchError) as refused:
            reshard(geometry, grids[0], grids[1])
        assert refused.value.field == "tp_size"


def test_scales_go_with_their_head() -> None:
    geometry = KVGeometry((LayerShape(2, 4, 4),), "int8")
    plan = reshard(geometry, ShardGrid(2, 1, 16), ShardGrid(1, 1, 16))
    each, scales = 16 * 4, 16 * 2
    found = {copy.source.tp_rank: merge_segments(copy.segments).tolist() for copy in plan.copies}
    for head in (0, 1):
        begins = [head * each, (2 + head) * each, 4 * each + head * scales, 4 * each + (2 + head) * scales]
        sizes = [each, each, scales, scales]
        starts = [0, each, 2 * each, 2 * each + scales]
        assert found[head] == [list(x) for x in zip(starts, begins, sizes, strict=True)]


def test_conversions_join_where_rows_go_on_and_say_what_they_read_and_write() -> None:
    geometry = KVGeometry((LayerShape(2, 4, 4), LayerShape(2, 4, 4)), "bfloat16")
    wanted = KVGeometry(geometry.layers, "int8;bfloat16@1")
    (copy,) = reshard(geometry, ShardGrid(1, 1, 16), ShardGrid(1, 1, 16), wanted).copies
    assert copy.casts is not None
    assert len(copy.casts) == 8  # K and V of two heads and two layers
    joined = merge_casts(copy.casts)
    rows = 2 * 2 * 16
    assert joined.tolist() == [
        [0, -1, 0, rows * 4, rows, 4, CODES["bfloat16"], CODES["int8"]],
        [rows * 8, -1, rows * 6, -1, rows, 4, CODES["bfloat16"], CODES["bfloat16"]],
    ]
    assert cast_spans(joined, target=False).tolist() == [[0, 2 * rows * 8]]
    assert cast_spans(joined, target=True).tolist() == [[0, rows * 6 + rows * 8]]
    part = cast_rows(joined[0], 3, 5)
    assert part.tolist() == [3 * 8, -1, 3 * 4, rows * 4 + 6, 5, 4, CODES["bfloat16"], CODES["int8"]]


def test_equal_shapes_take_whole_blocks() -> None:
    geometry = KVGeometry((LayerShape(4, 8, 8),) * 3, "bfloat16")
    plan = reshard(geometry, ShardGrid(2, 1, 16), ShardGrid(2, 1, 16))
    assert plan.trivial
    block_bytes = shard_layout(geometry, ShardSpec(2), 16).block_bytes
    for copy in plan.copies:
        assert copy.source == copy.target
        assert merge_segments(copy.segments).tolist() == [[0, 0, block_bytes]]


def test_pieces_of_unequal_blocks() -> None:
    pieces = token_pieces(16, 32)
    assert [(p.source_block, p.target_block, p.target_token, p.num_tokens) for p in pieces] == [
        (0, 0, 0, 16),
        (1, 0, 16, 16),
    ]
    assert sum(p.num_tokens for p in token_pieces(12, 8)) == 24


def test_layers_of_stages() -> None:
    assert [list(layer_range(7, 3, rank)) for rank in range(3)] == [[0, 1, 2], [3, 4], [5, 6]]
    assert [list(head_range(2, 8, rank)) for rank in range(8)] == [[0]] * 4 + [[1]] * 4


def test_block_sizes_without_a_common_measure_are_refused() -> None:
    geometry = KVGeometry((LayerShape(4, 8, 8),), "float32")
    with pytest.raises(FingerprintMismatchError) as refused:
        reshard(geometry, ShardGrid(1, 1, 65_537), ShardGrid(1, 1, 16))
    assert refused.value.field == "block_size"


@pytest.mark.parametrize(
    ("grid", "field"),
    [
        (ShardGrid(3, 1, 16), "tp_size"),
        (ShardGrid(1, 5, 16), "pp_size"),
        (ShardGrid(0, 1, 1), "tp_size"),
        (ShardGrid(4096, 1, 16), "tp_size"),
    ],
)
def test_what_cannot_be_mapped_names_the_field(grid: ShardGrid, field: str) -> None:
    geometry = KVGeometry((LayerShape(4, 8, 8),) * 4, "float32")
    for pair in ((grid, ShardGrid(1, 1, 16)), (ShardGrid(1, 1, 16), grid)):
        with pytest.raises(FingerprintMismatchError) as refused:
            reshard(geometry, *pair)
        assert refused.value.field == field
    with pytest.raises(ConfigError):
        head_range(4, 3, 0)


def test_whole_blocks_fill_blocks_of_layer_groups_and_not_the_other_way() -> None:
    geometry = KVGeometry((LayerShape(2, 4, 4),) * 3, "float32")
    whole, grouped = ShardGrid(1, 1, 16), ShardGrid(1, 1, 16, (1, 0, 1))
    each = LayerShape(2, 4, 4).elements_per_token * 16 * 4
    found = {copy.group: merge_segments(copy.segments).tolist() for copy in reshard(geometry, whole, grouped).copies}
    assert found == {0: [[each, 0, each]], 1: [[0, 0, each], [2 * each, each, each]]}
    with pytest.raises(FingerprintMismatchError) as refused:
        reshard(geometry, grouped, whole)
    assert refused.value.field == "layer_groups"
    for groups in ((0, 1), (0, -1, 1)):
        with pytest.raises(FingerprintMismatchError) as refused:
            reshard(geometry, whole, ShardGrid(1, 1, 16, groups))
        assert refused.value.field == "layer_groups"
