"""Attention over latents, absorbed or expanded, is attention over the keys and values that they expand to."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from baton_kernels.cpu import CpuLibrary
from baton_kernels.paged_attention import (
    AttentionSpec,
    CpuPagedAttention,
    LatentProjections,
    LayerPool,
    PagedAttention,
    RaggedBatch,
    TorchPagedAttention,
    attend_latent,
    paged_attention_reference,
    torch_backend,
)

TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}
SEQUENCES = ((1, 1), (5, 5), (70, 1), (130, 67), (200, 1), (64, 64), (65, 2), (600, 1))
"""(context, new tokens)"""
# heads, nope, rope, v_dim, rank, block_size
SHAPES = (
    (4, 8, 8, 12, 16, 16),
    (8, 32, 32, 32, 64, 16),
    (16, 16, 32, 24, 96, 16),
    (3, 5, 2, 7, 9, 5),
    (20, 8, 8, 8, 32, 64),
)
WIDE = ((2, 128, 64, 128, 512, 16), (3, 70, 10, 100, 90, 16))
"""Keys, values and latents of more than one tile; the first is DeepSeek's."""
LONG = ((1500, 1400), (900, 1), (1100, 600))
"""Chunks that threads share."""
Sequences = tuple[tuple[int, int], ...]


def make_batch(size: int, sequences: Sequences = SEQUENCES, seed: int = 0) -> tuple[RaggedBatch, int]:
    generator = np.random.default_rng(seed)
    widths = [-(-context // size) for context, _ in sequences]
    num_blocks = sum(widths) + 3
    order, at = generator.permutation(num_blocks).astype(np.int32), 0
    tables = np.zeros((len(sequences), max(widths)), np.int32)
    for row, width in enumerate(widths):
        tables[row, :width] = order[at : at + width]
        at += width
    starts = np.concatenate([[0], np.cumsum([new for _, new in sequences])]).astype(np.int32)
    positions = np.concatenate([np.arange(context - new, context) for context, new in sequences])
    return RaggedBatch(positions, starts, np.array([c for c, _ in sequences], np.int32), tables, size), num_blocks


def check(
    backend: PagedAttention,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    window: int = 0,
    sequences: Sequences = SEQUENCES,
) -> None:
    heads, nope, rope, v_dim, rank, size = shape
    batch, num_blocks = make_batch(size, sequences)
    generator = torch.Generator().manual_seed(1)

    def normal(*dims: int) -> torch.Tensor:
        return torch.randn(*dims, generator=generator).to(dtype)

    weight = (normal(heads * (nope + v_dim), rank).float() * rank**-0.5).to(dtype)
    total, row = int(batch.query_starts[-1]), rank + rope
    # Another layer's elements lie before and after this one's.
    memory = normal(num_blocks, 11 + size * row)
    keys = memory[:, 5 : 5 + size * row].unflatten(1, (1, size, row))
    pool, before = LayerPool(keys, keys[..., :rank]), memory.clone()
    q, rows = normal(total, heads, nope + rope), normal(total, row)

    exact = LatentProjections(weight.double(), heads, v_dim)
    old_keys, old_values = exact.expand(keys.double().reshape(-1, row))
    expanded = LayerPool(
        old_keys.view(num_blocks, size, heads, -1).transpose(1, 2).contiguous(),
        old_values.view(num_blocks, size, heads, -1).transpose(1, 2).contiguous(),
    )
    whole = AttentionSpec(heads, heads, nope + rope, v_dim, (nope + rope) ** -0.5, window)
    want = paged_attention_reference(batch, whole, expanded, q, *exact.expand(rows.double()))

    spec = dataclasses.replace(whole, kv_heads=1, k_dim=row, v_dim=rank, latent=True)
    projections = LatentProjections(weight, heads, v_dim)
    got = attend_latent(backend, backend.prepare(batch), spec, pool, projections, (q, rows))
    torch.testing.assert_close(got.double(), want, rtol=0, atol=TOLERANCE[dtype])
    assert got.is_contiguous()
    assert got.dtype == dtype

    written = torch.zeros(num_blocks, size, dtype=torch.bool)
    at = 0
    for seq, (context, new) in enumerate(sequences):
        for position in range(context - new, context):
            block, offset = int(batch.block_tables[seq, position // size]), position % size
            written[block, offset] = True
            assert torch.equal(keys[block, 0, offset], rows[at])
            at += 1
    assert torch.equal(memory[:, :5], before[:, :5])
    assert torch.equal(memory[:, 5 + size * row :], before[:, 5 + size * row :])
    stale = before[:, 5 : 5 + size * row].unflatten(1, (size, row))
    assert torch.equal(keys[:, 0][~written], stale[~written])


@pytest.fixture(params=["absorbed", "expanded", "mixed"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """All sequences one way, or each the one that takes fewer operations."""
    chosen: str = request.param
    if chosen != "mixed":
        monkeypatch.setattr(LatentProjections, "expanding_pays", lambda *_: chosen == "expanded")
    return chosen


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda d: str(d)[6:])
def test_cpp_equals_attention_over_expanded_keys(
    library: CpuLibrary, dtype: torch.dtype, shape: tuple[int, ...], threads: int
) -> None:
    check(CpuPagedAttention(library), dtype, shape)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("shape", SHAPES[::2], ids=str)
@pytest.mark.parametrize("window", [0, 24])
def test_torch_equals_attention_over_expanded_keys(shape: tuple[int, ...], window: int) -> None:
    check(TorchPagedAttention(), torch.float32, shape, window)


@pytest.mark.parametrize("shape", WIDE, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda d: str(d)[6:])
def test_wide_heads(library: CpuLibrary, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    check(CpuPagedAttention(library), dtype, shape, sequences=((300, 300), (150, 1)))
    check(TorchPagedAttention(), dtype, shape, sequences=((300, 300), (150, 1)))


def test_long_chunks(library: CpuLibrary, threads: int) -> None:
    check(CpuPagedAttention(library), torch.float32, SHAPES[0], sequences=LONG)


def test_the_fall_back_expands_a_few_heads_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_backend, "GATHER_BYTES", 3 * 130 * (32 + 32 + 32) * 4)
    check(TorchPagedAttention(), torch.float32, SHAPES[1])


def test_cpp_in_float32_without_tiles(library: CpuLibrary) -> None:
    backend = CpuPagedAttention(library)
    backend._amx = backend._pairs = False
    for shape in SHAPES:
        check(backend, torch.bfloat16, shape, window=33)


@pytest.mark.parametrize(
    ("new", "context", "window", "expands"),
    [
        (1, 1, 0, True),
        (1, 4096, 0, False),
        (2, 2, 0, True),
        (512, 512, 0, True),
        (128, 4096, 0, False),
        (192, 4096, 0, True),
        (64, 256, 0, False),
        (64, 4096, 64, False),
        (256, 4096, 64, True),
        (16, 4096, 512, False),
    ],
)
def test_what_takes_fewer_operations(new: int, context: int, window: int, expands: bool) -> None:
    """DeepSeek's shape: from about 160 tokens on, or a prompt from its beginning."""
    projections = LatentProjections(torch.zeros(256, 512), 1, 128)
    assert projections.expanding_pays(new, context, window) == expands


def test_a_latent_with_several_heads_is_refused(library: CpuLibrary) -> None:
    keys = torch.zeros(2, 2, 16, 24)
    backend = CpuPagedAttention(library)
    batch = RaggedBatch(np.zeros(1, np.int64), *(np.array(x, np.int32) for x in ([0, 1], [1], [[0]])), 16)
    spec = AttentionSpec(2, 2, 24, 16, 1.0, latent=True)
    q, k = torch.zeros(1, 2, 24), torch.zeros(1, 2, 24)
    with pytest.raises(ValueError, match="one KV head"):
        backend.run(backend.prepare(batch), spec, LayerPool(keys, keys[..., :16]), q, k, k[..., :16])
