"""Mixtures of experts with quantized weights by Triton; definition in ``baton_kernels.quantized_experts``.

Rows are grouped as in :mod:`baton_kernels.gpu.experts`; weights stay packed and are unpacked in registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from baton_kernels.gpu.experts import GroupedExperts, GroupedRows
from baton_kernels.gpu.row_wise import gated
from baton_kernels.gpu.tuning import Tuning
from baton_kernels.gpu.weights import DeviceWeights, device_weights, product, rounded_inputs
from baton_kernels.quantization import EXACT, ActivationScheme
from baton_kernels.quantized_experts import QuantizedExpertWeights
from baton_kernels.row_wise import Activation


@triton.jit
def _of_expert(values, scales, zeros, table, order, expert, expert_bytes, expert_scales, columns, FORM: tl.constexpr,
               ZEROS: tl.constexpr, ORDER: tl.constexpr):  # fmt: skip
    """Return where an expert's values, scales, zeros, table and order of columns begin."""
    expert = expert.to(tl.int64)
    if ZEROS:
        zeros += expert * expert_scales
    if FORM == 3:
        table += expert * 16
    if ORDER:
        order += expert * columns
    return values + expert * expert_bytes, scales + expert * expert_scales, zeros, table, order


@triton.jit
def quantized_gate_up_kernel(
    x, values, scales, zeros, table, order, row_bytes, groups, group, height, x_scales, bias, out,
    pairs, starts, counts, tile_experts, tile_firsts,
    x_row, expert_bytes, expert_scales, hidden, inner, alpha, limit, num_experts,
    FORM: tl.constexpr, SCALES: tl.constexpr, ZEROS: tl.constexpr, ORDER: tl.constexpr, GROUP: tl.constexpr,
    TOP_K: tl.constexpr, KIND: tl.constexpr, X_SCALES: tl.constexpr, BIAS: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """``activation(x gate^T) * (x up^T)`` of a tile of one expert's rows. Grid: (tiles, ceil(inner / TILE_N))."""
    expert = tl.load(tile_experts + tl.program_id(0))
    if expert < num_experts:
        i = tl.load(tile_firsts + tl.program_id(0)) + tl.arange(0, TILE_M)
        live = i < tl.load(counts + expert)
        row = tl.load(starts + expert) + i
        token = tl.load(pairs + row, mask=live, other=0) // TOP_K
        n = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
        there = n < inner
        x_rows = x + token.to(tl.int64) * x_row
        values, scales, zeros, table, order = _of_expert(
            values, scales, zeros, table, order, expert, expert_bytes, expert_scales, hidden, FORM, ZEROS, ORDER
        )
        gate = product(
            x_rows, live, values, scales, zeros, table, order, row_bytes, groups, group, height, n, there, 0, hidden,
            FORM, SCALES, ZEROS, ORDER, GROUP, TILE_M, TILE_N, TILE_K,
        )  # fmt: skip
        up = product(
            x_rows, live, values, scales, zeros, table, order, row_bytes, groups, group, height, n + inner, there, 0,
            hidden, FORM, SCALES, ZEROS, ORDER, GROUP, TILE_M, TILE_N, TILE_K,
        )  # fmt: skip
        if X_SCALES:
            x_scale = tl.load(x_scales + token, mask=live, other=0.0)[:, None]
            gate *= x_scale
            up *= x_scale
        if BIAS:
            gate += tl.load(bias + expert * 2 * inner + n, mask=there, other=0.0).to(tl.float32)[None, :]
            up += tl.load(bias + expert * 2 * inner + inner + n, mask=there, other=0.0).to(tl.float32)[None, :]
        y = gated(gate, up, alpha, limit, KIND).to(out.dtype.element_ty)
        tl.store(out + row.to(tl.int64)[:, None] * inner + n[None, :], y, mask=live[:, None] & there[None, :])


@triton.jit
def quantized_down_kernel(
    x, values, scales, zeros, table, order, row_bytes, groups, group, height, x_scales, bias, factors, out,
    pairs, starts, counts, tile_experts, tile_firsts, expert_bytes, expert_scales, hidden, inner, num_experts,
    first_column, columns,
    FORM: tl.constexpr, SCALES: tl.constexpr, ZEROS: tl.constexpr, ORDER: tl.constexpr, GROUP: tl.constexpr,
    X_SCALES: tl.constexpr, BIAS: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """``factor * (x down^T + bias)`` of a tile of one expert's rows, each to its own place in ``out`` [rows, columns].

    Grid: (tiles, ceil(columns / TILE_N)).
    """
    expert = tl.load(tile_experts + tl.program_id(0))
    if expert < num_experts:
        i = tl.load(tile_firsts + tl.program_id(0)) + tl.arange(0, TILE_M)
        live = i < tl.load(counts + expert)
        row = tl.load(starts + expert) + i
        pair = tl.load(pairs + row, mask=live, other=0)
        column = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
        n, there = first_column + column, column < columns
        values, scales, zeros, table, order = _of_expert(
            values, scales, zeros, table, order, expert, expert_bytes, expert_scales, inner, FORM, ZEROS, ORDER
        )
        total = product(
            x + row.to(tl.int64) * inner, live, values, scales, zeros, table, order, row_bytes, groups, group, height,
            n, there, 0, inner, FORM, SCALES, ZEROS, ORDER, GROUP, TILE_M, TILE_N, TILE_K,
        )  # fmt: skip
        if X_SCALES:
            total *= tl.load(x_scales + row, mask=live, other=0.0)[:, None]
        if BIAS:
            total += tl.load(bias + expert * hidden + n, mask=there, other=0.0).to(tl.float32)[None, :]
        total *= tl.load(factors + pair, mask=live, other=0.0)[:, None]
        to = out + pair.to(tl.int64)[:, None] * columns + column[None, :]
        tl.store(to, total, mask=live[:, None] & there[None, :])


class TritonQuantizedExperts(GroupedExperts):
    """The experts of one layer on a GPU, like :class:`baton_kernels.quantized_experts.CpuQuantizedExperts` on a CPU.

    Args:
        experts: Weights of the experts, on the device; they are copied into one tensor.
        activation: Activation between both products.
        activations: How inputs of both products are rounded, by torch before each (:func:`.rounded_inputs`).

    Raises:
        ValueError: Experts differ in form or group.
    """

    def __init__(
        self,
        experts: QuantizedExpertWeights,
        activation: Activation,
        activations: tuple[ActivationScheme, ActivationScheme] = (EXACT, EXACT),
    ) -> None:
        self.name = "triton"
        self._activation = activation
        self._activations = activations
        self._gate_up_weights = device_weights(experts.gate_up)
        self._down_weights = device_weights(experts.down)
        biases = (experts.gate_up_bias, experts.down_bias)
        self._gate_up_bias, self._down_bias = (None if each is None else each.detach().contiguous() for each in biases)
        self.nbytes = self._gate_up_weights.nbytes + self._down_weights.nbytes
        super().__init__("quantized_experts", len(experts.down), self._down_weights.rows, self._down_weights.columns)

    def _gate_up(self, rows: GroupedRows) -> torch.Tensor:
        w = self._gate_up_weights
        bias = self._gate_up_bias
        how = self._activation
        x, scales = rounded_inputs(rows.x, self._activations[0])
        out = rows.x.new_empty(rows.count, self.inner)
        quantized_gate_up_kernel[rows.grid(self.inner)](
            *_inputs(x, w, scales, bias),
            *(out, *rows.groups, x.stride(0), *_strides(w)),
            *(self.hidden, self.inner, how.alpha, how.limit, self._experts),
            TOP_K=rows.top_k,
            KIND=int(how.kind),
            **_constants(w, scales, bias, rows.tuning),
        )
        return out

    def _down(self, rows: GroupedRows, x: torch.Tensor, out: torch.Tensor, first: int) -> None:
        w = self._down_weights
        bias = self._down_bias
        x, scales = rounded_inputs(x, self._activations[1])
        quantized_down_kernel[rows.grid(out.shape[1])](
            *_inputs(x, w, scales, bias),
            *(rows.factors, out, *rows.groups, *_strides(w), self.hidden, self.inner, self._experts),
            *(first, out.shape[1]),
            **_constants(w, scales, bias, rows.tuning),
        )


def _inputs(
    x: torch.Tensor, weights: DeviceWeights, scales: torch.Tensor | None, bias: torch.Tensor | None
) -> tuple[torch.Tensor | int, ...]:
    """Return the first arguments of both kernels."""
    return (x, *weights.arguments(), *(x if each is None else each for each in (scales, bias)))


def _strides(weights: DeviceWeights) -> tuple[int, int]:
    """Return the bytes, and the number of scales, from an expert to the next one."""
    return weights.values.stride(0), weights.scales.stride(0)


def _constants(
    weights: DeviceWeights, scales: torch.Tensor | None, bias: torch.Tensor | None, chosen: Tuning
) -> dict[str, int | bool]:
    """Return the constants of both kernels."""
    chosen = weights.fitted(chosen)
    tiles = {"TILE_M": chosen.tile_m, "TILE_N": chosen.tile_n, "num_warps": chosen.warps, "num_stages": chosen.stages}
    flags = {"X_SCALES": scales is not None, "BIAS": bias is not None}
    return {**weights.constants(chosen.tile_k), **tiles, **flags}
