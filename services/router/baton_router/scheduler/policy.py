"""What a policy sees and what it answers, and how the winner is taken from that.

A policy scores, it does not choose: it gives each prefill instance, each decode instance and, if it wants, each pair a
number made of named terms; :func:`choose` takes the best pair. Most terms belong to one instance of the pair alone, so
16 x 16 pairs cost a policy 32 numbers, not 256.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import msgspec

from baton.types import InstanceId, PrefillPath, Role

_SMOOTHING = 0.25
"""Share of a request's own work in the relative load. In simulations 0.1 to 0.5 gave the lowest time to first token:
1.0 balances too late, 0 gives up a tenth of the hits while the cluster is nearly idle."""


class Request(msgspec.Struct):
    """The request that is to be placed.

    Attributes:
        tokens: Prompt tokens, output generated so far included.
        sequences: Sequences from this prompt.
        session: The conversation it belongs to; empty: unknown.
        max_tokens: Tokens it may generate; ``None``: unknown.
        kv_bytes_per_token: Bytes of a token's KV on the wire.
        threshold: ``--remote-prefill-threshold``: missing tokens below which decode prefills itself; overrides costs.
    """

    tokens: int
    sequences: int = 1
    session: str = ""
    max_tokens: int | None = None
    kv_bytes_per_token: float = 0.0
    threshold: int | None = None


class InstanceLoad(Protocol):
    """What is known of one instance's load (:class:`baton_router.registry.load.LoadTracker`).

    Attributes:
        requests: Sequences that this router has in flight there.
    """

    requests: int

    @property
    def work(self) -> float:
        """Everything in flight, in tokens."""

    @property
    def prompts_waiting(self) -> int:
        """Prompt tokens that it has yet to compute."""


class Side(msgspec.Struct):
    """The instances of one role that can be chosen, as parallel lists: entry ``i`` of each is of instance ``i``.

    Attributes:
        role: Theirs.
        ids: Their names.
        matched: Leading prompt tokens that lie in the instance's own memory.
        match_rates: Matched prompt tokens / prompt tokens, 0 to 1; tokens in slower tiers count by the tier's weight.
        work: Work in flight, in tokens (see ``baton_router.registry.load``).
        loads: Work in flight and a share of what was done in the last minutes, in tokens.
        cost: Work that this request would add to any of them if nothing matched, in the same unit.
        trackers: All that is known of their load.
        loadable: Leading prompt tokens that the instance holds or can load from a slower tier or the KV store;
            ``None``: for every instance the same as ``matched``.
        tiers: Which tiers these come from, and how many tokens from each; ``None`` like ``loadable``.
    """

    role: Role
    ids: list[InstanceId]
    matched: list[int]
    match_rates: list[float]
    work: list[float]
    loads: list[float]
    cost: float
    trackers: Sequence[InstanceLoad] = ()
    loadable: list[int] | None = None
    tiers: list[dict[str, int]] | None = None

    def __len__(self) -> int:
        return len(self.ids)


class Scores(msgspec.Struct):
    """One number per instance of a side, higher is better, and the named terms that add up to it."""

    terms: dict[str, list[float]]
    totals: list[float]

    @classmethod
    def of(cls, **terms: list[float]) -> Scores:
        """Add up terms, each a list with an entry per instance; a cost is a negative term."""
        columns = list(terms.values())
        if len(columns) == 1:
            return cls(terms, columns[0])
        if len(columns) == 2:
            return cls(terms, [a + b for a, b in zip(*columns, strict=True)])
        return cls(terms, [sum(values) for values in zip(*columns, strict=True)])

    def explain(self, at: int) -> dict[str, float]:
        """Return one instance's terms."""
        return {name: values[at] for name, values in self.terms.items()}


class Pairs(msgspec.Struct):
    """What speaks for a pair beyond what speaks for each of its two.

    Attributes:
        rows: ``rows[d][p]`` is added to the scores of decode instance ``d`` and prefill instance ``p``.
        explain: Returns the named terms of ``(p, d)``, which add up to ``rows[d][p]``; called only for explanations.
    """

    rows: list[list[float]]
    explain: Callable[[int, int], dict[str, float]]


class Ratings(msgspec.Struct):
    """A policy's answer.

    The score of the pair ``(p, d)`` is ``prefill[p] + decode[d] + pairs[d][p]``; of the prefill on ``d`` itself
    ``decode[d] + local[d]``; of loading from the KV store and computing the rest on ``d`` ``decode[d] + store[d]``.
    Entries of ``-inf`` are impossible.

    Attributes:
        prefill: Per prefill instance.
        decode: Per decode instance.
        pairs: Per pair; ``None``: nothing to add.
        local: Per decode instance; ``None``: whether to prefill locally is left to the decode instance's threshold.
        store: Per decode instance; ``None``: not a candidate.
        temperature: Of the softmax by which the winner is drawn, in units of the score; 0: the best wins.
    """

    prefill: Scores
    decode: Scores
    pairs: Pairs | None = None
    local: Scores | None = None
    store: Scores | None = None
    temperature: float = 0.0


class Policy(Protocol):
    """Scores the instances for one request. Called for every request, on the event loop: must not block.

    Attributes:
        name: As ``--policy`` has it.
    """

    name: str

    def score(self, request: Request, prefill: Side, decode: Side) -> Ratings:
        """Score both sides, either of which may be empty; changes nothing."""

    def chosen(self, request: Request, instances: Sequence[InstanceId]) -> None:
        """Take note of which instances the request went to: decode first, then prefill if one was chosen."""
        return None


def relative_loads(side: Side) -> list[float]:
    """Return each instance's load relative to the mean of all, smoothed by a part of the request's own work.

    ``(load_i + s) / (mean(load) + s)`` with ``s = cost / 4``: 1.0 for all on an idle cluster and in perfect balance.
    The smoothing keeps the ratio tame while there is little in flight (without it the only busy one of eight instances
    stands at 8 times the mean after a single request) and vanishes beside the queues of a busy cluster.
    """
    loads = side.loads
    if not loads:
        return []
    smoothing = _SMOOTHING * side.cost
    mean = sum(loads) / len(loads) + smoothing
    if mean <= 0:
        return [1.0] * len(loads)
    scale, offset = 1.0 / mean, smoothing / mean
    return [load * scale + offset for load in loads]


def scaled(values: Iterable[float], factor: float) -> list[float]:
    """Return the values times a factor."""
    return [value * factor for value in values]


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
