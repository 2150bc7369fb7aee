"""The C++ operator: one call per layer for prompt chunks and decodes together, KV write included."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from baton_kernels.cpu.library import DTYPE_CODES, CpuLibrary
from baton_kernels.paged_attention.definition import AttentionSpec, LayerPool, RaggedBatch


class AttentionCall(ctypes.Structure):
    """The C structure ``Attention``; see ``csrc/paged_attention.h``."""

    _fields_: ClassVar[list[Any]] = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "k_pool", "v_pool", "out", "sinks")),
        *((name, ctypes.c_void_p) for name in ("query_starts", "context_lens", "block_tables")),
        *((name, ctypes.c_void_p) for name in ("cos", "sin", "q_norm", "k_norm")),
        *((name, ctypes.c_int64) for name in ("q_token", "q_head", "k_token", "k_head", "v_token", "v_head")),
        *((name, ctypes.c_int64) for name in ("block_stride", "table_stride")),
        *((name, ctypes.c_int32) for name in ("dtype", "num_seqs", "num_heads", "kv_heads", "k_dim", "v_dim")),
        *((name, ctypes.c_int32) for name in ("block_size", "window", "rotary", "threads", "pairs")),
        *((name, ctypes.c_float) for name in ("scale", "softcap", "norm_eps", "norm_offset")),
        *((name, ctypes.c_int32) for name in ("amx", "latent", "rotate_pairs")),
    ]


@dataclass(frozen=True, slots=True)
class CpuPlan:
    """A batch's arrays, contiguous, with the part of the call that all layers share.

    ``tables`` is where the first group's block tables begin, ``table_bytes`` from one group's to the next one's.
    """

    batch: RaggedBatch
    call: AttentionCall
    tables: int
    table_bytes: int


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rotary embedding, and RMS norm of each head before it, done by the operator on its way.

    Attributes:
        cos: float32 [positions, rotary / 2], attention scaling included; ``sin`` likewise.
        q_norm: Weight [k_dim] in the model's dtype, or ``None``; ``k_norm`` likewise.
        norm_offset: Added to the weight (1 for models that store it as a difference).
        pairs: Whether neighbours are turned against each other (GLM 4), not the two halves of the rotary dims.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    norm_eps: float = 0.0
    norm_offset: float = 0.0
    pairs: bool = False


class CpuPagedAttention:
    """See the module's docstring. Not thread-safe: one object per runner."""

    name = "cpp"

    def __init__(self, library: CpuLibrary) -> None:
        if library.attention_struct_bytes != ctypes.sizeof(AttentionCall):
            raise ValueError("the library's structure differs from AttentionCall")
        self._run = library.paged_attention
        self._pairs, self._amx = library.pairs_are_faster, library.amx

    def prepare(self, batch: RaggedBatch) -> CpuPlan:
        """Fill in what all layers share."""
        starts, lens, tables = (array.__array_interface__["data"][0] for array in _checked(batch))
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
        return CpuPlan(batch, call, tables, batch.table(0).shape[1] * batch.block_tables.itemsize)

    def run(
        self, plan: CpuPlan, spec: AttentionSpec, pool: LayerPool, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """See :meth:`PagedAttention.run`."""
        return self.run_rotated(plan, spec, pool, (q, k, v), None)

    def run_rotated(
        self,
        plan: CpuPlan,
        spec: AttentionSpec,
        pool: LayerPool,
        qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        rotation: Rotation | None,
    ) -> torch.Tensor:
        """As :meth:`run`, with queries and keys rotated on the way; queries are changed in place."""
        q, k, v = (tensor if tensor.stride(2) == 1 else tensor.contiguous() for tensor in qkv)
        out = q.new_empty(q.shape[0], spec.num_heads, spec.v_dim)
        call = plan.call
        fill_layer(call, spec, pool)
        call.block_tables = plan.tables + pool.group * plan.table_bytes
        call.q, call.k, call.v, call.out = q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()
        call.q_token, call.q_head, _ = q.stride()
        call.k_token, call.k_head, _ = k.stride()
        call.v_token, call.v_head, _ = v.stride()
        fill_rotation(call, rotation)
        self._run(ctypes.byref(call))
        return out


def fill_layer(call: AttentionCall, spec: AttentionSpec, pool: LayerPool) -> None:
    """Set the fields that belong to a layer.

    Raises:
        ValueError: K and V are not parts of the same blocks, or V is a view of K with several heads.
    """
    if pool.k.stride(0) != pool.v.stride(0):
        raise ValueError("K and V must be views of one pool, with the same stride from block to block")
    call.k_pool, call.v_pool, call.block_stride = pool.k.data_ptr(), pool.v.data_ptr(), pool.k.stride(0)
    call.num_heads, call.kv_heads, call.k_dim, call.v_dim = spec.num_heads, spec.kv_heads, spec.k_dim, spec.v_dim
    call.scale, call.softcap, call.window = spec.scale, spec.softcap, spec.window
    call.latent = pool.is_latent
    if call.latent and (spec.kv_heads != 1 or spec.v_dim > spec.k_dim):
        raise ValueError("a latent has one KV head, and values that are part of its keys")
    call.sinks = None if spec.sinks is None else spec.sinks.data_ptr()
    call.dtype = DTYPE_CODES[pool.k.dtype]


def fill_rotation(call: AttentionCall, rotation: Rotation | None) -> None:
    """Set the fields of the rotary embedding."""
    if rotation is None:
        call.cos = call.sin = call.q_norm = call.k_norm = None
        return
    call.cos, call.sin, call.rotary = rotation.cos.data_ptr(), rotation.sin.data_ptr(), 2 * rotation.cos.shape[1]
    call.q_norm = None if rotation.q_norm is None else rotation.q_norm.data_ptr()
    call.k_norm = None if rotation.k_norm is None else rotation.k_norm.data_ptr()
    call.norm_eps, call.norm_offset = rotation.norm_eps, rotation.norm_offset
    call.rotate_pairs = rotation.pairs


def _checked(batch: RaggedBatch) -> tuple[Any, Any, Any]:
    """The batch's arrays, after a check that C code may index them."""
    arrays = (batch.query_starts, batch.context_lens, batch.block_tables)
    for array in arrays:
        if array.dtype != "int32" or not array.flags.c_contiguous:
            raise ValueError("query_starts, context_lens and block_tables must be contiguous int32")
    if len(batch.query_starts) != len(batch.context_lens) + 1 or len(batch.block_tables) != len(batch.context_lens):
        raise ValueError("query_starts, context_lens and block_tables disagree about the number of sequences")
    if int(batch.context_lens.max(initial=0)) > batch.table(0).shape[1] * batch.block_size:
        raise ValueError("a sequence is longer than its block table")
    return arrays
