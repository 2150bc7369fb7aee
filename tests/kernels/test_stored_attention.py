"""Attention over pools whose elements are of another type than the queries: int8 and fp8 with scales, bfloat16."""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.test_paged_attention import MIXED, SHAPES, VARIANTS, Case, make_case, ragged

from baton_kernels.cpu import CpuLibrary, load_library, runnable_variants
from baton_kernels.paged_attention import (
    CpuPagedAttention,
    LayerPool,
    PagedAttention,
    Rotation,
    TorchPagedAttention,
    paged_attention_reference,
)
from baton_kernels.paged_attention.quantized import quantize_rows, read_blocks, to_fp8

STORAGES = (torch.int8, torch.float8_e4m3fn, torch.bfloat16)
TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 3e-2, torch.float16: 6e-3}
PAIRS = [(d, s) for d in TOLERANCE for s in STORAGES if s is not torch.bfloat16 or d is torch.float32]


def pool_of(case: Case, storage: torch.dtype, *, garbage: bool = True) -> LayerPool:
    """Views over a pool [blocks, bytes] that holds garbage, or zeros, as a layer of :class:`KVLayout` has them."""
    spec, size, unit = case.spec, case.batch.block_size, storage.itemsize
    rows = spec.kv_heads * size
    parts = [rows * spec.k_dim * unit, rows * spec.v_dim * unit, 2 * rows, 2 * rows]
    parts[1] += sum(parts[:2]) % 2
    generator = torch.Generator().manual_seed(1)
    memory = torch.randint(0, 256, (case.num_blocks, -(-sum(parts) // 64) * 64), dtype=torch.uint8, generator=generator)
    memory *= garbage
    k, v, k_scales, v_scales = memory[:, : sum(parts)].split(parts, dim=1)
    shape = (spec.kv_heads, size)
    views = [
        part.view(dtype)[:, : math.prod(inner)].unflatten(1, inner)
        for part, dtype, inner in (
            (k, storage, (*shape, spec.k_dim)),
            (v, storage, (*shape, spec.v_dim)),
            (k_scales, torch.bfloat16, shape),
            (v_scales, torch.bfloat16, shape),
        )
    ]
    if storage is torch.bfloat16:
        return LayerPool(views[0], views[1])
    if storage is torch.int8:
        return LayerPool(views[0], views[1], 0, views[2], views[3])
    per_head = torch.rand(2, spec.kv_heads, generator=generator) * 0.02 + 0.002  # beyond the largest one some saturate
    return LayerPool(views[0], views[1], 0, per_head[0], per_head[1])


def written(case: Case, pool: LayerPool, side: str) -> torch.Tensor:
    """The bytes that a pool has for a batch's sequences, and their scales, as numbers."""
    cache, scales = (pool.k, pool.k_scales) if side == "k" else (pool.v, pool.v_scales)
    rows = []
    for table, context in zip(case.batch.block_tables, case.batch.context_lens, strict=True):
        blocks = torch.from_numpy(table[: -(-int(context) // case.batch.block_size)].astype(np.int64))
        rows.append(read_blocks(cache, scales, blocks).float().transpose(1, 2).flatten(0, 1)[: int(context)])
    return torch.cat(rows)


def fill(case: Case, pool: LayerPool) -> None:
    """Write a sequence's earlier tokens: what a batch finds in the pool."""
    whole = dataclasses.replace(case.batch, query_starts=np.r_[0, np.cumsum(case.batch.context_lens)].astype(np.int32))
    positions = np.concatenate([np.arange(context) for context in case.batch.context_lens])
    whole = dataclasses.replace(whole, positions=positions)
    generator = torch.Generator().manual_seed(2)
    q, k, v = (
        torch.randn(len(positions), heads, dim, generator=generator).to(case.q.dtype)
        for heads, dim in (
            (case.spec.num_heads, case.spec.k_dim),
            (case.spec.kv_heads, case.spec.k_dim),
            (case.spec.kv_heads, case.spec.v_dim),
        )
    )
    backend = TorchPagedAttention()
    backend.run(backend.prepare(whole), case.spec, pool, q, k, v)


def check(case: Case, storage: torch.dtype, backend: PagedAttention, want: torch.Tensor | None = None) -> None:
    # Plain torch multiplies what it masks: an infinite number in an unused part of a block would show.
    pools = [pool_of(case, storage, garbage=isinstance(backend, CpuPagedAttention)) for _ in range(2)]
    for pool in pools:
        fill(case, pool)
    expected = (
        paged_attention_reference(case.batch, case.spec, pools[0], case.q, case.k, case.v) if want is None else want
    )
    got = backend.run(backend.prepare(case.batch), case.spec, pools[1], case.q, case.k, case.v)
    if want is None:
        for side in ("k", "v"):
            assert torch.equal(written(case, pools[1], side), written(case, pools[0], side))
    assert got.dtype == case.q.dtype
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=TOLERANCE[case.q.dtype])


@functools.cache
def mixed(
    shape: tuple[int, int, int, int, int], dtype: torch.dtype, storage: torch.dtype, variant: str
) -> tuple[Case, torch.Tensor]:
    case = make_case(MIXED, shape, dtype, **VARIANTS[variant])
    pool = pool_of(case, storage)
    fill(case, pool)
    return case, paged_attention_reference(case.batch, case.spec, pool, case.q, case.k, case.v)


@pytest.mark.parametrize("variant", ["plain", "all"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("dtype", "storage"), PAIRS, ids=str)
def test_cpp_equals_the_reference(
    library: CpuLibrary,
    dtype: torch.dtype,
    storage: torch.dtype,
    shape: tuple[int, int, int, int, int],
    variant: str,
    threads: int,
) -> None:
    case, want = mixed(shape, dtype, storage, variant)
    check(case, storage, CpuPagedAttention(library), want)


@pytest.mark.parametrize("shape", SHAPES[::3], ids=str)
@pytest.mark.parametrize(("dtype", "storage"), PAIRS, ids=str)
def test_torch_equals_the_reference(
    dtype: torch.dtype, storage: torch.dtype, shape: tuple[int, int, int, int, int]
) -> None:
    case, want = mixed(shape, dtype, storage, "all")
    check(case, storage, TorchPagedAttention(), want)


@pytest.mark.parametrize("name", [each.name for each in runnable_variants()])
@pytest.mark.parametrize(("dtype", "storage"), PAIRS, ids=str)
def test_every_build_writes_the_same_bytes(name: str, dtype: torch.dtype, storage: torch.dtype) -> None:
    build = load_library(next(each for each in runnable_variants() if each.name == name))
    check(make_case(MIXED[:4], (6, 2, 33, 31, 5), dtype), storage, CpuPagedAttention(build))


@settings(max_examples=25, deadline=None)
@given(
    sequences=ragged(),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 10),
    dims=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    size=st.integers(1, 33),
    window=st.integers(0, 80),
    storage=st.sampled_from(STORAGES),
)
def test_any_ragged_batch(
    library: CpuLibrary,
    sequences: tuple[tuple[int, int], ...],
    kv_heads: int,
    group: int,
    dims: tuple[int, int],
    size: int,
    window: int,
    storage: torch.dtype,
) -> None:
    case = make_case(sequences, (kv_heads * group, kv_heads, *dims, size), torch.float32, window=window)
    check(case, storage, CpuPagedAttention(library))


def test_long_decodes_are_split_between_threads_and_merged(library: CpuLibrary, threads: int) -> None:
    case = make_case(((1500, 1), (900, 1)), (4, 2, 16, 16, 16), torch.float32, sinks=True)
    check(case, torch.int8, CpuPagedAttention(library))


@pytest.mark.parametrize("storage", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_keys_are_rotated_on_the_way_into_the_pool(
    library: CpuLibrary, dtype: torch.dtype, storage: torch.dtype
) -> None:
    """What is rotated first and written then is the same but for roundings to the model's dtype between both."""
    case = make_case(MIXED[:4], (4, 2, 24, 16, 16), dtype)
    angles = torch.rand(256, 8, generator=torch.Generator().manual_seed(3)) * 7
    rotation = Rotation(angles.cos(), angles.sin())
    positions = torch.from_numpy(case.batch.positions)
    cos, sin = (table[positions][:, None] for table in (rotation.cos, rotation.sin))

    def turned(x: torch.Tensor) -> torch.Tensor:
        low, high, rest = x.float().tensor_split([8, 16], dim=-1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin, rest], dim=-1).to(dtype)

    plain, way = pool_of(case, storage), pool_of(case, storage)
    for pool in (plain, way):
        fill(case, pool)
    backend = CpuPagedAttention(library)
    plan = backend.prepare(case.batch)
    want = backend.run(plan, case.spec, plain, turned(case.q), turned(case.k), case.v)
    got = backend.run_rotated(plan, case.spec, way, (case.q.clone(), case.k, case.v), rotation)
    precision = {torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 5e-3}[dtype]
    step = 0.13 if storage is torch.float8_e4m3fn else 0.03  # a number may round to the next one
    torch.testing.assert_close(written(case, way, "k"), written(case, plain, "k"), rtol=step, atol=step)
    torch.testing.assert_close(got.float(), want.float(), rtol=0, atol=max(20 * precision, 0.02))


numbers = st.floats(-(2.0**99), 2.0**99, width=32) | st.floats(-(2.0**-99), 2.0**-99, width=32)


@settings(deadline=None)
@given(rows=st.lists(st.lists(numbers, min_size=3, max_size=3), min_size=1, max_size=8))
def test_a_number_is_off_by_half_a_step_at_most(rows: list[list[float]]) -> None:
    x = torch.tensor(rows)
    q, scales = quantize_rows(x)
    assert q.dtype is torch.int8
    assert int(q.abs().max()) <= 127
    each = scales.double()[:, None]
    error = (q.double() * each - x.double()).abs()
    assert (error <= each * (0.5 + 1e-6) + 2.0**-119).all()
    largest = x.abs().amax(dim=1).double()
    assert (scales.double() <= largest / 127 * (1 + 2**-8)).all()


def test_rows_without_numbers_and_beyond_them() -> None:
    x = torch.tensor([[0.0, -0.0], [float("inf"), 1.0], [float("nan"), 1.0], [1e-40, 0.0], [3e38, -3e38]])
    q, scales = quantize_rows(x)
    assert scales[0] == scales[3] == 0
    assert scales[1:3].isnan().all()
    assert q.tolist()[:4] == [[0, 0]] * 4
    assert q[4].tolist() == [127, -127]
    values = to_fp8(torch.tensor([[[900.0, -1e9, float("inf"), float("nan"), 1.07]]]), torch.tensor([2.0])).float()
    assert values[0, 0, :2].tolist() == [448.0, -448.0]
    assert values[0, 0, 2:4].isnan().all()
    assert float(values[0, 0, 4]) == 0.5625  # of 0.535, between 0.5 and 0.5625


def test_types_that_do_not_go_together_are_refused(library: CpuLibrary) -> None:
    case = make_case(((3, 3),), (2, 2, 8, 8, 4), torch.float16)
    backend = CpuPagedAttention(library)
    with pytest.raises(ValueError, match="storage type 1"):
        backend.run(backend.prepare(case.batch), case.spec, pool_of(case, torch.bfloat16), case.q, case.k, case.v)
