"""Linear layers with quantized weights against their definition."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.models.quantized import FORMS, make

from baton_kernels.cpu import CpuLibrary, load_library, runnable_variants
from baton_kernels.quantization import (
    EXACT,
    INT8_PER_TOKEN,
    ActivationScheme,
    ActivationType,
    Int4Weight,
    Int8Weight,
    QuantizedWeight,
    TableWeight,
    quantize_fp8,
    quantize_int4,
    quantize_int8,
    quantize_nf4,
)
from baton_kernels.quantized_linear import (
    CpuQuantizedLinear,
    PlainQuantizedLinear,
    make_quantized_linear,
    quantized_linear_reference,
)

SCHEMES = {
    "exact": EXACT,
    "int8": INT8_PER_TOKEN,
    "int8-static": ActivationScheme(ActivationType.INT8, 0.03),
    "fp8": ActivationScheme(ActivationType.FP8),
}
ROWS = [1, 2, 6, 13, 17, 130]
TABLE_OF_BFLOAT16 = "table of bfloat16"
"""As MXFP4's: another way than with a table whose values have more bits."""


def inputs(rows: int, columns: int, outputs: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    random = torch.Generator().manual_seed(rows)
    sizes = ((rows, columns), (outputs,), (rows, outputs))
    return tuple(torch.randn(*each, generator=random).to(dtype) for each in sizes)


def close(got: torch.Tensor, want: torch.Tensor, precision: float = 2e-6) -> None:
    torch.testing.assert_close(got, want, rtol=precision, atol=precision * float(want.abs().max() + 1))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_what_it_is_defined_to_be(build: CpuLibrary, form: str, scheme: str) -> None:
    weight = make(form, 70, 384, 32)
    for rows in ROWS:
        x, bias, residual = inputs(rows, 384, 70)
        want = quantized_linear_reference(x, weight, bias, residual, SCHEMES[scheme])
        close(CpuQuantizedLinear(build, weight, bias, SCHEMES[scheme])(x, residual), want)
        close(PlainQuantizedLinear(weight, bias, SCHEMES[scheme])(x, residual), want)


def test_threads_share_panels(library: CpuLibrary, threads: int) -> None:
    weight = make("int4", 150, 128, 32)
    for scheme in (EXACT, INT8_PER_TOKEN):
        for rows in (1, 40):
            x, _, _ = inputs(rows, 128, 150)
            want = quantized_linear_reference(x, weight, activations=scheme)
            close(CpuQuantizedLinear(library, weight, None, scheme)(x), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scheme", ["exact", "int8", "fp8"])
def test_narrow_inputs_give_narrow_outputs(library: CpuLibrary, dtype: torch.dtype, scheme: str) -> None:
    weight = quantize_int4(torch.randn(50, 256, generator=torch.Generator().manual_seed(1)))
    x, bias, residual = inputs(9, 256, 50, dtype)
    want = quantized_linear_reference(x, weight, bias, residual, SCHEMES[scheme])
    got = CpuQuantizedLinear(library, weight, bias, SCHEMES[scheme])(x, residual)
    assert got.dtype == dtype
    torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)
    assert (got == want).float().mean() > 0.95  # rounded once: nearly always to the same value


@settings(max_examples=80, deadline=None)
@given(
    form=st.sampled_from([*FORMS, TABLE_OF_BFLOAT16]),
    rows=st.one_of(st.integers(1, 30), st.sampled_from([100, 130])),
    outputs=st.integers(1, 70),
    groups=st.integers(1, 4),
    group=st.sampled_from([2, 4, 6, 10, 16, 32, 50, 128, 600]),
)
def test_pairs_of_bfloat16_lose_nothing(form: str, rows: int, outputs: int, groups: int, group: int) -> None:
    """Inputs and what weights are before their scales are bfloat16: products of pairs are those of float32."""
    if _library().instructions != "avx512-bf16":
        pytest.skip("no vdpbf16ps here")
    if form == TABLE_OF_BFLOAT16:
        table = make("table", outputs, groups * group, group)
        assert isinstance(table, TableWeight)
        weight: QuantizedWeight = replace(table, table=table.table.bfloat16().float())
    else:
        weight = make(form, outputs, groups * group, group)
    x = inputs(rows, groups * group, outputs, torch.bfloat16)[0]
    want = quantized_linear_reference(x.float(), weight)
    for pairs in (False, True):
        library = copy.copy(_library())
        library.amx, library.pairs_are_faster = False, pairs
        got = CpuQuantizedLinear(library, weight)(x)
        torch.testing.assert_close(got.float(), want, rtol=5e-3, atol=2e-5 * float(want.abs().max() + 1))


@settings(max_examples=80, deadline=None)
@given(
    form=st.sampled_from(FORMS),
    scheme=st.sampled_from(["exact", "int8"]),
    rows=st.integers(1, 20),
    outputs=st.integers(1, 70),
    groups=st.integers(1, 5),
    group=st.sampled_from([2, 4, 6, 10, 16, 32, 50, 128, 600]),
)
def test_any_shape(form: str, scheme: str, rows: int, outputs: int, groups: int, group: int) -> None:
    weight = make(form, outputs, groups * group, group)
    x, _, _ = inputs(rows, groups * group, outputs)
    got = CpuQuantizedLinear(_library(), weight, None, SCHEMES[scheme])(x)
    close(got, quantized_linear_reference(x, weight, activations=SCHEMES[scheme]), 1e-5)


def _library() -> CpuLibrary:
    return load_library(runnable_variants()[0])


def test_products_at_the_ends_of_their_ranges_do_not_saturate(build: CpuLibrary) -> None:
    x = torch.full((5, 512), 127.0)
    for value in (-128, 127):
        weight = Int8Weight(torch.full((40, 512), value, dtype=torch.int8), torch.ones(40, 1))
        assert (CpuQuantizedLinear(build, weight, None, INT8_PER_TOKEN)(x) == 512.0 * 127 * value).all()
    nibbles = Int4Weight(torch.full((40, 256), 0xFF, dtype=torch.uint8), torch.ones(40, 1), torch.zeros(40, 1))
    for sign in (1, -1):
        assert (CpuQuantizedLinear(build, nibbles, None, INT8_PER_TOKEN)(x * sign) == sign * 512.0 * 127 * 15).all()


@settings(max_examples=150, deadline=None)
@given(
    values=st.sampled_from(["few", "many", "most", "equal"]),
    inputs=st.sampled_from(["few", "many", "most", "equal", "aligned"]),
    rows=st.integers(1, 14),
    outputs=st.integers(1, 40),
    groups=st.integers(1, 3),
    group=st.sampled_from([4, 10, 16, 32, 40, 150, 200]),
    seed=st.integers(0, 2**32),
)
def test_integers_are_summed_without_loss(
    values: str, inputs: str, rows: int, outputs: int, groups: int, group: int, seed: int
) -> None:
    """However large they are, and wherever operators sum in fewer bits: to the last bit."""
    random = torch.Generator().manual_seed(seed)
    weight = Int8Weight(
        _integers(values, outputs, groups * group, random).clamp(max=127).to(torch.int8), torch.ones(outputs, groups)
    )
    if inputs == "aligned":  # with a row of the weight, which makes a sum as large as it gets
        x = weight.values[:1].sign().float() * _integers("most", rows, groups * group, random).abs()
    else:
        x = _integers(inputs, rows, groups * group, random)
    x = x.clamp(-127, 127)
    x[:, 0] = 127  # the scale becomes 1
    got = CpuQuantizedLinear(_library(), weight, None, INT8_PER_TOKEN)(x)
    assert torch.equal(got, (x.double() @ weight.values.double().T).float())


def _integers(kind: str, rows: int, columns: int, random: torch.Generator) -> torch.Tensor:
    """Integers as float32 [rows, columns], from -128 to 128: normal with few or many outliers, or large ones alone."""
    if kind == "most":
        return (
            torch.randint(90, 129, (rows, columns), generator=random)
            * torch.randn(rows, columns, generator=random).sign()
        )
    if kind == "equal":
        return torch.full((rows, columns), 128.0 if torch.rand(1, generator=random) < 0.5 else -128.0)
    deviation = 12.0 if kind == "few" else 45.0
    made = (torch.randn(rows, columns, generator=random) * deviation).round().clamp(-128, 128)
    outlying = torch.rand(rows, columns, generator=random) < 0.02
    return torch.where(outlying, made.sign() * 128, made)


def test_fp8_subnormals_and_signed_zeros(build: CpuLibrary) -> None:
    every = torch.arange(256, dtype=torch.uint8)
    every = every[(every & 127) != 127].view(torch.float8_e4m3fn)  # all but what is not a number
    weight = quantize_fp8(torch.ones(len(every), 4))
    values = every[:, None].expand(-1, 4).contiguous()
    weight = type(weight)(values, torch.ones(len(every), 1), (1, 4))
    x = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]])
    assert torch.equal(CpuQuantizedLinear(build, weight)(x), every.float().expand(2, -1))


