from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton_kernels.cpu import CpuLibrary
from baton_kernels.paged_attention import (
    AttentionSpec,
    CpuPagedAttention,
    LayerPool,
    PagedAttention,
    RaggedBatch,
    Rotation,
    TorchPagedAttention,
    paged_attention_reference,
)

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
# (context, new tokens): decodes, whole prompts, later chunks, lengths around the 64-key tile
MIXED = ((1, 1), (5, 5), (70, 1), (130, 67), (200, 1), (64, 64), (65, 2), (63, 1), (128, 1))
# heads, kv_heads, k_dim, v_dim, block_size
SHAPES = (
    (4, 2, 16, 16, 16),
    (12, 4, 64, 64, 16),
    (4, 4, 24, 12, 16),
    (5, 1, 80, 80, 8),
    (16, 1, 18, 7, 3),
    (2, 2, 128, 128, 64),
    (3, 1, 1, 1, 1),
    (6, 2, 33, 31, 5),
)
VARIANTS = {
    "plain": {},
    "window": {"window": 24},
    "softcap": {"softcap": 5.0},
    "sinks": {"sinks": True},
    "all": {"window": 7, "softcap": 3.0, "sinks": True},
}


@dataclass
class Case:
    batch: RaggedBatch
    spec: AttentionSpec
    memory: torch.Tensor
    num_blocks: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    def pool(self) -> LayerPool:
        """Views over a copy of the memory, with another layer's elements before and after this one's."""
        memory, spec, size = self.memory.clone(), self.spec, self.batch.block_size
        stride = len(memory) // self.num_blocks
        keys = (self.num_blocks, spec.kv_heads, size, spec.k_dim)
        values = (self.num_blocks, spec.kv_heads, size, spec.v_dim)
        end = 5 + spec.kv_heads * size * spec.k_dim
        return LayerPool(
            torch.as_strided(memory, keys, (stride, size * spec.k_dim, spec.k_dim, 1), 5),
            torch.as_strided(memory, values, (stride, size * spec.v_dim, spec.v_dim, 1), end),
        )

    def expected(self) -> tuple[torch.Tensor, LayerPool]:
        pool = self.pool()
        return paged_attention_reference(self.batch, self.spec, pool, self.q, self.k, self.v), pool

    def run(self, backend: PagedAttention) -> tuple[torch.Tensor, LayerPool]:
        pool = self.pool()
        plan = backend.prepare(self.batch)
        return backend.run(plan, self.spec, pool, self.q, self.k, self.v), pool


