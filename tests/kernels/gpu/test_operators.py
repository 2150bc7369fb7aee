"""The other Triton kernels against their definitions: on a GPU, or on a CPU under Triton's interpreter."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.test_experts import CLIPPED, SHAPES, make_experts
from tests.kernels.test_sampling import FILTERS, case, defined, draws_of, filter_of

from baton.types import SamplingParams
from baton_kernels import kv_copy as definition
from baton_kernels.experts import experts_reference
from baton_kernels.row_wise import GELU_TANH, SILU, Activation, ActivationKind, gated_reference, rms_norm_reference
from baton_kernels.token_mask import mask_tokens, pack_mask

pytest.importorskip("triton")
from baton_kernels.gpu import kv_copy, row_wise
from baton_kernels.gpu.experts import TritonExperts
from baton_kernels.gpu.sampling import TritonSampler

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, **({torch.bfloat16: 3e-2} if CUDA else {})}


@pytest.mark.parametrize("dim", [1, 7, 64, 1000, 4096])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda d: str(d)[6:])
def test_rms_norm(dtype: torch.dtype, dim: int) -> None:
    x, weight, residual = (torch.randn(*size).to(dtype) for size in ((5, dim + 3), (dim,), (5, dim)))
    x, tolerance = x[:, :dim], TOLERANCE[dtype]
    want = rms_norm_reference(x.double(), weight.double(), 1e-6, 1.0)
    norm = row_wise.TritonRmsNorm(weight.to(DEVICE), 1e-6, 1.0)
    got, summed = norm(x.to(DEVICE)), norm(x.to(DEVICE), residual.to(DEVICE))
    torch.testing.assert_close(got.double().cpu(), want, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(summed.double().cpu(), want + residual.double(), rtol=tolerance, atol=2 * tolerance)
    assert (got.dtype, got.is_contiguous()) == (dtype, True)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # numpy's, of the interpreter: a sigmoid of 0
@pytest.mark.parametrize("dim", [1, 1023, 2050])
@pytest.mark.parametrize("kind", ActivationKind)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda d: str(d)[6:])
def test_gated_products(dtype: torch.dtype, kind: ActivationKind, dim: int) -> None:
    how = {ActivationKind.SILU: SILU, ActivationKind.GELU_TANH: GELU_TANH}.get(kind, Activation(kind, 1.702, 7.0))
    x = (torch.randn(3, 2 * dim + 5) * 4).to(dtype)[:, : 2 * dim]
    got = row_wise.TritonGatedMul(how)(x.to(DEVICE))
    want = gated_reference(x.double(), how)
    torch.testing.assert_close(got.double().cpu(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


CASTS = [
    (torch.uint8, torch.uint8),
    (torch.float32, torch.float32),
    (torch.float16, torch.float16),
    (torch.float32, torch.float16),
    (torch.float16, torch.float32),
]


@settings(max_examples=25)
@given(
    cast=st.sampled_from(CASTS),
    elements=st.integers(1, 5000),
    unit=st.sampled_from([1, 2, 8]),
    data=st.data(),
)
def test_spans_are_gathered_and_scattered(
    cast: tuple[torch.dtype, torch.dtype], elements: int, unit: int, data: st.DataObject
) -> None:
    elements *= unit
    pool = (torch.randn(6, elements) * 50).to(cast[0])
    blocks = data.draw(st.lists(st.integers(0, 5), max_size=6, unique=True))
    spans = np.zeros((len(blocks), 3), np.int64)
    for row, block in enumerate(blocks):
        first = data.draw(st.integers(0, elements // unit)) * unit
        spans[row] = block, first, data.draw(st.integers(0, (elements - first) // unit)) * unit
    want, got = (torch.zeros(int(spans[:, 2].sum()), dtype=cast[1]) for _ in range(2))
    definition.gather_spans(pool, spans, want)
    got = got.to(DEVICE)
    kv_copy.gather_spans(pool.to(DEVICE), spans, got)
    assert torch.equal(got.cpu(), want)
    source = (torch.randn(len(want)) * 40).to(cast[1])
    target = pool.to(DEVICE, copy=True)
    definition.scatter_spans(pool, spans, source)
    kv_copy.scatter_spans(target, spans, source.to(DEVICE))
    assert torch.equal(target.cpu(), pool)


@pytest.mark.parametrize("copy", [definition, kv_copy])
@pytest.mark.parametrize(
    "span", [(3, 0, 8), (-1, 0, 8), (0, 60, 8), (0, -1, 8), (0, 0, -8), (0, 0, 9)], ids=lambda span: str(span)
)
def test_spans_elsewhere_are_refused(copy: object, span: tuple[int, int, int]) -> None:
    pool, buffer = torch.zeros(3, 64, device=DEVICE), torch.zeros(8, device=DEVICE)
    for function in (copy.gather_spans, copy.scatter_spans):  # type: ignore[attr-defined]
        with pytest.raises(ValueError, match="span"):
            function(pool, np.array([span]), buffer)


@pytest.mark.parametrize(("dtype", "elements"), [(torch.uint8, 12291), (torch.float16, 4096), (torch.float32, 1)])
def test_blocks_are_copied_within_a_pool(dtype: torch.dtype, elements: int) -> None:
    pool = (torch.randn(8, elements) * 50).to(dtype)
    pairs, got = np.array([[0, 4], [1, 7], [3, 5]]), pool.to(DEVICE, copy=True)
    definition.copy_blocks(pool, pairs)
    kv_copy.copy_blocks(got, pairs)
    assert torch.equal(got.cpu(), pool)


@pytest.mark.parametrize("vocab", [1, 97, 128, 5003])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda d: str(d)[6:])
def test_tokens_are_those_of_the_definition(dtype: torch.dtype, vocab: int) -> None:
    for scale in (0.0, 1.0, 8.0):
        logits, draws, tokens = case(vocab, dtype, scale)
        got = TritonSampler(DEVICE)(logits.to(DEVICE), [filter_of(one) for one in FILTERS], draws.keys())
        assert got.tolist() == tokens


def test_forbidden_tokens_are_not_drawn() -> None:
    rng = np.random.default_rng(5)
    logits, vocab = torch.randn(len(FILTERS) + 1, 700), 700
    params = [*FILTERS, SamplingParams()]
    masks = [pack_mask(rng.random(vocab) < 0.05) for _ in FILTERS]
    keys = draws_of(len(params)).keys()
    got = TritonSampler(DEVICE)(logits.to(DEVICE), [filter_of(one) for one in params], keys, [*masks, None]).tolist()
    mask_tokens(logits, range(len(FILTERS)), masks)
    assert got == defined(logits, params, keys)


def test_a_row_that_is_not_finite_is_bad_alone() -> None:
    logits = torch.randn(5, 1000)
    logits[1, 999], logits[2, 0], logits[3] = float("nan"), float("inf"), float("-inf")
    params, keys = [FILTERS[0], FILTERS[1], FILTERS[3], FILTERS[7], FILTERS[7]], draws_of(5).keys()
    got = TritonSampler(DEVICE)(logits.to(DEVICE), [filter_of(one) for one in params], keys).tolist()
    assert got[1:4] == [-1, -1, -1]
    assert [got[0], got[4]] == defined(logits[[0, 4]], [params[0], params[4]], keys[[0, 4]])


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("activation", [SILU, GELU_TANH, CLIPPED], ids=lambda activation: activation.kind.name)
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[1], SHAPES[2], SHAPES[4]], ids=str)
def test_mixtures_of_experts(shape: tuple[int, ...], activation: Activation) -> None:
    tokens, count, top_k, hidden, inner = shape
    generator = torch.Generator().manual_seed(tokens)
    weights = make_experts(generator, torch.float32, count, hidden, inner, interleaved=activation is CLIPPED)
    x, residual = (torch.randn(tokens, size, generator=generator) for size in (hidden + 9, hidden))
    x = x[:, 4 : 4 + hidden]
    ids = torch.rand(tokens, count, generator=generator).topk(top_k).indices.int()
    ids[0, 0], ids[-1, -1] = count, -1  # choose none
    factors = torch.rand(tokens, top_k, generator=generator)
    there = {name: getattr(weights, name) for name in ("gate_up", "down", "gate_up_bias", "down_bias")}
    there = {name: None if tensor is None else tensor.to(DEVICE) for name, tensor in there.items()}
    operator = TritonExperts(dataclasses.replace(weights, **there), activation)
    for more in (None, residual):
        want = experts_reference(weights, activation, x, ids, factors, more)
        moved = (tensor if tensor is None else tensor.to(DEVICE) for tensor in (x, ids, factors, more))
        got = operator(*moved)
        torch.testing.assert_close(got.double().cpu(), want, rtol=3e-5, atol=3e-5)


def test_no_tokens_and_no_chosen_expert() -> None:
    weights = make_experts(torch.Generator().manual_seed(0), torch.float32, 4, 8, 8, interleaved=False)
    there = {"gate_up": weights.gate_up.to(DEVICE), "down": weights.down.to(DEVICE)}
    operator = TritonExperts(dataclasses.replace(weights, **there), SILU)
    x, factors = torch.randn(3, 8, device=DEVICE), torch.ones(3, 2, device=DEVICE)
    none = torch.tensor([[4, -1]] * 3, dtype=torch.int32, device=DEVICE)
    assert operator(x[:0], none[:0], factors[:0]).shape == (0, 8)
    assert torch.equal(operator(x, none, factors, x), x)
