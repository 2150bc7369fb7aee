"""The C++ operator: one call per layer for prompt chunks and decodes together, KV write included."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch

from baton_kernels.cpu.library import DTYPE_CODES, BoundCall, CpuLibrary
from baton_kernels.paged_attention.definition import (
    MAX_TREE_TOKENS,
    AttentionSpec,
    LayerPool,
    RaggedBatch,
    RotatingAttention,
    Rotation,
)
from baton_kernels.paged_attention.latent import LatentProjections

_STORAGE_CODES = {**DTYPE_CODES, torch.int8: 3, torch.float8_e4m3fn: 4}
"""Types of stored KV, as ``csrc/operators.h`` numbers them."""


class AttentionCall(ctypes.Structure):
    """The C structure ``Attention`` of ``csrc/operators.h``."""

    _fields_: ClassVar[list[Any]] = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "k_pool", "v_pool", "out", "sinks")),
        *((name, ctypes.c_void_p) for name in ("query_starts", "context_lens", "block_tables")),
        *((name, ctypes.c_void_p) for name in ("cos", "sin", "q_norm", "k_norm", "key_up", "value_up")),
        *((name, ctypes.c_void_p) for name in ("k_scales", "v_scales", "ancestors", "tree_starts")),
        *((name, ctypes.c_int64) for name in ("q_token", "q_head", "k_token", "k_head", "v_token", "v_head")),
        *((name, ctypes.c_int64) for name in ("block_stride", "table_stride", "scale_stride")),
        *((name, ctypes.c_int32) for name in ("dtype", "num_seqs", "num_heads", "kv_heads", "k_dim", "v_dim")),
        *((name, ctypes.c_int32) for name in ("block_size", "window", "rotary", "threads", "pairs")),
        *((name, ctypes.c_float) for name in ("scale", "softcap", "norm_eps", "norm_offset")),
        *((name, ctypes.c_int32) for name in ("amx", "latent", "rotate_pairs", "nope", "up_dim", "storage")),
    ]


PLANNED = (
    "query_starts",
    "context_lens",
    "table_stride",
    "num_seqs",
    "block_size",
    "threads",
    "pairs",
    "amx",
    "ancestors",
    "tree_starts",
)
"""Fields of a call that depend on the batch alone, and are the same in all layers."""


@dataclass(frozen=True, slots=True)
class CpuPlan:
    """A batch with the part of the call that all layers share.

    Attributes:
        batch: The batch, whose arrays are contiguous.
        call: A call with the fields ``PLANNED``.
        tables: Address of the first layer group's block tables.
        table_bytes: Bytes from one group's block tables to the next one's.
        parts: Parts of the batch for attention over latents, by the shape of the projections.
    """

    batch: RaggedBatch
    call: AttentionCall
    tables: int
    table_bytes: int
    parts: dict[tuple[int, ...], tuple[LatentPart, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LatentPart:
    """The sequences of a batch that attend over latents in one way.

    Attributes:
        expanded: Whether latents are expanded to keys and values of heads.
        rows: The sequences' tokens in the batch, a slice or int64 [T].
        plan: Plan of these sequences alone.
    """

    expanded: bool
    rows: slice | torch.Tensor
    plan: CpuPlan


class BoundAttention:
    """Attention of one layer, bound to memory.

    Attributes:
        call: The bound call; :meth:`set_batch` comes before it.
    """

    def __init__(self, call: BoundCall, spec: AttentionSpec) -> None:
        self.call = call
        self._spec = spec
        self._pool: LayerPool | None = None

    def set_batch(self, plan: CpuPlan, pool: LayerPool) -> None:
        """Set the batch and the layer's pool for the calls until the next ``set_batch``."""
        call = self.call.structure
        shared = plan.call
        if pool is not self._pool:
            fill_layer(call, self._spec, pool)
            self._pool = pool
        call.block_tables = plan.tables + pool.group * plan.table_bytes
        for name in PLANNED:
            setattr(call, name, getattr(shared, name))