def make_case(
    sequences: tuple[tuple[int, int], ...],
    shape: tuple[int, int, int, int, int],
    dtype: torch.dtype,
    *,
    window: int = 0,
    softcap: float = 0.0,
    sinks: bool = False,
    seed: int = 0,
) -> Case:
    heads, kv_heads, k_dim, v_dim, size = shape
    generator = torch.Generator().manual_seed(seed)

    def normal(*dims: int) -> torch.Tensor:
        return torch.randn(*dims, generator=generator).to(dtype)

    widths = [-(-context // size) for context, _ in sequences]
    num_blocks = sum(widths) + 3
    order = torch.randperm(num_blocks, generator=generator).numpy().astype(np.int32)
    tables, at = np.zeros((len(sequences), max(widths)), np.int32), 0
    for row, width in enumerate(widths):
        tables[row, :width] = order[at : at + width]
        at += width
    starts = np.concatenate([[0], np.cumsum([new for _, new in sequences])]).astype(np.int32)
    positions = np.concatenate([np.arange(context - new, context) for context, new in sequences])
    contexts = np.array([context for context, _ in sequences], np.int32)
    total = int(starts[-1])
    sink = torch.randn(heads, generator=generator) * 2 if sinks else None
    return Case(
        RaggedBatch(positions, starts, contexts, tables, size),
        AttentionSpec(heads, kv_heads, k_dim, v_dim, 2 * k_dim**-0.5, window, softcap, sink),
        normal(num_blocks * (10 + size * kv_heads * (k_dim + v_dim))),
        num_blocks,
        normal(total, heads, k_dim),
        normal(total, kv_heads, k_dim),
        normal(total, kv_heads, v_dim),
    )


def check(case: Case, backend: PagedAttention, expected: tuple[torch.Tensor, LayerPool] | None = None) -> None:
    want, want_pool = expected or case.expected()
    got, got_pool = case.run(backend)
    assert torch.equal(got_pool.k, want_pool.k)
    assert torch.equal(got_pool.v, want_pool.v)
    assert got.dtype == case.q.dtype
    assert got.is_contiguous()
    torch.testing.assert_close(got.double(), want, rtol=0, atol=TOLERANCE[case.q.dtype])


@functools.cache
def mixed_case(
    shape: tuple[int, int, int, int, int], dtype: torch.dtype, variant: str
) -> tuple[Case, tuple[torch.Tensor, LayerPool]]:
    """What every backend is asked for, with any number of threads, and what the reference says."""
    case = make_case(MIXED, shape, dtype, **VARIANTS[variant])
    return case, case.expected()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda d: str(d)[6:])
def test_cpp_equals_the_reference(
    library: CpuLibrary, dtype: torch.dtype, shape: tuple[int, int, int, int, int], variant: str, threads: int
) -> None:
    case, expected = mixed_case(shape, dtype, variant)
    check(case, CpuPagedAttention(library), expected)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shape", SHAPES[::3], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda d: str(d)[6:])
def test_torch_fallback_equals_the_reference(
    dtype: torch.dtype, shape: tuple[int, int, int, int, int], variant: str
) -> None:
    case, expected = mixed_case(shape, dtype, variant)
    check(case, TorchPagedAttention(), expected)


@pytest.mark.parametrize("pairs", [False, True], ids=["float32", "pairs"])
def test_both_ways_to_multiply_bfloat16(library: CpuLibrary, pairs: bool) -> None:
    if pairs and library.instructions != "avx512-bf16":
        pytest.skip("this processor has no vdpbf16ps")
    backend = CpuPagedAttention(library)
    backend._pairs = pairs
    for shape in SHAPES:
        check(make_case(MIXED, shape, torch.bfloat16, window=24, sinks=True), backend)


@pytest.mark.parametrize("sinks", [False, True])
def test_long_decodes_are_split_between_threads_and_merged(library: CpuLibrary, sinks: bool, threads: int) -> None:
    check(make_case(((1500, 1), (900, 1)), (4, 2, 16, 16, 16), torch.float32, sinks=sinks), CpuPagedAttention(library))


# As with drafts that are verified: some tokens see none of the last tile's keys, or of a part's.
FEW = ((700, 2), (1030, 4), (641, 3), (66, 8), (129, 3), (64, 2), (3, 3), (900, 1))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[2], SHAPES[3], SHAPES[6]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
def test_few_tokens_beside_long_contexts(
    library: CpuLibrary, dtype: torch.dtype, shape: tuple[int, int, int, int, int], variant: str, threads: int
) -> None:
    check(make_case(FEW, shape, dtype, **VARIANTS[variant]), CpuPagedAttention(library))


def test_tokens_that_are_verified_together_attend_as_they_would_alone(library: CpuLibrary) -> None:
    """Bit for bit: a draft that is verified has the attention of a step of its own."""
    case = make_case(((300, 2), (130, 2)), (12, 4, 64, 64, 16), torch.float32)
    together, pool = case.run(CpuPagedAttention(library))
    for token, row in enumerate(case.batch.positions):
        seq = token // 2
        alone = RaggedBatch(
            case.batch.positions[token : token + 1],
            np.array([0, 1], np.int32),
            np.array([row + 1], np.int32),
            case.batch.block_tables[seq : seq + 1],
            case.batch.block_size,
        )
        backend, one = CpuPagedAttention(library), slice(token, token + 1)
        got = backend.run(backend.prepare(alone), case.spec, pool, case.q[one], case.k[one], case.v[one])
        assert torch.equal(got, together[one])


def test_stale_garbage_in_unused_parts_of_a_block_does_no_harm(library: CpuLibrary) -> None:
    case = make_case(((70, 67), (3, 1), (17, 1)), (4, 2, 16, 16, 16), torch.bfloat16)
    want, _ = case.expected()
    pool = case.pool()
    used = {(int(case.batch.block_tables[s, p // 16]), p % 16) for s, c in enumerate((70, 3, 17)) for p in range(c)}
    for block in range(case.num_blocks):
        for offset in range(16):
            if (block, offset) not in used:
                pool.k[block, :, offset] = float("nan")
                pool.v[block, :, offset] = float("inf")
    backend = CpuPagedAttention(library)
    got = backend.run(backend.prepare(case.batch), case.spec, pool, case.q, case.k, case.v)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=TOLERANCE[torch.bfloat16])


def test_inputs_may_be_strided(library: CpuLibrary) -> None:
    case = make_case(MIXED, (6, 2, 16, 16, 16), torch.float32)
    want, _ = case.expected()
    joined = torch.cat([case.q, case.k, case.v], dim=1).transpose(0, 1).contiguous().transpose(0, 1)
    case = dataclasses.replace(case, q=joined[:, :6], k=joined[:, 6:8], v=joined[:, 8:])
    got, _ = case.run(CpuPagedAttention(library))
    torch.testing.assert_close(got.double(), want, rtol=0, atol=2e-5)


def rotate_reference(
    x: torch.Tensor, rotation: Rotation, positions: torch.Tensor, norm: torch.Tensor | None
) -> torch.Tensor:
    """x [T, heads, dim] in float64: RMS norm, then halves or neighbours of `rotary` dims turned against each other."""
    x = x.double()
    if norm is not None:
        x = (
            x
            * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + rotation.norm_eps)
            * (norm.double() + rotation.norm_offset)
        )
    half = rotation.cos.shape[1]
    cos, sin = (table[positions].double()[:, None] for table in (rotation.cos, rotation.sin))
    low, high, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    if rotation.pairs:
        low, high = x[..., : 2 * half : 2], x[..., 1 : 2 * half : 2]
    turned = low * cos - high * sin, high * cos + low * sin
    return torch.cat([torch.stack(turned, -1).flatten(-2) if rotation.pairs else torch.cat(turned, -1), rest], dim=-1)


@pytest.mark.parametrize("pairs", [False, True], ids=["halves", "pairs"])
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "head-norm"])
@pytest.mark.parametrize(("k_dim", "rotary"), [(16, 16), (24, 8), (10, 6), (128, 128)])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda d: str(d)[6:])
def test_rotation_on_the_way(
    library: CpuLibrary, dtype: torch.dtype, k_dim: int, rotary: int, norm: bool, pairs: bool
) -> None:
    case = make_case(MIXED, (4, 2, k_dim, 16, 16), dtype)
    angles = torch.rand(256, rotary // 2) * 7
    weights = [torch.rand(k_dim).to(dtype) + 0.5 for _ in range(2)] if norm else [None, None]
    rotation = Rotation(angles.cos(), angles.sin(), *weights, norm_eps=1e-5, norm_offset=0.25, pairs=pairs)
    positions = torch.from_numpy(case.batch.positions)
    rotated = dataclasses.replace(
        case,
        q=rotate_reference(case.q, rotation, positions, weights[0]).to(dtype),
        k=rotate_reference(case.k, rotation, positions, weights[1]).to(dtype),
    )
    want, want_pool = rotated.expected()
    backend, pool = CpuPagedAttention(library), case.pool()
    qkv = (case.q.clone(), case.k, case.v)
    got = backend.run_rotated(backend.prepare(case.batch), case.spec, pool, qkv, rotation)
    precision = {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 4e-3}[dtype]
    torch.testing.assert_close(pool.k, want_pool.k, rtol=precision, atol=precision)
    assert torch.equal(pool.v, want_pool.v)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=4 * TOLERANCE[dtype])


