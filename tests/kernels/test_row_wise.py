from __future__ import annotations

import pytest
import torch

from baton_kernels.cpu import CpuLibrary
from baton_kernels.row_wise import CpuRmsNorm, CpuSiluMul, rms_norm_reference, silu_mul_reference


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
    torch.testing.assert_close(got, rms_norm_reference(x, weight, 1e-5, offset), rtol=8 * precision, atol=precision)


@pytest.mark.parametrize(("rows", "dim"), [(1, 1), (3, 70), (37, 256), (5, 15)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda d: str(d)[6:])
def test_silu_mul_equals_the_reference(
    library: CpuLibrary, dtype: torch.dtype, rows: int, dim: int, threads: int
) -> None:
    generator = torch.Generator().manual_seed(rows)
    x = (torch.randn(rows, 2 * dim, generator=generator) * 10).to(dtype)
    precision = torch.finfo(dtype).eps
    torch.testing.assert_close(CpuSiluMul(library, dtype)(x), silu_mul_reference(x), rtol=8 * precision, atol=1e-6)


def test_extreme_gates_stay_finite(library: CpuLibrary) -> None:
    gates = torch.tensor([[-1e30, -200.0, -88.0, 0.0, 88.0, 200.0, 1e30]])
    got = CpuSiluMul(library, torch.float32)(torch.cat([gates, torch.ones_like(gates)], dim=1))
    torch.testing.assert_close(got, torch.tensor([[0.0, 0.0, 0.0, 0.0, 88.0, 200.0, 1e30]]), rtol=1e-6, atol=1e-30)
