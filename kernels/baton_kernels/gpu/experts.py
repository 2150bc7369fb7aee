"""Mixtures of experts by Triton: rows grouped by expert, two grouped products; definition in ``baton_kernels.experts``.

Rows (a token with one of its experts) are sorted by expert, and each expert's rows are cut into tiles. Only the device
knows how many tiles an expert has: the largest possible number of programs is launched, and programs without a tile
return. So the host does not wait for the device, and a launch can be captured.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from baton_kernels.experts import ExpertWeights
from baton_kernels.gpu import PRECISION
from baton_kernels.gpu.row_wise import gated
from baton_kernels.gpu.tuning import Tuning, tuning_for
from baton_kernels.row_wise import Activation

SUM_BYTES = 128 << 20
"""Of the experts' outputs in float32 before they are summed: of more, some columns are computed at a time."""
LEAST_COLUMNS = 128


@triton.jit
def _gate_up_kernel(
    x, weights, bias, out, order, starts, counts, tile_experts, tile_firsts,
    x_row, expert_stride, w_row, hidden, inner, alpha, limit, num_experts,
    TOP_K: tl.constexpr, KIND: tl.constexpr, BIAS: tl.constexpr, INTERLEAVED: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """``activation(x gate^T) * (x up^T)`` of a tile of one expert's rows. Grid: (tiles, ceil(inner / TILE_N))."""
    expert = tl.load(tile_experts + tl.program_id(0))
    if expert < num_experts:
        i = tl.load(tile_firsts + tl.program_id(0)) + tl.arange(0, TILE_M)
        live = i < tl.load(counts + expert)
        row = tl.load(starts + expert) + i
        token = tl.load(order + row, mask=live, other=0) // TOP_K
        n = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
        of_expert = weights + expert.to(tl.int64) * expert_stride
        if INTERLEAVED:
            # Gates and ups alternate: they are read and multiplied together, and told apart afterwards.
            both_n = tl.program_id(1) * (2 * TILE_N) + tl.arange(0, 2 * TILE_N)
            both = tl.zeros([TILE_M, 2 * TILE_N], tl.float32)
        else:
            gate = tl.zeros([TILE_M, TILE_N], tl.float32)
            up = tl.zeros([TILE_M, TILE_N], tl.float32)
        for at in range(0, hidden, TILE_K):
            k = at + tl.arange(0, TILE_K)
            from_x = x + token.to(tl.int64)[:, None] * x_row + k[None, :]
            a = tl.load(from_x, mask=live[:, None] & (k[None, :] < hidden), other=0.0)
            if INTERLEAVED:
                from_w = of_expert + both_n[None, :] + k[:, None] * w_row
                there = (both_n[None, :] < 2 * inner) & (k[:, None] < hidden)
                both += tl.dot(a, tl.load(from_w, mask=there, other=0.0), input_precision=PRECISION)
            else:
                from_w = of_expert + n[None, :] * w_row + k[:, None]
                there = (n[None, :] < inner) & (k[:, None] < hidden)
                gate += tl.dot(a, tl.load(from_w, mask=there, other=0.0), input_precision=PRECISION)
                up_w = tl.load(from_w + inner.to(tl.int64) * w_row, mask=there, other=0.0)
                up += tl.dot(a, up_w, input_precision=PRECISION)
        from_bias = bias + expert * 2 * inner
        if INTERLEAVED:
            if BIAS:
                both += tl.load(from_bias + both_n, mask=both_n < 2 * inner, other=0.0).to(tl.float32)[None, :]
            gate, up = tl.split(tl.reshape(both, [TILE_M, TILE_N, 2]))
        elif BIAS:
            gate += tl.load(from_bias + n, mask=n < inner, other=0.0).to(tl.float32)[None, :]
            up += tl.load(from_bias + inner + n, mask=n < inner, other=0.0).to(tl.float32)[None, :]
        to = out + row.to(tl.int64)[:, None] * inner + n[None, :]
        y = gated(gate, up, alpha, limit, KIND).to(out.dtype.element_ty)
        tl.store(to, y, mask=live[:, None] & (n[None, :] < inner))


@triton.jit
def _down_kernel(
    x, weights, bias, factors, out, order, starts, counts, tile_experts, tile_firsts,
    expert_stride, n_stride, k_stride, hidden, inner, num_experts, first_column, columns,
    BIAS: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """``factor * (x down^T + bias)`` of a tile of one expert's rows, each to its own place in ``out`` [rows, columns].

    Grid: (tiles, ceil(columns / TILE_N)).
    """
    expert = tl.load(tile_experts + tl.program_id(0))
    if expert < num_experts:
        i = tl.load(tile_firsts + tl.program_id(0)) + tl.arange(0, TILE_M)
        live = i < tl.load(counts + expert)
        row = tl.load(starts + expert) + i
        pair = tl.load(order + row, mask=live, other=0)
        column = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
        n = first_column + column
        of_expert = weights + expert.to(tl.int64) * expert_stride
        total = tl.zeros([TILE_M, TILE_N], tl.float32)
        for at in range(0, inner, TILE_K):
            k = at + tl.arange(0, TILE_K)
            from_x = x + row.to(tl.int64)[:, None] * inner + k[None, :]
            a = tl.load(from_x, mask=live[:, None] & (k[None, :] < inner), other=0.0)
            from_w = of_expert + n[None, :] * n_stride + k[:, None] * k_stride
            there = (n[None, :] < hidden) & (k[:, None] < inner)
            total += tl.dot(a, tl.load(from_w, mask=there, other=0.0), input_precision=PRECISION)
        if BIAS:
            total += tl.load(bias + expert * hidden + n, mask=n < hidden, other=0.0).to(tl.float32)[None, :]
        total *= tl.load(factors + pair, mask=live, other=0.0)[:, None]
        to = out + pair.to(tl.int64)[:, None] * columns + column[None, :]
        tl.store(to, total, mask=live[:, None] & (column[None, :] < columns))


@dataclass(frozen=True, slots=True)
class GroupedRows:
    """The rows of one step (a token with one of its experts), in tiles of one expert each.

    Attributes:
        x: Inputs [T, hidden], with contiguous rows.
        factors: Weights of the chosen experts, float32 [T, top_k].
        groups: Rows by expert, from :func:`group_by_expert`.
        tuning: Tile sizes of the launches.
    """

    x: torch.Tensor
    factors: torch.Tensor
    groups: tuple[torch.Tensor, ...]
    tuning: Tuning

    @property
    def count(self) -> int:
        """Number of rows, T * top_k."""
        return self.factors.numel()

    @property
    def top_k(self) -> int:
        """Number of experts per token."""
        return self.factors.shape[1]

    def grid(self, columns: int) -> tuple[int, int]:
        """Return the grid of the programs that write ``columns`` columns of all tiles."""
        return len(self.groups[3]), triton.cdiv(columns, self.tuning.tile_n)


class GroupedExperts(ABC):
    """Base of the operators for experts: groups tokens by expert, and sums up the outputs of a token's experts.

    Args:
        operator: Name of the operator in tables of configurations.
        experts: Number of experts.
        hidden: Number of elements of a token.
        inner: Number of elements between both products.
    """

    def __init__(self, operator: str, experts: int, hidden: int, inner: int) -> None:
        self._operator = operator
        self._experts = experts
        self.hidden = hidden
        self.inner = inner

    def __call__(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See :func:`baton_kernels.experts.experts_reference`; the result has x's dtype, sums are in float32.

        Args:
            x: Inputs [T, hidden], rows of any stride.
            ids: Chosen experts, int32 or int64 [T, top_k].
            weights: Weights of the chosen experts, float32 [T, top_k].
            residual: Added to the result, [T, hidden], or ``None``.
        """
        (tokens, top_k), device = ids.shape, x.device
        pairs = tokens * top_k
        out = x.new_empty(tokens, self.hidden)
        if not pairs:
            return out
        each = -(-pairs // self._experts)
        sizes = {"tokens_per_expert": each, "experts": self._experts, "hidden": self.hidden, "inner": self.inner}
        chosen = tuning_for(self._operator, device, {**sizes, "bytes": x.element_size()})
        groups = group_by_expert(ids, self._experts, chosen.tile_m)
        inputs = x if x.stride(1) == 1 else x.contiguous()
        rows = GroupedRows(inputs, weights.contiguous(), groups, chosen)
        activated = self._gate_up(rows)
        step = max(LEAST_COLUMNS, SUM_BYTES // (4 * pairs) // LEAST_COLUMNS * LEAST_COLUMNS)
        for start in range(0, self.hidden, step):
            part = slice(start, min(start + step, self.hidden))
            outputs = torch.zeros(pairs, part.stop - start, dtype=torch.float32, device=device)
            self._down(rows, activated, outputs, start)
            summed = outputs.view(tokens, top_k, -1).sum(1)
            out[:, part] = summed if residual is None else summed + residual[:, part].float()
        return out

    @abstractmethod
    def _gate_up(self, rows: GroupedRows) -> torch.Tensor:
        """Return the activated outputs of the first product, [rows, inner]; rows without an expert are not written."""

    @abstractmethod
    def _down(self, rows: GroupedRows, x: torch.Tensor, out: torch.Tensor, first: int) -> None:
        """Write weighted outputs of x [rows, inner] to ``out`` float32 [rows, columns], in the order of tokens.

        Args:
            rows: The rows.
            x: Activated outputs of the first product.
            out: Place of the outputs' columns from ``first`` on.
            first: The first of these columns.
        """


def group_by_expert(ids: torch.Tensor, experts: int, tile_m: int) -> tuple[torch.Tensor, ...]:
    """Sort pairs of tokens and experts, and cut each expert's pairs into tiles, without waiting for the device.

    Args:
        ids: Chosen experts [T, top_k]; numbers out of range choose none.
        experts: Number of experts.
        tile_m: Number of pairs of a tile.

    Returns:
        Five int32 tensors: indices of pairs, sorted by expert [T * top_k]; per expert, the index of its first pair and
        the number of its pairs [experts + 1], the last entry being pairs without an expert; per tile, its expert
        (``experts``: the tile is not used), and the index of its first pair among the expert's pairs.
    """
    pairs = ids.numel()
    flat = ids.reshape(-1).long()
    flat = torch.where((flat >= 0) & (flat < experts), flat, experts)  # pairs without an expert come last
    order = torch.argsort(flat, stable=True).int()
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=ids.device)
    counts = counts.scatter_add_(0, flat, torch.ones_like(flat))
    starts = counts.cumsum(0) - counts
    tiles = -(-counts[:experts] // tile_m)
    ends = tiles.cumsum(0)
    number = torch.arange(-(-pairs // tile_m) + min(experts, pairs), device=ids.device)
    expert = torch.searchsorted(ends, number, right=True)
    known = expert.clamp(max=experts - 1)
    first = (number - (ends[known] - tiles[known])) * tile_m
    return order, starts.int(), counts.int(), expert.int(), first.int()


class TritonExperts(GroupedExperts):
    """The experts of one layer on a GPU, like :class:`baton_kernels.experts.CpuExperts` on a CPU.

    Args:
        experts: Weights of the experts, on the device; they are not copied.
        activation: Activation between both products.
    """

    def __init__(self, experts: ExpertWeights, activation: Activation) -> None:
        self._gate_up_weights = experts.gate_up.detach()
        self._down_weights = experts.down.detach()
        self._gate_up_bias = experts.gate_up_bias
        self._down_bias = experts.down_bias
        self._activation = activation
        self._interleaved = experts.interleaved
        shape = self._down_weights.shape
        inner, hidden = (shape[1], shape[2]) if experts.interleaved else (shape[2], shape[1])
        super().__init__("experts", len(self._gate_up_weights), hidden, inner)

    def _gate_up(self, rows: GroupedRows) -> torch.Tensor:
        x = rows.x
        w = self._gate_up_weights
        bias = self._gate_up_bias
        inner = self.inner
        how = self._activation
        out = x.new_empty(rows.count, inner)
        _gate_up_kernel[rows.grid(inner)](
            *(x, w, w if bias is None else bias, out, *rows.groups, x.stride(0), w.stride(0), w.stride(1)),
            *(self.hidden, inner, how.alpha, how.limit, self._experts),
            TOP_K=rows.top_k,
            KIND=int(how.kind),
            BIAS=bias is not None,
            INTERLEAVED=self._interleaved,
            **_constants(rows.tuning),
        )
        return out

    def _down(self, rows: GroupedRows, x: torch.Tensor, out: torch.Tensor, first: int) -> None:
        w = self._down_weights
        bias = self._down_bias
        n, k = (1, w.stride(1)) if self._interleaved else (w.stride(1), 1)
        _down_kernel[rows.grid(out.shape[1])](
            *(x, w, w if bias is None else bias, rows.factors, out, *rows.groups),
            *(w.stride(0), n, k, self.hidden, self.inner, self._experts, first, out.shape[1]),
            BIAS=bias is not None,
            **_constants(rows.tuning),
        )


def _constants(chosen: Tuning) -> dict[str, int]:
    sizes = {"TILE_M": chosen.tile_m, "TILE_N": chosen.tile_n, "TILE_K": chosen.tile_k}
    return {**sizes, "num_warps": chosen.warps, "num_stages": chosen.stages}
