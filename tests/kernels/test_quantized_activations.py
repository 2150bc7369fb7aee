"""Activations rounded to int8 and fp8."""

from __future__ import annotations

import pytest
import torch

from baton_kernels.quantization import EXACT, INT8_PER_TOKEN, ActivationScheme, ActivationType


def test_int8_per_token_is_within_half_a_step() -> None:
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 5)[:, None]
    values, scales = INT8_PER_TOKEN.quantize(x)
    assert values.dtype == torch.int8
    assert values.abs().amax(-1).tolist() == [127] * 5
    assert ((INT8_PER_TOKEN.round(x) - x).abs() <= scales * 0.5001).all()


def test_a_group_has_a_scale_of_its_own() -> None:
    x = torch.tensor([[1.0, 2.0, 100.0, 200.0]])
    scheme = ActivationScheme(ActivationType.FP8, group=2)
    values, scales = scheme.quantize(x)
    assert values.float().tolist() == [[224.0, 448.0, 224.0, 448.0]]
    torch.testing.assert_close(scales, torch.tensor([[2.0, 200.0]]) / 448)
    torch.testing.assert_close(scheme.round(x), x)


@pytest.mark.parametrize(("kind", "limit"), [(ActivationType.INT8, 127), (ActivationType.FP8, 448)])
def test_static_scales_saturate(kind: ActivationType, limit: int) -> None:
    values, scales = ActivationScheme(kind, 0.5).quantize(torch.tensor([[1.0, -1e9, 1e9]]))
    assert values.float().tolist() == [[2, -limit, limit]]
    assert scales.tolist() == [[0.5]]


def test_zeros_stay_zeros_and_exact_ones_exact() -> None:
    assert INT8_PER_TOKEN.round(torch.zeros(2, 8)).tolist() == torch.zeros(2, 8).tolist()
    x = torch.randn(2, 8).bfloat16()
    assert torch.equal(EXACT.round(x), x.float())


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan")])
def test_scales_that_are_none_are_refused(scale: float) -> None:
    with pytest.raises(ValueError, match="must be positive and finite"):
        ActivationScheme(ActivationType.INT8, scale)
    with pytest.raises(ValueError, match="only dynamic scales have groups"):
        ActivationScheme(ActivationType.INT8, 1.0, 32)
