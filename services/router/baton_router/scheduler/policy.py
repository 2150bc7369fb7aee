"""What a policy sees and what it answers, and how the winner is taken from that.

A policy scores, it does not choose: it gives each prefill instance, each decode instance and, if it wants, each pair a
number made of named terms; :func:`choose` takes the best pair. Most terms belong to one instance of the pair alone, so
16 x 16 pairs cost a policy 32 numbers, not 256. Numbers of instances are arrays, so that hundreds of them are scored in
a few steps, and pairs that cannot be the best are not scored at all.
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
_SMOOTHING = 0.25
"""Share of a request's own work in the relative load. In simulations 0.1 to 0.5 gave the lowest time to first token:
1.0 balances too late, 0 gives up a tenth of the hits while the cluster is nearly idle."""
_ROUNDING = 1e-9
"""By how much of it a bound may lie below a score that was added up in another order."""


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


class SidePart(Protocol):
    """Whose numbers a side has (:class:`baton_router.scheduler.roster.Part`)."""

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
        block: Rows of ``matched``, ``match_rates``, ``work``, ``loads`` and what :meth:`sequences` and
            :meth:`prompts_waiting` return, ``[6, instances]``: the arrays are views of it; ``None``: they are arrays of
            their own.
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
    block: FloatArray | None = None
    _place: int = 0

    @classmethod
    def of(cls, part: SidePart, block: FloatArray, cost: float, place: int) -> Side:
        """Return the side whose numbers are the rows of a block.

        Args:
            part: Whose they are.
            block: The numbers.
            cost: Of the request.
            place: Where the block is in memory; 0: unknown.
        """
        matched, rates, work, loads, _, _ = block
        return cls(part.role, part.ids, matched, rates, work, loads, cost, part.trackers, None, None, block, place)

    def __post_init__(self) -> None:
        if self.block is not None:
            return
        self.matched = as_floats(self.matched)
        self.match_rates = as_floats(self.match_rates)
        self.work = as_floats(self.work)
        self.loads = as_floats(self.loads)

    def __len__(self) -> int:
        return len(self.ids)

    def sequences(self) -> FloatArray:
        """Return how many sequences this router has in flight on each instance."""
        if self.block is not None:
            sequences: FloatArray = self.block[4]
            return sequences
        return np.array([x.requests for x in self.trackers] or [0] * len(self), float)

    def prompts_waiting(self) -> FloatArray:
        """Return how many prompt tokens each instance has yet to compute by itself."""
        if self.block is not None:
            waiting: FloatArray = self.block[5]
            return waiting
        return np.array([x.prompts_waiting for x in self.trackers] or [0] * len(self), float)

    def packed(self) -> tuple[FloatArray, int]:
        """Return :attr:`block`, or the same made of arrays of their own, and where it is in memory."""
        block = self.block
        if block is None:
            rows = (self.matched, self.match_rates, self.work, self.loads, self.sequences(), self.prompts_waiting())
            block = np.array(rows, np.float64)
        return block, self._place or address_of(block)


class Scores(msgspec.Struct):
    """One number per instance of a side, higher is better, and the named terms that add up to it."""

    terms: dict[str, FloatArray]
    totals: FloatArray
    _place: int = 0

    @classmethod
    def of(cls, **terms: Numbers) -> Scores:
        """Add up terms, each a list or an array with an entry per instance; a cost is a negative term."""
        columns = {name: as_floats(values) for name, values in terms.items()}
        totals = np.zeros(0)
        for number, column in enumerate(columns.values()):
            totals = totals + column if number else column
        return cls(columns, totals)

    @property
    def place(self) -> int:
        """Where the totals are in memory."""
        if not self._place:
            self.totals = np.ascontiguousarray(self.totals)
            self._place = address_of(self.totals)
        return self._place

    def explain(self, at: int) -> dict[str, float]:
        return {name: float(values[at]) for name, values in self.terms.items()}


class Rows(Protocol):
    """A row per decode instance with a number per prefill instance; a list of lists is one."""

    def __getitem__(self, d: int, /) -> Numbers:
        """Return the row of decode instance ``d``."""


class Pairs(msgspec.Struct):
    """What speaks for a pair beyond what speaks for each of its two.

    Attributes:
        rows: ``rows[d][p]`` is added to the scores of decode instance ``d`` and prefill instance ``p``. It may make a
            row when it is asked for; :func:`choose` asks for those alone that may have the best pair.
        explain: Returns the named terms of ``(p, d)``, which add up to ``rows[d][p]``; called only for explanations.
        most: Per decode instance, what ``rows[d][p]`` and the score of ``p`` are together at most, whatever ``p``;
            ``None``: unknown, so every row is looked at.
        packed: The same as native code reads it (:func:`~baton_router.scheduler.kernels.pack_pairs`); ``rows`` keeps
            what it points to. ``None``: there is none.
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
        prefill: Per prefill instance.
        decode: Per decode instance.
        pairs: Per pair; ``None``: nothing to add.
        local: Per decode instance; ``None``: whether to prefill locally is left to the decode instance's threshold.
        store: Per decode instance; ``None``: not a candidate.
        leave: Whether the decode instance of a pair still decides by its threshold, although ``local`` was rated.
        temperature: Of the softmax by which the winner is drawn, in units of the score; 0: the best wins.
    """

    prefill: Scores
    decode: Scores
    pairs: Pairs | None = None
    local: Scores | None = None
    store: Scores | None = None
    temperature: float = 0.0
    leave: bool = False


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


def as_floats(values: Numbers) -> FloatArray:
    """Return numbers as an array, which they may be already."""
    return np.asarray(values, np.float64)


def relative_loads(side: Side) -> FloatArray:
    """Return each instance's load relative to the mean of all, smoothed by a part of the request's own work.

    ``(load_i + s) / (mean(load) + s)`` with ``s = cost / 4``: 1.0 for all on an idle cluster and in perfect balance.
    The smoothing keeps the ratio tame while there is little in flight (without it the only busy one of eight instances
    stands at 8 times the mean after a single request) and vanishes beside the queues of a busy cluster.
    """
    loads = as_floats(side.loads)
    if not loads.size:
        return loads
    smoothing = _SMOOTHING * side.cost
    mean = float(np.add.reduce(loads)) / loads.size + smoothing
    if mean <= 0:
        return np.ones(loads.size)
    return (loads + smoothing) / mean


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
    """Take the best pair, or draw one; there must be a decode instance.

    Raises:
        ValueError: A score is not a number.
    """
    if ratings.temperature > 0:
        return _draw(ratings, rng)
    pairs = ratings.pairs
    if pairs is not None and pairs.packed is None:
        return _best(ratings, pairs, rng)
    draws = [-1.0, -1.0]
    options = _packed(ratings)
    packed = None if pairs is None else pairs.packed
    need, d, column, score = kernels.choose(options, packed, draws)
    while need:
        draws[need - 1] = rng.random()
        need, d, column, score = kernels.choose(options, packed, draws)
    return Choice(d, *_option(ratings, column), score)


def _packed(ratings: Ratings) -> bytes:
    prefill = ratings.prefill
    decode = ratings.decode
    local = ratings.local
    store = ratings.store
    return kernels.pack_options(
        prefill.place,
        decode.place,
        0 if local is None else local.place,
        0 if store is None else store.place,
        (prefill.totals.size, decode.totals.size),
    )


def _draw(ratings: Ratings, rng: random.Random) -> Choice:
    """Draw a pair by a softmax."""
    prefill = ratings.prefill.totals
    decode = ratings.decode.totals
    if ratings.pairs is None and ratings.local is None and ratings.store is None:
        # Nothing couples the two: a softmax over pairs is one over each.
        d = _pick(decode, ratings.temperature, rng)
        if not prefill.size:
            return Choice(d, None, PrefillPath.LOCAL, float(decode[d]))
        p = _pick(prefill, ratings.temperature, rng)
        return Choice(d, p, None, float(decode[d] + prefill[p]))
    rows = np.array([_options(ratings, d) for d in range(decode.size)])
    d, column = divmod(_pick(rows.ravel(), ratings.temperature, rng), rows.shape[1])
    return Choice(d, *_option(ratings, column), float(rows[d, column]))


def _best(ratings: Ratings, pairs: Pairs, rng: random.Random) -> Choice:
    """Take the best of everything that can be chosen, ties at random; decode instances that cannot have it are left."""
    most = _most(ratings, pairs)
    best = -math.inf
    ties = 0
    found: list[tuple[int, npt.NDArray[np.intp]]] = []
    for d in np.argsort(-most, kind="stable").tolist():
        if most[d] < best - _ROUNDING * abs(best):
            break
        options = _options(ratings, d)
        top = float(options.max())
        if top < best:
            continue
        if top > best:
            best = top
            found = []
            ties = 0
        columns = np.flatnonzero(options == top)
        found.append((d, columns))
        ties += columns.size
    skip = int(rng.random() * ties)
    for d, columns in found:
        if skip < columns.size:
            return Choice(d, *_option(ratings, int(columns[skip])), best)
        skip -= columns.size
    raise ValueError("a policy's score is not a number")


def _most(ratings: Ratings, pairs: Pairs) -> FloatArray:
    """Return what each decode instance's best option scores at most."""
    most: FloatArray | float = 0.0 if not ratings.prefill.totals.size and ratings.local is None else -math.inf
    if ratings.prefill.totals.size:
        most = pairs.most if pairs.most is not None else math.inf
    for alone in (ratings.local, ratings.store):
        if alone is not None:
            most = np.maximum(most, alone.totals)
    return ratings.decode.totals + most


