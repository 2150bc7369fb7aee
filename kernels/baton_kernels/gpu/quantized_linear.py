"""Linear layers with quantized weights by Triton; definition and forms: ``baton_kernels.quantized_linear``.

Few rows of x: the weight is read once, unpacked in registers, and its columns are divided between as many programs as
the device has room for, whose sums a second kernel adds up (in a fixed order: nothing is added atomically). Many rows:
parts of the weight are unpacked into memory, and multiplied by the vendor's library.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from baton_kernels.gpu.tuning import Tuning, processors, tuning_for
from baton_kernels.gpu.weights import dequantize_kernel, device_weights, product, rounded_inputs
from baton_kernels.quantization import EXACT, ActivationScheme, QuantizedWeight

SLAB_BYTES = 64 << 20
"""Of a weight that is unpacked into memory at a time."""
LEAST_COLUMNS = 256
"""Fewer are not worth a program of their own."""
SUM_TILE = 512


@triton.jit
def linear_kernel(
    x, values, scales, zeros, table, order, row_bytes, groups, group, height, x_scales, bias, residual, out, sums,
    tokens, rows, columns, x_row, residual_row, share,
    FORM: tl.constexpr, SCALES: tl.constexpr, ZEROS: tl.constexpr, ORDER: tl.constexpr, GROUP: tl.constexpr,
    X_SCALES: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, SPLIT: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """A tile of ``x W^T + bias + residual``, or of the sums over ``share`` columns, float32 [splits, tokens, rows].

    Grid: (ceil(tokens / TILE_M), ceil(rows / TILE_N), splits): programs that read the same weights run together.
    """
    m = tl.program_id(0).to(tl.int64) * TILE_M + tl.arange(0, TILE_M)
    n = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    live, there = m < tokens, n < rows
    first = tl.program_id(2) * share
    acc = product(
        x + m * x_row, live, values, scales, zeros, table, order, row_bytes, groups, group, height, n, there,
        first, tl.minimum(first + share, columns), FORM, SCALES, ZEROS, ORDER, GROUP, TILE_M, TILE_N, TILE_K,
    )  # fmt: skip
    if X_SCALES:
        acc *= tl.load(x_scales + m, mask=live, other=0.0)[:, None]
    inside = live[:, None] & there[None, :]
    if SPLIT:
        to = sums + (tl.program_id(2).to(tl.int64) * tokens + m)[:, None] * rows + n[None, :]
        tl.store(to, acc, mask=inside)
    else:
        if BIAS:
            acc += tl.load(bias + n, mask=there, other=0.0).to(tl.float32)[None, :]
        if RESIDUAL:
            acc += tl.load(residual + m[:, None] * residual_row + n[None, :], mask=inside, other=0.0).to(tl.float32)
        tl.store(out + m[:, None] * rows + n[None, :], acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def sum_kernel(
    sums, bias, residual, out, tokens, rows, residual_row, splits,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Add up what programs found of a row. Grid: (tokens, ceil(rows / TILE))."""
    token, n = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    there = n < rows
    total = tl.zeros([TILE], tl.float32)
    for split in range(splits):
        total += tl.load(sums + (split * tokens + token) * rows + n, mask=there, other=0.0)
    if BIAS:
        total += tl.load(bias + n, mask=there, other=0.0).to(tl.float32)
    if RESIDUAL:
        total += tl.load(residual + token * residual_row + n, mask=there, other=0.0).to(tl.float32)
    tl.store(out + token * rows + n, total.to(out.dtype.element_ty), mask=there)


