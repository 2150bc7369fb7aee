"""Mixtures of experts with quantized weights against their definition."""

from __future__ import annotations

import pytest
import torch
from tests.support.models.quantized import FORMS, make

from baton_kernels.cpu import CpuLibrary
from baton_kernels.quantization import EXACT, INT8_PER_TOKEN, ActivationScheme, ActivationType
from baton_kernels.quantized_experts import (
    CpuQuantizedExperts,
    PlainQuantizedExperts,
    QuantizedExpertWeights,
    make_quantized_experts,
    quantized_experts_reference,
)
from baton_kernels.row_wise import GELU_TANH, SILU, Activation, ActivationKind

HIDDEN, INNER, EXPERTS = 96, 48, 5


def experts_of(form: str, *, biased: bool = False) -> QuantizedExpertWeights:
    random = torch.Generator().manual_seed(5)
    return QuantizedExpertWeights(
        [make(form, 2 * INNER, HIDDEN, 32, seed) for seed in range(EXPERTS)],
        [make(form, HIDDEN, INNER, 16, seed + 50) for seed in range(EXPERTS)],
        torch.randn(EXPERTS, 2 * INNER, generator=random) if biased else None,
        torch.randn(EXPERTS, HIDDEN, generator=random) if biased else None,
    )


def chosen(tokens: int, top_k: int = 2) -> tuple[torch.Tensor, ...]:
    random = torch.Generator().manual_seed(tokens)
    ids = torch.stack([torch.randperm(EXPERTS + 1, generator=random)[:top_k] for _ in range(tokens)]).int()
    sizes = ((tokens, HIDDEN), (tokens, top_k), (tokens, HIDDEN))  # the id EXPERTS is nobody's
    x, weights, residual = (torch.randn(*each, generator=random) for each in sizes)
    return x * 0.1, ids, weights, residual


@pytest.mark.parametrize("form", FORMS)
def test_exact_experts_are_what_they_are_defined_to_be(build: CpuLibrary, form: str) -> None:
    experts = experts_of(form, biased=True)
    for activation in (SILU, GELU_TANH, Activation(ActivationKind.CLIPPED_SWISH, 1.702, 7.0)):
        for tokens in (1, 40):
            given = chosen(tokens)
            want = quantized_experts_reference(experts, activation, *given)
            got = CpuQuantizedExperts(build, experts, activation)(*given)
            torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5 * float(want.abs().max()))


@pytest.mark.parametrize("form", [each for each in FORMS if each.startswith("int")])
def test_experts_with_inputs_in_int8(library: CpuLibrary, form: str, threads: int) -> None:
    """What lies between the products is rounded too: one step of that is what a difference of its last bit makes."""
    experts = experts_of(form)
    for tokens in (1, 3, 100):
        given = chosen(tokens)
        want = quantized_experts_reference(experts, SILU, *given, activations=INT8_PER_TOKEN)
        got = CpuQuantizedExperts(library, experts, SILU, INT8_PER_TOKEN)(*given)
        difference = (got.double() - want).norm() / want.norm()
        assert difference < 2e-3
        exact = quantized_experts_reference(experts, SILU, *given)
        assert (want - exact).norm() > 3 * (got.double() - want).norm()


def test_narrow_inputs_strided_and_none(library: CpuLibrary) -> None:
    experts = experts_of("int4")
    x, ids, weights, residual = chosen(9)
    wide, wide_residual = torch.zeros(9, HIDDEN + 10).bfloat16(), torch.zeros(9, HIDDEN + 30).bfloat16()
    wide[:, 3 : HIDDEN + 3], wide_residual[:, 7 : HIDDEN + 7] = x, residual
    x, residual = wide[:, 3 : HIDDEN + 3], wide_residual[:, 7 : HIDDEN + 7]
    operator = make_quantized_experts(library, experts, SILU)
    want = quantized_experts_reference(experts, SILU, x, ids, weights, residual).bfloat16()
    got = operator(x, ids, weights, residual)
    # Where bfloat16 is multiplied in pairs, what lies between the products is rounded too.
    assert (got - want).float().norm() / want.float().norm() < 5e-3
    assert operator(x[:0], ids[:0], weights[:0]).shape == (0, HIDDEN)


def test_inputs_that_the_operator_does_not_round_are_rounded_by_torch(library: CpuLibrary) -> None:
    experts, given = experts_of("fp8"), chosen(7)
    for scheme in (ActivationScheme(ActivationType.FP8), ActivationScheme(ActivationType.FP8, group=16)):
        operator = make_quantized_experts(library, experts, SILU, scheme)
        assert isinstance(operator, PlainQuantizedExperts)
        want = quantized_experts_reference(experts, SILU, *given, activations=scheme)
        assert (operator(*given).double() - want).norm() / want.norm() < 1e-2
        with pytest.raises(ValueError, match="by the token"):
            CpuQuantizedExperts(library, experts, SILU, scheme)


def test_experts_that_do_not_fit_are_refused(library: CpuLibrary) -> None:
    gate_up, down = make("int8", 64, 32, 16), make("int8", 32, 32, 16)
    with pytest.raises(ValueError, match="make no experts"):
        QuantizedExpertWeights([gate_up], [down, down])
    with pytest.raises(ValueError, match="does not fit down"):
        QuantizedExpertWeights([gate_up], [make("int8", 32, 16, 16)])
    with pytest.raises(ValueError, match="has a bias"):
        QuantizedExpertWeights([gate_up], [down], torch.zeros(1, 64))
    differing = QuantizedExpertWeights([gate_up, make("int8", 64, 32, 32)], [down, down])
    with pytest.raises(ValueError, match="differ in shape"):
        CpuQuantizedExperts(library, differing, SILU, EXACT)
