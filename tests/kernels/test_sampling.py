"""The sampling operator against its definition in torch: the same tokens for the same seeds."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.sampler import LEAST_TEMPERATURE, draw, filter_batch, sample
from baton.engine.sampler_row import SamplerRow
from baton.types import SamplingParams
from baton_kernels.cpu import CpuLibrary, load_library, runnable_variants
from baton_kernels.random_numbers import Draws, draw_keys, next_keys
from baton_kernels.sampling import MOST_KEPT, CpuSampler, RowFilter, Watch
from baton_kernels.token_mask import pack_mask

FILTERS = [
    SamplingParams(),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1e-300),
    SamplingParams(top_p=0.9),
    SamplingParams(top_p=0.01),
    SamplingParams(top_p=0.9999, temperature=1.7),
    SamplingParams(top_k=1),
    SamplingParams(top_k=50),
    SamplingParams(top_k=4000, top_p=0.5),
    SamplingParams(top_k=20, top_p=0.8, temperature=0.7, min_p=0.05),
    SamplingParams(min_p=0.1, temperature=1.5),
    SamplingParams(min_p=1.0),
]


def filter_of(params: SamplingParams) -> RowFilter:
    return SamplerRow(params, 0, stop_ids=(), prompt=(), output=()).filter


def draws_of(rows: int, seed: int = 0) -> Draws:
    return Draws(range(seed, seed + rows), range(rows))


def defined(logits: torch.Tensor, params: list[SamplingParams], keys: np.ndarray) -> list[int]:
    """Each row by itself: what stands beside it does not matter."""
    tokens = []
    for row, one, key in zip(logits.float(), params, keys, strict=True):
        if one.greedy:
            tokens.append(int(row.numpy().argmax()))
            continue
        scaled = (row - row.max()) / max(one.temperature, LEAST_TEMPERATURE)
        tokens += draw(filter_batch(scaled[None], [one]), np.array([key]))
    return tokens


@functools.cache
def case(vocab: int, dtype: torch.dtype, scale: float) -> tuple[torch.Tensor, Draws, list[int]]:
    """Logits, draws and the tokens that are right."""
    generator = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(len(FILTERS), vocab + 3, generator=generator) * scale).to(dtype)[:, :vocab]
    draws = draws_of(len(FILTERS), vocab)
    return logits, draws, defined(logits, FILTERS, draws.keys())


@pytest.mark.parametrize("variant", runnable_variants(), ids=lambda variant: variant.name)
@pytest.mark.parametrize("vocab", [1, 97, 128, 5003, 32000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda d: str(d)[6:])
def test_tokens_are_those_of_the_definition(variant: object, vocab: int, dtype: torch.dtype, threads: int) -> None:
    operator = CpuSampler(load_library(variant))  # type: ignore[arg-type]
    for scale in (0.0, 1.0, 8.0):
        logits, draws, tokens = case(vocab, dtype, scale)
        assert operator(logits, [filter_of(one) for one in FILTERS], draws) == tokens


@pytest.mark.parametrize("variant", runnable_variants(), ids=lambda variant: variant.name)
@pytest.mark.parametrize("vocab", [1, 97, 128, 5003, 32000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda d: str(d)[6:])
def test_what_a_mask_forbids_is_as_if_its_logit_were_minus_infinity(
    variant: object, vocab: int, dtype: torch.dtype, threads: int
) -> None:
    operator, filters = CpuSampler(load_library(variant)), [filter_of(one) for one in FILTERS]  # type: ignore[arg-type]
    logits, draws, _ = case(vocab, dtype, 1.0)
    rng = np.random.default_rng(vocab)
    for share in (0.0, 0.001, 0.5, 1.0):
        allowed = rng.random(logits.shape) < share
        allowed[:, rng.integers(vocab)] = True
        allowed[:, : vocab // 2] &= share != 0.5  # whole chunks without, and parts of one
        allowed[2::3] = True
        allowed[3] = False
        masks = [None if row % 3 == 2 else pack_mask(each) for row, each in enumerate(allowed)]
        masked = logits.masked_fill(torch.from_numpy(~allowed), float("-inf"))
        expected = operator(masked, filters, draws)
        assert expected[3] == -1
        hidden = logits.masked_fill(torch.from_numpy(~allowed), float("nan"))
        assert operator(logits, filters, draws, masks) == expected
        assert operator(hidden, filters, draws, masks) == expected


@pytest.mark.parametrize("variant", runnable_variants(), ids=lambda variant: variant.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
def test_logits_of_chunks_lie_far_apart(variant: object, dtype: torch.dtype) -> None:
    """What chunks are weighed by changes on the way; the first ones are forbidden, or have nothing above zero."""
    operator, rows, chunks = CpuSampler(load_library(variant)), 64, 12  # type: ignore[arg-type]
    levels = torch.tensor([-np.inf, 0.0, 18.0, 19.0, 41.0, 20.0, 60.0, 59.0, -np.inf, 61.0, 38.0, -300.0])
    for order in (torch.arange(chunks), torch.arange(chunks).flip(0), torch.arange(chunks) * 5 % chunks):
        noise = torch.randn(rows, chunks * 128, generator=torch.Generator().manual_seed(5))
        logits = (noise + levels[order].repeat_interleave(128)).to(dtype)
        allowed = np.ones((rows, chunks * 128), np.bool_)
        allowed[1::2, :128] = False
        # Above some level nothing is allowed, so that each of them comes to draw.
        for row in range(rows):
            allowed[row] &= np.repeat(levels[order].numpy() < [5.0, 30.0, 50.0, 100.0][row % 4], 128)
        masks = [pack_mask(each) for each in allowed]
        for params in (SamplingParams(), SamplingParams(temperature=0.3), SamplingParams(temperature=4.0)):
            draws = draws_of(rows)
            masked = logits.masked_fill(torch.from_numpy(~allowed), float("-inf"))
            want = defined(masked, [params] * rows, draws.keys())
            assert operator(masked, [filter_of(params)] * rows, draws) == want
            assert operator(logits, [filter_of(params)] * rows, draws, masks) == want
            assert len({token // 128 for token in want}) > 4


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    vocab=st.integers(1, 3000),
    levels=st.integers(1, 40),
    temperature=st.sampled_from([0.2, 1.0, 3.0]),
    top_k=st.integers(0, 3000),
    top_p=st.sampled_from([0.001, 0.3, 0.5, 0.75, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.5]),
    forbidden=st.floats(0.0, 0.99),
)
def test_ties_and_forbidden_tokens(
    library: CpuLibrary, seed: int, vocab: int, levels: int, temperature: float, top_k: int, top_p: float, min_p: float,
    forbidden: float,
) -> None:  # fmt: skip
    """Few different logits, so that many are equal at every threshold, and some tokens that may not be drawn."""
    rng = np.random.default_rng(seed)
    values = rng.integers(0, levels, (4, vocab)).astype(np.float32) / 8
    hidden = rng.random((4, vocab)) < forbidden
    always = rng.integers(vocab)
    values[:, always], hidden[:, always] = 1.0, False
    free = torch.from_numpy(values.copy())
    values[hidden] = -np.inf
    logits = torch.from_numpy(values)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    draws = draws_of(4, seed)
    got = CpuSampler(library)(logits, [filter_of(params)] * 4, draws)
    masks = [pack_mask(row) for row in ~hidden]
    assert CpuSampler(library)(free, [filter_of(params)] * 4, draws, masks) == got
    # Equal weights reach a top-p in steps: where it falls on one, rounding decides.
    if top_p in (0.5, 0.75):
        scaled = (logits - logits.amax(-1, keepdim=True)) / temperature
        allowed = filter_batch(scaled, [params.replace(top_p=top_p + 1e-6)]) > 0
        assert all(allowed[i, token] for i, token in enumerate(got))
    else:
        assert got == defined(logits, [params] * 4, draws.keys())
    assert np.isfinite(values[np.arange(4), got]).all()


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    vocab=st.integers(1, 700),
    levels=st.sampled_from([2, 5, 1000]),
    scale=st.sampled_from([1.0, 6.0, 15.0]),
    top_k=st.sampled_from([0, 1, 3, 8, 20]),
    top_p=st.sampled_from([0.3, 0.8, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.1]),
    forbidden=st.sampled_from([0.3, 0.9, 0.999]),
)
def test_what_filters_leave_they_leave_under_each_mask_that_has_it(
    library: CpuLibrary, seed: int, vocab: int, levels: int, scale: float, top_k: int, top_p: float, min_p: float,
    forbidden: float,
) -> None:  # fmt: skip
    rng = np.random.default_rng(seed)
    values = np.round(rng.random((6, vocab)) * levels).astype(np.float32) * (scale / levels)
    logits, draws = torch.from_numpy(values), draws_of(6, seed)
    params = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p)
    filters, kept = [filter_of(params)] * 6, np.zeros((6, MOST_KEPT), np.int64)
    free = CpuSampler(library)(logits, filters, draws, kept=kept)
    assert free == CpuSampler(library)(logits, filters, draws)
    left = filter_batch(logits - logits.amax(-1, keepdim=True), [params] * 6)
    allowed = rng.random((6, vocab)) >= forbidden
    if params.top_k <= 0 and params.top_p >= 1.0 and params.min_p <= 0.0:
        assert (kept[:, 0] == -1).all()
    for row, own in enumerate(kept.tolist()):
        if own[0] < 0:
            continue
        some = [token for token in own if token >= 0]
        if top_p not in (0.3, 0.8, 0.95) or levels == 1000:  # else rounding may decide
            assert some == torch.nonzero(left[row])[:, 0].tolist()
        assert free[row] in some
        allowed[row, some] = True
    masks = [pack_mask(each) if own[0] >= 0 else None for each, own in zip(allowed, kept, strict=True)]
    assert CpuSampler(library)(logits, filters, draws, masks) == free


@pytest.mark.parametrize("count", [0, 1, 5, 40])
def test_tokens_are_told_in_order_as_they_are_chosen(library: CpuLibrary, threads: int, count: int) -> None:
    logits, draws = torch.randn(40, 3000), draws_of(40)
    filters = [RowFilter(1.0, 0, 1.0, 0.0)] * 40
    want = CpuSampler(library)(logits, filters, draws)
    watched = [39 - 7 * i % 40 for i in range(count)]
    seen: list[int] = []
    caller = threading.get_ident()

    def ready(begin: int, end: int, tokens: Sequence[int]) -> None:
        assert threading.get_ident() == caller
        assert begin == len(seen) < end
        seen.extend(tokens[row] for row in watched[begin:end])

    assert CpuSampler(library)(logits, filters, draws, watch=Watch(ready, watched)) == want
    assert seen == [want[row] for row in watched]

    def fail(*_: object) -> None:
        seen.append(-1)
        raise ValueError("not this one")

    seen.clear()
    if count:
        with pytest.raises(ValueError, match="not this one"):
            CpuSampler(library)(logits, filters, draws, watch=Watch(fail, watched))
        assert seen == [-1]
    with pytest.raises(ValueError, match="rows that are watched"):
        CpuSampler(library)(logits, filters, draws, watch=Watch(ready, [*watched, 40]))


def test_some_rows_draw_again(library: CpuLibrary, threads: int) -> None:
    """With the next numbers where they have no filters, and with the same where they have."""
    logits, draws = torch.randn(len(FILTERS), 3000), draws_of(len(FILTERS))
    places = [*range(0, len(FILTERS), 2)][::-1]
    own = [FILTERS[i] for i in places]
    filters = [filter_of(one) for one in own]
    found = CpuSampler(library)(logits, filters, draws, at=places, again=True)
    keys = draw_keys(np.array(places, np.uint64), np.array(places, np.uint64))  # as draws_of has seeds and positions
    others = np.where([one.unfiltered for one in filters], next_keys(keys), keys)
    assert draws.keys(places, [one.unfiltered for one in filters]).tolist() == others.tolist()
    assert any(one.unfiltered for one in filters)
    assert found == defined(logits[places], own, others)
    for wrong in ([0, len(FILTERS)], [-1, 0], [0]):
        with pytest.raises(ValueError, match="rows of logits"):
            CpuSampler(library)(logits, filters[:2], draws, at=wrong)


def test_few_tokens_that_filters_leave_are_said(library: CpuLibrary) -> None:
    """As models that know what they want have it: nearly all of the sum in few tokens."""
    logits = torch.randn(300, 5000, generator=torch.Generator().manual_seed(1))
    logits[torch.arange(300), torch.arange(300) * 7] = 16.0
    for params in (SamplingParams(top_p=0.9), SamplingParams(top_k=20, top_p=0.8), SamplingParams(min_p=0.1)):
        kept = np.zeros((300, MOST_KEPT), np.int64)
        CpuSampler(library)(logits, [filter_of(params)] * 300, draws_of(300), kept=kept)
        assert (kept[:, 0] == np.arange(300) * 7).all()
        assert (kept[:, 1:] == -1).all()


def test_a_row_that_is_not_finite_is_bad_alone(library: CpuLibrary) -> None:
    logits = torch.randn(6, 1000)
    logits[1, 999] = float("nan")
    logits[2, 0] = float("inf")
    logits[3] = float("-inf")
    params = [FILTERS[0], FILTERS[1], FILTERS[3], FILTERS[7], FILTERS[0], FILTERS[1]]
    draws = draws_of(6)
    got = CpuSampler(library)(logits, [filter_of(one) for one in params], draws)
    assert got[1:4] == [-1, -1, -1]
    good = [0, 4, 5]
    assert [got[i] for i in good] == defined(logits[good], [params[i] for i in good], draws.keys()[good])
    rows = [SamplerRow(one.replace(logprobs=2), i, stop_ids=(), prompt=(), output=()) for i, one in enumerate(params)]
    found = sample(logits, rows)
    assert found.bad_rows == (1, 2, 3)
    assert found.logprobs is not None
    assert [one is None for one in found.logprobs] == [False, True, True, True, False, False]


DRAWS, BATCH = 1_000_000, 50_000


def chi_square_of(operator: CpuSampler, params: SamplingParams, draws_at: Callable[[int], Draws]) -> float:
    """Return chi-square of a million draws, per degree of freedom; tokens that are filtered out must not come."""
    logits = torch.randn(1, 140, generator=torch.Generator().manual_seed(3)) * 1.5
    logits[0, 30:70] = -np.inf
    probs = filter_batch((logits - logits.max()) / params.temperature, [params])[0].double().numpy()
    counts = np.zeros(logits.shape[1], np.int64)
    filters = [filter_of(params)] * BATCH
    for begin in range(0, DRAWS, BATCH):
        tokens = operator(logits.expand(BATCH, -1), filters, draws_at(begin))
        counts += np.bincount(tokens, minlength=len(counts))
    expected = DRAWS * probs / probs.sum()
    common = expected > 20
    assert counts.sum() == DRAWS
    assert not counts[probs == 0].any()
    left = np.array([*counts[common], counts[~common].sum()]), np.array([*expected[common], expected[~common].sum()])
    possible = left[1] > 0
    return float((((left[0] - left[1]) ** 2)[possible] / left[1][possible]).sum() / (possible.sum() - 1))


CHI_SQUARE_LIMIT = 2.0
"""Per degree of freedom, of 29 at least: once in 800 tries at most, and seeds are fixed."""


@pytest.mark.parametrize(
    "params",
    [SamplingParams(temperature=0.7), SamplingParams(temperature=1.3, top_p=0.9), SamplingParams(top_k=30)],
    ids=["0.7", "1.3, top-p", "top-k"],
)
def test_a_million_draws_follow_the_probabilities(library: CpuLibrary, params: SamplingParams) -> None:
    found = chi_square_of(CpuSampler(library), params, lambda begin: draws_of(BATCH, begin))
    assert found < CHI_SQUARE_LIMIT


def test_random_numbers_that_repeat_are_noticed(library: CpuLibrary) -> None:
    params = SamplingParams(temperature=0.7)
    assert chi_square_of(CpuSampler(library), params, lambda _: draws_of(BATCH)) > 2 * CHI_SQUARE_LIMIT