@pytest.mark.parametrize("scheme", ["exact", "int8"])
def test_what_is_not_finite_stays_so(library: CpuLibrary, scheme: str) -> None:
    linear = CpuQuantizedLinear(library, quantize_int8(torch.randn(20, 64)), None, SCHEMES[scheme])
    x = torch.randn(3, 64)
    x[0, 5], x[2, 7] = float("nan"), float("inf")
    got = linear(x)
    assert not got[0].isfinite().any()
    assert not got[2].isfinite().any()
    assert got[1].isfinite().all()


def test_rows_may_be_strided_and_none(library: CpuLibrary) -> None:
    weight = quantize_nf4(torch.randn(33, 64, generator=torch.Generator().manual_seed(0)))
    wide, wide_residual = torch.randn(9, 90), torch.randn(9, 50)
    linear = make_quantized_linear(library, weight)
    got = linear(wide[:, 10:74], wide_residual[:, 5:38])
    close(got, quantized_linear_reference(wide[:, 10:74], weight, None, wide_residual[:, 5:38]))
    assert linear(torch.empty(0, 64)).shape == (0, 33)


def test_scales_are_stored_as_narrow_as_they_are_exact(library: CpuLibrary) -> None:
    weight = quantize_int4(torch.randn(32, 256))
    packed = CpuQuantizedLinear(library, weight).nbytes
    assert packed == 32 * 128 + 32 * 4 * 2  # symmetric: one zero for all; float16 scales
    wide = Int4Weight(weight.values, weight.scales * 1.0001, weight.zeros)
    assert CpuQuantizedLinear(library, wide).nbytes == 32 * 128 + 32 * 4 * 4


def test_without_operators_the_plain_layer_runs() -> None:
    weight = quantize_int8(torch.randn(6, 8))
    assert make_quantized_linear(None, weight).name == "torch"


@pytest.mark.parametrize(
    ("quantize", "error"),
    [(quantize_int8, 0.01), (quantize_int4, 0.10), (quantize_fp8, 0.03), (quantize_nf4, 0.10)],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_rounding_loses_what_the_form_has_to(quantize: object, error: float) -> None:
    plain = torch.randn(300, 512, generator=torch.Generator().manual_seed(3)).bfloat16()
    plain[7] = 0
    assert callable(quantize)
    weight: QuantizedWeight = quantize(plain)
    got = weight.dequantize()
    assert (got - plain.float()).norm() / plain.float().norm() < error
    assert (got[7] == 0).all()
    assert torch.equal(quantize(got).dequantize(), got) or quantize is not quantize_int8