def best_option(ratings: Ratings, d: int) -> tuple[int | None, PrefillPath | None, float]:
    """Return the best that decode instance ``d`` can be part of: prefill instance, path and score."""
    options = _options(ratings, d)
    at = int(options.argmax())
    return (*_option(ratings, at), float(options[at]))


def prefill_order(ratings: Ratings, choice: Choice, limit: int, rng: random.Random) -> list[int]:
    """Return prefill instances for the chosen decode instance, the chosen one first, then the best, ties at random."""
    total = ratings.prefill.totals.size
    if not total or limit <= 0:
        return []
    if limit == 1 and choice.prefill is not None:
        return [choice.prefill]
    first = int(rng.random() * total)
    pairs = ratings.pairs
    if pairs is None or pairs.packed is not None:
        packed = None if pairs is None else pairs.packed
        order = kernels.prefill_order(_packed(ratings), packed, choice.decode, first, min(limit + 1, total))
    else:
        values = _column(ratings, choice.decode)
        best = np.argsort(np.concatenate((-values[first:], -values[:first])), kind="stable")[: limit + 1]
        order = ((best + first) % total).tolist()
    if choice.prefill is not None and order[0] != choice.prefill:
        order = [choice.prefill, *(p for p in order if p != choice.prefill)]
    return order[:limit]


