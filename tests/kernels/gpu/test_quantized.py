"""Products with packed weights by Triton against the dequantized definition: linear layers and mixtures of experts."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.test_quantized_experts import chosen, experts_of
from tests.support.models.quantized import FORMS, make

from baton_kernels.quantization import EXACT, INT8_PER_TOKEN, ActivationScheme, ActivationType, Fp8Weight, Int8Weight
from baton_kernels.quantized_experts import QuantizedExpertWeights, quantized_experts_reference
from baton_kernels.quantized_linear import quantized_linear_reference
from baton_kernels.row_wise import GELU_TANH, SILU, Activation, ActivationKind

pytest.importorskip("triton")
from baton_kernels.gpu import quantized_linear, weights
from baton_kernels.gpu.quantized_experts import TritonQuantizedExperts
from baton_kernels.gpu.quantized_linear import TritonQuantizedLinear
from baton_kernels.gpu.tuning import Tuning
from baton_kernels.gpu.weights import Scales, device_weights

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3}


def moved(form: Any) -> Any:
    """A form with its tensors on the device."""
    tensors = {f.name: getattr(form, f.name) for f in dataclasses.fields(form)}
    there = {name: each.to(DEVICE) for name, each in tensors.items() if isinstance(each, torch.Tensor)}
    return dataclasses.replace(form, **there)


def inputs(rows: int, columns: int, outputs: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    random = torch.Generator().manual_seed(rows)
    sizes = ((rows, columns + 7), (outputs,), (rows, outputs + 5))
    x, bias, residual = (torch.randn(*each, generator=random).to(dtype) for each in sizes)
    return x[:, 3 : columns + 3], bias, residual[:, 2 : outputs + 2]


def check(weight: Any, rows: int, dtype: torch.dtype = torch.float32) -> None:
    x, bias, residual = inputs(rows, weight.columns, weight.rows, dtype)
    want = quantized_linear_reference(x.double(), weight, bias, residual)
    got = TritonQuantizedLinear(moved(weight), bias.to(DEVICE))(x.to(DEVICE), residual.to(DEVICE))
    assert (got.dtype, got.shape, got.is_contiguous()) == (dtype, want.shape, True)
    precision = TOLERANCE[dtype]
    torch.testing.assert_close(got.double().cpu(), want, rtol=precision, atol=precision * float(want.abs().max() + 1))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda d: str(d)[6:])
def test_few_rows(form: str, dtype: torch.dtype) -> None:
    """Columns are divided between programs, groups are as long as a tile, and the last tiles are not full."""
    check(make(form, 70, 384, 128), 3, dtype)


@pytest.mark.parametrize(("group", "scales"), [(384, "ROW"), (64, "TILE"), (32, "SPREAD"), (6, "ANY")])
@pytest.mark.parametrize("form", FORMS)
def test_groups_of_any_length(form: str, group: int, scales: str) -> None:
    weight = make(form, 35, 384, group)
    assert device_weights([weight]).scales_of(128)[0] is Scales[scales]
    check(weight, 18)


@pytest.mark.parametrize("form", FORMS)
def test_many_rows(form: str) -> None:
    check(make(form, 37, 96, 32), 300)


def test_large_weights_are_unpacked_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_linear, "SLAB_BYTES", 96 * 4 * 15)
    check(make("int4-order", 37, 96, 32), 300)
    check(make("fp8", 37, 96, 32), 300)


@settings(max_examples=20)
@given(
    form=st.sampled_from(FORMS),
    rows=st.integers(1, 40),
    outputs=st.integers(1, 70),
    groups=st.integers(1, 5),
    group=st.sampled_from([2, 4, 6, 10, 16, 32, 50, 128]),
)
def test_any_shape(form: str, rows: int, outputs: int, groups: int, group: int) -> None:
    check(make(form, outputs, groups * group, group), rows)


def test_fp8_blocks_that_end_within_the_weight() -> None:
    random = torch.Generator().manual_seed(1)
    values = torch.randn(150, 200, generator=random).to(torch.float8_e4m3fn)
    check(Fp8Weight(values, torch.randn(2, 2, generator=random), (128, 128)), 5)
    check(Fp8Weight(values, torch.randn(1, 1, generator=random), (150, 200)), 5)


def test_integers_are_multiplied_without_rounding() -> None:
    """The scales alone are applied to sums: of inputs that are integers nothing is lost in float16."""
    values = torch.randint(-128, 128, (40, 256), dtype=torch.int8, generator=torch.Generator().manual_seed(2))
    weight = Int8Weight(values, torch.full((40, 1), 2.0**-13), torch.full((40, 1), 3.0))
    x = torch.randint(-3, 4, (4, 256), generator=torch.Generator().manual_seed(3)).half()
    got = TritonQuantizedLinear(moved(weight))(x.to(DEVICE)).cpu()
    assert torch.equal(got, ((x.double() @ (values.double() - 3).T) * 2.0**-13).half())


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")  # numpy's, of the interpreter
def test_what_is_not_finite_stays_in_its_row_and_no_rows_are_no_launch() -> None:
    operator = TritonQuantizedLinear(moved(make("int4", 20, 64, 32)))
    x = torch.randn(3, 64)
    x[0, 5], x[2, 7] = float("nan"), float("inf")
    got = operator(x.to(DEVICE))
    assert not got[0].isfinite().any()
    assert not got[2].isfinite().any()
    assert got[1].isfinite().all()
    assert operator(x[:0].to(DEVICE)).shape == (0, 20)


def test_rounded_inputs() -> None:
    weight, (x, _, _) = make("int8", 20, 64, 64), inputs(5, 64, 20)
    got = TritonQuantizedLinear(moved(weight), None, INT8_PER_TOKEN)(x.to(DEVICE))
    want = quantized_linear_reference(x, weight, activations=INT8_PER_TOKEN)
    torch.testing.assert_close(got.cpu(), want, rtol=1e-5, atol=1e-4)


def test_work_is_divided_by_shapes_alone() -> None:
    chosen = Tuning(tile_m=16, programs=2)
    for programs, columns in ((1, 4096), (3, 384), (1, 100), (100, 4096)):
        share, splits = quantized_linear.divide_columns(programs, columns, 128, chosen, torch.device("cpu"))
        assert share % 128 == 0
        assert (splits - 1) * share < columns <= splits * share


def moved_experts(experts: QuantizedExpertWeights) -> QuantizedExpertWeights:
    biases = (None if each is None else each.to(DEVICE) for each in (experts.gate_up_bias, experts.down_bias))
    return QuantizedExpertWeights([moved(e) for e in experts.gate_up], [moved(e) for e in experts.down], *biases)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # numpy's, of the interpreter: a sigmoid of 0
@pytest.mark.parametrize("form", FORMS)
def test_mixtures_of_experts(form: str) -> None:
    experts = experts_of(form, biased=True)
    for tokens, activation in ((1, SILU), (9, Activation(ActivationKind.CLIPPED_SWISH, 1.702, 7.0)), (60, GELU_TANH)):
        given = chosen(tokens)
        want = quantized_experts_reference(experts, activation, *given)
        got = TritonQuantizedExperts(moved_experts(experts), activation)(*(each.to(DEVICE) for each in given))
        torch.testing.assert_close(got.double().cpu(), want, rtol=1e-4, atol=1e-5 * float(want.abs().max()))


def test_experts_that_do_not_fit_are_refused() -> None:
    down = [make("int8", 32, 32, 16)] * 2
    for other in (make("int8", 64, 32, 32), make("fp8", 64, 32, 16), make("int8-order", 64, 32, 16)):
        with pytest.raises(ValueError, match="differ in form"):
            TritonQuantizedExperts(QuantizedExpertWeights([make("int8", 64, 32, 16), other], down), SILU)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize(
    ("form", "schemes"),
    [
        ("int8", (INT8_PER_TOKEN, INT8_PER_TOKEN)),
        ("fp8", (ActivationScheme(ActivationType.FP8, group=16), ActivationScheme(ActivationType.FP8, group=16))),
        ("table", (EXACT, ActivationScheme(ActivationType.INT8, scale=0.4))),
    ],
    ids=["int8 by the token", "fp8 by the group", "static, of the second product alone"],
)
def test_experts_round_inputs_of_both_products(form: str, schemes: tuple[ActivationScheme, ActivationScheme]) -> None:
    """What lies between the products is rounded too: one step of that is what a difference of its last bit makes."""
    experts, given = experts_of(form), chosen(9)
    exact = quantized_experts_reference(experts, SILU, *given)
    want = quantized_experts_reference(experts, SILU, *given, activations=schemes)
    got = TritonQuantizedExperts(moved_experts(experts), SILU, schemes)(*(each.to(DEVICE) for each in given))
    assert (want - exact).norm() > 3 * (got.double().cpu() - want).norm()


def test_fp8_is_read_by_its_bits_where_triton_does_not_convert_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on GPUs before compute capability 8.9: every number there is, in both ways to multiply."""
    monkeypatch.setattr(weights, "converts_fp8", lambda _: False)
    bits = torch.tensor([each for each in range(256) if each & 127 != 127], dtype=torch.uint8)
    values = bits.view(torch.float8_e4m3fn).view(2, 127)
    operator = TritonQuantizedLinear(moved(Fp8Weight(values, torch.ones(2, 1), (1, 127))))
    for times in (1, 3):
        x = torch.eye(127).repeat(times, 1)
        assert torch.equal(operator(x.to(DEVICE)).cpu(), values.float().T.repeat(times, 1))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_zeros_of_some_experts_alone() -> None:
    gate_up, down = (
        [make(form, *sizes, 16, seed) for seed, form in enumerate(("int8", "int8-zeros"))]
        for sizes in ((64, 32), (32, 32))
    )
    experts = QuantizedExpertWeights(gate_up, down)
    x, factors = torch.randn(7, 32, generator=torch.Generator().manual_seed(0)) * 0.1, torch.ones(7, 2)
    ids = torch.tensor([[0, 1]] * 7, dtype=torch.int32)
    want = quantized_experts_reference(experts, SILU, x, ids, factors)
    got = TritonQuantizedExperts(moved_experts(experts), SILU)(*(each.to(DEVICE) for each in (x, ids, factors)))
    torch.testing.assert_close(got.double().cpu(), want, rtol=1e-4, atol=1e-5 * float(want.abs().max()))