class CpuPagedAttention(RotatingAttention):
    """See the module's docstring. Not thread-safe: one object per runner."""

    name = "cpp"
    trees = True
    stores = frozenset({torch.bfloat16, torch.int8, torch.float8_e4m3fn})

    def __init__(self, library: CpuLibrary) -> None:
        self.library = library
        self._run = library.paged_attention
        self._pairs = library.pairs_are_faster
        self._amx = library.amx

    def prepare(self, batch: RaggedBatch) -> CpuPlan:
        """Check the batch and fill in the fields that all layers share."""
        starts, lens, tables = (array.__array_interface__["data"][0] for array in _check_batch(batch))
        call = AttentionCall(
            query_starts=starts,
            context_lens=lens,
            table_stride=batch.block_tables.shape[1],
            num_seqs=len(batch.context_lens),
            block_size=batch.block_size,
            threads=torch.get_num_threads(),
            pairs=self._pairs,
            amx=self._amx,
        )
        if batch.trees is not None:
            call.ancestors, call.tree_starts = (array.__array_interface__["data"][0] for array in _check_trees(batch))
        return CpuPlan(batch, call, tables, batch.table(0).shape[1] * batch.block_tables.itemsize)

    def run_rotated(
        self,
        plan: CpuPlan,
        spec: AttentionSpec,
        pool: LayerPool,
        qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        rotation: Rotation | None,
    ) -> torch.Tensor:
        q, k, v = (tensor if tensor.stride(2) == 1 else tensor.contiguous() for tensor in qkv)
        out = q.new_empty(q.shape[0], spec.num_heads, spec.v_dim)
        call = plan.call
        fill_layer(call, spec, pool)
        call.block_tables = plan.tables + pool.group * plan.table_bytes
        fill_tensors(call, q, k, v, out)
        fill_rotation(call, rotation)
        self._run_call(call, q.dtype)
        return out

    def bind(
        self,
        spec: AttentionSpec,
        qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        out: torch.Tensor,
        rotation: Rotation | None,
    ) -> BoundAttention:
        """Bind one layer's :meth:`run_rotated` to memory: q, k, v and out with rows for the largest batch."""
        call = AttentionCall(dtype=DTYPE_CODES[out.dtype])
        fill_tensors(call, *qkv, out)
        fill_rotation(call, rotation)
        return BoundAttention(BoundCall(self._run, call, (*qkv, out, rotation, spec), checked=True), spec)

    def _run_call(self, call: AttentionCall, dtype: torch.dtype) -> None:
        """Run a call whose tensors, except for the pool, are of one dtype."""
        call.dtype = DTYPE_CODES[dtype]
        if self._run(ctypes.byref(call)):
            raise ValueError(f"{dtype} does not attend to a pool of the storage type {call.storage}")

    def run_latent(
        self,
        plan: CpuPlan,
        spec: AttentionSpec,
        pool: LayerPool,
        projections: LatentProjections,
        inputs: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        parts = plan.parts.get(projections.shape)
        if parts is None:
            parts = plan.parts[projections.shape] = self._divide(plan, projections, spec.window)
        if len(parts) == 1:
            return self._run_part(parts[0], spec, pool, projections, inputs)
        q, rows = inputs
        out = q.new_empty(*q.shape[:2], projections.v_dim)
        for part in parts:
            out[part.rows] = self._run_part(part, spec, pool, projections, (q[part.rows], rows[part.rows]))
        return out

    def _run_part(
        self,
        part: LatentPart,
        spec: AttentionSpec,
        pool: LayerPool,
        projections: LatentProjections,
        inputs: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        q, rows = inputs
        keys = rows[:, None]
        if not part.expanded:
            values = keys[..., : spec.v_dim]
            return projections.outputs(self.run(part.plan, spec, pool, projections.queries(q), keys, values))
        call = part.plan.call
        q = q if q.stride(2) == 1 else q.contiguous()
        keys = keys if keys.stride(2) == 1 else keys.contiguous()
        out = q.new_empty(len(q), spec.num_heads, projections.v_dim)
        fill_layer(call, spec, pool)
        call.block_tables = part.plan.tables + pool.group * part.plan.table_bytes
        call.q = q.data_ptr()
        call.k = keys.data_ptr()
        call.out = out.data_ptr()
        call.q_token, call.q_head, _ = q.stride()
        call.k_token, call.k_head, _ = keys.stride()
        call.key_up = projections.key_up.data_ptr()
        call.value_up = projections.value_up.data_ptr()
        call.nope = projections.nope
        call.up_dim = projections.v_dim
        self._run_call(call, q.dtype)
        return out

    def _divide(self, plan: CpuPlan, projections: LatentProjections, window: int) -> tuple[LatentPart, ...]:
        """Divide a batch into the sequences whose keys and values are expanded, and the others."""
        batch = plan.batch
        starts = batch.query_starts.tolist()
        counts = np.diff(batch.query_starts).tolist()
        expanded = [
            projections.expanding_pays(new, context, window)
            for new, context in zip(counts, batch.context_lens.tolist(), strict=True)
        ]
        if len(set(expanded)) <= 1:
            return (LatentPart(any(expanded), slice(None), plan),)
        parts = []
        for way in (False, True):
            chosen = [seq for seq, expands in enumerate(expanded) if expands == way]
            rows = np.concatenate([np.arange(starts[seq], starts[seq + 1]) for seq in chosen])
            part = RaggedBatch(
                positions=batch.positions[rows],
                query_starts=np.cumsum([0, *(counts[seq] for seq in chosen)], dtype=np.int32),
                context_lens=batch.context_lens[chosen],
                block_tables=batch.block_tables[chosen],
                block_size=batch.block_size,
                groups=batch.groups,
                trees=None if batch.trees is None else batch.trees.select(rows, chosen),
            )
            first = int(rows[0])
            last = int(rows[-1]) + 1
            part_rows = slice(first, last) if last - first == len(rows) else torch.from_numpy(rows)
            parts.append(LatentPart(way, part_rows, self.prepare(part)))
        return tuple(parts)


def fill_layer(call: AttentionCall, spec: AttentionSpec, pool: LayerPool) -> None:
    """Set the fields that belong to a layer.

    Raises:
        ValueError: K and V are not parts of the same blocks, or V is a view of K with several heads.
    """
    if pool.k.stride(0) != pool.v.stride(0):
        raise ValueError("K and V must be views of one pool, with the same stride from block to block")
    call.k_pool = pool.k.data_ptr()
    call.v_pool = pool.v.data_ptr()
    call.block_stride = pool.k.stride(0)
    call.num_heads = spec.num_heads
    call.kv_heads = spec.kv_heads
    call.k_dim = spec.k_dim
    call.v_dim = spec.v_dim
    call.scale = spec.scale
    call.softcap = spec.softcap
    call.window = spec.window
    call.latent = pool.is_latent
    if call.latent and (spec.kv_heads != 1 or spec.v_dim > spec.k_dim):
        raise ValueError("a latent has one KV head, and values that are part of its keys")
    call.sinks = None if spec.sinks is None else spec.sinks.data_ptr()
    call.storage = _STORAGE_CODES[pool.k.dtype]
    call.k_scales = call.v_scales = None
    if pool.k_scales is not None and pool.v_scales is not None:
        call.k_scales = pool.k_scales.data_ptr()
        call.v_scales = pool.v_scales.data_ptr()
        call.scale_stride = pool.k_scales.stride(0)


def fill_tensors(call: AttentionCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
    """Set the fields of queries, new keys and values, and results."""
    call.q = q.data_ptr()
    call.k = k.data_ptr()
    call.v = v.data_ptr()
    call.out = out.data_ptr()
    call.q_token, call.q_head, _ = q.stride()
    call.k_token, call.k_head, _ = k.stride()
    call.v_token, call.v_head, _ = v.stride()


def fill_rotation(call: AttentionCall, rotation: Rotation | None) -> None:
    """Set the fields of the rotary embedding."""
    if rotation is None:
        call.cos = call.sin = call.q_norm = call.k_norm = None
        return
    call.cos = rotation.cos.data_ptr()
    call.sin = rotation.sin.data_ptr()
    call.rotary = 2 * rotation.cos.shape[1]
    call.q_norm = None if rotation.q_norm is None else rotation.q_norm.data_ptr()
    call.k_norm = None if rotation.k_norm is None else rotation.k_norm.data_ptr()
    call.norm_eps = rotation.norm_eps
    call.norm_offset = rotation.norm_offset
    call.rotate_pairs = rotation.pairs


def _check_batch(batch: RaggedBatch) -> tuple[Any, Any, Any]:
    """Return the batch's arrays, after a check that C code may index them."""
    arrays = (batch.query_starts, batch.context_lens, batch.block_tables)
    for array in arrays:
        if array.dtype != "int32" or not array.flags.c_contiguous:
            raise ValueError("query_starts, context_lens and block_tables must be contiguous int32")
    if len(batch.query_starts) != len(batch.context_lens) + 1 or len(batch.block_tables) != len(batch.context_lens):
        raise ValueError("query_starts, context_lens and block_tables disagree about the number of sequences")
    if int(batch.context_lens.max(initial=0)) > batch.table(0).shape[1] * batch.block_size:
        raise ValueError("a sequence is longer than its block table")
    return arrays


def _check_trees(batch: RaggedBatch) -> tuple[Any, Any]:
    """Return the arrays of a batch's trees, after a check that C code may rely on them."""
    assert batch.trees is not None
    ancestors = batch.trees.ancestors
    starts = batch.trees.starts
    for array, dtype, count in ((ancestors, "uint64", batch.query_starts[-1]), (starts, "int32", len(starts))):
        if array.dtype != dtype or array.shape != (count,) or not array.flags.c_contiguous:
            raise ValueError("ancestors must be contiguous uint64 [T], starts of trees contiguous int32 [S]")
    if len(starts) != len(batch.context_lens):
        raise ValueError("starts of trees and context_lens disagree about the number of sequences")
    inside = ancestors != 0
    own = (batch.slots() - np.repeat(starts, np.diff(batch.query_starts)))[inside]
    far = bool(((own < 0) | (own >= MAX_TREE_TOKENS)).any())
    if far or bool((ancestors[inside] >> own.astype(np.uint64) != 1).any()):
        raise ValueError("a token of a tree must see its own slot, within 64 of the root, and none behind it")
    return ancestors, starts
