"""The sampler against Hugging Face's logits processors, plain references and statistics."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from baton.engine.sampler import (
    CHUNK,
    draw,
    filter_batch,
    filtered_probs,
    sample,
    token_logprobs,
)
from baton.engine.sampler_row import SamplerRow, apply_edits
from baton.errors import InvalidRequestError
from baton.seeds import request_seed, sequence_seed
from baton.types import RANGES, SamplingParams
from baton_kernels.random_numbers import draw_keys, exponentials
from baton_kernels.token_mask import pack_mask

VOCAB = 97
NO_IDS = torch.zeros(1, 0, dtype=torch.int64)


def logits_of(seed: int, rows: int = 1, vocab: int = VOCAB, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def row(
    params: SamplingParams,
    *,
    seed: int = 0,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    stop: Sequence[int] = (),
) -> SamplerRow:
    return SamplerRow(params, seed, stop_ids=stop, prompt=prompt, output=output)


def edited(logits: torch.Tensor, one: SamplerRow) -> torch.Tensor:
    copy = logits.clone()
    if one.edits is not None:
        apply_edits(copy, [(0, one.edits, one.counts, one.position)])
    return copy


# Filters


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1000),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, -1, 1, 2, 10, VOCAB, 500]),
    top_p=st.sampled_from([1.0, 0.99, 0.7, 0.3, 0.01]),
    min_p=st.sampled_from([0.0, 0.01, 0.2, 1.0]),
)
def test_filters_equal_hugging_face(seed: int, temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    logits = logits_of(seed)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    expected = TemperatureLogitsWarper(temperature)(NO_IDS, logits.clone()) if temperature != 1.0 else logits.clone()
    if top_k > 0:
        expected = TopKLogitsWarper(top_k)(NO_IDS, expected)
    if top_p < 1.0:
        expected = TopPLogitsWarper(top_p)(NO_IDS, expected)
    if min_p > 0.0:
        expected = MinPLogitsWarper(min_p)(NO_IDS, expected)
    for probs in (filtered_probs(logits, [params]), filter_batch(logits / temperature, [params])):
        torch.testing.assert_close(probs / probs.sum(-1, keepdim=True), expected.softmax(-1), rtol=1e-4, atol=1e-7)


def test_filters_of_rows_do_not_touch_each_other() -> None:
    many = [
        SamplingParams(top_p=0.5),
        SamplingParams(top_k=3),
        SamplingParams(temperature=0.2, min_p=0.3),
        SamplingParams(),
        SamplingParams(top_k=20, top_p=0.9, min_p=0.05, temperature=1.3),
    ]
    logits = logits_of(3, rows=len(many), vocab=2000)
    together = filtered_probs(logits, many)
    for i, params in enumerate(many):
        assert torch.equal(together[i], filtered_probs(logits[i : i + 1], [params])[0])


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-10])
def test_a_temperature_next_to_zero_is_greedy(temperature: float) -> None:
    logits = logits_of(1, rows=3) * 50
    rows = [row(SamplingParams(temperature=temperature), seed=seed) for seed in range(3)]
    assert sample(logits.clone(), rows).token_ids == logits.argmax(-1).tolist()


# Edits


@settings(max_examples=40, deadline=None)
@given(
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=80),
    output=st.lists(st.integers(0, VOCAB - 1), max_size=80),
    penalty=st.sampled_from([0.5, 1.0, 1.3, 5.0]),
)
def test_repetition_penalty_equals_hugging_face(prompt: list[int], output: list[int], penalty: float) -> None:
    logits = logits_of(len(prompt))
    one = row(SamplingParams(repetition_penalty=penalty), prompt=prompt, output=output[:1])
    for token in output[1:]:
        one.append(token)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + output]), logits.clone())
    torch.testing.assert_close(edited(logits, one), expected)


def test_presence_and_frequency_count_the_output_alone() -> None:
    logits = logits_of(1)
    one = row(SamplingParams(presence_penalty=0.5, frequency_penalty=-0.25), prompt=[1, 2, 3], output=[3, 4, 4])
    expected = logits.clone()
    expected[0, 3] -= 0.5 - 0.25
    expected[0, 4] -= 0.5 - 2 * 0.25
    torch.testing.assert_close(edited(logits, one), expected)


def test_counts_grow_with_the_output() -> None:
    logits = torch.zeros(1, 1000)
    one = row(SamplingParams(frequency_penalty=1.0, repetition_penalty=1.1), prompt=range(10))
    for token in [*range(5, 700), 650]:
        one.append(token)
    values = edited(logits, one)[0]
    assert values[0] == 0.0
    assert values[650] == -2.0
    assert (values[5:650] == -1.0).all()
    assert (values[700:] == 0.0).all()


def test_all_penalties_together_come_in_order() -> None:
    logits = logits_of(1)
    params = SamplingParams(
        repetition_penalty=2.0, presence_penalty=1.0, frequency_penalty=0.5, logit_bias={4: 3.0, 9: -100.0}
    )
    one = row(params, prompt=[1, 4], output=[4, 5])
    expected = logits.clone()
    expected[0, 4] += 3.0
    expected[0, 9] -= 100.0
    for token in (1, 4, 5):
        expected[0, token] *= 2.0 if expected[0, token] < 0 else 0.5
    expected[0, 4] -= 1.5
    expected[0, 5] -= 1.5
    torch.testing.assert_close(edited(logits, one), expected)


def test_min_tokens_bans_stop_tokens_until_then() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 7] = 10.0
    logits[0, 8] = 5.0
    logits[0, 9] = 1.0
    one = row(SamplingParams(temperature=0.0, min_tokens=2), stop=[7, 8])
    tokens = []
    for _ in range(3):
        tokens += sample(logits.clone(), [one]).token_ids
        one.append(tokens[-1])
    assert tokens == [9, 9, 7]


def test_logit_bias_moves_the_choice_of_its_row_alone() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[:, 3] = 1.0
    rows = [row(SamplingParams(temperature=0.0, logit_bias={50: 100.0})), row(SamplingParams(temperature=0.0))]
    assert sample(logits, rows).token_ids == [50, 3]


# Draws


def test_draws_follow_the_distribution() -> None:
    draws = 20_000
    logits = logits_of(5, vocab=20, scale=1.0)
    params = SamplingParams(temperature=0.8, top_k=12)
    expected = filtered_probs(logits, [params])[0]
    expected = (expected / expected.sum()).double()
    rows = [row(params, seed=seed) for seed in range(draws)]
    counts = Counter(sample(logits.expand(draws, -1).clone(), rows).token_ids)
    assert sum(p > 0 for p in expected) == 12
    assert all(expected[token] > 0 for token in counts)
    kept = [token for token in range(20) if expected[token] > 0]
    chi2 = sum((counts[t] - draws * expected[t].item()) ** 2 / (draws * expected[t].item()) for t in kept)
    assert chi2 < 31.3  # 99.9th percentile for 11 degrees of freedom


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1000), vocab=st.sampled_from([1, 100, 128, 300, 1024]), kept=st.integers(1, 50))
def test_draws_are_those_of_two_plain_races(seed: int, vocab: int, kept: int) -> None:
    probs = logits_of(seed, vocab=vocab).softmax(-1)
    probs[0, torch.randperm(vocab, generator=torch.Generator().manual_seed(seed))[kept:]] = 0.0
    keys = draw_keys(np.array([seed], np.uint64), np.array([7], np.uint64))
    (token,) = draw(probs, keys)
    assert probs[0, token] > 0
    times = exponentials(keys, np.arange(1 << 32, (1 << 32) + vocab, dtype=np.uint64))[0]
    chunk_times = exponentials(keys, np.arange(-(-vocab // CHUNK), dtype=np.uint64))[0]
    chunks = [probs[0, at : at + CHUNK].double().numpy() for at in range(0, vocab, CHUNK)]
    arrivals = [time / max(float(p.sum()), 1e-300) for time, p in zip(chunk_times, chunks, strict=True)]
    chunk = arrivals.index(min(arrivals))
    inside = [times[chunk * CHUNK + i] / max(float(p), 1e-300) for i, p in enumerate(chunks[chunk])]
    assert token == chunk * CHUNK + inside.index(min(inside))


def test_draws_of_many_chunks_follow_the_distribution() -> None:
    probs = logits_of(3, vocab=640, scale=0.5).softmax(-1)
    draws = 64_000
    keys = draw_keys(np.arange(draws, dtype=np.uint64), np.full(draws, 5, np.uint64))
    counts = np.bincount(draw(probs.expand(draws, -1), keys), minlength=640)
    expected = draws * probs[0].double().numpy()
    assert ((counts - expected) ** 2 / expected).sum() < 755.0  # 99.9th percentile for 639 degrees of freedom


def test_rounding_hardly_ever_changes_a_draw() -> None:
    """Logits that differ ten times as much as those of other batch compositions in float32."""
    vocab, rows = 32_000, 200
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(rows, vocab, generator=generator) * 2.0
    probs = logits.softmax(-1)
    other = (logits + (torch.rand(rows, vocab, generator=generator) - 0.5) * 1e-4).softmax(-1)
    changed = 0
    for position in range(20):
        keys = draw_keys(np.arange(rows, dtype=np.uint64), np.full(rows, position, np.uint64))
        changed += sum(a != b for a, b in zip(draw(probs, keys), draw(other, keys), strict=True))
    assert changed <= 2  # of 4000; by inverse CDF over token ids it was 34


def test_numbers_are_independent_along_all_axes() -> None:
    seeds = np.arange(200, dtype=np.uint64).repeat(200)
    positions = np.tile(np.arange(200, dtype=np.uint64), 200)
    times = exponentials(draw_keys(seeds, positions), np.arange(2, dtype=np.uint64))
    assert times.min() > 0.0
    values = np.exp(-times[:, 0])
    counts = np.histogram(values, bins=64, range=(0, 1))[0]
    assert ((counts - 625) ** 2 / 625).sum() < 104.0  # 99.9th percentile for 63 degrees of freedom
    grid, other = values.reshape(200, 200), np.exp(-times[:, 1]).reshape(200, 200)
    for a, b in ((grid[:, :-1], grid[:, 1:]), (grid[:-1], grid[1:]), (grid, other)):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.02


def test_first_key_is_splitmix64() -> None:
    # The published first outputs of SplitMix64 seeded with 0 and 1234567.
    keys = draw_keys(np.array([0, 1234567], np.uint64), np.zeros(2, np.uint64))
    assert keys.tolist() == [0xE220A8397B1DCDAF, 6457827717110365317]


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    params = SamplingParams(temperature=1.0, top_p=0.95)
    logits = logits_of(2, rows=6, vocab=500)
    rows = [row(params, seed=i, output=[1] * i) for i in range(6)]
    together = sample(logits.clone(), rows).token_ids
    alone = [sample(logits[i : i + 1].clone(), rows[i : i + 1]).token_ids[0] for i in range(6)]
    mixed = sample(logits[[5, 0]].clone(), [rows[5], row(SamplingParams(temperature=0.0))]).token_ids
    assert together == alone
    assert mixed[0] == together[5]
    resumed = row(params, seed=5, output=[1, 1])
    for _ in range(3):
        resumed.append(1)
    assert sample(logits[5:].clone(), [resumed]).token_ids == together[5:]


def test_seeds_of_sequences_and_requests() -> None:
    assert sequence_seed(7, 0) == 7
    assert len({sequence_seed(7, i) for i in range(50)} | {sequence_seed(8, i) for i in range(50)}) == 100
    assert request_seed(1, "a") == request_seed(1, "a")
    assert len({request_seed(1, "a"), request_seed(1, "b"), request_seed(2, "a")}) == 3


def test_a_token_without_probability_is_never_drawn() -> None:
    probs = torch.zeros(1, 50)
    probs[0, :3] = torch.tensor([0.3, 0.3, 0.4])
    logits = probs.log()
    for seed in range(300):
        assert sample(logits.clone(), [row(SamplingParams(), seed=seed)]).token_ids[0] < 3


# Greedy, log probabilities, bad rows


def test_greedy_takes_the_first_of_equals() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[0, [30, 60]] = 4.0
    greedy = SamplingParams(temperature=0.0)
    assert sample(logits, [row(greedy), row(SamplingParams(top_k=1))]).token_ids == [30, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logprobs_are_of_the_unscaled_distribution_after_edits(dtype: torch.dtype) -> None:
    logits = logits_of(4, rows=3).to(dtype)
    params = SamplingParams(temperature=0.5, top_k=5, logprobs=3, logit_bias={11: 2.0})
    rows = [row(params, seed=1), row(SamplingParams(temperature=0.0)), row(SamplingParams(temperature=0.0, logprobs=0))]
    found = sample(logits.clone(), rows)
    assert found.logprobs is not None
    first, second, third = found.logprobs
    expected = logits.float()
    expected[0, 11] += 2.0
    reference = expected.log_softmax(-1)
    assert second is None
    assert first is not None
    assert third is not None
    assert first.token_id == found.token_ids[0]
    assert math.isclose(first.logprob, reference[0, first.token_id].item(), abs_tol=1e-5)
    assert first.rank == int((reference[0] > reference[0, first.token_id]).sum()) + 1
    assert [token for token, _ in first.top] == reference[0].topk(3).indices.tolist()
    assert third.rank == 1
    assert third.top == ()


def test_many_rows_of_logprobs_are_those_of_single_rows() -> None:
    logits = logits_of(8, rows=600)
    tokens = [i % VOCAB for i in range(600)]
    together = token_logprobs(logits, tokens, [i % 3 for i in range(600)])
    for i in (0, 255, 256, 599):
        assert together[i] == token_logprobs(logits[i : i + 1], tokens[i : i + 1], [i % 3])[0]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("params", [SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(logprobs=1)])
def test_a_row_that_is_not_finite_is_named(value: float, params: SamplingParams) -> None:
    logits = logits_of(1, rows=3)
    clean = sample(logits.clone(), [row(params)] * 3).token_ids
    logits[1] = value
    found = sample(logits, [row(params)] * 3)
    assert found.bad_rows == (1,)
    assert [found.token_ids[0], found.token_ids[2]] == [clean[0], clean[2]]


# Masks


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(seed=1, temperature=2.0, top_p=0.3),
        SamplingParams(seed=2, top_k=3, logprobs=2),
        SamplingParams(temperature=0.0, logit_bias={5: 100.0}, repetition_penalty=1.5),
    ],
    ids=["greedy", "top_p", "top_k", "edits"],
)
def test_a_mask_that_allows_one_token_decides_and_leaves_other_rows_alone(params: SamplingParams) -> None:
    logits, rows = logits_of(7, rows=3), [row(params, output=[1, 2], seed=9) for _ in range(3)]
    free = sample(logits.clone(), rows).token_ids
    only = np.zeros(VOCAB, np.bool_)
    only[41] = True
    rows[1].mask = pack_mask(only)
    out = sample(logits.clone(), rows)
    assert out.token_ids == [free[0], 41, free[2]]
    assert out.bad_rows == ()
    if out.logprobs is not None and out.logprobs[1] is not None:
        assert (out.logprobs[1].rank, out.logprobs[1].logprob) == (1, 0.0)


def test_a_mask_that_allows_nothing_is_a_bad_row() -> None:
    rows = [row(SamplingParams(temperature=0.0)), row(SamplingParams(seed=3))]
    rows[1].mask = pack_mask(np.zeros(VOCAB, np.bool_))
    assert sample(logits_of(1, rows=2), rows).bad_rows == (1,)


# Any parameters that are accepted

_EXTREMES = {name: (low, high) for name, low, high, _ in RANGES}


def _within(name: str, *usual: float) -> st.SearchStrategy[float]:
    return st.sampled_from([*_EXTREMES[name], *usual])


@settings(max_examples=200, deadline=None)
@given(
    temperature=_within("temperature", 1.0, 1e-40),
    top_p=_within("top_p", 0.9),
    top_k=st.sampled_from([-1, 0, 1, 5, VOCAB, 10 * VOCAB]),
    min_p=_within("min_p", 0.05),
    repetition=_within("repetition_penalty", 1.0, 1.2),
    presence=_within("presence_penalty", 0.0),
    frequency=_within("frequency_penalty", 0.0),
    seed=st.sampled_from([0, 2**63, 2**64 - 1]),
    bias=st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, 100.0]), max_size=3),
    scale=st.sampled_from([1e-3, 1.0, 1e4]),
)
def test_no_parameters_that_are_accepted_break_a_row_or_the_one_beside_it(
    temperature: float, top_p: float, top_k: int, min_p: float, repetition: float, presence: float, frequency: float,
    seed: int, bias: dict[int, float], scale: float,
) -> None:  # fmt: skip
    params = SamplingParams(
        temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, repetition_penalty=repetition,
        presence_penalty=presence, frequency_penalty=frequency, seed=seed, logit_bias=bias, logprobs=2, min_tokens=9,
    )  # fmt: skip
    params.validate(vocab_size=VOCAB)
    tokens = [1, 2, 2, 3]
    odd = row(params, seed=seed, prompt=tokens, output=tokens, stop=[VOCAB - 1])
    logits = logits_of(3, rows=2, scale=scale)
    found = sample(logits.clone(), [odd, row(SamplingParams(temperature=1.0), seed=4)])
    assert not found.bad_rows
    assert 0 <= found.token_ids[0] < VOCAB - 1
    alone = sample(logits[1:].clone(), [row(SamplingParams(temperature=1.0), seed=4)])
    assert found.token_ids[1] == alone.token_ids[0]


def test_penalties_that_overflow_are_refused() -> None:
    with pytest.raises(InvalidRequestError) as refused:
        SamplingParams(repetition_penalty=1e-40).validate(vocab_size=VOCAB)
    assert refused.value.field == "repetition_penalty"
