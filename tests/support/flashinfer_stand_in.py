"""Stands in for FlashInfer where there is no GPU: its two wrappers as they are documented, computed by plain torch.

Interface, defaults and refusals are those of ``BatchDecodeWithPagedKVCacheWrapper`` and
``BatchPrefillWithPagedKVCacheWrapper`` (https://docs.flashinfer.ai, 0.6): what Baton's adapter gets wrong in a call is
an error here too. Numbers are computed in float32 and given back in the queries' dtype.
"""

from __future__ import annotations

import math
from typing import Any

import torch

_DTYPES = (torch.float16, torch.bfloat16)
_HEAD_SIZES = (64, 128, 256)


class _Wrapper:
    """What both have in common.

    Attributes:
        plans: Times that it was planned.
        runs: Times that it ran.
    """

    made: list[_Wrapper] = []  # noqa: RUF012  all of them, for tests to count

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        if float_workspace_buffer.dtype is not torch.uint8 or float_workspace_buffer.data_ptr() % 16:
            raise ValueError("the workspace is bytes, aligned to 16")
        if kv_layout not in ("NHD", "HND"):
            raise KeyError(f"Invalid kv_layout {kv_layout}")
        self._layout = kv_layout
        self._planned: dict[str, Any] | None = None
        self.plans = self.runs = 0
        self.made.append(self)

    def _plan(
        self,
        qo_indptr: torch.Tensor,
        pages: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        sizes: tuple[int, int, int, int],
        causal: bool,
        options: dict[str, Any],
    ) -> None:
        (indptr, indices, last), (heads, kv_heads, dim, size) = pages, sizes
        for tensor in (qo_indptr, *pages):
            if tensor.dtype is not torch.int32 or tensor.dim() != 1:
                raise TypeError("index tensors are int32, of one dimension")
        count = len(last)
        if len(indptr) != count + 1 or len(qo_indptr) != count + 1 or int(indptr[-1]) != len(indices):
            raise ValueError("index tensors of different lengths")
        if count and not (bool((last >= 1).all()) and bool((last <= size).all())):
            raise ValueError("1 <= paged_kv_last_page_len <= page_size")
        if heads % kv_heads:
            raise ValueError("num_qo_heads must be a multiple of num_kv_heads")
        if dim not in _HEAD_SIZES or options["q_data_type"] not in _DTYPES:
            raise ValueError("no kernel is compiled for these")
        self._planned = {"qo": qo_indptr.tolist(), "indptr": indptr.tolist(), "indices": indices.long()}
        self._planned |= {"last": last.tolist(), "sizes": sizes, "causal": causal, **options}
        self.plans += 1

    def run(self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Attend; q [tokens, num_qo_heads, head_dim]."""
        plan = self._planned
        if plan is None:
            raise RuntimeError("plan() comes before run()")
        heads, kv_heads, dim, size = plan["sizes"]
        if q.dtype != plan["q_data_type"] or any(x.dtype != plan["kv_data_type"] for x in paged_kv_cache):
            raise ValueError("another dtype than planned")
        if tuple(q.shape) != (plan["qo"][-1], heads, dim) or q.stride(-1) != 1:
            raise ValueError(f"q of shape {tuple(q.shape)}")
        keys, values = (x if self._layout == "HND" else x.transpose(1, 2) for x in paged_kv_cache)
        for cache in (keys, values):
            if tuple(cache.shape[1:]) != (kv_heads, size, dim) or cache.stride(-1) != 1:
                raise ValueError(f"pages of shape {tuple(cache.shape[1:])}")
        if keys.stride() != values.stride():
            raise ValueError("paged_k_cache and paged_v_cache must have identical strides")
        out = torch.full_like(q, float("nan"), memory_format=torch.contiguous_format)
        for i, last in enumerate(plan["last"]):
            pages = plan["indices"][plan["indptr"][i] : plan["indptr"][i + 1]]
            kv_len = (len(pages) - 1) * size + last
            k, v = (x[pages].transpose(0, 1).flatten(1, 2)[:, :kv_len].float() for x in (keys, values))
            rows = slice(plan["qo"][i], plan["qo"][i + 1])
            out[rows] = self._attend(q[rows].float().transpose(0, 1), k, v).transpose(0, 1).to(q.dtype)
        self.runs += 1
        return out

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q [heads, n, dim] over k and v [kv_heads, kv_len, dim]."""
        plan = self._planned
        assert plan is not None
        group, (qo_len, kv_len) = q.shape[0] // k.shape[0], (q.shape[1], k.shape[1])
        k, v = (x.repeat_interleave(group, 0) for x in (k, v))
        scale = 1 / math.sqrt(q.shape[2]) if plan["sm_scale"] is None else plan["sm_scale"]
        logits = q @ k.transpose(1, 2) * scale
        if cap := plan["logits_soft_cap"] or 0.0:
            logits = cap * torch.tanh(logits / cap)
        at, key = torch.arange(qo_len)[:, None], torch.arange(kv_len)
        mask = torch.ones(qo_len, kv_len, dtype=torch.bool)
        if plan["causal"]:
            mask &= key + qo_len <= kv_len + at
        if plan["window_left"] >= 0:
            mask &= key + qo_len + plan["window_left"] >= kv_len + at
        return logits.masked_fill(~mask, -math.inf).softmax(-1) @ v


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    """One new token per request."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout)
        if use_cuda_graph:
            raise ValueError("paged_kv_indptr_buffer should be a torch.Tensor in cudagraph mode")
        self._tensor_cores = use_tensor_cores

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        sm_scale: float | None = None,
    ) -> None:
        """Plan a batch."""
        if not self._tensor_cores and num_qo_heads // num_kv_heads not in (1, 2, 3, 4, 8):
            raise ValueError("no kernel is compiled for groups of this size")
        assert pos_encoding_mode == "NONE"
        options = {
            "window_left": window_left, "logits_soft_cap": logits_soft_cap, "sm_scale": sm_scale,
            "q_data_type": q_data_type, "kv_data_type": kv_data_type or q_data_type,
        }  # fmt: skip
        starts = torch.arange(len(last_page_len) + 1, dtype=torch.int32)
        sizes = (num_qo_heads, num_kv_heads, head_dim, page_size)
        self._plan(starts, (indptr, indices, last_page_len), sizes, False, options)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    """Any number of new tokens per request, the last ones of its KV."""

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        sm_scale: float | None = None,
    ) -> None:
        """Plan a batch."""
        assert pos_encoding_mode == "NONE"
        options = {
            "window_left": window_left, "logits_soft_cap": logits_soft_cap, "sm_scale": sm_scale,
            "q_data_type": q_data_type, "kv_data_type": kv_data_type or q_data_type,
        }  # fmt: skip
        pages = (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        self._plan(qo_indptr, pages, (num_qo_heads, num_kv_heads, head_dim_qk, page_size), causal, options)
