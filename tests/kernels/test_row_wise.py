from __future__ import annotations

import pytest
import torch

from baton_kernels.cpu import CpuLibrary
from baton_kernels.row_wise import (
    GELU_TANH,
    SILU,
    Activation,
    ActivationKind,
    CpuGatedMul,
    CpuRmsNorm,
    gated_reference,
    rms_norm_reference,
)

ACTIVATIONS = [SILU, GELU_TANH, Activation(ActivationKind.CLIPPED_SWISH, 1.702, 7.0)]


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize(("rows", "dim"), [(1, 1), (3, 70), (37, 768), (5, 15)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda d: str(d)[6:])
def test_rms_norm_equals_the_reference(
    library: CpuLibrary, dtype: torch.dtype, rows: int, dim: int, offset: float, threads: int
) -> None:
    generator = torch.Generator().manual_seed(rows)
    x = (torch.randn(rows, dim + 3, generator=generator) * 3).to(dtype)[:, :dim]
    weight = torch.randn(dim, generator=generator).to(dtype)
    got = CpuRmsNorm(library, weight, 1e-5, offset)(x)
    precision = torch.finfo(dtype).eps
    want = rms_norm_reference(x, weight, 1e-5, offset)
    torch.testing.assert_close(got, want, rtol=8 * precision, atol=precision)
    residual = torch.randn(rows, dim, generator=generator).to(dtype)
    got = CpuRmsNorm(library, weight, 1e-5, offset)(x, residual)
    torch.testing.assert_close(got, residual + want, rtol=8 * precision, atol=16 * precision)


@pytest.mark.parametrize(("rows", "dim"), [(1, 1), (3, 70), (37, 256), (5, 15)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda activation: activation.kind.name)
def test_gated_mul_equals_the_reference(
    library: CpuLibrary, activation: Activation, dtype: torch.dtype, rows: int, dim: int, threads: int
) -> None:
    generator = torch.Generator().manual_seed(rows)
    x = (torch.randn(rows, 2 * dim, generator=generator) * 10).to(dtype)
    precision = torch.finfo(dtype).eps
    got, want = CpuGatedMul(library, dtype, activation)(x), gated_reference(x, activation)
    torch.testing.assert_close(got, want, rtol=8 * precision, atol=1e-5)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda activation: activation.kind.name)
def test_extreme_gates_stay_finite(library: CpuLibrary, activation: Activation) -> None:
    gates = torch.tensor([[-1e30, -200.0, -88.0, 0.0, 88.0, 200.0, 1e30]])
    got = CpuGatedMul(library, torch.float32, activation)(torch.cat([gates, torch.ones_like(gates)], dim=1))
    large = [14.0] * 3 if activation.limit else [88.0, 200.0, 1e30]
    torch.testing.assert_close(got, torch.tensor([[0.0, 0.0, 0.0, 0.0, *large]]), rtol=1e-4, atol=1e-30)
