"""What a policy gets and what it answers, and how the winner is chosen from that.

A policy scores, it does not choose: it gives each prefill instance, each decode instance and, if it wants, each pair a
number made of named terms; :func:`choose` takes the best pair. Most terms belong to one instance of the pair alone, so
16 x 16 pairs cost a policy 32 numbers, not 256. Numbers of instances are arrays, so that hundreds of them are scored in
a few steps, and pairs that cannot be the best are not scored at all.

:func:`choose_plainly` defines the choice. It also serves policies that rate pairs in Python; for all others the same is
computed in C (:mod:`~baton_router.scheduler.kernels`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from baton.native import address_of
from baton.types import InstanceId, PrefillPath, Role
from baton_router.scheduler import kernels

FloatArray = npt.NDArray[np.float64]
Numbers = Sequence[float] | FloatArray
SideRows = npt.NDArray[np.void]
"""An array of ``kernels.SIDE_ROW.dtype``."""
_SMOOTHING = 0.25
"""Share of a request's own work in the relative load. In simulations 0.1 to 0.5 gave the lowest time to first token:
1.0 balances too late, 0 gives up a tenth of the hits while the cluster is nearly idle."""
_ROUNDING = 1e-9
"""Relative difference by which a bound may be below a score whose terms were added in another order."""


class Request(msgspec.Struct):
    """The request to place.

    Attributes:
        tokens: Number of prompt tokens, output generated so far included.
        sequences: Number of sequences generated from this prompt.
        session: Conversation that the request belongs to; empty: unknown.
        max_tokens: Maximum number of tokens to generate; ``None``: unknown.
        expected_tokens: Tokens that each sequence is expected to generate; ``None``: unknown.
        kv_bytes_per_token: KV bytes per token on the wire.
        threshold: ``--remote-prefill-threshold``: missing tokens below which decode prefills itself; overrides costs.
    """

    tokens: int
    sequences: int = 1
    session: str = ""
    max_tokens: int | None = None
    expected_tokens: int | None = None
    kv_bytes_per_token: float = 0.0
    threshold: int | None = None


class InstanceLoad(Protocol):
    """The load of one instance (:class:`baton_router.registry.load.LoadTracker`).

    Attributes:
        requests: Sequences that this router has in flight there.
    """

    requests: int

    @property
    def work(self) -> float:
        """Work in flight, in tokens."""

    @property
    def prompts_waiting(self) -> int:
        """Prompt tokens that the instance has yet to compute."""


class SidePart(Protocol):
    """The instances of a side (:class:`baton_router.scheduler.roster.Part`)."""

    @property
    def role(self) -> Role: ...

    @property
    def ids(self) -> Sequence[InstanceId]: ...

    @property
    def trackers(self) -> Sequence[InstanceLoad]: ...


class Side(msgspec.Struct):
    """The instances of one role that can be chosen: entry ``i`` of each list and array is of instance ``i``.

    Numbers may be given as lists; they are kept as arrays of float64.

    Attributes:
        role: Role of the instances.
        ids: Names of the instances.
        matched: Leading prompt tokens in the instance's own memory.
        match_rates: Matched prompt tokens / prompt tokens, 0 to 1; tokens in slower tiers count by the tier's weight.
        work: Work in flight, in tokens (see ``baton_router.registry.load``).
        loads: Work in flight and a share of what was done in the last minutes, in tokens.
        cost: Work that this request would add to any instance if nothing matched, in tokens.
        trackers: Load of the instances, in full.
        loadable: Leading prompt tokens that the instance holds or can load from a slower tier or the KV store;
            ``None``: for every instance the same as ``matched``.
        tiers: Tokens that each instance can load, by tier; ``None`` like ``loadable``.
        rows: The numbers as rows of ``kernels.SIDE_ROW``: the arrays are columns of it; ``None``: they are separate.
    """

    role: Role
    ids: Sequence[InstanceId]
    matched: FloatArray
    match_rates: FloatArray
    work: FloatArray
    loads: FloatArray
    cost: float
    trackers: Sequence[InstanceLoad] = ()
    loadable: FloatArray | None = None
    tiers: list[dict[str, int]] | None = None
    rows: SideRows | None = None

    @classmethod
    def of_rows(cls, part: SidePart, rows: SideRows, cost: float) -> Side:
        """Return the side whose numbers are columns of rows.

        Args:
            part: Instances of the rows.
            rows: Numbers, ``[instances]`` of ``kernels.SIDE_ROW``.
            cost: Work that the request would add, in tokens.
        """
        columns = rows["matched"], rows["match_rate"], rows["work"], rows["load"]
        return cls(part.role, part.ids, *columns, cost, part.trackers, None, None, rows)

    def __post_init__(self) -> None:
        if self.rows is None:
            self.matched = as_floats(self.matched)
            self.match_rates = as_floats(self.match_rates)
            self.work = as_floats(self.work)
            self.loads = as_floats(self.loads)

    def __len__(self) -> int:
        return len(self.ids)

    def sequences(self) -> FloatArray:
        """Return how many sequences this router has in flight on each instance."""
        if self.rows is not None:
            return self.rows["sequences"]
        return np.array([x.requests for x in self.trackers] or [0] * len(self), float)

    def prompts_waiting(self) -> FloatArray:
        """Return how many prompt tokens each instance has yet to compute by itself."""
        if self.rows is not None:
            return self.rows["waiting"]
        return np.array([x.prompts_waiting for x in self.trackers] or [0] * len(self), float)

    def packed(self) -> SideRows:
        """Return :attr:`rows`, or new ones filled from separate arrays."""
        if self.rows is not None:
            return self.rows
        rows = np.empty(len(self), kernels.SIDE_ROW.dtype)
        rows["matched"] = self.matched
        rows["match_rate"] = self.match_rates
        rows["work"] = self.work
        rows["load"] = self.loads
        rows["sequences"] = self.sequences()
        rows["waiting"] = self.prompts_waiting()
        return rows


class Scores(msgspec.Struct):
    """One number per instance of a side, higher is better, and the named terms that add up to it."""

    terms: dict[str, FloatArray]
    totals: FloatArray
    _column: tuple[int, int] | None = None

    @classmethod
    def of(cls, **terms: Numbers) -> Scores:
        """Add up terms, each a list or an array with an entry per instance; a cost is a negative term."""
        columns = {name: as_floats(values) for name, values in terms.items()}
        totals = np.zeros(0)
        for number, column in enumerate(columns.values()):
            totals = totals + column if number else column
        return cls(columns, totals)

    def column(self) -> tuple[int, int]:
        """Return the address of the totals, and the bytes from one to the next."""
        if self._column is None:
            self.totals = as_floats(self.totals)
            self._column = address_of(self.totals), self.totals.strides[0]
        return self._column

    def explain(self, at: int) -> dict[str, float]:
        """Return the terms of instance ``at``."""
        return {name: float(values[at]) for name, values in self.terms.items()}


class Rows(Protocol):
    """A row per decode instance with a number per prefill instance; a list of lists is one."""

    def __getitem__(self, d: int, /) -> Numbers:
        """Return the row of decode instance ``d``."""


class Pairs(msgspec.Struct):
    """Scores of pairs beyond those of their two instances.

    Attributes:
        rows: ``rows[d][p]`` is added to the scores of decode instance ``d`` and prefill instance ``p``. A row may be
            computed when it is read; :func:`choose` reads only those that may have the best pair.
        explain: Returns the named terms of ``(p, d)``, which add up to ``rows[d][p]``; called only for explanations.
        most: Per decode instance, the upper bound of ``rows[d][p]`` plus the score of ``p`` over all ``p``; ``None``:
            unknown, so every row is read.
        packed: The same as a ``kernels.PAIRS`` structure, which points to arrays that ``rows`` keeps; ``None``: pairs
            are rated in Python.
    """

    rows: Rows
    explain: Callable[[int, int], dict[str, float]]
    most: FloatArray | None = None
    packed: bytes | None = None


class Ratings(msgspec.Struct):
    """A policy's answer.

    The score of the pair ``(p, d)`` is ``prefill[p] + decode[d] + pairs[d][p]``; of the prefill on ``d`` itself
    ``decode[d] + local[d]``; of loading from the KV store and computing the rest on ``d`` ``decode[d] + store[d]``.
    Entries of ``-inf`` are impossible.

    Attributes:
        prefill: Scores of the prefill instances.
        decode: Scores of the decode instances.
        pairs: Scores of pairs; ``None``: a pair's score is the sum of its instances'.
        local: Scores of the prefill on each decode instance itself; ``None``: whether to prefill locally is left to the
            decode instance's threshold.
        store: Scores of loading from the KV store first, per decode instance; ``None``: not a candidate.
        leave: Whether the decode instance of a pair still decides by its threshold, although ``local`` was rated.
        temperature: Temperature of the softmax by which the winner is drawn, in units of the score; 0: the best wins.
    """

    prefill: Scores
    decode: Scores
    pairs: Pairs | None = None
    local: Scores | None = None
    store: Scores | None = None
    temperature: float = 0.0
    leave: bool = False

    @property
    def couples(self) -> bool:
        """Whether it rates more than prefill and decode instances by themselves."""
        return not (self.pairs is None and self.local is None and self.store is None)


class Policy(Protocol):
    """Scores the instances for one request. Called for every request, on the event loop: must not block.

    Attributes:
        name: Name of the policy, as in ``--policy``.
    """

    name: str

    def score(self, request: Request, prefill: Side, decode: Side) -> Ratings:
        """Score all instances for a request; must not change any state.

        Args:
            request: Request to place.
            prefill: Prefill instances, may be empty.
            decode: Decode instances, may be empty.

        Returns:
            A number per instance, higher is better; optionally terms of pairs, of local prefill and of the store.
        """

    def chosen(self, request: Request, instances: Sequence[InstanceId]) -> None:
        """Record where a request was placed.

        Args:
            request: Request that was placed.
            instances: The decode instance, then the prefill instance if one was chosen.
        """
        return None


def as_floats(values: Numbers) -> FloatArray:
    """Return numbers as an array of float64; no copy of one that is."""
    return np.asarray(values, np.float64)


def relative_loads(side: Side) -> FloatArray:
    """Return each instance's load relative to the mean of all, smoothed by a part of the request's own work.

    ``(load_i + s) / (mean(load) + s)`` with ``s = cost / 4``: 1.0 for all on an idle cluster and in perfect balance.
    The smoothing bounds the ratio while there is little in flight (without it the only busy one of eight instances
    is at 8 times the mean after a single request) and vanishes beside the queues of a busy cluster.
    """
    loads = as_floats(side.loads)
    if not loads.size:
        return loads
    smoothing = _SMOOTHING * side.cost
    mean = float(np.add.reduce(loads)) / loads.size + smoothing
    if mean <= 0:
        return np.ones(loads.size)
    return (loads + smoothing) / mean


# --- the choice ---


class Choice(msgspec.Struct):
    """Where a request goes.

    Attributes:
        decode: Position among the decode instances.
        prefill: Position among the prefill instances; ``None``: none is used, or there is none.
        path: Where the prompt is computed; ``None``: the decode instance decides by its threshold.
        score: Score of the chosen option.
    """

    decode: int
    prefill: int | None
    path: PrefillPath | None
    score: float


def choose(ratings: Ratings, rng: random.Random) -> Choice:
    """Choose the best option, or draw one by the temperature; there must be a decode instance.

    Raises:
        ValueError: A score is not a number.
    """
    if ratings.temperature > 0:
        return _draw_by_softmax(ratings, rng)
    pairs = ratings.pairs
    if pairs is not None and pairs.packed is None:
        return choose_plainly(ratings, rng)
    draws = [-1.0, -1.0]
    options = _pack_options(ratings)
    packed = None if pairs is None else pairs.packed
    need, d, option, score = kernels.choose(options, packed, draws)
    while need:
        draws[need - 1] = rng.random()
        need, d, option, score = kernels.choose(options, packed, draws)
    return Choice(d, *option_at(ratings, option), score)


def choose_plainly(ratings: Ratings, rng: random.Random) -> Choice:
    """Choose the best option: the definition of what :func:`choose` does without a temperature.

    Without scores of pairs the best prefill instance is the same for all decode instances: so the decode instance with
    the best option is chosen first, then its option. With them the best of all options is chosen. Equal ones are drawn.
    """
    if ratings.pairs is not None:
        return _best_pair(ratings, ratings.pairs, rng)
    decode = ratings.decode.totals
    if not (ratings.couples or ratings.prefill.totals.size):
        d = _draw_best(decode, rng)
        return Choice(d, *option_at(ratings, 0), float(decode[d]))
    if ratings.couples:
        d = _draw_best(np.array([option_scores(ratings, d).max() for d in range(decode.size)]), rng)
        option = _draw_best(option_scores(ratings, d), rng)
    else:
        d = _draw_best(decode, rng)
        option = _draw_best(ratings.prefill.totals, rng)
    return Choice(d, *option_at(ratings, option), float(option_scores(ratings, d)[option]))


def _draw_best(values: FloatArray, rng: random.Random) -> int:
    """Return the position of the highest value, by draw if there are several."""
    ties = np.flatnonzero(values == values.max())
    if not ties.size:
        raise ValueError("a policy's score is not a number")
    return int(ties[0 if ties.size == 1 else int(rng.random() * ties.size)])


def _best_pair(ratings: Ratings, pairs: Pairs, rng: random.Random) -> Choice:
    """Choose the best of all options; decode instances whose bound is below the best found so far are skipped."""
    bounds = _upper_bounds(ratings, pairs)
    best = -math.inf
    tied: list[tuple[int, npt.NDArray[np.intp]]] = []
    for d in np.argsort(-bounds, kind="stable").tolist():
        if bounds[d] < best - _ROUNDING * abs(best):
            break
        scores = option_scores(ratings, d)
        top = float(scores.max())
        if top > best:
            best = top
            tied = []
        if top == best:
            tied.append((d, np.flatnonzero(scores == top)))
    skip = int(rng.random() * sum(options.size for _, options in tied))
    for d, options in tied:
        if skip < options.size:
            return Choice(d, *option_at(ratings, int(options[skip])), best)
        skip -= options.size
    raise ValueError("a policy's score is not a number")


def _upper_bounds(ratings: Ratings, pairs: Pairs) -> FloatArray:
    """Return an upper bound of each decode instance's best option."""
    decode = ratings.decode.totals
    bound: FloatArray | float = 0.0 if ratings.local is None else -math.inf
    if ratings.prefill.totals.size:
        if pairs.most is None:
            return np.full(decode.size, math.inf)
        bound = pairs.most
    for alone in (ratings.local, ratings.store):
        if alone is not None:
            bound = np.maximum(bound, alone.totals)
    return decode + bound


