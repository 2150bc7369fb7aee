from __future__ import annotations

import copy

import pytest
import torch

from baton_kernels.cpu import CpuLibrary, load_library, runnable_variants
from baton_kernels.experts import (
    CpuExperts,
    CpuRouting,
    ExpertWeights,
    Routing,
    Scoring,
    experts_reference,
    routing_reference,
)
from baton_kernels.row_wise import GELU_TANH, SILU, Activation, ActivationKind

CLIPPED = Activation(ActivationKind.CLIPPED_SWISH, 1.702, 7.0)
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
SHAPES = [(1, 4, 2, 64, 32), (7, 5, 1, 33, 17), (40, 3, 3, 70, 100), (300, 8, 2, 96, 48), (3, 64, 8, 48, 5)]
"""Tokens, experts, top_k, hidden, inner."""


def normal(generator: torch.Generator, dtype: torch.dtype, *dims: int) -> torch.Tensor:
    return torch.randn(*dims, generator=generator).to(dtype)


def make_experts(
    generator: torch.Generator, dtype: torch.dtype, count: int, hidden: int, inner: int, *, interleaved: bool
) -> ExpertWeights:
    """Weights as most models have them, or as GPT-OSS has them, with biases."""
    first, second = normal(generator, dtype, count, 2 * inner, hidden), normal(generator, dtype, count, hidden, inner)
    first, second = first / hidden**0.5, second / inner**0.5
    if not interleaved:
        return ExpertWeights(first, second)
    biases = normal(generator, dtype, count, 2 * inner), normal(generator, dtype, count, hidden)
    return ExpertWeights(first.mT.contiguous(), second.mT.contiguous(), *biases, interleaved=True)


def check(library: CpuLibrary, dtype: torch.dtype, shape: tuple[int, ...], activation: Activation) -> None:
    tokens, count, top_k, hidden, inner = shape
    generator = torch.Generator().manual_seed(tokens)
    experts = make_experts(generator, dtype, count, hidden, inner, interleaved=activation is CLIPPED)
    wide = normal(generator, dtype, tokens, hidden + 9)
    x, residual = wide[:, 4 : 4 + hidden], normal(generator, dtype, tokens, hidden)
    ids = torch.rand(tokens, count, generator=generator).topk(top_k).indices.int()
    ids[0, 0] = count  # chooses none
    weights = torch.rand(tokens, top_k, generator=generator)
    operator = CpuExperts(library, experts, activation)
    for more in (None, residual):
        want = experts_reference(experts, activation, x, ids, weights, more)
        got = operator(x, ids, weights, more)
        torch.testing.assert_close(got.double(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("activation", [SILU, GELU_TANH, CLIPPED], ids=lambda activation: activation.kind.name)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda d: str(d)[6:])
def test_experts_equal_the_reference(
    library: CpuLibrary, dtype: torch.dtype, shape: tuple[int, ...], activation: Activation, threads: int
) -> None:
    check(library, dtype, shape, activation)


@pytest.mark.parametrize("pairs", [False, True], ids=["float32", "pairs"])
@pytest.mark.parametrize("build", [each.name for each in runnable_variants()])
def test_experts_by_every_product_of_every_build(build: str, pairs: bool) -> None:
    chosen = copy.copy(load_library(next(each for each in runnable_variants() if each.name == build)))
    chosen.pairs_are_faster = pairs
    for dtype in TOLERANCE:
        check(chosen, dtype, SHAPES[2], SILU)
        check(chosen, dtype, SHAPES[3], CLIPPED)


def test_more_rows_than_are_taken_at_a_time(library: CpuLibrary) -> None:
    check(library, torch.float32, (1200, 8, 8, 16, 16), SILU)


def test_no_tokens_and_no_chosen_expert(library: CpuLibrary) -> None:
    generator = torch.Generator().manual_seed(0)
    experts = CpuExperts(library, make_experts(generator, torch.float32, 4, 8, 8, interleaved=False), SILU)
    x, weights = normal(generator, torch.float32, 3, 8), torch.ones(3, 2)
    assert experts(x[:0], torch.zeros(0, 2, dtype=torch.int32), weights[:0]).shape == (0, 8)
    none = torch.tensor([[4, -1]] * 3, dtype=torch.int32)
    assert not experts(x, none, weights).any()
    assert torch.equal(experts(x, none, weights, x), x)


def test_another_dtype_is_refused(library: CpuLibrary) -> None:
    weights = make_experts(torch.Generator(), torch.float16, 2, 8, 8, interleaved=False)
    with pytest.raises(ValueError, match="float16"):
        CpuExperts(library, weights, SILU)


ROUTINGS = {
    "qwen3_moe": (Routing(8, normalize=True), 64),
    "qwen2_moe": (Routing(4), 60),
    "gpt_oss": (Routing(4, Scoring.SOFTMAX_OF_CHOSEN), 32),
    "deepseek_v3": (
        Routing(6, Scoring.SIGMOID, normalize=True, scale=2.5, groups=8, top_groups=3, bias=torch.linspace(-1, 1, 64)),
        64,
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("tokens", [1, 200])
@pytest.mark.parametrize("name", ROUTINGS)
def test_routing_equals_the_reference(
    library: CpuLibrary, name: str, tokens: int, dtype: torch.dtype, threads: int
) -> None:
    routing, experts = ROUTINGS[name]
    generator = torch.Generator().manual_seed(tokens)
    # No two alike in bfloat16 either, as far as softmax and sigmoid keep them apart.
    logits = torch.rand(tokens, experts, generator=generator).argsort(-1).to(dtype) / 16 - 2
    ids, weights = CpuRouting(library, routing, experts)(logits)
    want_ids, want = routing_reference(routing, logits)
    order, want_order = ids.argsort(-1), want_ids.argsort(-1)
    assert torch.equal(ids.gather(-1, order), want_ids.gather(-1, want_order))
    torch.testing.assert_close(weights.gather(-1, order), want.gather(-1, want_order), rtol=1e-5, atol=1e-7)


def test_impossible_choices_are_refused(library: CpuLibrary) -> None:
    for routing in (Routing(5), Routing(3, groups=2, top_groups=1), Routing(1, groups=3), Routing(1, top_groups=2)):
        with pytest.raises(ValueError, match="4 experts"):
            CpuRouting(library, routing, 4)
