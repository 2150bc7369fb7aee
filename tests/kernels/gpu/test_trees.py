"""Trees of tokens by Triton: each sees what is before the root, its ancestors and itself."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels import test_stored_attention as stored
from tests.kernels.gpu.test_attention import DEVICE, check, on_device
from tests.kernels.gpu.test_stored_attention import moved
from tests.kernels.test_paged_attention import VARIANTS, make_case, rotate_reference
from tests.kernels.test_tree_attention import Tree, mixed_case, sequences, with_trees

from baton_kernels.paged_attention import Rotation, paged_attention_reference

pytest.importorskip("triton")
from baton_kernels.paged_attention import gpu


@pytest.mark.parametrize("variant", ["plain", "window", "all"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=lambda d: str(d)[6:])
def test_trees_beside_other_sequences(dtype: torch.dtype, variant: str) -> None:
    check(mixed_case((4, 2, 16, 16, 16), dtype, **VARIANTS[variant]))


def test_small_trees_share_their_keys_between_programs() -> None:
    trees = [Tree(700, (0, 0, 1, 1)), Tree(650, (0, 0, 0), known=3)]
    case = make_case(tuple(tree.sizes for tree in trees), (4, 2, 16, 16, 16), torch.float32, sinks=True)
    check(with_trees(case, trees))


@settings(max_examples=8)
@given(
    drawn=sequences(),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 5),
    dims=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    size=st.integers(1, 33),
    window=st.one_of(st.just(0), st.integers(1, 80)),
)
def test_any_trees(
    drawn: list[Tree | tuple[int, int]], kv_heads: int, group: int, dims: tuple[int, int], size: int, window: int
) -> None:
    sizes = tuple(each.sizes if isinstance(each, Tree) else each for each in drawn)
    case = make_case(sizes, (kv_heads * group, kv_heads, *dims, size), torch.float32, window=window)
    check(with_trees(case, [each if isinstance(each, Tree) else None for each in drawn]))


def test_trees_over_eight_bits() -> None:
    case = mixed_case((4, 2, 16, 16, 16), torch.float32, window=24)
    pool = stored.pool_of(case, torch.int8, garbage=False)
    there = moved(pool, DEVICE)
    want = paged_attention_reference(case.batch, case.spec, pool, case.q, case.k, case.v)
    at, backend = on_device(case), gpu.TritonPagedAttention(DEVICE)
    got = backend.run(backend.prepare(case.batch), at.spec, there, at.q, at.k, at.v)
    torch.testing.assert_close(got.double().cpu(), want, rtol=0, atol=3e-5)


@pytest.mark.parametrize("pairs", [False, True], ids=["halves", "pairs"])
def test_positions_that_are_rotated_are_those_by_depth(pairs: bool) -> None:
    case = mixed_case((4, 2, 24, 16, 16), torch.float32)
    angles = torch.rand(256, 4, generator=torch.Generator().manual_seed(0)) * 7
    rotation = Rotation(angles.cos(), angles.sin(), pairs=pairs)
    positions = torch.from_numpy(case.batch.positions)
    q, k = (rotate_reference(each, rotation, positions, None).float() for each in (case.q, case.k))
    want, want_pool = dataclasses.replace(case, q=q, k=k).expected()
    at, backend = on_device(case), gpu.TritonPagedAttention(DEVICE)
    pool, there = at.pool(), dataclasses.replace(rotation, cos=rotation.cos.to(DEVICE), sin=rotation.sin.to(DEVICE))
    got = backend.run_rotated(backend.prepare(case.batch), at.spec, pool, (at.q, at.k, at.v), there)
    torch.testing.assert_close(pool.k.cpu(), want_pool.k, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.double().cpu(), want, rtol=0, atol=8e-5)
