"""RMS norm and gated products by Triton; definitions in ``baton_kernels.row_wise``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from baton_kernels.row_wise import SILU, Activation

TILE = 1024
"""Number of elements of a gated product that one program computes."""


@triton.jit
def _rms_norm_kernel(x, weight, residual, out, x_row, dim, eps, offset, D: tl.constexpr, RESIDUAL: tl.constexpr):
    """A row: ``x / rms(x) * (weight + offset)``, and a residual added to it. Grid: (rows,)."""
    row, d = tl.program_id(0).to(tl.int64), tl.arange(0, D)
    there = d < dim
    wide = tl.load(x + row * x_row + d, mask=there, other=0.0).to(tl.float32)
    wide *= 1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / dim + eps)
    wide *= tl.load(weight + d, mask=there, other=0.0).to(tl.float32) + offset
    if RESIDUAL:
        wide += tl.load(residual + row * dim + d, mask=there, other=0.0).to(tl.float32)
    tl.store(out + row * dim + d, wide.to(out.dtype.element_ty), mask=there)


@triton.jit
def gated(gate, up, alpha, limit, KIND: tl.constexpr):
    """``activation(gate) * up`` in float32; ``KIND`` as ``ActivationKind`` numbers them."""
    if KIND == 2:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit) + 1.0
        gate = gate * tl.sigmoid(alpha * gate)
    elif KIND == 1:
        # tanh(x) = 2 sigmoid(2 x) - 1
        gate = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        gate = gate * tl.sigmoid(gate)
    return gate * up


@triton.jit
def _gated_kernel(x, out, x_row, dim, alpha, limit, KIND: tl.constexpr, D: tl.constexpr):
    """Grid: (rows, ceil(dim / D))."""
    row, d = tl.program_id(0).to(tl.int64), tl.program_id(1) * D + tl.arange(0, D)
    there = d < dim
    gate = tl.load(x + row * x_row + d, mask=there, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_row + dim + d, mask=there, other=0.0).to(tl.float32)
    tl.store(out + row * dim + d, gated(gate, up, alpha, limit, KIND).to(out.dtype.element_ty), mask=there)


class TritonRmsNorm:
    """RMS norm with one weight [dim] on a GPU, like :class:`baton_kernels.row_wise.CpuRmsNorm` on a CPU."""

    def __init__(self, weight: torch.Tensor, eps: float, offset: float = 0.0) -> None:
        self._weight = weight.detach().contiguous()
        self._eps = eps
        self._offset = offset
        self._padded = triton.next_power_of_2(len(weight))

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Return the norm of x [rows, dim], rows of any stride, plus a contiguous residual, contiguous [rows, dim]."""
        x = x if x.stride(1) == 1 else x.contiguous()
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        if len(x):
            _rms_norm_kernel[len(x),](
                *(x, self._weight, x if residual is None else residual, out),
                *(x.stride(0), x.shape[1], self._eps, self._offset),
                D=self._padded,
                RESIDUAL=residual is not None,
                num_warps=min(16, max(1, self._padded // 512)),
            )
        return out


class TritonGatedMul:
    """A gated product on a GPU, like :class:`baton_kernels.row_wise.CpuGatedMul` on a CPU."""

    def __init__(self, activation: Activation = SILU) -> None:
        self._activation = activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product, contiguous [rows, dim], of x [rows, 2 dim], gates first, rows of any stride."""
        x = x if x.stride(1) == 1 else x.contiguous()
        dim = x.shape[1] // 2
        how = self._activation
        out = x.new_empty(len(x), dim)
        if len(x):
            _gated_kernel[len(x), triton.cdiv(dim, TILE)](
                *(x, out, x.stride(0), dim, how.alpha, how.limit), KIND=int(how.kind), D=TILE
            )
        return out
