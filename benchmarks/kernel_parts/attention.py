"""Paged attention: decodes, prompts, KV of 8 bits and latents, beside torch's attention and FlashInfer."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from benchmarks.kernel_parts.measure import Check, Timed, error

from baton_kernels.paged_attention import AttentionSpec, LayerPool, RaggedBatch, Rotation, paged_attention_reference
from baton_kernels.paged_attention.flashinfer import FlashInferPagedAttention
from baton_kernels.paged_attention.gpu import TritonPagedAttention

BLOCK_SIZE = 16
HEADS = 32
KV_HEADS = 8
HEAD = 128
"""Those of Llama 3.1 8B."""
LATENT = (128, 576, 512)
"""Heads, elements of a latent with its rotary key, elements of a value: DeepSeek-V3, absorbed."""
STORAGES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


def make_batch(sequences: list[tuple[int, int]], seed: int = 0) -> tuple[RaggedBatch, int]:
    """A batch of (context, new tokens) whose blocks lie anywhere, and how many blocks there are."""
    widths = [-(-context // BLOCK_SIZE) for context, _ in sequences]
    order = np.random.default_rng(seed).permutation(sum(widths)).astype(np.int32)
    at = 0
    tables = np.zeros((len(sequences), max(widths)), np.int32)
    for row, width in enumerate(widths):
        tables[row, :width] = order[at : at + width]
        at += width
    news = np.array([new for _, new in sequences])
    positions = np.concatenate([np.arange(context - new, context) for context, new in sequences])
    starts = np.concatenate([[0], np.cumsum(news)]).astype(np.int32)
    contexts = np.array([context for context, _ in sequences], np.int32)
    return RaggedBatch(positions, starts, contexts, tables, BLOCK_SIZE), sum(widths)


def make_pool(spec: AttentionSpec, blocks: int, dtype: torch.dtype, device: torch.device) -> LayerPool:
    """A layer of a pool with random contents."""
    shape = (blocks, spec.kv_heads, BLOCK_SIZE)

    def numbers(dim: int) -> torch.Tensor:
        if dtype is torch.int8:
            return torch.randint(-127, 128, (*shape, dim), dtype=dtype, device=device)
        return torch.randn(*shape, dim, device=device).to(dtype)

    k = numbers(spec.k_dim)
    if spec.latent:
        return LayerPool(k, k[..., : spec.v_dim])
    v = numbers(spec.v_dim)
    if dtype is torch.int8:
        scales = [(torch.rand(shape, device=device) / 50 + 1e-3).bfloat16() for _ in range(2)]
        return LayerPool(k, v, 0, *scales)
    if dtype is torch.float8_e4m3fn:
        return LayerPool(k, v, 0, *(torch.rand(spec.kv_heads, device=device) + 0.1 for _ in range(2)))
    return LayerPool(k, v)


def inputs(
    spec: AttentionSpec, tokens: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random queries, keys and values of new tokens."""
    heads = ((spec.num_heads, spec.k_dim), (spec.kv_heads, spec.k_dim), (spec.kv_heads, spec.v_dim))
    q, k, v = (torch.randn(tokens, *each, device=device).to(dtype) for each in heads)
    return q, k, k[..., : spec.v_dim] if spec.latent else v