def test_prepare_refuses_what_c_code_must_not_index(library: CpuLibrary) -> None:
    backend = CpuPagedAttention(library)
    batch = make_case(((20, 20),), (4, 2, 16, 16, 16), torch.float32).batch
    with pytest.raises(ValueError, match="block table"):
        backend.prepare(dataclasses.replace(batch, context_lens=np.array([33], np.int32)))
    with pytest.raises(ValueError, match="int32"):
        backend.prepare(dataclasses.replace(batch, query_starts=batch.query_starts.astype(np.int64)))
    with pytest.raises(ValueError, match="disagree"):
        backend.prepare(dataclasses.replace(batch, query_starts=np.array([0, 10, 20], np.int32)))


@st.composite
def ragged(draw: st.DrawFn) -> tuple[tuple[int, int], ...]:
    count = draw(st.integers(1, 5))
    contexts = [draw(st.integers(1, 150)) for _ in range(count)]
    return tuple((context, draw(st.integers(1, context))) for context in contexts)


@settings(max_examples=40, deadline=None)
@given(
    sequences=ragged(),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 10),
    dims=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    size=st.integers(1, 33),
    window=st.integers(0, 80),
    seed=st.integers(0, 5),
)
def test_any_ragged_batch(
    library: CpuLibrary,
    sequences: tuple[tuple[int, int], ...],
    kv_heads: int,
    group: int,
    dims: tuple[int, int],
    size: int,
    window: int,
    seed: int,
) -> None:
    shape = (kv_heads * group, kv_heads, *dims, size)
    check(make_case(sequences, shape, torch.float32, window=window, seed=seed), CpuPagedAttention(library))
