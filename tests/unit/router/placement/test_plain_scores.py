"""Native scores and choices against plain ones, on instances, speeds and scores of all kinds."""

from __future__ import annotations

import math
import random
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.router.placement.plain_scores import (
    PlainRatings,
    choose_plainly,
    cost_ms,
    match_minus_load,
    options,
    order_plainly,
)

from baton.types import InstanceId, Role
from baton_router.registry.load import LoadTracker
from baton_router.scheduler.policies import Pairs, PolicyContext, Ratings, Request, Scores, Side, make_policy
from baton_router.scheduler.policy import Choice, choose, prefill_order
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


def same(found: Scores | None, expected: list[float] | None) -> None:
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        assert found.totals.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)
        added = [sum(found.explain(at).values()) for at in range(len(expected))]
        assert added == pytest.approx(expected, rel=1e-9, abs=1e-9)


def same_choice(ratings: Ratings, rated: PlainRatings, seed: int) -> None:
    """The winner is the plain one; where sums in another order make a tie of it or no tie, one that is as good."""
    choice, plain = choose(ratings, random.Random(seed)), choose_plainly(rated, random.Random(seed))
    assert choice.score == pytest.approx(plain.score, rel=1e-9, abs=1e-9)
    mine = {(p, path): score for score, p, path in options(rated, choice.decode)}
    assert mine[choice.prefill, choice.path] == pytest.approx(plain.score, rel=1e-9, abs=1e-9)


@settings(max_examples=150, deadline=None)
@given(seeds, counts, st.integers(1, 9), st.booleans(), st.sampled_from(["match_minus_load", "cost_ms"]))
def test_scores_are_those_of_the_description(
    seed: int, prefills: int, decodes: int, threshold: bool, name: str
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
    speeds, beta = learnt(rng, prefill, decode), rng.choice((0.0, 0.5, 2.0))
    ratings = make_policy(name, PolicyContext(beta=beta, speeds=speeds)).score(request, prefill, decode)
    if name == "cost_ms":
        rated = cost_ms(speeds, request, prefill, decode)
    else:
        rated = match_minus_load(speeds, beta, request, prefill, decode)
    same(ratings.prefill, rated.prefill)
    same(ratings.decode, rated.decode)
    same(ratings.local, rated.local)
    same(ratings.store, rated.store)
    assert (ratings.pairs is None) == (rated.pairs is None)
    if ratings.pairs is not None and rated.pairs is not None:
        assert ratings.pairs.most is not None
        for d, row in enumerate(rated.pairs):
            assert list(ratings.pairs.rows[d]) == pytest.approx(row, rel=1e-9, abs=1e-9)
            assert [sum(ratings.pairs.explain(p, d).values()) for p in range(prefills)] == pytest.approx(row)
            best = max(a + b for a, b in zip(rated.prefill, row, strict=True))
            assert best <= ratings.pairs.most[d] + 1e-6
        written = msgspec.structs.replace(ratings.pairs, packed=None)
        in_python = msgspec.structs.replace(ratings, pairs=written)
        for draw in range(3):
            a, b = random.Random(draw), random.Random(draw)
            choice = choose(ratings, a)
            assert choice == choose(in_python, b), "pairs that native code reads, and as a policy's own rows"
            for limit in (1, 3, 20):
                assert prefill_order(ratings, choice, limit, a) == prefill_order(in_python, choice, limit, b)
            assert a.getstate() == b.getstate()
    for draw in range(3):
        same_choice(ratings, rated, draw)


whole = st.integers(-2, 2).map(float)
"""Few different scores: many ties, and sums that are exact in any order."""


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_the_winner_and_its_ties_are_those_of_the_description(data: st.DataObject) -> None:
    prefills, decodes = data.draw(st.integers(0, 5)), data.draw(st.integers(1, 5))
    column = st.one_of(whole, st.just(-math.inf))

    def scores(count: int) -> list[float]:
        return data.draw(st.lists(column, min_size=count, max_size=count))

    rated = PlainRatings(scores(prefills), scores(decodes), leave=data.draw(st.booleans()))
    for name in ("local", "store"):
        if data.draw(st.booleans()):
            setattr(rated, name, scores(decodes))
    if prefills and data.draw(st.booleans()):
        rated.pairs = [scores(prefills) for _ in range(decodes)]

    def made(values: list[float] | None) -> Any:
        return None if values is None else Scores.of(score=values)

    ratings = Ratings(
        *(made(rated.prefill), made(rated.decode)),
        pairs=None if rated.pairs is None else Pairs(rated.pairs, lambda p, d: {}, exact_bound(rated)),
        local=made(rated.local),
        store=made(rated.store),
        leave=rated.leave,
    )
    for seed in range(4):
        a, b = random.Random(seed), random.Random(seed)
        choice = choose(ratings, a)
        assert choice == choose_plainly(rated, b)
        limit = data.draw(st.integers(0, 6))
        assert prefill_order(ratings, choice, limit, a) == order_plainly(rated, choice, limit, b)
        assert a.getstate() == b.getstate(), "the draws are as many"


def exact_bound(rated: PlainRatings) -> Any:
    assert rated.pairs is not None
    return np.array([max(p + x for p, x in zip(rated.prefill, row, strict=True)) for row in rated.pairs])


def test_a_score_that_is_no_number_is_refused() -> None:
    good, bad = Scores.of(a=[0.0, 1.0]), Scores.of(a=[0.0, math.nan])
    for ratings in (Ratings(good, bad), Ratings(bad, good), Ratings(good, good, local=bad)):
        with pytest.raises(ValueError, match="not a number"):
            choose(ratings, random.Random(0))


def test_scores_of_every_nth_number_are_read_as_they_are() -> None:
    """A policy of another package may give views."""
    values = np.array([[3.0, 9.0], [1.0, 0.0], [2.0, 7.0]])
    ratings = Ratings(Scores({}, values[:, 1]), Scores({}, values[::-1, 0]))
    assert choose(ratings, random.Random(0)) == Choice(2, 0, None, 12.0)