def checks(device: torch.device) -> Iterator[Check]:
    """Each kind of attention at small shapes against the definition."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    plain = AttentionSpec(4, 2, 32, 32, 32**-0.5)
    every = AttentionSpec(4, 2, 80, 64, 80**-0.5, 24, 5.0, torch.randn(4))
    latent = AttentionSpec(4, 1, 48, 32, 48**-0.5, latent=True)
    for name, spec, storage in (
        ("float", plain, dtype),
        ("window, soft cap, sinks", every, dtype),
        ("latent", latent, dtype),
        *((f"KV in {name}", plain, storage) for name, storage in STORAGES.items()),
    ):
        yield Check(f"attention, {name}", lambda spec=spec, storage=storage: _check(spec, storage, dtype, device))


def _check(spec: AttentionSpec, storage: torch.dtype, dtype: torch.dtype, device: torch.device) -> float:
    batch, blocks = make_batch([(70, 1), (20, 3), (40, 40), (600, 1)])
    host = torch.device("cpu")
    pool = make_pool(spec, blocks, storage, host)
    q, k, v = inputs(spec, len(batch.positions), dtype, host)
    backend = TritonPagedAttention(device)
    there = [None if x is None else x.to(device) for x in (pool.k, pool.v, pool.k_scales, pool.v_scales)]
    if spec.latent:
        there[1] = there[0][..., : spec.v_dim]  # type: ignore[index]
    moved = dataclasses.replace(spec, sinks=None if spec.sinks is None else spec.sinks.to(device))
    moved_pool = LayerPool(there[0], there[1], 0, there[2], there[3])  # type: ignore[arg-type]
    got = backend.run(backend.prepare(batch), moved, moved_pool, q.to(device), k.to(device), v.to(device))
    want = paged_attention_reference(batch, spec, pool, q, k, v)
    return error(got, want, 2e-5 if dtype is torch.float32 else 2e-2)


def timed(device: torch.device) -> Iterator[Timed]:
    """Decodes of 4,096 tokens, prompts, latents, and what writes new tokens' KV."""
    spec = AttentionSpec(HEADS, KV_HEADS, HEAD, HEAD, HEAD**-0.5)
    for batch in (1, 8, 64):
        yield _decode(f"attention, decode, batch {batch}, context 4096", spec, batch, torch.bfloat16, device)
    for name, storage in STORAGES.items():
        yield _decode(f"attention, decode, batch 64, context 4096, {name}", spec, 64, storage, device)
    heads, k_dim, v_dim = LATENT
    latent = AttentionSpec(heads, 1, k_dim, v_dim, k_dim**-0.5, latent=True)
    yield _decode("attention, decode, batch 64, context 4096, latent", latent, 64, torch.bfloat16, device)
    for tokens in (2048, 8192):
        yield _prefill(f"attention, prompt of {tokens}", spec, tokens, device)
    yield _write("kv_write, rotated, 4096 tokens", spec, torch.bfloat16, device)
    yield _write("kv_write, rotated, 4096 tokens, int8", spec, torch.int8, device)


def _decode(name: str, spec: AttentionSpec, sequences: int, storage: torch.dtype, device: torch.device) -> Timed:
    context = 4096
    batch, blocks = make_batch([(context, 1)] * sequences)
    pool = make_pool(spec, blocks, storage, device)
    q, k, v = inputs(spec, sequences, torch.bfloat16, device)
    backend = TritonPagedAttention(device)
    on_device = (torch.from_numpy(each).to(device) for each in (batch.context_lens, batch.block_tables))
    plan = backend.prepare_decodes(*on_device, BLOCK_SIZE, 1)
    backend.write(plan, spec, pool, (q, k, v), None)
    rows = sequences * context * spec.kv_heads
    sizes = rows * (spec.k_dim + (0 if spec.latent else spec.v_dim)) * storage.itemsize
    sizes += rows * 4 if storage is torch.int8 else 0
    rivals: dict[str, Any] = {}
    if storage is torch.bfloat16 and not spec.latent:
        keys, values = (_gathered(cache, batch, device) for cache in (pool.k, pool.v))
        rivals["torch SDPA, KV not in blocks"] = lambda: F.scaled_dot_product_attention(
            q[:, :, None], keys, values, scale=spec.scale, enable_gqa=True
        )[:, :, 0]
        rivals |= _flashinfer(spec, batch, pool, q, device)
    flops = 2 * sequences * context * spec.num_heads * (spec.k_dim + spec.v_dim)
    tunes = ("attention_few", _sizes(spec))
    return Timed(name, lambda: backend.attend(plan, spec, pool, q), sizes, flops, rivals, tunes=tunes)


