from __future__ import annotations

import pytest
import torch

from baton_kernels.cpu import CpuLibrary
from baton_kernels.linear import AmxLinear, CpuLinear, OneDnnLinear, PairsLinear, PlainLinear, linear_reference

SHAPES = [
    (1, 64, 100),
    (2, 1, 1),
    (5, 33, 64),
    (7, 768, 130),
    (33, 100, 768),
    (47, 200, 65),
    (48, 256, 64),
    (300, 129, 200),
    (290, 2050, 96),
]


def tensors(rows: int, inputs: int, outputs: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(rows)

    def normal(*dims: int) -> torch.Tensor:
        return torch.randn(*dims, generator=generator).bfloat16()

    return normal(rows, inputs), normal(outputs, inputs), normal(outputs), normal(rows, outputs)


@pytest.fixture(params=[CpuLinear, PairsLinear, AmxLinear])
def kind(request: pytest.FixtureRequest, library: CpuLibrary) -> type[CpuLinear]:
    if request.param is AmxLinear and not library.amx:
        pytest.skip("no AMX here")
    kind: type[CpuLinear] = request.param
    return kind


@pytest.mark.parametrize("extras", [False, True], ids=["bare", "bias-residual"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_cpp_equals_the_reference(
    library: CpuLibrary, kind: type[CpuLinear], shape: tuple[int, int, int], extras: bool, threads: int
) -> None:
    x, weight, bias, residual = tensors(*shape)
    linear = kind(library, weight, bias if extras else None)
    got = linear(x, residual if extras else None)
    want = linear_reference(x, weight, *((bias, residual) if extras else (None, None)))
    torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)
    assert (got == want).float().mean() > 0.95  # rounded once: nearly always to the same value


def test_rows_may_be_strided(library: CpuLibrary, kind: type[CpuLinear]) -> None:
    x, weight, _, residual = tensors(9, 70, 33)
    wide, wide_residual = torch.zeros(9, 90).bfloat16(), torch.zeros(9, 50).bfloat16()
    wide[:, 10:80], wide_residual[:, 5:38] = x, residual
    got = kind(library, weight)(wide[:, 10:80], wide_residual[:, 5:38])
    torch.testing.assert_close(got, linear_reference(x, weight, None, residual), rtol=1e-2, atol=1e-2)


def test_no_rows_are_no_work(library: CpuLibrary, kind: type[CpuLinear]) -> None:
    x, weight, _, _ = tensors(3, 16, 8)
    assert kind(library, weight)(x[:0]).shape == (0, 8)


def test_float32_weights_are_refused(library: CpuLibrary, kind: type[CpuLinear]) -> None:
    with pytest.raises(ValueError, match="bfloat16"):
        kind(library, torch.zeros(4, 4))


@pytest.mark.parametrize("count", [2, 3, 7])
def test_any_number_of_threads_gives_the_same_bits(library: CpuLibrary, count: int) -> None:
    """More rows than are converted at a time, and fewer panels than threads, too."""
    generator = torch.Generator().manual_seed(0)
    before = torch.get_num_threads()
    for columns in (16, 40, 333):
        weight = (torch.randn(columns, 96, generator=generator) * 0.05).bfloat16()
        x = torch.randn(300, 96, generator=generator).bfloat16()
        try:
            torch.set_num_threads(1)
            want = CpuLinear(library, weight)(x)
            torch.set_num_threads(count)
            got = CpuLinear(library, weight)(x)
        finally:
            torch.set_num_threads(before)
        assert torch.equal(got, want)


@pytest.mark.parametrize("other", [OneDnnLinear, PlainLinear])
@pytest.mark.parametrize("shape", SHAPES[2:6], ids=str)
def test_the_others_equal_the_reference_too(other: type, shape: tuple[int, int, int]) -> None:
    if other is OneDnnLinear and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN has no bfloat16 here")
    x, weight, bias, residual = tensors(*shape)
    got = other(weight, bias)(x, residual)
    torch.testing.assert_close(got, linear_reference(x, weight, bias, residual), rtol=2e-2, atol=2e-1)
