"""Attention by Triton over KV of 8 bits, and over plans that know no lengths, as CUDA graphs need them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels import test_stored_attention as stored
from tests.kernels.gpu.test_attention import DEVICE, on_device
from tests.kernels.test_paged_attention import VARIANTS, Case, make_case, ragged

from baton_kernels.paged_attention import LayerPool, Rotation, paged_attention_reference
from baton_kernels.paged_attention.quantized import quantize_rows, to_fp8

pytest.importorskip("triton")
from baton_kernels.paged_attention import gpu

MIXED = ((1, 1), (20, 1), (37, 20), (70, 9))
STORAGES = (torch.int8, torch.float8_e4m3fn)
TOLERANCE = {torch.float32: 3e-5, torch.float16: 6e-3}


def moved(pool: LayerPool, device: torch.device) -> LayerPool:
    """A copy of a pool, its views and all that lies between them."""
    memory = pool.k.untyped_storage()
    flat = torch.empty(0, dtype=torch.uint8).set_(memory).to(device, copy=True)

    def view(x: torch.Tensor | None) -> torch.Tensor | None:
        if x is None or x.untyped_storage().data_ptr() != memory.data_ptr():
            return None if x is None else x.to(device)
        return flat.view(x.dtype).as_strided(x.shape, x.stride(), x.storage_offset())

    k, v, k_scales, v_scales = (view(x) for x in (pool.k, pool.v, pool.k_scales, pool.v_scales))
    assert k is not None
    assert v is not None
    return LayerPool(k, v, pool.group, k_scales, v_scales)


def check(case: Case, storage: torch.dtype) -> None:
    """The pool holds garbage where no token is, and numbers that are none in it."""
    pool = stored.pool_of(case, storage)
    stored.fill(case, pool)
    there = moved(pool, DEVICE)
    want = paged_attention_reference(case.batch, case.spec, pool, case.q, case.k, case.v)
    at, backend = on_device(case), gpu.TritonPagedAttention(DEVICE)
    assert storage in backend.stores
    got = backend.run(backend.prepare(case.batch), at.spec, there, at.q, at.k, at.v)
    back = moved(there, torch.device("cpu"))
    for side in ("k", "v"):
        assert torch.equal(stored.written(case, back, side), stored.written(case, pool, side))
    assert got.dtype == case.q.dtype
    torch.testing.assert_close(got.double().cpu(), want, rtol=0, atol=TOLERANCE[case.q.dtype])


@pytest.mark.parametrize(("shape", "variant"), [((4, 2, 16, 16, 16), "plain"), ((6, 2, 33, 31, 5), "all")], ids=str)
@pytest.mark.parametrize("storage", STORAGES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda d: str(d)[6:])
def test_eight_bits_equal_the_definition(
    dtype: torch.dtype, storage: torch.dtype, shape: tuple[int, int, int, int, int], variant: str
) -> None:
    check(make_case(MIXED, shape, dtype, **VARIANTS[variant]), storage)


@pytest.mark.parametrize("storage", STORAGES, ids=lambda d: str(d)[6:])
def test_long_decodes_over_eight_bits_are_split_and_merged(storage: torch.dtype) -> None:
    check(make_case(((1100, 1), (3, 1)), (4, 2, 16, 16, 16), torch.float32, sinks=True), storage)


@settings(max_examples=4)
@given(
    sequences=ragged(),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 10),
    dims=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    size=st.integers(1, 33),
    window=st.integers(0, 80),
    storage=st.sampled_from(STORAGES),
)
def test_any_ragged_batch(
    sequences: tuple[tuple[int, int], ...], kv_heads: int, group: int, dims: tuple[int, int], size: int, window: int,
    storage: torch.dtype,
) -> None:  # fmt: skip
    check(make_case(sequences, (kv_heads * group, kv_heads, *dims, size), torch.float32, window=window), storage)


def test_numbers_at_the_ends_are_stored_as_defined() -> None:
    """Zeros, numbers that are none, infinite, subnormal and huge ones, and ties between two integers."""
    none, most = float("nan"), float("inf")
    rows = torch.tensor(
        [[0.0, -0.0], [most, 1.0], [none, 1.0], [1.0, none], [1e-40, 0.0], [3e38, -3e38], [127.0, 0.5], [127.0, 1.5],
         [127.0, -2.5], [900.0, -1e9], [1.07, 2.0**-10], [-most, 448.0]]
    )  # fmt: skip
    rows = torch.cat([rows, torch.randn(88, 2, generator=torch.Generator().manual_seed(0)) * 100])
    count = len(rows)
    spec = make_case(((count, count),), (1, 1, 2, 2, 4), torch.float32).spec
    batch = make_case(((count, count),), (1, 1, 2, 2, 4), torch.float32).batch
    shape = (int(batch.block_tables.max()) + 1, 1, 4)
    given = rows.to(DEVICE)[:, None]
    slots = torch.from_numpy(batch.block_tables[0].astype(np.int64))[torch.arange(count) // 4], torch.arange(count) % 4
    backend = gpu.TritonPagedAttention(DEVICE)
    for storage in STORAGES:
        k, v = (torch.zeros(*shape, 2, dtype=storage, device=DEVICE) for _ in range(2))
        ks, vs = (torch.zeros(shape, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
        if storage is not torch.int8:
            ks, vs = (torch.tensor([2.0], device=DEVICE) for _ in range(2))
        backend.write(backend.prepare(batch), spec, LayerPool(k, v, 0, ks, vs), (given, given, given), None)
        got = k.view(torch.uint8).cpu()[slots[0], 0, slots[1]]
        if storage is torch.int8:
            want, scales = quantize_rows(rows)
            assert torch.equal(got.view(torch.int8), want)
            torch.testing.assert_close(ks.cpu()[slots[0], 0, slots[1]], scales, rtol=0, atol=0, equal_nan=True)
        else:
            values = to_fp8(rows[:, None], torch.tensor([2.0]))[:, 0]
            torch.testing.assert_close(got.view(storage).float(), values.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("storage", STORAGES, ids=lambda d: str(d)[6:])
def test_keys_are_rotated_before_they_are_rounded(storage: torch.dtype) -> None:
    case = make_case(MIXED[:2], (4, 2, 24, 16, 16), torch.float32)
    angles = torch.rand(256, 8, generator=torch.Generator().manual_seed(3)) * 7
    rotation = Rotation(angles.cos().to(DEVICE), angles.sin().to(DEVICE))
    positions = torch.from_numpy(case.batch.positions)
    cos, sin = (table[positions][:, None] for table in (angles.cos(), angles.sin()))

    def turned(x: torch.Tensor) -> torch.Tensor:
        low, high, rest = x.tensor_split([8, 16], dim=-1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin, rest], dim=-1)

    pool = stored.pool_of(case, storage)
    stored.fill(case, pool)
    there = moved(pool, DEVICE)
    want = paged_attention_reference(case.batch, case.spec, pool, turned(case.q), turned(case.k), case.v)
    at, backend = on_device(case), gpu.TritonPagedAttention(DEVICE)
    got = backend.run_rotated(backend.prepare(case.batch), at.spec, there, (at.q, at.k, at.v), rotation)
    back = moved(there, torch.device("cpu"))
    step = 0.13 if storage is torch.float8_e4m3fn else 0.03  # a number may round to the next one
    torch.testing.assert_close(stored.written(case, back, "k"), stored.written(case, pool, "k"), rtol=step, atol=step)
    torch.testing.assert_close(got.double().cpu(), want, rtol=0, atol=0.02)


@pytest.mark.parametrize("groups", [1, 2])
def test_a_plan_of_decodes_takes_any_lengths(groups: int) -> None:
    """As in a captured graph: the plan knows memory, and lengths are in it when it runs. Rows behind are padding."""
    backend, width, rows = gpu.TritonPagedAttention(DEVICE), 40, 5
    lens = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
    tables = torch.zeros(rows, groups * width, dtype=torch.int32, device=DEVICE)
    plan = backend.prepare_decodes(lens, tables, 16, groups)
    for sequences in (((1, 1), (600, 1)), ((70, 1), (20, 1), (40, 1)), ((9, 1),) * 5):
        case = make_case(sequences, (4, 2, 16, 16, 16), torch.float32, window=50, sinks=len(sequences) == 3)
        want, want_pool = case.expected()
        count, given = len(sequences), case.batch.block_tables
        lens.zero_()
        lens[:count] = torch.from_numpy(case.batch.context_lens)
        tables.fill_(-1)
        last = (groups - 1) * width
        tables[:count, last : last + given.shape[1]] = torch.from_numpy(given)
        none = {name: torch.full((rows - count, *getattr(case, name).shape[1:]), torch.nan) for name in ("q", "k", "v")}
        wide = {name: torch.cat([getattr(case, name), behind]) for name, behind in none.items()}
        at = on_device(dataclasses.replace(case, **wide))
        pool = dataclasses.replace(at.pool(), group=groups - 1)
        got = backend.run(plan, at.spec, pool, at.q, at.k, at.v).cpu()
        torch.testing.assert_close(got[:count].double(), want, rtol=0, atol=2e-5)
        assert (got[count:] == 0).all()
        assert torch.equal(pool.k.cpu(), want_pool.k)
        assert torch.equal(pool.v.cpu(), want_pool.v)