class TritonQuantizedLinear:
    """The operator; takes the place of :class:`baton_kernels.quantized_linear.CpuQuantizedLinear`.

    Weights stay where they are, in the form's bytes. Launches depend on shapes alone, so they can be captured.

    Args:
        weight: On the device.
        bias: [rows], or ``None``.
        activations: How inputs are rounded, by torch before the product (:func:`.rounded_inputs`).
    """

    def __init__(
        self, weight: QuantizedWeight, bias: torch.Tensor | None = None, activations: ActivationScheme = EXACT
    ) -> None:
        self.name = "triton"
        self._weights = device_weights([weight])
        self.out_features = weight.rows
        self.in_features = weight.columns
        self.nbytes = self._weights.nbytes
        self._bias = None if bias is None else bias.detach().contiguous()
        self._activations = activations

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """See :class:`baton_kernels.linear.PackedLinear`; rows of x and residual have any stride."""
        residual = residual if residual is None or residual.stride(1) == 1 else residual.contiguous()
        out = x.new_empty(len(x), self.out_features)
        if len(x):
            shape = {"tokens": len(x), "rows": self.out_features, "columns": self.in_features}
            chosen = tuning_for("quantized_linear", x.device, shape, form=self._weights.form.name.lower())
            x, scales = rounded_inputs(x if x.stride(1) == 1 else x.contiguous(), self._activations)
            (self._multiply if chosen.tile_m else self._unpack)(chosen, x, scales, residual, out)
        return out

    def _multiply(
        self,
        chosen: Tuning,
        x: torch.Tensor,
        scales: torch.Tensor | None,
        residual: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        """Unpack in registers."""
        weights, (tokens, rows) = self._weights, out.shape
        constants = weights.constants(chosen.tile_k)
        tile_k = int(constants["TILE_K"])
        grid = (triton.cdiv(tokens, chosen.tile_m), triton.cdiv(rows, chosen.tile_n))
        share, splits = shares(grid[0] * grid[1], self.in_features, tile_k, chosen, x.device)
        sums = out if splits == 1 else out.new_empty(splits, tokens, rows, dtype=torch.float32)
        x_scales, bias, more = (out if each is None else each for each in (scales, self._bias, residual))
        flags = {"BIAS": self._bias is not None, "RESIDUAL": residual is not None}
        linear_kernel[(*grid, splits)](
            *(x, *weights.arguments(), x_scales, bias, more, out, sums, tokens, rows, self.in_features),
            *(x.stride(0), more.stride(0), share),
            **constants,
            **flags,
            X_SCALES=scales is not None,
            SPLIT=splits > 1,
            TILE_M=chosen.tile_m,
            TILE_N=chosen.tile_n,
            num_warps=chosen.warps,
            num_stages=chosen.stages,
        )
        if splits > 1:
            sum_kernel[tokens, triton.cdiv(rows, SUM_TILE)](
                *(sums, bias, more, out, tokens, rows, more.stride(0), splits), **flags, TILE=SUM_TILE
            )

    def _unpack(
        self,
        chosen: Tuning,
        x: torch.Tensor,
        scales: torch.Tensor | None,
        residual: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        """Unpack into memory, some rows of the weight at a time; sums are in float32, rounded before what is added."""
        weights = self._weights
        columns = self.in_features
        step = min(self.out_features, max(1, SLAB_BYTES // (columns * x.element_size())))
        slab = x.new_empty(step, columns)
        for start in range(0, self.out_features, step):
            part = slab[: min(step, self.out_features - start)]
            grid = (triton.cdiv(len(part), chosen.tile_n), triton.cdiv(columns, chosen.tile_k))
            dequantize_kernel[grid](
                *(*weights.arguments(), part, len(part), columns, start),
                FORM=int(weights.form),
                ZEROS=weights.zeros is not None,
                ORDER=weights.order is not None,
                TILE_N=chosen.tile_n,
                TILE_K=chosen.tile_k,
                num_warps=chosen.warps,
            )
            made = x @ part.T
            out[:, start : start + len(part)] = made if scales is None else made * scales[:, None]
        for each in (self._bias, residual):
            if each is not None:
                out += each


def shares(programs: int, columns: int, tile_k: int, chosen: Tuning, device: torch.device) -> tuple[int, int]:
    """Return how many columns a program takes, a multiple of ``tile_k``, and how many programs share a tile."""
    tiles = triton.cdiv(columns, tile_k)
    wanted = max(1, chosen.programs * processors(device) // programs)
    splits = min(wanted, triton.cdiv(columns, LEAST_COLUMNS), tiles)
    share = triton.cdiv(tiles, splits) * tile_k
    return share, triton.cdiv(columns, share)
