"""Mixtures of experts with quantized weights by Triton; definition in ``baton_kernels.quantized_experts``.

Rows are grouped as in :mod:`baton_kernels.gpu.experts`; weights stay packed and are unpacked in registers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import triton
import triton.language as tl

from baton_kernels.gpu.experts import GroupedExperts
from baton_kernels.gpu.row_wise import gated
from baton_kernels.gpu.tuning import Tuning
from baton_kernels.gpu.weights import DeviceWeights, device_weights, product
from baton_kernels.quantized_activations import EXACT, ActivationScheme, ActivationType
from baton_kernels.quantized_weights import QuantizedWeight
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
    x, values, scales, zeros, table, order, row_bytes, groups, group, height, bias, out,
    pairs, starts, counts, tile_experts, tile_firsts,
    x_row, expert_bytes, expert_scales, hidden, inner, alpha, limit, num_experts,
    FORM: tl.constexpr, SCALES: tl.constexpr, ZEROS: tl.constexpr, ORDER: tl.constexpr, GROUP: tl.constexpr,
    TOP_K: tl.constexpr, KIND: tl.constexpr, BIAS: tl.constexpr,
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
        if BIAS:
            gate += tl.load(bias + expert * 2 * inner + n, mask=there, other=0.0).to(tl.float32)[None, :]
            up += tl.load(bias + expert * 2 * inner + inner + n, mask=there, other=0.0).to(tl.float32)[None, :]
        y = gated(gate, up, alpha, limit, KIND).to(out.dtype.element_ty)
        tl.store(out + row.to(tl.int64)[:, None] * inner + n[None, :], y, mask=live[:, None] & there[None, :])


@triton.jit
def quantized_down_kernel(
    x, values, scales, zeros, table, order, row_bytes, groups, group, height, bias, factors, out,
    pairs, starts, counts, tile_experts, tile_firsts, expert_bytes, expert_scales, hidden, inner, num_experts,
    FORM: tl.constexpr, SCALES: tl.constexpr, ZEROS: tl.constexpr, ORDER: tl.constexpr, GROUP: tl.constexpr,
    BIAS: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """``factor * (x down^T + bias)`` of a tile of one expert's rows, each to its own place in ``out``.

    Grid: (tiles, ceil(hidden / TILE_N)).
    """
    expert = tl.load(tile_experts + tl.program_id(0))
    if expert < num_experts:
        i = tl.load(tile_firsts + tl.program_id(0)) + tl.arange(0, TILE_M)
        live = i < tl.load(counts + expert)
        row = tl.load(starts + expert) + i
        pair = tl.load(pairs + row, mask=live, other=0)
        n = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
        there = n < hidden
        values, scales, zeros, table, order = _of_expert(
            values, scales, zeros, table, order, expert, expert_bytes, expert_scales, inner, FORM, ZEROS, ORDER
        )
        total = product(
            x + row.to(tl.int64) * inner, live, values, scales, zeros, table, order, row_bytes, groups, group, height,
            n, there, 0, inner, FORM, SCALES, ZEROS, ORDER, GROUP, TILE_M, TILE_N, TILE_K,
        )  # fmt: skip
        if BIAS:
            total += tl.load(bias + expert * hidden + n, mask=there, other=0.0).to(tl.float32)[None, :]
        total *= tl.load(factors + pair, mask=live, other=0.0)[:, None]
        to = out + pair.to(tl.int64)[:, None] * hidden + n[None, :]
        tl.store(to, total, mask=live[:, None] & there[None, :])


class PackedExperts(Protocol):
    """What :class:`baton_kernels.quantized_experts.QuantizedExpertWeights` has; importing it would be a circle."""

    @property
    def gate_up(self) -> Sequence[QuantizedWeight]:
        """See there."""

    @property
    def down(self) -> Sequence[QuantizedWeight]:
        """See there."""

    @property
    def gate_up_bias(self) -> torch.Tensor | None:
        """See there."""

    @property
    def down_bias(self) -> torch.Tensor | None:
        """See there."""


class TritonQuantizedExperts(GroupedExperts):
    """The operator; takes the place of :class:`baton_kernels.quantized_experts.CpuQuantizedExperts`.

    Args:
        experts: Their weights, on the device; they are copied behind each other.
        activation: Between their linears.
        activations: How inputs of both products are rounded: not at all.

    Raises:
        ValueError: Inputs would be rounded, or experts differ in form or group.
    """

    def __init__(self, experts: PackedExperts, activation: Activation, activations: ActivationScheme = EXACT) -> None:
        if activations.type is not ActivationType.NONE:
            raise ValueError("the operator does not round inputs")
        self.name, self._activation = "triton", activation
        self._gate_up, self._down = device_weights(experts.gate_up), device_weights(experts.down)
        biases = (experts.gate_up_bias, experts.down_bias)
        self._gate_up_bias, self._down_bias = (None if each is None else each.detach().contiguous() for each in biases)
        self.nbytes = self._gate_up.nbytes + self._down.nbytes
        super().__init__("quantized_experts", len(experts.down), self._down.rows, self._down.columns)

    def _run(
        self,
        chosen: Tuning,
        groups: tuple[torch.Tensor, ...],
        top_k: int,
        x: torch.Tensor,
        weights: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """See :meth:`GroupedExperts._run`."""
        tiles, how = len(groups[3]), self._activation
        h = x.new_empty(len(out), self.inner)
        w, bias = self._gate_up, self._gate_up_bias
        quantized_gate_up_kernel[tiles, triton.cdiv(self.inner, chosen.tile_n)](
            *(x, *w.arguments(), h if bias is None else bias, h, *groups, x.stride(0), *_strides(w)),
            *(self.hidden, self.inner, how.alpha, how.limit, self._experts),
            TOP_K=top_k,
            KIND=int(how.kind),
            BIAS=bias is not None,
            **_constants(w, chosen),
        )
        w, bias = self._down, self._down_bias
        quantized_down_kernel[tiles, triton.cdiv(self.hidden, chosen.tile_n)](
            *(h, *w.arguments(), h if bias is None else bias, weights, out, *groups, *_strides(w)),
            *(self.hidden, self.inner, self._experts),
            BIAS=bias is not None,
            **_constants(w, chosen),
        )


def _strides(weights: DeviceWeights) -> tuple[int, int]:
    """Bytes, and scales, from an expert to the next one."""
    return weights.values.stride(0), weights.scales.stride(0)


def _constants(weights: DeviceWeights, chosen: Tuning) -> dict[str, int | bool]:
    tiles = {"TILE_M": chosen.tile_m, "TILE_N": chosen.tile_n, "num_warps": chosen.warps, "num_stages": chosen.stages}
    return {**weights.constants(chosen.tile_k), **tiles}