def _prefill(name: str, spec: AttentionSpec, tokens: int, device: torch.device) -> Timed:
    batch, blocks = make_batch([(tokens, tokens)])
    pool = make_pool(spec, blocks, torch.bfloat16, device)
    q, k, v = inputs(spec, tokens, torch.bfloat16, device)
    backend = TritonPagedAttention(device)
    plan = backend.prepare(batch)
    backend.write(plan, spec, pool, (q, k, v), None)
    query, keys, values = (x.transpose(0, 1)[None] for x in (q, k, v))
    rivals: dict[str, Any] = {
        "torch SDPA": lambda: F.scaled_dot_product_attention(
            query, keys, values, is_causal=True, scale=spec.scale, enable_gqa=True
        )[0].transpose(0, 1)
    }
    if tokens <= 2048:
        rivals |= _flex(query, keys, values, spec)
    rivals |= _flashinfer(spec, batch, pool, q, device)
    flops = 2 * tokens * tokens / 2 * spec.num_heads * (spec.k_dim + spec.v_dim)
    sizes = 2 * tokens * (2 * spec.num_heads + 2 * spec.kv_heads) * spec.k_dim
    tunes = ("attention_many", _sizes(spec))
    return Timed(name, lambda: backend.attend(plan, spec, pool, q), sizes, flops, rivals, tunes=tunes)


def _write(name: str, spec: AttentionSpec, storage: torch.dtype, device: torch.device) -> Timed:
    tokens = 4096
    batch, blocks = make_batch([(64, 64)] * (tokens // 64))
    pool = make_pool(spec, blocks, storage, device)
    qkv = inputs(spec, tokens, torch.bfloat16, device)
    angles = torch.rand(8192, spec.k_dim // 2, device=device)
    rotation = Rotation(angles.cos(), angles.sin())
    backend = TritonPagedAttention(device)
    plan = backend.prepare(batch)
    new = tokens * spec.kv_heads * (spec.k_dim + spec.v_dim)
    moved = 2 * 2 * tokens * spec.num_heads * spec.k_dim + new * (2 + storage.itemsize)
    return Timed(name, lambda: backend.write(plan, spec, pool, qkv, rotation), moved)


def _sizes(spec: AttentionSpec) -> dict[str, tuple[int, int] | str]:
    """What an entry of a table is for."""
    group = spec.num_heads // spec.kv_heads
    return {"k_dim": (spec.k_dim, spec.k_dim), "v_dim": (spec.v_dim, spec.v_dim), "group": (group, group)}


def _gathered(cache: torch.Tensor, batch: RaggedBatch, device: torch.device) -> torch.Tensor:
    """[S, kv_heads, context, dim] of sequences of one length."""
    tables = torch.from_numpy(batch.block_tables.astype(np.int64)).to(device)
    return cache[tables].transpose(1, 2).flatten(2, 3)


def _flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec) -> dict[str, Any]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def causal(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return query >= key

    mask = create_block_mask(causal, None, None, q.shape[2], k.shape[2], device=str(q.device))
    compiled = torch.compile(flex_attention)
    return {
        "torch flex_attention": lambda: compiled(q, k, v, block_mask=mask, scale=spec.scale, enable_gqa=True)[
            0
        ].transpose(0, 1)
    }


def _flashinfer(
    spec: AttentionSpec, batch: RaggedBatch, pool: LayerPool, q: torch.Tensor, device: torch.device
) -> dict[str, Any]:
    """FlashInfer over the same blocks, where it is installed, as engines run it; planned by its first run."""
    try:
        library = importlib.import_module("flashinfer")
    except ImportError:
        return {}
    backend = FlashInferPagedAttention(device, library)
    plan = backend.prepare(batch)
    return {"FlashInfer": lambda: backend.attend(plan, spec, pool, q)}
