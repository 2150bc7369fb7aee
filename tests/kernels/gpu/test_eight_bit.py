"""Products of 8 bits with 8 bits by Triton against the definition, and which weights and inputs are multiplied so."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.gpu.test_quantized import DEVICE, inputs, moved
from tests.support.models.quantized import make

from baton_kernels.quantization import (
    EXACT,
    INT8_PER_TOKEN,
    ActivationScheme,
    ActivationType,
    Fp8Weight,
    Int8Weight,
    QuantizedWeight,
)
from baton_kernels.quantized_linear import quantized_linear_reference

pytest.importorskip("triton")
from baton_kernels.gpu.quantized_linear import MOST_COLUMNS, TritonEightBitLinear, takes_eight_bits

FP8_PER_TOKEN = ActivationScheme(ActivationType.FP8)
STATIC = ActivationScheme(ActivationType.INT8, scale=0.02)


def int8_weight(rows: int, columns: int, *, zeros: bool = False) -> Int8Weight:
    random = torch.Generator().manual_seed(rows)
    values = torch.randint(-128, 128, (rows, columns), dtype=torch.int8, generator=random)
    scales = torch.rand(rows, 1, generator=random) / 100 + 0.001
    offsets = torch.randint(-9, 9, (rows, 1), generator=random).float()
    return Int8Weight(values, scales, offsets if zeros else None)


def fp8_weight(rows: int, columns: int, height: int) -> Fp8Weight:
    random = torch.Generator().manual_seed(rows)
    values = (torch.randn(rows, columns, generator=random) * 20).to(torch.float8_e4m3fn)
    return Fp8Weight(values, torch.rand(-(-rows // height), 1, generator=random) / 100, (height, columns))


def check(weight: QuantizedWeight, scheme: ActivationScheme, tokens: int, precision: float = 1e-5) -> None:
    assert takes_eight_bits(weight, scheme)
    x, bias, residual = inputs(tokens, weight.columns, weight.rows)
    for more in (None, residual):
        want = quantized_linear_reference(x, weight, bias, more, activations=scheme)
        given = None if more is None else more.to(DEVICE)
        got = TritonEightBitLinear(moved(weight), bias.to(DEVICE), scheme)(x.to(DEVICE), given)
        assert (got.dtype, got.shape, got.is_contiguous()) == (x.dtype, want.shape, True)
        torch.testing.assert_close(got.cpu(), want, rtol=precision, atol=precision * float(want.abs().max() + 1))


@pytest.mark.parametrize("scheme", [INT8_PER_TOKEN, STATIC], ids=["per token", "static"])
@pytest.mark.parametrize("zeros", [False, True])
def test_int8(scheme: ActivationScheme, zeros: bool) -> None:
    """Few tokens, whose columns are divided between programs, and many; the last tiles are not full."""
    check(int8_weight(70, 600, zeros=zeros), scheme, 3)
    check(int8_weight(70, 90, zeros=zeros), scheme, 150)


@pytest.mark.parametrize("height", [1, 128, 70], ids=["per channel", "blocks of rows", "per tensor"])
def test_fp8(height: int) -> None:
    check(fp8_weight(70, 600, height), FP8_PER_TOKEN, 3)
    check(fp8_weight(70, 90, height), FP8_PER_TOKEN, 70)


@settings(max_examples=15)
@given(tokens=st.integers(1, 40), rows=st.integers(1, 70), columns=st.integers(1, 200), fp8=st.booleans())
def test_any_shape(tokens: int, rows: int, columns: int, fp8: bool) -> None:
    check(fp8_weight(rows, columns, 1) if fp8 else int8_weight(rows, columns), FP8_PER_TOKEN if fp8 else STATIC, tokens)


def test_integers_are_summed_exactly() -> None:
    """In 32 bits: float32 loses some of sums above 2^24."""
    columns = 2048
    weight = Int8Weight(torch.full((20, columns), 127, dtype=torch.int8), torch.ones(20, 1))
    weight.values[:, 0] = -128
    x = torch.full((2, columns), 127.0)
    x[1, 5] = 126.0
    got = TritonEightBitLinear(moved(weight), None, ActivationScheme(ActivationType.INT8, scale=1.0))(x.to(DEVICE))
    want = x.long() @ weight.values.long().T
    assert torch.equal(got.cpu().long(), want.float().long())
    assert int(want.max()) > 1 << 24


def test_no_rows_are_no_launch_and_zeros_stay() -> None:
    operator = TritonEightBitLinear(moved(int8_weight(20, 64)), None, INT8_PER_TOKEN)
    assert operator(torch.empty(0, 64, device=DEVICE)).shape == (0, 20)
    assert not operator(torch.zeros(2, 64, device=DEVICE)).any()


def test_what_is_multiplied_in_8_bits() -> None:
    int8, fp8 = int8_weight(16, 64), fp8_weight(16, 64, 1)
    assert takes_eight_bits(int8, dataclasses.replace(INT8_PER_TOKEN, group=64))
    for weight, scheme in (
        (int8, EXACT),
        (int8, FP8_PER_TOKEN),
        (fp8, INT8_PER_TOKEN),
        (int8, dataclasses.replace(INT8_PER_TOKEN, group=16)),
        (make("int8", 16, 64, 16), INT8_PER_TOKEN),
        (make("int8-order", 16, 64, 64), INT8_PER_TOKEN),
        (make("int4", 16, 64, 64), INT8_PER_TOKEN),
        (Fp8Weight(fp8.values, torch.ones(1, 2), (128, 32)), FP8_PER_TOKEN),
        (Int8Weight(torch.zeros(1, 2 * MOST_COLUMNS, dtype=torch.int8), torch.ones(1, 1)), INT8_PER_TOKEN),
    ):
        assert not takes_eight_bits(weight, scheme)