def _draw_by_softmax(ratings: Ratings, rng: random.Random) -> Choice:
    prefill = ratings.prefill.totals
    decode = ratings.decode.totals
    if not ratings.couples:
        # The softmax over pairs is one over each side.
        d = _draw_weighted(decode, ratings.temperature, rng)
        if not prefill.size:
            return Choice(d, None, PrefillPath.LOCAL, float(decode[d]))
        p = _draw_weighted(prefill, ratings.temperature, rng)
        return Choice(d, p, None, float(decode[d] + prefill[p]))
    rows = np.array([option_scores(ratings, d) for d in range(decode.size)])
    d, option = divmod(_draw_weighted(rows.ravel(), ratings.temperature, rng), rows.shape[1])
    return Choice(d, *option_at(ratings, option), float(rows[d, option]))


def _draw_weighted(values: FloatArray, temperature: float, rng: random.Random) -> int:
    best = values.max()
    if best == -math.inf:  # all are impossible, and alike
        return int(rng.random() * values.size) if values.size > 1 else 0
    weights = np.exp((values - best) / temperature).cumsum()
    return int(np.searchsorted(weights, rng.random() * weights[-1], side="right"))


def prefill_order(
    ratings: Ratings, choice: Choice, limit: int, rng: random.Random, *, plainly: bool = False
) -> list[int]:
    """Return prefill instances for the chosen decode instance, the chosen one first, then the best, ties at random.

    Args:
        ratings: A policy's answer.
        choice: The choice among its options.
        limit: Maximum number of prefill instances.
        rng: Source of the draws.
        plainly: Compute in Python even what C can compute.
    """
    total = ratings.prefill.totals.size
    if not total or limit <= 0:
        return []
    if limit == 1 and choice.prefill is not None:
        return [choice.prefill]
    first = int(rng.random() * total)
    pairs = ratings.pairs
    if plainly or (pairs is not None and pairs.packed is None):
        values = _prefill_parts(ratings, choice.decode)
        best = np.argsort(np.concatenate((-values[first:], -values[:first])), kind="stable")[: limit + 1]
        order: list[int] = ((best + first) % total).tolist()
    else:
        packed = None if pairs is None else pairs.packed
        order = kernels.prefill_order(_pack_options(ratings), packed, choice.decode, first, min(limit + 1, total))
    if choice.prefill is not None and order[0] != choice.prefill:
        order = [choice.prefill, *(p for p in order if p != choice.prefill)]
    return order[:limit]


