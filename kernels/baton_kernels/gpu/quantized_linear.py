"""Linear layers with quantized weights by Triton; definition and forms: ``baton_kernels.quantized_linear``.

Few rows of x: the weight is read once, unpacked in registers, and its columns are divided between as many programs as
the device has room for, whose sums a second kernel adds up (in a fixed order: nothing is added atomically). Many rows:
parts of the weight are unpacked into memory, and multiplied by the vendor's library.

Where weights and inputs both have 8 bits, with a scale per row of the weight and one per token
(:class:`TritonEightBitLinear`), products are in int8 or fp8 on the tensor cores, and nothing has to be scaled inside of
the sum: int8 values are summed exactly, in int32; fp8 ones in float32, which Hopper's tensor cores add up with fewer
bits, so that the sum over each tile of columns is added to a register of full precision.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from baton_kernels.gpu import converts_fp8
from baton_kernels.gpu.tuning import Tuning, processors, tuning_for
from baton_kernels.gpu.weights import dequantize_kernel, device_weights, product, rounded_inputs
from baton_kernels.quantization import EXACT, ActivationScheme, ActivationType, Fp8Weight, Int8Weight, QuantizedWeight

SLAB_BYTES = 64 << 20
"""Bytes of a weight that are unpacked into memory at a time."""
LEAST_COLUMNS = 256
"""Fewer columns are not worth a program of their own."""
SUM_TILE = 512


@triton.jit(do_not_specialize=["tokens"])
def linear_kernel(
    x, values, scales, zeros, table, order, row_bytes, groups, group, height, x_scales, bias, residual, out, sums,
    tokens, rows, columns, residual_row, x_row, share,
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


@triton.jit(do_not_specialize=["tokens", "splits"])
def sum_kernel(
    sums, bias, residual, out, tokens, rows, residual_row, splits,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Add up the programs' partial sums of a row. Grid: (tokens, ceil(rows / TILE))."""
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


