"""Scores and choices in C against their definitions in Python, on instances, speeds and scores of all kinds."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.types import InstanceId, Role
from baton_router.registry.load import LoadTracker
from baton_router.scheduler.policies import Pairs, PolicyContext, Ratings, Request, Scores, Side
from baton_router.scheduler.policies.cost_ms import CostMs
from baton_router.scheduler.policies.match_minus_load import MatchMinusLoad
from baton_router.scheduler.policy import Choice, choose, choose_plainly, option_at, option_scores, prefill_order
from baton_router.scheduler.speeds import Speeds

seeds = st.integers(0, 2**32)
counts = st.integers(0, 9)


def random_side(rng: random.Random, role: Role, count: int, tokens: int, cost: float) -> Side:
    """Instances that hold some of a prompt and are more or less busy, many of them alike."""
    trackers = []
    for _ in range(count):
        tracker = LoadTracker(role)
        tracker.requests, tracker.prompts = rng.choice((0, 0, 3, rng.randrange(50))), rng.choice((0, 0, 5000))
        trackers.append(tracker)
    matched = [float(rng.choice((0, 0, tokens // 2, rng.randint(0, tokens)))) for _ in range(count)]
    work = [rng.choice((0.0, 0.0, 1000.0, rng.random() * 1e5)) for _ in range(count)]
    loads = [x + rng.choice((0.0, 0.0, 500.0, rng.random() * 1e4)) for x in work]
    ids = [InstanceId(f"{role.value}-{at}") for at in range(count)]
    made = Side(role, ids, matched, [m / max(1, tokens) for m in matched], work, loads, cost, trackers)  # type: ignore[arg-type]
    if role is Role.DECODE and rng.random() < 0.3:
        made.loadable = np.array([min(tokens, m + rng.choice((0, 100, 1000))) for m in matched], float)
    return made


def learnt(rng: random.Random, prefill: Side, decode: Side) -> Speeds:
    """Speeds of some instances and pairs, of which some are too old to count."""
    clock = [0.0]
    speeds = Speeds(lambda: clock[0])
    known = rng.choice((0.0, 0.5, 1.0))
    for at in (0.0, 50.0):
        clock[0] = at
        for amount in (100.0, 1000.0, 4000.0):
            for p in prefill.ids:
                if rng.random() < known:
                    speeds.prefill.add(p, amount, 3.0 + amount * rng.choice((0.1, 0.1, 0.4)))
                for d in decode.ids:
                    if rng.random() < known:
                        speeds.transfer.add((p, d), amount, amount * rng.choice((1e-3, 1e-3, 5e-3)))
            for d in decode.ids:
                if rng.random() < known:
                    speeds.local.add(d, amount, 2.0 + amount * rng.choice((0.2, 0.3)))
                    speeds.decode.add(d, amount / 100, rng.choice((15.0, 15.0, 60.0)))
                    speeds.store.add(d, amount, amount * 1e-3)
    clock[0] = rng.choice((50.0, 100.0, 1000.0))
    return speeds


def same(scores: Scores | None, expected: Scores | None) -> None:
    assert (scores is None) == (expected is None)
    if scores is not None and expected is not None:
        assert scores.totals.tolist() == pytest.approx(expected.totals.tolist(), rel=1e-9, abs=1e-9)
        assert scores.terms.keys() == expected.terms.keys()
        for at in range(expected.totals.size):
            terms = expected.explain(at)
            assert scores.explain(at) == pytest.approx(terms, rel=1e-9, abs=1e-9)
            assert sum(terms.values()) == pytest.approx(expected.totals[at], rel=1e-9, abs=1e-9)


def same_choice(ratings: Ratings, plain: Ratings, seed: int) -> None:
    """The winner is the defined one; where sums in another order make a tie of it or no tie, one that is as good."""
    choice = choose(ratings, random.Random(seed))
    best = choose_plainly(plain, random.Random(seed))
    assert choice.score == pytest.approx(best.score, rel=1e-9, abs=1e-9)
    scores = option_scores(plain, choice.decode)
    options = {option_at(plain, at): score for at, score in enumerate(scores.tolist())}
    assert options[choice.prefill, choice.path] == pytest.approx(best.score, rel=1e-9, abs=1e-9)


@settings(max_examples=150, deadline=None)
@given(seeds, counts, st.integers(1, 9), st.booleans(), st.sampled_from([MatchMinusLoad, CostMs]))
def test_scores_are_those_of_the_definition(
    seed: int, prefills: int, decodes: int, threshold: bool, kind: type[MatchMinusLoad] | type[CostMs]
) -> None:
    rng = random.Random(seed)
    tokens = rng.choice((0, 1, 1000, 20_000))
    prefill = random_side(rng, Role.PREFILL, prefills, tokens, tokens + 64)
    decode = random_side(rng, Role.DECODE, decodes, tokens, rng.choice((0.0, tokens + 64)))
    request = Request(
        tokens,
        rng.choice((1, 4)),
        max_tokens=rng.choice((None, 10)),
        kv_bytes_per_token=rng.choice((0.0, 1.0)),
        threshold=rng.choice((0, 500)) if threshold else None,
    )
    context = PolicyContext(beta=rng.choice((0.0, 0.5, 2.0)), speeds=learnt(rng, prefill, decode))
    policy = kind.make(context)
    ratings = policy.score(request, prefill, decode)
    plain = policy.plain_score(request, prefill, decode)
    same(ratings.prefill, plain.prefill)
    same(ratings.decode, plain.decode)
    same(ratings.local, plain.local)
    same(ratings.store, plain.store)
    assert (ratings.leave, ratings.temperature) == (plain.leave, plain.temperature)
    assert (ratings.pairs is None) == (plain.pairs is None)
    if ratings.pairs is not None and plain.pairs is not None:
        assert ratings.pairs.most is not None
        for d in range(decodes):
            row = list(plain.pairs.rows[d])
            assert list(ratings.pairs.rows[d]) == pytest.approx(row, rel=1e-9, abs=1e-9)
            assert [sum(ratings.pairs.explain(p, d).values()) for p in range(prefills)] == pytest.approx(row)
            best = max(a + b for a, b in zip(plain.prefill.totals, row, strict=True))
            assert best <= ratings.pairs.most[d] + 1e-6
    for draw in range(3):
        a, b = random.Random(draw), random.Random(draw)
        choice = choose(ratings, a)
        assert choice == choose_plainly(ratings, b), "the same ratings, in C and in Python"
        for limit in (1, 3, 20):
            order = prefill_order(ratings, choice, limit, a)
            assert order == prefill_order(ratings, choice, limit, b, plainly=True)
        assert a.getstate() == b.getstate(), "the draws are as many"
        same_choice(ratings, plain, draw)


whole = st.integers(-2, 2).map(float)
"""Few different scores: many ties, and sums that are exact in any order."""


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_the_winner_is_one_of_the_best_options_and_any_of_them(data: st.DataObject) -> None:
    prefills, decodes = data.draw(st.integers(0, 5)), data.draw(st.integers(1, 5))
    column = st.one_of(whole, st.just(-math.inf))

    def scores(count: int) -> list[float]:
        return data.draw(st.lists(column, min_size=count, max_size=count))

    ratings = Ratings(
        Scores.of(score=scores(prefills)), Scores.of(score=scores(decodes)), leave=data.draw(st.booleans())
    )
    for name in ("local", "store"):
        if data.draw(st.booleans()):
            setattr(ratings, name, Scores.of(score=scores(decodes)))
    if prefills and data.draw(st.booleans()):
        rows = [scores(prefills) for _ in range(decodes)]
        bounds = np.array([max(p + x for p, x in zip(ratings.prefill.totals, row, strict=True)) for row in rows])
        ratings.pairs = Pairs(rows, lambda p, d: {}, data.draw(st.sampled_from([None, bounds])))
    every = {
        (d, *option_at(ratings, at)): score
        for d in range(decodes)
        for at, score in enumerate(option_scores(ratings, d).tolist())
    }
    best = {option for option, score in every.items() if score == max(every.values())}
    if not ratings.couples:  # each side is chosen by itself: -inf of one does not make all of the other alike
        tops = ratings.decode.totals.max(), ratings.prefill.totals.max(initial=-math.inf)
        best = {
            (d, p, path)
            for d, p, path in best
            if ratings.decode.totals[d] == tops[0] and (p is None or ratings.prefill.totals[p] == tops[1])
        }
    chosen = set()
    for seed in range(4 * len(best) + 4):
        a, b = random.Random(seed), random.Random(seed)
        choice = choose(ratings, a)
        assert choice == choose_plainly(ratings, b)
        assert (choice.decode, choice.prefill, choice.path) in best
        assert choice.score == max(every.values())
        chosen.add((choice.decode, choice.prefill, choice.path))
        limit = data.draw(st.integers(0, 6)) if seed < 4 else 2
        order = prefill_order(ratings, choice, limit, a)
        assert order == prefill_order(ratings, choice, limit, b, plainly=True)
        assert a.getstate() == b.getstate(), "the draws are as many"
        values = option_scores(ratings, choice.decode)[:prefills].tolist()
        rest = [p for p in order if p != choice.prefill]
        assert [values[p] for p in rest] == sorted((values[p] for p in rest), reverse=True)
    assert len(chosen) > 1 or len(best) == 1


def test_a_score_that_is_no_number_is_refused() -> None:
    good, bad = Scores.of(a=[0.0, 1.0]), Scores.of(a=[0.0, math.nan])
    for ratings in (Ratings(good, bad), Ratings(bad, good), Ratings(good, good, local=bad)):
        with pytest.raises(ValueError, match="not a number"):
            choose(ratings, random.Random(0))
        with pytest.raises(ValueError, match="not a number"):
            choose_plainly(ratings, random.Random(0))


def test_scores_of_every_nth_number_are_read_as_they_are() -> None:
    """A policy of another package may give views."""
    values = np.array([[3.0, 9.0], [1.0, 0.0], [2.0, 7.0]])
    ratings = Ratings(Scores({}, values[:, 1]), Scores({}, values[::-1, 0]))
    assert choose(ratings, random.Random(0)) == Choice(2, 0, None, 12.0)
