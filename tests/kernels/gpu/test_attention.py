"""The Triton kernels of attention against the definition: on a GPU, or on a CPU under Triton's interpreter."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels import test_latent_attention as latent
from tests.kernels.test_paged_attention import (
    SHAPES,
    TOLERANCE,
    VARIANTS,
    Case,
    make_case,
    ragged,
    rotate_reference,
)

from baton_kernels.paged_attention import Rotation

pytest.importorskip("triton")
from baton_kernels.paged_attention import gpu

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
# The interpreter's bfloat16 is wrong (numpy has none).
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if CUDA else [])]
MIXED = ((1, 1), (5, 5), (70, 1), (90, 20), (33, 33), (65, 2), (129, 9))
"""(context, new tokens): decodes, drafts, whole prompts, later chunks, lengths around a tile."""
FEW = ((1, 1), (20, 1), (30, 12), (9, 2))


def on_device(case: Case) -> Case:
    spec = case.spec if case.spec.sinks is None else dataclasses.replace(case.spec, sinks=case.spec.sinks.to(DEVICE))
    tensors = {name: getattr(case, name).to(DEVICE) for name in ("memory", "q", "k", "v")}
    return dataclasses.replace(case, spec=spec, **tensors)


def check(case: Case, backend: gpu.TritonPagedAttention | None = None) -> None:
    want, want_pool = case.expected()
    got, got_pool = on_device(case).run(backend or gpu.TritonPagedAttention(DEVICE))
    assert torch.equal(got_pool.k.cpu(), want_pool.k)
    assert torch.equal(got_pool.v.cpu(), want_pool.v)
    assert (got.dtype, got.is_contiguous()) == (case.q.dtype, True)
    torch.testing.assert_close(got.double().cpu(), want, rtol=0, atol=TOLERANCE[case.q.dtype])


@pytest.mark.parametrize("variant", ["plain", "all"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
def test_attention_equals_the_definition(
    dtype: torch.dtype, shape: tuple[int, int, int, int, int], variant: str
) -> None:
    check(make_case(MIXED, shape, dtype, **VARIANTS[variant]))


@pytest.mark.parametrize("variant", ["window", "softcap", "sinks"])
def test_each_option_alone(variant: str) -> None:
    check(make_case(MIXED, (12, 4, 64, 64, 16), torch.float32, **VARIANTS[variant]))


@pytest.mark.parametrize("sinks", [False, True])
def test_the_keys_of_long_decodes_are_split_and_merged(sinks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    splits: list[int] = []
    count = gpu.TritonPagedAttention._splits

    def counted(*args: object) -> int:
        splits.append(count(*args))  # type: ignore[arg-type]
        return splits[-1]

    monkeypatch.setattr(gpu.TritonPagedAttention, "_splits", counted)
    check(make_case(((1500, 1), (3, 1), (700, 3)), (4, 2, 16, 16, 16), torch.float32, sinks=sinks))
    assert max(splits) > 1


def test_memory_that_no_token_wrote_does_no_harm() -> None:
    """Behind a sequence's end, and where blocks were given back because no window reaches them."""
    sequences = ((70, 67), (3, 1), (170, 1), (170, 20))
    case = make_case(sequences, (4, 2, 16, 16, 16), torch.float16, window=24)
    want, _ = case.expected()
    case = on_device(case)
    pool = case.pool()
    used = {
        (int(case.batch.block_tables[s, p // 16]), p % 16)
        for s, (context, new) in enumerate(sequences)
        for p in range(max(0, context - new - 24), context)
    }
    for block in range(case.num_blocks):
        for offset in range(16):
            if (block, offset) not in used:
                pool.k[block, :, offset] = float("nan")
                pool.v[block, :, offset] = float("inf")
    backend = gpu.TritonPagedAttention(DEVICE)
    got = backend.run(backend.prepare(case.batch), case.spec, pool, case.q, case.k, case.v)
    torch.testing.assert_close(got.double().cpu(), want, rtol=0, atol=TOLERANCE[torch.float16])


@pytest.mark.parametrize("pairs", [False, True], ids=["halves", "pairs"])
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "head-norm"])
@pytest.mark.parametrize(("k_dim", "rotary"), [(16, 16), (10, 6), (128, 128)])
def test_norm_and_rotation_on_the_way(k_dim: int, rotary: int, norm: bool, pairs: bool) -> None:
    case = make_case(FEW, (4, 2, k_dim, 16, 16), torch.float32)
    angles = torch.rand(256, rotary // 2) * 7
    weights = [torch.rand(k_dim) + 0.5 for _ in range(2)] if norm else [None, None]
    rotation = Rotation(angles.cos(), angles.sin(), *weights, norm_eps=1e-5, norm_offset=0.25, pairs=pairs)
    positions = torch.from_numpy(case.batch.positions)
    q, k = (
        rotate_reference(x, rotation, positions, weight).float()
        for x, weight in zip((case.q, case.k), weights, strict=True)
    )
    want, want_pool = dataclasses.replace(case, q=q, k=k).expected()
    case, backend = on_device(case), gpu.TritonPagedAttention(DEVICE)
    parts = {name: getattr(rotation, name) for name in ("cos", "sin", "q_norm", "k_norm")}
    rotation = dataclasses.replace(rotation, **{n: None if x is None else x.to(DEVICE) for n, x in parts.items()})
    pool, before = case.pool(), case.q.clone()
    got = backend.run_rotated(backend.prepare(case.batch), case.spec, pool, (case.q, case.k, case.v), rotation)
    torch.testing.assert_close(pool.k.cpu(), want_pool.k, rtol=1e-5, atol=1e-5)
    assert torch.equal(pool.v.cpu(), want_pool.v)
    assert torch.equal(case.q, before)
    torch.testing.assert_close(got.double().cpu(), want, rtol=0, atol=1e-4)


@pytest.mark.skipif(CUDA, reason="its tensors are on the CPU")
@pytest.mark.parametrize("shape", [latent.SHAPES[0], latent.SHAPES[3], latent.WIDE[0]], ids=str)
def test_latents_in_absorbed_form(shape: tuple[int, ...]) -> None:
    latent.check(gpu.TritonPagedAttention(DEVICE), torch.float32, shape, sequences=((1, 1), (5, 5), (70, 1), (90, 37)))


@settings(max_examples=8)
@given(
    sequences=ragged(),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 20),
    dims=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    size=st.integers(1, 33),
    window=st.integers(0, 80),
    seed=st.integers(0, 5),
)
def test_any_ragged_batch(
    sequences: tuple[tuple[int, int], ...], kv_heads: int, group: int, dims: tuple[int, int], size: int, window: int,
    seed: int,
) -> None:  # fmt: skip
    shape = (kv_heads * group, kv_heads, *dims, size)
    check(make_case(sequences, shape, torch.float32, window=window, seed=seed))


def test_a_step_without_tokens_is_no_launch() -> None:
    case = make_case(((20, 1),), (4, 2, 16, 16, 16), torch.float32)
    starts, none = np.zeros(1, np.int32), np.zeros((0, 2), np.int32)
    batch = dataclasses.replace(
        case.batch, positions=np.zeros(0, np.int64), query_starts=starts, context_lens=starts[:0], block_tables=none
    )
    case = on_device(dataclasses.replace(case, batch=batch, q=case.q[:0], k=case.k[:0], v=case.v[:0]))
    got, _ = case.run(gpu.TritonPagedAttention(DEVICE))
    assert got.shape == (0, 4, 16)
