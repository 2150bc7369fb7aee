"""FlashInfer as an attention backend: the adapter against the definition, with what stands in for the library."""

from __future__ import annotations

import dataclasses
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.test_paged_attention import TOLERANCE, Case, make_case, ragged
from tests.support import flashinfer_stand_in

pytest.importorskip("triton")
from baton_kernels.paged_attention import RaggedBatch, TokenTrees
from baton_kernels.paged_attention.flashinfer import FlashInferPagedAttention, obstacle

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="computes on the CPU; tests/gpu has the real one")
HALF, CPU = torch.float16, torch.device("cpu")
MIXED = ((1, 1), (5, 5), (70, 1), (40, 12), (16, 16), (33, 2), (32, 1))
"""(context, new tokens): decodes, prompts, later chunks, pages that are full and that have one token."""
SHAPE = (6, 2, 64, 64, 16)


def backend() -> FlashInferPagedAttention:
    flashinfer_stand_in._Wrapper.made.clear()
    return FlashInferPagedAttention(CPU, flashinfer_stand_in)


def runs() -> dict[str, int]:
    """How often wrappers of each kind ran."""
    made = flashinfer_stand_in._Wrapper.made
    return {name: sum(each.runs for each in made if name in type(each).__name__) for name in ("Decode", "Prefill")}


def check(case: Case) -> None:
    want, want_pool = case.expected()
    got, pool = case.run(backend())
    assert torch.equal(pool.k, want_pool.k)
    assert torch.equal(pool.v, want_pool.v)
    assert (got.dtype, got.is_contiguous()) == (case.q.dtype, True)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=TOLERANCE[HALF])


@pytest.mark.parametrize(
    ("sequences", "kinds"),
    [
        (MIXED, {"Decode": 1, "Prefill": 1}),
        (((70, 1), (3, 1), (16, 1)), {"Decode": 1, "Prefill": 0}),
        (((9, 9), (40, 3)), {"Decode": 0, "Prefill": 1}),
    ],
)
@pytest.mark.parametrize("change", [{}, {"window": 5}, {"softcap": 4.0}, {"window": 19, "softcap": 2.0}], ids=str)
def test_it_is_the_definition(
    sequences: tuple[tuple[int, int], ...], kinds: dict[str, int], change: dict[str, float]
) -> None:
    check(make_case(sequences, SHAPE, HALF, **change))  # type: ignore[arg-type]
    assert runs() == kinds


@settings(max_examples=6, deadline=None)
@given(sequences=ragged(), heads=st.sampled_from([(1, 1), (5, 1), (4, 2)]), size=st.sampled_from([1, 8, 16, 24]),
       window=st.integers(0, 60), seed=st.integers(0, 3))  # fmt: skip
def test_any_ragged_batch(
    sequences: tuple[tuple[int, int], ...], heads: tuple[int, int], size: int, window: int, seed: int
) -> None:
    few = tuple((min(context, 40), min(new, 8, context, 40)) for context, new in sequences)
    check(make_case(few, (*heads, 64, 64, size), HALF, window=window, seed=seed))


def test_layers_with_the_same_numbers_share_a_plan_and_others_have_their_own() -> None:
    case, attention = make_case(MIXED, SHAPE, HALF), backend()
    windowed = dataclasses.replace(case.spec, window=5)
    for step in range(2):
        plan = attention.prepare(case.batch)
        for spec in (case.spec, windowed, case.spec):
            got = attention.run(plan, spec, case.pool(), case.q, case.k, case.v)
            want, _ = dataclasses.replace(case, spec=spec).expected()
            torch.testing.assert_close(got.double(), want, rtol=0, atol=TOLERANCE[HALF])
        made = flashinfer_stand_in._Wrapper.made
        assert [each.plans for each in made] == [step + 1] * 4  # decodes and prompts of either
    assert sum(each.runs for each in made) == 12


def test_layers_of_another_group_read_by_their_own_tables() -> None:
    case, attention = make_case(MIXED, SHAPE, HALF), backend()
    batch, moved = case.batch, case.num_blocks - 1 - case.batch.block_tables
    both = dataclasses.replace(batch, block_tables=np.concatenate([batch.block_tables, moved], 1), groups=2)
    alone = dataclasses.replace(case, batch=dataclasses.replace(batch, block_tables=moved))
    want, want_pool = alone.expected()
    plan = attention.prepare(both)
    attention.run(plan, case.spec, case.pool(), case.q, case.k, case.v)
    pool = dataclasses.replace(case.pool(), group=1)
    got = attention.run(plan, case.spec, pool, case.q, case.k, case.v)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=TOLERANCE[HALF])
    assert torch.equal(pool.k, want_pool.k)


def with_tree(batch: RaggedBatch) -> RaggedBatch:
    """The last sequence's two new tokens, which begin at slot 31, as a chain that is written as a tree."""
    ancestors = np.zeros(len(batch.positions), np.uint64)
    ancestors[-2:] = 1, 3
    starts = np.zeros(len(batch.context_lens), np.int32)
    starts[-1] = batch.context_lens[-1] - 2
    return dataclasses.replace(batch, trees=TokenTrees(ancestors, starts))


@pytest.mark.parametrize(
    ("shape", "change"),
    [(SHAPE, {"sinks": True}), ((4, 2, 16, 16, 16), {}), ((4, 2, 64, 32, 16), {}), (SHAPE, {"tree": True})],
    ids=["sinks", "head-size", "head-sizes", "trees"],
)
def test_what_it_does_not_do_triton_does(shape: tuple[int, int, int, int, int], change: dict[str, bool]) -> None:
    case = make_case(((20, 1), (33, 2)), shape, HALF, sinks=change.get("sinks", False))
    if change.get("tree"):
        case = dataclasses.replace(case, batch=with_tree(case.batch))
    check(case)
    assert runs() == {"Decode": 0, "Prefill": 0}


def test_why_not() -> None:
    spec = make_case(((2, 1),), SHAPE, HALF).spec
    assert obstacle(spec, HALF) == obstacle(spec, torch.bfloat16) == ""
    assert obstacle(spec, torch.float32) == "float32 numbers"
    assert obstacle(dataclasses.replace(spec, k_dim=80, v_dim=80), HALF) == "heads of 80 and 80 elements"
    assert obstacle(dataclasses.replace(spec, latent=True), HALF) == "latents instead of keys and values"
    assert obstacle(dataclasses.replace(spec, sinks=torch.zeros(6)), HALF) == "attention sinks"


def test_the_benchmark_has_it_beside_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.kernel_parts import attention

    case = make_case(MIXED, SHAPE, HALF)
    want, pool = case.expected()
    beside = case.batch, pool, case.q, CPU
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    assert attention._flashinfer(case.spec, *beside) == {}
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer_stand_in)
    (run,) = attention._flashinfer(case.spec, *beside).values()
    torch.testing.assert_close(run().double(), want, rtol=0, atol=TOLERANCE[HALF])
