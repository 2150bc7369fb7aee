"""From a policy's scores to a pair: the best one, ties at random, or one drawn by softmax."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence

import msgspec

from baton.types import PrefillPath
from baton_router.scheduler.policies.base import Ratings


class Choice(msgspec.Struct):
    """Where a request goes.

    Attributes:
        decode: Position among the decode instances.
        prefill: Position among the prefill instances; ``None``: none is used, or there is none.
        path: Where the prompt is computed; ``None``: the decode instance decides by its threshold.
        score: The winner's.
    """

    decode: int
    prefill: int | None
    path: PrefillPath | None
    score: float


def choose(ratings: Ratings, rng: random.Random) -> Choice:
    """Take the best pair, or draw one; there must be a decode instance."""
    prefill, decode = ratings.prefill.totals, ratings.decode.totals
    if ratings.pairs is None and ratings.local is None and ratings.store is None:
        # Nothing couples the two: the best of each is the best pair, and a softmax over pairs is one over each.
        d = _pick(decode, ratings.temperature, rng)
        if not prefill:
            return Choice(d, None, PrefillPath.LOCAL, decode[d])
        p = _pick(prefill, ratings.temperature, rng)
        return Choice(d, p, None, decode[d] + prefill[p])
    flat = _flat(ratings, range(len(decode)))
    at = _pick(flat, ratings.temperature, rng)
    d, column = divmod(at, len(flat) // len(decode))
    prefill_at, path = _option(ratings, column)
    return Choice(d, prefill_at, path, flat[at])


def best_option(ratings: Ratings, d: int) -> tuple[int | None, PrefillPath | None, float]:
    """Return the best that decode instance ``d`` can be part of: prefill instance, path and score."""
    flat = _flat(ratings, [d])
    at = flat.index(max(flat))
    return (*_option(ratings, at), flat[at])


def prefill_order(ratings: Ratings, choice: Choice, limit: int, rng: random.Random) -> list[int]:
    """Return prefill instances for the chosen decode instance, the chosen one first, then the best, ties at random."""
    total = len(ratings.prefill.totals)
    if not total or limit <= 0:
        return []
    if limit == 1 and choice.prefill is not None:
        return [choice.prefill]
    values = _column(ratings, choice.decode)
    first = int(rng.random() * total)
    order = sorted([*range(first, total), *range(first)], key=values.__getitem__, reverse=True)
    if choice.prefill is not None and order[0] != choice.prefill:
        order.remove(choice.prefill)
        order.insert(0, choice.prefill)
    return order[:limit]


def _option(ratings: Ratings, column: int) -> tuple[int | None, PrefillPath | None]:
    """Return what a column of :func:`_flat` stands for."""
    num_prefills = len(ratings.prefill.totals)
    if column < num_prefills:
        return column, PrefillPath.REMOTE if ratings.local is not None else None
    has_local = ratings.local is not None or not num_prefills
    return None, PrefillPath.LOCAL if column == num_prefills and has_local else PrefillPath.STORE


def _column(ratings: Ratings, d: int) -> list[float]:
    """Return every prefill instance's part in the score of its pair with decode instance ``d``."""
    totals = ratings.prefill.totals
    if ratings.pairs is None:
        return totals
    return [a + b for a, b in zip(totals, ratings.pairs.rows[d], strict=True)]


def _flat(ratings: Ratings, decodes: Iterable[int]) -> list[float]:
    """Return the scores of everything that can be chosen: per decode instance all prefills, local, store."""
    prefill, local, store = ratings.prefill.totals, ratings.local, ratings.store
    rows = ratings.pairs.rows if ratings.pairs is not None else None
    flat: list[float] = []
    for d in decodes:
        base = ratings.decode.totals[d]
        if rows is None:
            flat += [base + a for a in prefill]
        else:
            flat += [base + a + b for a, b in zip(prefill, rows[d], strict=True)]
        if local is not None:
            flat.append(base + local.totals[d])
        elif not prefill:
            flat.append(base)
        if store is not None:
            flat.append(base + store.totals[d])
    return flat


def _pick(values: Sequence[float], temperature: float, rng: random.Random) -> int:
    best = max(values)
    if temperature > 0 and best > -math.inf:
        weights = [math.exp((value - best) / temperature) for value in values]
        return rng.choices(range(len(values)), weights)[0]
    ties = values.count(best)
    if ties == 1:
        return values.index(best)
    skip = int(rng.random() * ties)
    at = values.index(best)
    for _ in range(skip):
        at = values.index(best, at + 1)
    return at