def _option(ratings: Ratings, column: int) -> tuple[int | None, PrefillPath | None]:
    """Return what a column of :func:`_options` stands for."""
    num_prefills = ratings.prefill.totals.size
    if column < num_prefills:
        return column, PrefillPath.REMOTE if ratings.local is not None and not ratings.leave else None
    has_local = ratings.local is not None or not num_prefills
    return None, PrefillPath.LOCAL if column == num_prefills and has_local else PrefillPath.STORE


def _column(ratings: Ratings, d: int) -> FloatArray:
    """Return every prefill instance's part in the score of its pair with decode instance ``d``."""
    totals = ratings.prefill.totals
    return totals if ratings.pairs is None else totals + as_floats(ratings.pairs.rows[d])


def _options(ratings: Ratings, d: int) -> FloatArray:
    """Return the scores of everything that decode instance ``d`` can be chosen with: all prefills, local, store."""
    alone = [x.totals[d] for x in (ratings.local, ratings.store) if x is not None]
    column = _column(ratings, d)
    if ratings.local is None and not column.size:
        alone.insert(0, 0.0)
    options: FloatArray = np.concatenate((column, alone)) if alone else column
    return options + float(ratings.decode.totals[d])


def _pick(values: FloatArray, temperature: float, rng: random.Random) -> int:
    best = values.max()
    if best == -math.inf:  # all are impossible, and alike
        return int(rng.random() * values.size) if values.size > 1 else 0
    weights = np.exp((values - best) / temperature).cumsum()
    return int(np.searchsorted(weights, rng.random() * weights[-1], side="right"))
