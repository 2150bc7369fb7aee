"""How many draft tokens a step verifies, by what steps take and how often drafts are right."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from baton.engine.speculation.speculator import (
    FIRST_TRIALS,
    MOST_PAUSE,
    RARE_TRIAL,
    Pace,
    Record,
    StepTimes,
    worth_drafting,
)


def flat(rows: float) -> float:
    return 1.0


def proportional(rows: float) -> float:
    return rows


def zen4(rows: float) -> float:
    """Milliseconds of one layer's linears by rows, as measured, and lines between."""
    return float(np.interp(rows, [1, 4, 6, 8, 16, 32, 288], [1.25, 1.56, 2.03, 2.5, 3.4, 6.1, 49.3]))


def run(
    time_of: Callable[[float], float],
    sequences: int,
    rate: float,
    *,
    first: float = 1.0,
    noise: float = 0.05,
    drafting: float = 0.0,
    seed: int = 0,
) -> tuple[float, float]:
    """Simulate steps with drafts of 16 tokens; returns tokens per time relative to none, and draft tokens per step.

    Args:
        time_of: What a step of so many rows takes.
        sequences: How many are decoded.
        rate: How often a draft token is right.
        first: The first step of each number of rows takes so many times as long.
        drafting: What a proposal takes.
        noise: Steps take up to such a share more or less.
        seed: Of that and of which tokens are right.
    """
    pace, rng, steps = Pace(), np.random.default_rng(seed), 400
    seen = set[int]()
    tokens = time = drafted = 0.0
    for step in range(steps):
        count, asked = 0, 0.0
        if not pace.wait():
            each, asked = np.full(16, rate).cumprod(), drafting
            chances = -np.sort(-np.tile(each, sequences), kind="stable")
            count = pace.choose(chances, sequences, sequences)
            gained = int((rng.random(count) < chances[:count]).sum())
        took = time_of(sequences + count) * rng.uniform(1.0 - noise, 1.0 + noise)
        if sequences + count not in seen:
            seen.add(sequences + count)
            took *= first
        took += asked
        pace.observe(sequences + count, took, asked, drafts=count > 0)
        if step >= steps // 2:
            tokens, time, drafted = tokens + sequences + (gained if count else 0), time + took, drafted + count
    return tokens / time / (sequences / time_of(sequences)), 2 * drafted / steps


def test_as_many_tokens_as_pay() -> None:
    assert run(flat, 1, 0.9)[1] > 12
    assert run(proportional, 1, 0.6)[1] < 0.2
    assert run(zen4, 1, 0.8)[0] > 1.9
    assert run(zen4, 1, 0.6)[0] > 1.5
    assert run(zen4, 4, 0.8)[0] > 1.3


@pytest.mark.parametrize("seed", range(12))
def test_slow_first_steps_do_not_end_drafts_that_pay(seed: int) -> None:
    assert run(zen4, 4, 0.8, first=2.5, noise=0.3, seed=seed)[0] > 1.2
    assert run(zen4, 8, 0.8, first=2.5, noise=0.3, seed=seed)[0] > 1.15


@pytest.mark.parametrize("time_of", [flat, proportional, zen4])
@pytest.mark.parametrize("sequences", [1, 4, 8, 32])
@pytest.mark.parametrize("rate", [0.01, 0.1, 0.3, 0.6, 0.8])
def test_drafts_that_do_not_pay_cost_next_to_nothing(
    time_of: Callable[[float], float], sequences: int, rate: float
) -> None:
    assert run(time_of, sequences, rate)[0] > 0.97


@pytest.mark.parametrize("rate", [0.1, 0.6, 0.9])
@pytest.mark.parametrize("cost", [0.1, 1.0, 10.0])
def test_a_drafter_that_takes_more_than_it_gives_is_seldom_asked(cost: float, rate: float) -> None:
    assert run(flat, 1, rate, drafting=cost)[0] > 0.97


def test_what_all_sizes_have_in_common_is_learnt_from_one() -> None:
    times, rows = StepTimes(), np.array([1.0, 5.0])
    for _ in range(50):
        times.observe(1, 1.0)
        times.observe(5, 1.4)
    before = times.relative(rows)
    assert before[1] / before[0] == pytest.approx(1.4, rel=0.02)
    for _ in range(200):  # a longer context, and nothing but drafts
        times.observe(5, 2.8)
    after = times.relative(rows)
    assert 1.2 < after[1] / after[0] < 2.3
    for _ in range(60):
        times.observe(1, 2.0)
        times.observe(5, 2.8)
    again = times.relative(rows)
    assert again[1] / again[0] == pytest.approx(1.4, rel=0.05)


def test_sizes_that_were_not_seen_lie_between_and_beyond() -> None:
    times = StepTimes()
    times.observe(1, 1.0)
    few = times.relative(np.array([1.0, 2.0, 16.0, 1000.0]))
    assert (np.diff(few) > 0).all()
    assert few[1] / few[0] < 1.2
    assert few[3] / few[0] > 50


def test_looks_get_rarer_while_drafts_do_not_pay() -> None:
    pace = Pace()
    for _ in range(50):
        for rows in (1, 2, 4, 8):
            pace.times.observe(rows, float(rows))
    gaps, found, gap = [], [], 0
    for _ in range(600):
        if pace.wait():
            gap += 1
            continue
        gaps.append(gap)
        gap = 0
        found.append(pace.choose(np.array([0.5, 0.25]), 1, 1))
    assert gaps[:FIRST_TRIALS] == [0] * FIRST_TRIALS
    assert gaps[FIRST_TRIALS : FIRST_TRIALS + 4] == [0, 1, 3, 7]
    assert max(gaps) == MOST_PAUSE
    trials = [i for i, count in enumerate(found, 1) if count]
    assert trials == [i for i in range(1, len(found) + 1) if i <= FIRST_TRIALS or i % RARE_TRIAL == 0]


def test_a_drafter_that_promises_too_much_is_believed_less() -> None:
    record, given = Record(0.3), np.array([0.9, 0.9])
    assert record.chances(given, 2) == pytest.approx([0.9, 0.81])
    for _ in range(40):
        record.verified(2, 0, 1.71)
    assert record.chances(given, 2)[0] < 0.05
    assert record.chances(None, 3)[0] < 0.05
    for _ in range(2000):
        record.idle(0.3)
    assert record.chances(None, 1)[0] > 0.25


def test_what_is_worth_drafting_where_each_token_takes_time() -> None:
    assert [worth_drafting(rate) for rate in (0.0, 0.2, 0.5, 0.8, 1.0)] == [1, 1, 2, 6, 8]
