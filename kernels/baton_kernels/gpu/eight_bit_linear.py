"""Linear layers whose weights and inputs both have 8 bits: products in int8, or fp8, on a GPU's tensor cores.

With a scale per row of the weight and one per token nothing is left to multiply inside of the sum: int8 values are
summed exactly, in int32; fp8 ones in float32, which Hopper's tensor cores add up with fewer bits, so that the sum over
each tile of columns is added to a register of full precision. Definition: ``baton_kernels.quantized_linear``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from baton_kernels.gpu import converts_fp8
from baton_kernels.gpu.quantized_linear import SUM_TILE, shares, sum_kernel
from baton_kernels.gpu.tuning import tuning_for
from baton_kernels.quantization import ActivationScheme, ActivationType, Fp8Weight, Int8Weight, QuantizedWeight

MOST_COLUMNS = 1 << 17
"""Sums of so many products of 128 and 127 stay within 32 bits."""


@triton.jit
def eight_bit_kernel(
    x, x_scales, values, scales, zeros, bias, residual, out, sums,
    tokens, rows, columns, residual_row, height, share,
    INTEGER: tl.constexpr, ZEROS: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, SPLIT: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """A tile of ``x W^T + bias + residual``, or of the sums over ``share`` columns, float32 [splits, tokens, rows].

    Grid: (ceil(tokens / TILE_M), ceil(rows / TILE_N), splits).
    """
    m = tl.program_id(0).to(tl.int64) * TILE_M + tl.arange(0, TILE_M)
    n = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    live, there = m < tokens, n < rows
    first = tl.program_id(2) * share
    stop = tl.minimum(first + share, columns)
    from_values = values + n.to(tl.int64) * columns
    acc = tl.zeros([TILE_M, TILE_N], tl.int32) if INTEGER else tl.zeros([TILE_M, TILE_N], tl.float32)
    inputs = tl.zeros([TILE_M], tl.int32)
    for at in range(first, stop, TILE_K):
        k = at + tl.arange(0, TILE_K)
        a = tl.load(x + m[:, None] * columns + k[None, :], mask=live[:, None] & (k[None, :] < stop), other=0.0)
        w = tl.load(from_values[None, :] + k[:, None], mask=there[None, :] & (k[:, None] < stop), other=0.0)
        if INTEGER:
            acc = tl.dot(a, w, acc, out_dtype=tl.int32)
            if ZEROS:
                inputs += tl.sum(a.to(tl.int32), axis=1)
        else:
            acc = tl.dot(a, w, acc, max_num_imprecise_acc=TILE_K)
    found = acc.to(tl.float32)
    if ZEROS:
        found -= inputs.to(tl.float32)[:, None] * tl.load(zeros + n, mask=there, other=0.0)[None, :]
    found *= tl.load(scales + n // height, mask=there, other=0.0)[None, :]
    found *= tl.load(x_scales + m, mask=live, other=0.0)[:, None]
    inside = live[:, None] & there[None, :]
    if SPLIT:
        to = sums + (tl.program_id(2).to(tl.int64) * tokens + m)[:, None] * rows + n[None, :]
        tl.store(to, found, mask=inside)
    else:
        if BIAS:
            found += tl.load(bias + n, mask=there, other=0.0).to(tl.float32)[None, :]
        if RESIDUAL:
            found += tl.load(residual + m[:, None] * residual_row + n[None, :], mask=inside, other=0.0).to(tl.float32)
        tl.store(out + m[:, None] * rows + n[None, :], found.to(out.dtype.element_ty), mask=inside)


def takes_eight_bits(weight: QuantizedWeight, activations: ActivationScheme) -> bool:
    """Whether a weight and the way that its inputs are rounded are such that 8 bits are multiplied with 8 bits."""
    if activations.group not in (0, weight.columns) or weight.columns > MOST_COLUMNS:
        return False
    if activations.type is ActivationType.INT8:
        return isinstance(weight, Int8Weight) and weight.scales.shape[1] == 1 and weight.order is None
    if activations.type is ActivationType.FP8:
        fits = isinstance(weight, Fp8Weight) and weight.scales.shape[1] == 1
        return fits and converts_fp8(weight.values.device)
    return False


class TritonEightBitLinear:
    """The operator, for what :func:`takes_eight_bits`; implements :class:`baton_kernels.linear.PackedLinear`.

    Launches depend on shapes alone, so they can be captured.

    Args:
        weight: On the device.
        bias: [rows], or ``None``.
        activations: How inputs are rounded, by torch.
    """

    def __init__(self, weight: QuantizedWeight, bias: torch.Tensor | None, activations: ActivationScheme) -> None:
        self.name = "triton"
        self.out_features = weight.rows
        self.in_features = weight.columns
        self._values = weight.values.contiguous()
        self._scales = weight.scales.contiguous()
        zeros = getattr(weight, "zeros", None)
        self._zeros: torch.Tensor | None = None if zeros is None else zeros.contiguous()
        self._height = min(weight.block[0], weight.rows) if isinstance(weight, Fp8Weight) else 1
        self._bias = None if bias is None else bias.detach().contiguous()
        self._activations = activations
        tensors = (self._values, self._scales, self._zeros)
        self.nbytes = sum(each.nbytes for each in tensors if each is not None)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """See :class:`baton_kernels.linear.PackedLinear`; rows of x and residual have any stride."""
        residual = residual if residual is None or residual.stride(1) == 1 else residual.contiguous()
        tokens = len(x)
        rows = self.out_features
        columns = self.in_features
        out = x.new_empty(tokens, rows)
        if not tokens:
            return out
        integer = self._values.dtype is torch.int8
        sizes = {"tokens": tokens, "rows": rows, "columns": columns}
        chosen = tuning_for("eight_bit_linear", x.device, sizes, form="int8" if integer else "fp8")
        rounded, x_scales = self._activations.quantize(x if x.stride(1) == 1 else x.contiguous())
        grid = (triton.cdiv(tokens, chosen.tile_m), triton.cdiv(rows, chosen.tile_n))
        share, splits = shares(grid[0] * grid[1], columns, chosen.tile_k, chosen, x.device)
        sums = out if splits == 1 else out.new_empty(splits, tokens, rows, dtype=torch.float32)
        zeros, bias, more = (out if each is None else each for each in (self._zeros, self._bias, residual))
        flags = {"BIAS": self._bias is not None, "RESIDUAL": residual is not None}
        eight_bit_kernel[(*grid, splits)](
            *(rounded.contiguous(), x_scales[:, 0].contiguous(), self._values, self._scales, zeros, bias, more),
            *(out, sums, tokens, rows, columns, more.stride(0), self._height, share),
            **flags,
            INTEGER=integer,
            ZEROS=self._zeros is not None,
            SPLIT=splits > 1,
            TILE_M=chosen.tile_m,
            TILE_N=chosen.tile_n,
            TILE_K=chosen.tile_k,
            num_warps=chosen.warps,
            num_stages=chosen.stages,
        )
        if splits > 1:
            sum_kernel[tokens, triton.cdiv(rows, SUM_TILE)](
                *(sums, bias, more, out, tokens, rows, more.stride(0), splits), **flags, TILE=SUM_TILE
            )
        return out
