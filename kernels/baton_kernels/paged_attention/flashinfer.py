"""Attention by FlashInfer, where it is installed, over the same strided views of the pool.

Keys and values are normed, rotated and stored by Triton's kernel; then FlashInfer attends over the pool as a paged KV
cache of layout HND, whose pages are our blocks. Its wrappers are planned on the host once per step for all layers with
the same numbers: sequences with one new token by the one for decodes, the others by the one for prompts. What it does
not do (:func:`obstacle`; trees of tokens) Triton does.

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

from baton_kernels.paged_attention.definition import AttentionSpec, LayerPool, RaggedBatch, Rotation
from baton_kernels.paged_attention.gpu import TritonPagedAttention, TritonPlan

WORKSPACE_BYTES = 384 << 20
"""Memory on the device that all wrappers share, for partial results of long sequences.

The 128 MiB that FlashInfer recommends do not do for many heads."""
HEAD_SIZES = (64, 128, 256)
DTYPES = (torch.float16, torch.bfloat16)
_Key = tuple[bool, int, AttentionSpec, torch.dtype]


def obstacle(spec: AttentionSpec, dtype: torch.dtype) -> str:
    """Say why FlashInfer does not attend in a layer; empty: it does.

    Args:
        spec: Of the layer.
        dtype: Of queries and of the pool.
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
    """Sequences that one wrapper attends for.

    Attributes:
        decodes: Whether each has one new token.
        sequences: Their numbers in the batch.
        starts: int32 [n + 1], where the new tokens of each begin among those of all of them.
        rows: int64 [t], which of the batch's tokens these are, on the device.
    """

    decodes: bool
    sequences: npt.NDArray[np.int64]
    starts: torch.Tensor
    rows: torch.Tensor


@dataclass(frozen=True, slots=True)
class FlashInferPlan:
    """A batch.

    Attributes:
        number: No other plan's.
        triton: The same for Triton.
        batch: As it was given.
        parts: None where Triton attends in all layers.
        pages: By group of layers and part: int32 tensors on the host, where each sequence's pages begin [n + 1], all
            pages, and the tokens in the last page of each [n].
    """

    number: int
    triton: TritonPlan
    batch: RaggedBatch
    parts: tuple[Part, ...]
    pages: dict[tuple[int, bool], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class _Wrapper:
    """A wrapper, the plan that it is planned for, and when the device has taken over what planning wrote."""

    wrapper: Any
    number: int = -1
    taken: torch.cuda.Event | None = None


class FlashInferPagedAttention:
    """See the module's docstring. Not thread-safe: one object per runner.

    Args:
        device: Where queries and pools are.
        library: FlashInfer.
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
        """Take a batch to the device; wrappers are planned by the first layer that needs them."""
        parts = _parts_of(batch, self._device) if batch.trees is None else ()
        return FlashInferPlan(next(self._numbers), self._triton.prepare(batch), batch, parts)

    def run(
        self,
        plan: FlashInferPlan,
        spec: AttentionSpec,
        pool: LayerPool,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> torch.Tensor:
        return self.run_rotated(plan, spec, pool, (q, k, v), None)

    def run_rotated(
        self,
        plan: FlashInferPlan,
        spec: AttentionSpec,
        pool: LayerPool,
        qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        rotation: Rotation | None,
    ) -> torch.Tensor:
        """As :meth:`run`, with queries and keys normed and rotated on their way."""
        dtype = qkv[0].dtype
        if not plan.parts or pool.k.dtype != dtype or obstacle(spec, dtype):
            return self._triton.run_rotated(plan.triton, spec, pool, qkv, rotation)
        q, k, v = (tensor if tensor.stride(2) == 1 else tensor.contiguous() for tensor in qkv)
        return self.attend(plan, spec, pool, self._triton.write(plan.triton, spec, pool, (q, k, v), rotation))

    def attend(self, plan: FlashInferPlan, spec: AttentionSpec, pool: LayerPool, q: torch.Tensor) -> torch.Tensor:
        """Attend with q [T, num_heads, k_dim] over keys and values that are in the pool, by FlashInfer.

        Args:
            plan: Of a batch without trees.
            spec: Without an :func:`obstacle`.
            pool: In the dtype of the queries.
            q: Queries.
        """
        if len(plan.parts) == 1:
            attended: torch.Tensor = self._planned(plan, plan.parts[0], spec, pool).run(q, (pool.k, pool.v))
            return attended
        out = q.new_empty(len(q), spec.num_heads, spec.v_dim)
        for part in plan.parts:
            out[part.rows] = self._planned(plan, part, spec, pool).run(q[part.rows], (pool.k, pool.v))
        return out

    def _planned(self, plan: FlashInferPlan, part: Part, spec: AttentionSpec, pool: LayerPool) -> Any:
        """Return the wrapper for a part, planned for this step."""
        key = (part.decodes, pool.group, spec, pool.k.dtype)
        held = self._wrappers.get(key)
        if held is None:
            held = self._wrappers[key] = _Wrapper(self._new(decodes=part.decodes))
        if held.number == plan.number:
            return held.wrapper
        if held.taken is not None:
            held.taken.synchronize()  # planning writes pinned memory that the last plan's copies read from
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
            held.wrapper.plan(*pages, *sizes, plan.batch.block_size, **numbers)
        else:
            held.wrapper.plan(part.starts, *pages, *sizes, plan.batch.block_size, causal=True, **numbers)
        held.number = plan.number
        if self._device.type == "cuda":
            held.taken = torch.cuda.Event()  # type: ignore[no-untyped-call]
            held.taken.record(torch.cuda.current_stream(self._device))
        return held.wrapper

    def _new(self, *, decodes: bool) -> Any:
        """Make a wrapper: each has a plan of its own, and they share the workspace, one after the other on a stream."""
        if decodes:
            # By tensor cores, which take groups of any size: of the others only few are compiled.
            return self._library.BatchDecodeWithPagedKVCacheWrapper(self._workspace, "HND", use_tensor_cores=True)
        return self._library.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "HND")

    def _pages(self, plan: FlashInferPlan, part: Part, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the pages of a part's sequences; see :class:`FlashInferPlan`."""
        found = plan.pages.get((group, part.decodes))
        if found is None:
            batch = plan.batch
            size = plan.batch.block_size
            lens = batch.context_lens[part.sequences]
            tables = batch.table(group)[part.sequences]
            counts = -(-lens // size)
            pages = tables[np.arange(tables.shape[1]) < counts[:, None]]
            arrays = (_starts_of(counts), pages, lens - (counts - 1) * size)
            indptr, indices, last = (torch.from_numpy(array.astype(np.int32)) for array in arrays)
            found = plan.pages[group, part.decodes] = indptr, indices, last
        return found


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
    """Return where each of so many begins, int32 [n + 1]; the last is the sum."""
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
