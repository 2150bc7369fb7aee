from __future__ import annotations

import pytest
import torch

from baton_kernels.cpu import CpuLibrary
from baton_kernels.rms_norm import CpuRmsNorm, rms_norm_reference


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize(("rows", "dim"), [(1, 1), (3, 70), (37, 768), (5, 15)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda d: str(d)[6:])
def test_cpp_equals_the_reference(
    library: CpuLibrary, dtype: torch.dtype, rows: int, dim: int, offset: float, threads: int
) -> None:
    generator = torch.Generator().manual_seed(rows)
    x = (torch.randn(rows, dim + 3, generator=generator) * 3).to(dtype)[:, :dim]
    weight = torch.randn(dim, generator=generator).to(dtype)
    got = CpuRmsNorm(library, weight, 1e-5, offset)(x)
    precision = torch.finfo(dtype).eps
    torch.testing.assert_close(got, rms_norm_reference(x, weight, 1e-5, offset), rtol=8 * precision, atol=precision)