# --- options: what a decode instance can be chosen with ---


def option_scores(ratings: Ratings, d: int) -> FloatArray:
    """Return the scores of the options of decode instance ``d``: all prefill instances, then local, then store."""
    alone = [x.totals[d] for x in (ratings.local, ratings.store) if x is not None]
    parts = _prefill_parts(ratings, d)
    if ratings.local is None and not parts.size:
        alone.insert(0, 0.0)
    options: FloatArray = np.concatenate((parts, alone)) if alone else parts
    return options + float(ratings.decode.totals[d])


def option_at(ratings: Ratings, option: int) -> tuple[int | None, PrefillPath | None]:
    """Return the prefill instance and the path of an option, by its position in :func:`option_scores`."""
    num_prefills = ratings.prefill.totals.size
    if option < num_prefills:
        return option, PrefillPath.REMOTE if ratings.local is not None and not ratings.leave else None
    has_local = ratings.local is not None or not num_prefills
    return None, PrefillPath.LOCAL if option == num_prefills and has_local else PrefillPath.STORE


def best_option(ratings: Ratings, d: int) -> tuple[int | None, PrefillPath | None, float]:
    """Return the best option of decode instance ``d``: prefill instance, path and score."""
    options = option_scores(ratings, d)
    at = int(options.argmax())
    return (*option_at(ratings, at), float(options[at]))


def _prefill_parts(ratings: Ratings, d: int) -> FloatArray:
    """Return every prefill instance's part in the score of its pair with decode instance ``d``."""
    totals = ratings.prefill.totals
    return totals if ratings.pairs is None else totals + as_floats(ratings.pairs.rows[d])


def _pack_options(ratings: Ratings) -> bytes:
    prefill = ratings.prefill
    decode = ratings.decode
    return kernels.OPTIONS.pack(
        *prefill.column(),
        *decode.column(),
        *(_NO_COLUMN if ratings.local is None else ratings.local.column()),
        *(_NO_COLUMN if ratings.store is None else ratings.store.column()),
        prefill.totals.size,
        decode.totals.size,
    )


_NO_COLUMN = (0, 0)
