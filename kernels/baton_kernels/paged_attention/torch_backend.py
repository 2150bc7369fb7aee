"""The fallback in plain torch: decodes batched by gathering their blocks, prompt chunks one by one through SDPA.

The pool may be on another device than the model (a host pool for a CUDA model): blocks are gathered on the pool's
device and copied to the queries.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from baton_kernels.paged_attention.definition import AttentionSpec, LayerPool, RaggedBatch
from baton_kernels.paged_attention.latent import LatentProjections
from baton_kernels.paged_attention.quantized import read_blocks, write_rows

GATHER_BYTES = 1 << 28
"""Bytes of K and V that one group of decodes may gather, or some heads of a prompt chunk expand, at a time."""
SCORE_ELEMENTS = 1 << 24
"""Elements of a materialized score matrix, where SDPA cannot be used (soft cap, sinks)."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A prompt chunk or a tree.

    Attributes:
        first: Index of its first token in the batch.
        last: Index behind its last token in the batch.
        context: Number of tokens of the sequence, this chunk's included.
        blocks: int64, ids of the sequence's blocks.
        branches: For a tree, the slots of each token's ancestors and itself, from the root on.
    """

    first: int
    last: int
    context: int
    blocks: torch.Tensor
    branches: tuple[list[int], ...] = ()


@dataclass(frozen=True, slots=True)
class TorchPlan:
    """A batch as index tensors.

    Attributes:
        block_size: Number of tokens per block.
        blocks: int64 [T], id of each new token's block.
        offsets: int64 [T], each new token's slot in its block.
        chunks: Sequences with more than one new token, and trees.
        decode_rows: int64 [D], indices of the tokens of sequences with one new token.
        decode_lens: int64 [D], numbers of tokens of these sequences.
        decode_tables: int64 [D, W], block tables of these sequences.
    """

    block_size: int
    blocks: torch.Tensor
    offsets: torch.Tensor
    chunks: tuple[Chunk, ...]
    decode_rows: torch.Tensor
    decode_lens: torch.Tensor
    decode_tables: torch.Tensor


class TorchPagedAttention:
    """See the module's docstring."""

    name = "torch"
    trees = True
    stores = frozenset({torch.bfloat16, torch.int8, torch.float8_e4m3fn})

    def prepare(self, batch: RaggedBatch) -> tuple[TorchPlan, ...]:
        """Split a batch into decodes and prompt chunks, and compute each new token's block and slot, group by group."""
        return tuple(_plan(batch, batch.table(group)) for group in range(batch.groups))

    def run(
        self,
        plan: tuple[TorchPlan, ...],
        spec: AttentionSpec,
        pool: LayerPool,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> torch.Tensor:
        group_plan = plan[pool.group]
        where = group_plan.blocks, group_plan.offsets
        write_rows(pool.k, pool.k_scales, where, k)
        if not pool.is_latent:
            write_rows(pool.v, pool.v_scales, where, v)
        out = q.new_empty(q.shape[0], spec.num_heads, spec.v_dim)
        if len(group_plan.decode_rows):
            self._decode(group_plan, spec, pool, q, out)
        for chunk in group_plan.chunks:
            self._chunk(chunk, spec, pool, q, out)
        return out

    def run_latent(
        self,
        plan: tuple[TorchPlan, ...],
        spec: AttentionSpec,
        pool: LayerPool,
        projections: LatentProjections,
        inputs: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        q, rows = inputs
        group_plan = plan[pool.group]
        write_rows(pool.k, pool.k_scales, (group_plan.blocks, group_plan.offsets), rows[:, None])
        out = q.new_empty(*q.shape[:2], projections.v_dim)
        if count := len(group_plan.decode_rows):
            at = group_plan.decode_rows.to(q.device)
            latents = q.new_empty(count, spec.num_heads, spec.v_dim)
            decodes = replace(group_plan, decode_rows=torch.arange(count))
            self._decode(decodes, spec, pool, projections.queries(q[at]), latents)
            out[at] = projections.outputs(latents)
        for chunk in group_plan.chunks:
            span = slice(chunk.first, chunk.last)
            count = chunk.last - chunk.first
            alone = replace(chunk, first=0, last=count)
            if projections.expanding_pays(count, chunk.context, spec.window):
                self._chunk_expanded(alone, spec, pool, projections, (q[span], out[span]))
            else:
                latents = q.new_empty(count, spec.num_heads, spec.v_dim)
                self._chunk(alone, spec, pool, projections.queries(q[span]), latents)
                out[span] = projections.outputs(latents)
        return out

    def _decode(
        self, plan: TorchPlan, spec: AttentionSpec, pool: LayerPool, q: torch.Tensor, out: torch.Tensor
    ) -> None:
        length = plan.decode_tables.shape[1] * plan.block_size
        per_row = length * spec.kv_heads * (spec.k_dim + spec.v_dim) * pool.k.element_size()
        step = max(1, GATHER_BYTES // max(1, per_row))
        positions = torch.arange(length)
        for at in range(0, len(plan.decode_rows), step):
            rows = plan.decode_rows[at : at + step].to(q.device)
            lens = plan.decode_lens[at : at + step, None]
            keys, values = _gather(pool, plan.decode_tables[at : at + step], q)
            mask = positions < lens
            if spec.window:
                mask &= positions >= lens - spec.window
            mask = mask.to(q.device)[:, None, None]
            out[rows] = _attend(spec, q[rows][:, :, None], keys, values, mask)[:, :, 0]

    def _chunk(self, chunk: Chunk, spec: AttentionSpec, pool: LayerPool, q: torch.Tensor, out: torch.Tensor) -> None:
        keys, values = _gather(pool, chunk.blocks[None], q)
        self._chunk_over(chunk, spec, (keys[:, :, : chunk.context], values[:, :, : chunk.context]), q, out)

    def _chunk_expanded(
        self,
        chunk: Chunk,
        spec: AttentionSpec,
        pool: LayerPool,
        projections: LatentProjections,
        q_and_out: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """Attend over a few heads' keys and values at a time."""
        q, out = q_and_out
        rows = _gather(pool, chunk.blocks[None], q)[0][0, 0, : chunk.context]
        per_head = chunk.context * (q.shape[2] + projections.v_dim) * q.element_size()
        step = max(1, GATHER_BYTES // per_head)
        for first in range(0, spec.num_heads, step):
            heads = slice(first, min(first + step, spec.num_heads))
            count = heads.stop - heads.start
            some = replace(
                spec,
                num_heads=count,
                kv_heads=count,
                k_dim=q.shape[2],
                v_dim=projections.v_dim,
                sinks=None if spec.sinks is None else spec.sinks[heads],
                latent=False,
            )
            keys, values = (x.transpose(0, 1)[None] for x in projections.expand(rows, heads))
            self._chunk_over(chunk, some, (keys, values), q[:, heads], out[:, heads])

    def _chunk_over(
        self,
        chunk: Chunk,
        spec: AttentionSpec,
        context: tuple[torch.Tensor, torch.Tensor],
        q: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Attend over keys and values [1, kv_heads, context, dim]."""
        keys, values = context
        key_positions = torch.arange(chunk.context, device=q.device)
        step = max(1, SCORE_ELEMENTS // (chunk.context * spec.num_heads)) if _needs_scores(spec) else 1024
        start = chunk.context - (chunk.last - chunk.first)
        for at in range(chunk.first, chunk.last, step):
            end = min(chunk.last, at + step)
            first = start + at - chunk.first
            stop = first + end - at
            query_positions = torch.arange(first, stop, device=q.device)[:, None]
            if chunk.branches:
                branches = chunk.branches[at - chunk.first : end - chunk.first]
                mask = _tree_mask(branches, stop, spec.window).to(q.device)
            else:
                mask = key_positions[:stop] <= query_positions
                if spec.window:
                    mask &= key_positions[:stop] > query_positions - spec.window
            rows = q[at:end].transpose(0, 1)[None]
            out[at:end] = _attend(spec, rows, keys[:, :, :stop], values[:, :, :stop], mask[None, None])[0].transpose(
                0, 1
            )


def _plan(batch: RaggedBatch, tables: npt.NDArray[np.int32]) -> TorchPlan:
    size = batch.block_size
    counts = np.diff(batch.query_starts)
    sequence = np.repeat(np.arange(len(counts)), counts)
    slots = batch.slots()
    blocks = tables[sequence, slots // size].astype(np.int64)
    single = counts == 1
    if batch.trees is not None:
        single &= batch.trees.ancestors[batch.query_starts[:-1]] == 0
    decodes = np.flatnonzero(single)
    lens = batch.context_lens[decodes].astype(np.int64)
    width = -(-int(lens.max()) // size) if len(lens) else 0
    chunks = []
    for seq in np.flatnonzero((counts > 0) & ~single).tolist():
        context = int(batch.context_lens[seq])
        table = tables[seq, : -(-context // size)].astype(np.int64)
        first = int(batch.query_starts[seq])
        last = int(batch.query_starts[seq + 1])
        branches: tuple[list[int], ...] = ()
        if batch.trees is not None and batch.trees.ancestors[first]:
            branches = tuple(batch.trees.branch(row, seq) for row in range(first, last))
        chunks.append(Chunk(first, last, context, torch.from_numpy(table), branches))
    return TorchPlan(
        block_size=size,
        blocks=torch.from_numpy(blocks),
        offsets=torch.from_numpy(slots % size),
        chunks=tuple(chunks),
        decode_rows=torch.from_numpy(batch.query_starts[decodes].astype(np.int64)),
        decode_lens=torch.from_numpy(lens),
        decode_tables=torch.from_numpy(tables[decodes, :width].astype(np.int64)),
    )


def _tree_mask(branches: tuple[list[int], ...], stop: int, window: int) -> torch.Tensor:
    """Return which of ``stop`` slots a tree's tokens see, bool [tokens, stop]; ``branches`` as in :class:`Chunk`."""
    mask = torch.zeros(len(branches), stop, dtype=torch.bool)
    for row, branch in enumerate(branches):
        root = branch[0]
        depth = len(branch) - 1
        mask[row, max(0, root + depth + 1 - window) if window else 0 : root] = True
        mask[row, branch[-window:] if window else branch] = True
    return mask


def _gather(pool: LayerPool, tables: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V of blocks [B, W] as [B, kv_heads, W * block_size, dim] on the device of ``like``, in its dtype."""

    def gather_cache(cache: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        blocks = read_blocks(cache, scales, tables).permute(0, 2, 1, 3, 4)
        return blocks.reshape(tables.shape[0], cache.shape[1], -1, cache.shape[3]).to(like.device, like.dtype)

    keys = gather_cache(pool.k, pool.k_scales)
    return keys, keys[..., : pool.v.shape[3]] if pool.is_latent else gather_cache(pool.v, pool.v_scales)


def _needs_scores(spec: AttentionSpec) -> bool:
    return spec.softcap > 0 or spec.sinks is not None


def _attend(spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return attention of q [B, heads, Tq, Dk] over k, v [B, kv_heads, L, D] under a boolean mask [B, 1, Tq, L]."""
    grouped = spec.num_heads != spec.kv_heads
    if not _needs_scores(spec):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=spec.scale, enable_gqa=grouped)
    if grouped:
        k = k.repeat_interleave(spec.num_heads // spec.kv_heads, dim=1)
        v = v.repeat_interleave(spec.num_heads // spec.kv_heads, dim=1)
    scores = (q.float() @ k.float().transpose(-1, -2)) * spec.scale
    if spec.softcap:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    scores = scores.masked_fill(~mask, float("-inf"))
    if spec.sinks is not None:
        sinks = spec.sinks.to(scores.device, scores.dtype).reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(dim=-1)[..., : k.shape[2]]
    return (weights @ v.float()).to(q.dtype)