class _TritonLinear:
    """Base of the layers: launches over tiles of the output, and over parts of the columns where tiles are few."""

    name = "triton"

    def __init__(self, weight: QuantizedWeight, bias: torch.Tensor | None, activations: ActivationScheme) -> None:
        self.out_features = weight.rows
        self.in_features = weight.columns
        self._bias = None if bias is None else bias.detach().contiguous()
        self._activations = activations

    def _launch(
        self,
        kernel: Any,
        chosen: Tuning,
        inputs: tuple[Any, ...],
        size: int,
        out: torch.Tensor,
        residual: torch.Tensor | None,
        constants: dict[str, int | bool],
    ) -> None:
        """Launch a kernel, and add up its sums if programs share a tile.

        Args:
            kernel: Takes ``inputs``, bias, residual, ``out``, sums, the numbers of tokens, rows and columns, the
                residual's stride, ``size``, and the number of columns of a program.
            chosen: Sizes of tiles, but for ``TILE_K``.
            inputs: First arguments of the kernel.
            size: A number of the kernel's own.
            out: The output [tokens, rows], written.
            residual: Added to the output, or ``None``.
            constants: Constants of the kernel, ``TILE_K`` among them.
        """
        tokens, rows = out.shape
        grid = (triton.cdiv(tokens, chosen.tile_m), triton.cdiv(rows, chosen.tile_n))
        tile_k = int(constants["TILE_K"])
        share, splits = divide_columns(grid[0] * grid[1], self.in_features, tile_k, chosen, out.device)
        sums = out if splits == 1 else out.new_empty(splits, tokens, rows, dtype=torch.float32)
        bias, more = (out if each is None else each for each in (self._bias, residual))
        flags = {"BIAS": self._bias is not None, "RESIDUAL": residual is not None}
        kernel[(*grid, splits)](
            *(*inputs, bias, more, out, sums, tokens, rows, self.in_features, more.stride(0), size, share),
            **constants,
            **flags,
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


class TritonQuantizedLinear(_TritonLinear):
    """A linear layer on a GPU, like :class:`baton_kernels.quantized_linear.CpuQuantizedLinear` on a CPU.

    Weights are not copied. Launches depend on shapes alone, so they can be captured.

    Args:
        weight: The weight, on the device.
        bias: [rows], or ``None``.
        activations: How inputs are rounded, by torch before the product (:func:`.rounded_inputs`).
    """

    def __init__(
        self, weight: QuantizedWeight, bias: torch.Tensor | None = None, activations: ActivationScheme = EXACT
    ) -> None:
        super().__init__(weight, bias, activations)
        self._weights = device_weights([weight])
        self.nbytes = self._weights.nbytes

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """See :class:`baton_kernels.linear.PackedLinear`; rows of x and residual may have any stride."""
        residual = residual if residual is None or residual.stride(1) == 1 else residual.contiguous()
        out = x.new_empty(len(x), self.out_features)
        if not len(x):
            return out
        weights = self._weights
        x, scales = rounded_inputs(x if x.stride(1) == 1 else x.contiguous(), self._activations)
        shape = {"tokens": len(x), "rows": self.out_features, "columns": self.in_features, "bytes": x.element_size()}
        chosen = weights.fitted(tuning_for("quantized_linear", x.device, shape, form=weights.form.name.lower()))
        if not chosen.tile_m:
            self._unpack(chosen, x, scales, residual, out)
            return out
        inputs = (x, *weights.arguments(), out if scales is None else scales)
        constants = {**weights.constants(chosen.tile_k), "X_SCALES": scales is not None}
        self._launch(linear_kernel, chosen, inputs, x.stride(0), out, residual, constants)
        return out

    def _unpack(
        self,
        chosen: Tuning,
        x: torch.Tensor,
        scales: torch.Tensor | None,
        residual: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        """Multiply, with a few rows of the weight unpacked into memory at a time.

        Sums are in float32, and are rounded before bias and residual are added.
        """
        weights = self._weights
        columns = self.in_features
        step = min(self.out_features, max(1, SLAB_BYTES // (columns * x.element_size())))
        slab = x.new_empty(step, columns)
        for start in range(0, self.out_features, step):
            part = slab[: min(step, self.out_features - start)]
            grid = (triton.cdiv(len(part), chosen.tile_n), triton.cdiv(columns, chosen.tile_k))
            dequantize_kernel[grid](
                *(*weights.arguments(), part, len(part), columns, start),
                FORM=weights.kernel_form,
                ZEROS=weights.zeros is not None,
                ORDER=weights.order is not None,
                TILE_N=chosen.tile_n,
                TILE_K=chosen.tile_k,
                num_warps=chosen.warps,
            )
            product = x @ part.T
            out[:, start : start + len(part)] = product if scales is None else product * scales[:, None]
        for each in (self._bias, residual):
            if each is not None:
                out += each


def divide_columns(programs: int, columns: int, tile_k: int, chosen: Tuning, device: torch.device) -> tuple[int, int]:
    """Return the number of columns of a program, a multiple of ``tile_k``, and the number of programs per tile."""
    tiles = triton.cdiv(columns, tile_k)
    wanted = max(1, chosen.programs * processors(device) // programs)
    splits = min(wanted, triton.cdiv(columns, LEAST_COLUMNS), tiles)
    share = triton.cdiv(tiles, splits) * tile_k
    return share, triton.cdiv(columns, share)


# 8-bit weights and inputs


MOST_COLUMNS = 1 << 17
"""Largest number of columns: sums of so many products of 128 and 127 stay within 32 bits."""


@triton.jit(do_not_specialize=["tokens"])
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
    result = acc.to(tl.float32)
    if ZEROS:
        result -= inputs.to(tl.float32)[:, None] * tl.load(zeros + n, mask=there, other=0.0)[None, :]
    result *= tl.load(scales + n // height, mask=there, other=0.0)[None, :]
    result *= tl.load(x_scales + m, mask=live, other=0.0)[:, None]
    inside = live[:, None] & there[None, :]
    if SPLIT:
        to = sums + (tl.program_id(2).to(tl.int64) * tokens + m)[:, None] * rows + n[None, :]
        tl.store(to, result, mask=inside)
    else:
        if BIAS:
            result += tl.load(bias + n, mask=there, other=0.0).to(tl.float32)[None, :]
        if RESIDUAL:
            result += tl.load(residual + m[:, None] * residual_row + n[None, :], mask=inside, other=0.0).to(tl.float32)
        tl.store(out + m[:, None] * rows + n[None, :], result.to(out.dtype.element_ty), mask=inside)


def takes_eight_bits(weight: QuantizedWeight, activations: ActivationScheme) -> bool:
    """Whether :class:`TritonEightBitLinear` supports a weight and the rounding of its inputs."""
    if activations.group not in (0, weight.columns) or weight.columns > MOST_COLUMNS:
        return False
    if activations.type is ActivationType.INT8:
        return isinstance(weight, Int8Weight) and weight.scales.shape[1] == 1 and weight.order is None
    if activations.type is ActivationType.FP8:
        fits = isinstance(weight, Fp8Weight) and weight.scales.shape[1] == 1
        return fits and converts_fp8(weight.values.device)
    return False


class TritonEightBitLinear(_TritonLinear):
    """A linear layer with weights and inputs of 8 bits, where :func:`takes_eight_bits`.

    Launches depend on shapes alone, so they can be captured.

    Args:
        weight: The weight, on the device.
        bias: [rows], or ``None``.
        activations: How inputs are rounded, by torch.
    """

    def __init__(self, weight: QuantizedWeight, bias: torch.Tensor | None, activations: ActivationScheme) -> None:
        super().__init__(weight, bias, activations)
        self._values = weight.values.contiguous()
        self._scales = weight.scales.contiguous()
        zeros = getattr(weight, "zeros", None)
        self._zeros: torch.Tensor | None = None if zeros is None else zeros.contiguous()
        self._height = min(weight.block[0], weight.rows) if isinstance(weight, Fp8Weight) else 1
        tensors = (self._values, self._scales, self._zeros)
        self.nbytes = sum(each.nbytes for each in tensors if each is not None)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """See :class:`baton_kernels.linear.PackedLinear`; rows of x and residual may have any stride."""
        residual = residual if residual is None or residual.stride(1) == 1 else residual.contiguous()
        out = x.new_empty(len(x), self.out_features)
        if not len(x):
            return out
        integer = self._values.dtype is torch.int8
        sizes = {"tokens": len(x), "rows": self.out_features, "columns": self.in_features}
        chosen = tuning_for("eight_bit_linear", x.device, sizes, form="int8" if integer else "fp8")
        rounded, x_scales = self._activations.quantize(x if x.stride(1) == 1 else x.contiguous())
        zeros = out if self._zeros is None else self._zeros
        inputs = (rounded.contiguous(), x_scales[:, 0].contiguous(), self._values, self._scales, zeros)
        constants = {"INTEGER": integer, "ZEROS": self._zeros is not None, "TILE_K": chosen.tile_k}
        self._launch(eight_bit_kernel, chosen, inputs, self._height, out, residual, constants)
        return out
