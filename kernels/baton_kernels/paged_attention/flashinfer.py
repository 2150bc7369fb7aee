"""Attention by FlashInfer, where it is installed, over the same strided views of the pool.

Keys and values are normed, rotated and stored by Triton's kernel; then FlashInfer attends over the pool as a paged KV
cache of layout HND, whose pages are our blocks. Its wrappers are planned on the host once per step for all layers with
the same numbers: sequences with one new token by the one for decodes, the others by the one for prompts. Where
FlashInfer cannot attend (:func:`obstacle`; trees of tokens), Triton's kernels do.

Planning needs a step's lengths on the host, so steps are not captured in CUDA graphs.

Source: FlashInfer's documentation of ``BatchDecodeWithPagedKVCacheWrapper`` and ``BatchPrefillWithPagedKVCacheWrapper``
(https://docs.flashinfer.ai), 0.2 to 0.6.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from baton_kernels.paged_attention.definition import AttentionSpec, LayerPool, RaggedBatch, RotatingAttention, Rotation
from baton_kernels.paged_attention.gpu import TritonPagedAttention, TritonPlan

WORKSPACE_BYTES = 384 << 20
"""Memory on the device that all wrappers share, for partial results of long sequences.

The 128 MiB that FlashInfer recommends are too few for many heads."""
HEAD_SIZES = (64, 128, 256)
DTYPES = (torch.float16, torch.bfloat16)
_Key = tuple[bool, int, AttentionSpec, torch.dtype]


def obstacle(spec: AttentionSpec, dtype: torch.dtype) -> str:
    """Return why FlashInfer cannot attend in a layer; empty: it can.

    Args:
        spec: Numbers of the layer.
        dtype: Dtype of queries and pool.
    """
    if dtype not in DTYPES:
        return f"{str(dtype).removeprefix('torch.')} numbers"
    if spec.latent:
        return "latents instead of keys and values"
    if spec.k_dim != spec.v_dim or spec.k_dim not in HEAD_SIZES:
        return f"heads of {spec.k_dim} and {spec.v_dim} elements"
    if spec.sinks is not None:
        return "attention sinks"
    return ""


@dataclass(frozen=True, slots=True)
class Part:
    """The sequences of a batch that one wrapper attends for.

    Attributes:
        decodes: Whether each sequence has one new token.
        sequences: Indices of the sequences in the batch.
        starts: int32 [n + 1], index of each sequence's first new token among those of the part.
        rows: int64 [t], indices of the part's tokens in the batch, on the device.
    """

    decodes: bool
    sequences: npt.NDArray[np.int64]
    starts: torch.Tensor
    rows: torch.Tensor


@dataclass(frozen=True, slots=True)
class FlashInferPlan:
    """The plan of a batch.

    Attributes:
        number: Unique number of the plan.
        triton: Triton's plan of the same batch.
        batch: The batch.
        parts: Decodes and prompts of the batch; empty: Triton attends in all layers.
        pages: By group of layers and part, int32 tensors on the host: index of each sequence's first page [n + 1], all
            pages, and the number of tokens in each sequence's last page [n].
    """

    number: int
    triton: TritonPlan
    batch: RaggedBatch
    parts: tuple[Part, ...]
    pages: dict[tuple[int, bool], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class _Wrapper:
    """A wrapper of FlashInfer.

    Attributes:
        wrapper: FlashInfer's object.
        number: Number of the plan that the wrapper is planned for.
        copied: Event after which the device has copied the memory that planning wrote.
    """

    wrapper: Any
    number: int = -1
    copied: torch.cuda.Event | None = None


class FlashInferPagedAttention(RotatingAttention):
    """See the module's docstring. Not thread-safe: one object per runner.

    Args:
        device: Device of queries and pools.
        library: The module ``flashinfer``.
    """

    name = "flashinfer"
    trees = True

    def __init__(self, device: torch.device, library: Any) -> None:
        self._device = device
        self._library = library
        self._triton = TritonPagedAttention(device)
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrappers: dict[_Key, _Wrapper] = {}
        self._numbers = itertools.count()

    def prepare(self, batch: RaggedBatch) -> FlashInferPlan:
        """Copy a batch to the device; the first layer that needs a wrapper plans it."""
        parts = _parts_of(batch, self._device) if batch.trees is None else ()
        return FlashInferPlan(next(self._numbers), self._triton.prepare(batch), batch, parts)

    def run_rotated(
        self,
        plan: FlashInferPlan,
        spec: AttentionSpec,
        pool: LayerPool,
        qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        rotation: Rotation | None,
    ) -> torch.Tensor:
        dtype = qkv[0].dtype
        if not plan.parts or pool.k.dtype != dtype or obstacle(spec, dtype):
            return self._triton.run_rotated(plan.triton, spec, pool, qkv, rotation)
        q, k, v = (tensor if tensor.stride(2) == 1 else tensor.contiguous() for tensor in qkv)
        return self.attend(plan, spec, pool, self._triton.write(plan.triton, spec, pool, (q, k, v), rotation))

    def attend(self, plan: FlashInferPlan, spec: AttentionSpec, pool: LayerPool, q: torch.Tensor) -> torch.Tensor:
        """Attend with q [T, num_heads, k_dim] over keys and values that are in the pool, by FlashInfer.

        Args:
            plan: Plan of a batch without trees.
            spec: Numbers of a layer without an :func:`obstacle`.
            pool: The layer's KV pool, in the dtype of the queries.
            q: Queries.
        """
        if len(plan.parts) == 1:
            attended: torch.Tensor = self._plan_wrapper(plan, plan.parts[0], spec, pool).run(q, (pool.k, pool.v))
            return attended
        out = q.new_empty(len(q), spec.num_heads, spec.v_dim)
        for part in plan.parts:
            out[part.rows] = self._plan_wrapper(plan, part, spec, pool).run(q[part.rows], (pool.k, pool.v))
        return out

    def _plan_wrapper(self, plan: FlashInferPlan, part: Part, spec: AttentionSpec, pool: LayerPool) -> Any:
        """Return the wrapper for a part, planned for this step."""
        key = (part.decodes, pool.group, spec, pool.k.dtype)
        entry = self._wrappers.get(key)
        if entry is None:
            entry = self._wrappers[key] = _Wrapper(self._make_wrapper(decodes=part.decodes))
        if entry.number == plan.number:
            return entry.wrapper
        if entry.copied is not None:
            entry.copied.synchronize()  # planning writes pinned memory that the last plan's copies read from
        pages = self._pages(plan, part, pool.group)
        sizes = (spec.num_heads, spec.kv_heads, spec.k_dim)
        numbers = {
            "pos_encoding_mode": "NONE",
            "window_left": spec.window - 1 if spec.window else -1,
            "logits_soft_cap": spec.softcap or None,
            "sm_scale": spec.scale,
            "q_data_type": pool.k.dtype,
            "kv_data_type": pool.k.dtype,
        }
        if part.decodes:
            entry.wrapper.plan(*pages, *sizes, plan.batch.block_size, **numbers)
        else:
            entry.wrapper.plan(part.starts, *pages, *sizes, plan.batch.block_size, causal=True, **numbers)
        entry.number = plan.number
        if self._device.type == "cuda":
            entry.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            entry.copied.record(torch.cuda.current_stream(self._device))
        return entry.wrapper

    def _make_wrapper(self, *, decodes: bool) -> Any:
        """Return a new wrapper; wrappers have their own plans and share the workspace, one at a time on a stream."""
        if decodes:
            # Tensor cores support groups of any size; the other kernels are compiled for few sizes only.
            return self._library.BatchDecodeWithPagedKVCacheWrapper(self._workspace, "HND", use_tensor_cores=True)
        return self._library.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "HND")

    def _pages(self, plan: FlashInferPlan, part: Part, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the pages of a part's sequences; see :class:`FlashInferPlan`."""
        pages_of_part = plan.pages.get((group, part.decodes))
        if pages_of_part is None:
            batch = plan.batch
            size = plan.batch.block_size
            lens = batch.context_lens[part.sequences]
            tables = batch.table(group)[part.sequences]
            counts = -(-lens // size)
            pages = tables[np.arange(tables.shape[1]) < counts[:, None]]
            arrays = (_starts_of(counts), pages, lens - (counts - 1) * size)
            indptr, indices, last = (torch.from_numpy(array.astype(np.int32)) for array in arrays)
            pages_of_part = plan.pages[group, part.decodes] = indptr, indices, last
        return pages_of_part


def _parts_of(batch: RaggedBatch, device: torch.device) -> tuple[Part, ...]:
    """Divide a batch into decodes and the rest."""
    counts = np.diff(batch.query_starts)
    parts = []
    for decodes, mask in ((True, counts == 1), (False, counts > 1)):
        if mask.any():
            sequences = np.flatnonzero(mask)
            rows = torch.from_numpy(np.flatnonzero(np.repeat(mask, counts))).to(device)
            parts.append(Part(decodes, sequences, torch.from_numpy(_starts_of(counts[sequences])), rows))
    return tuple(parts)


def _starts_of(counts: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    """Return the index of the first of each of ``counts`` consecutive items, int32 [n + 1]; the last is the sum."""
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
