"""What a policy sees and what it answers.

A policy scores, it does not choose: it gives each prefill instance, each decode instance and, if it wants, each pair a
number made of named terms, and ``baton_router.scheduler.policies.choice`` takes the best pair. Most of what speaks
for a pair speaks for one of its two alone, so 16 x 16 pairs cost a policy 32 numbers, not 256.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import msgspec

from baton.types import InstanceId, Role
from baton_router.registry.load import InstanceLoad

_SMOOTHING = 0.25
"""Share of a request's own work in the relative load. In simulations 0.1 to 0.5 gave the lowest time to first token:
1.0 balances too late, 0 gives up a tenth of the hits while the cluster is nearly idle."""


class Request(msgspec.Struct):
    """The request that is to be placed.

    Attributes:
        tokens: Prompt tokens, output generated so far included.
        sequences: Sequences from this prompt.
        session: Whose conversation it belongs to; empty: nobody said.
        max_tokens: Tokens it may generate; ``None``: nobody said.
        kv_bytes_per_token: What a token's KV weighs on the wire.
        threshold: Missing tokens below which decode prefills by itself, where the operator set that; overrides costs.
    """

    tokens: int
    sequences: int = 1
    session: str = ""
    max_tokens: int | None = None
    kv_bytes_per_token: float = 0.0
    threshold: int | None = None


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
        books: The whole of what is known of their load.
        loadable: Leading prompt tokens that the instance holds or can load from a slower tier or the KV store;
            ``None``: nobody holds more than ``matched``.
        tiers: Which tiers these come from, and how many tokens from each; ``None`` like ``loadable``.
    """

    role: Role
    ids: list[InstanceId]
    matched: list[int]
    match_rates: list[float]
    work: list[float]
    loads: list[float]
    cost: float
    books: Sequence[InstanceLoad] = ()
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
        explain: Returns the named terms of ``(p, d)``, which add up to ``rows[d][p]``; called when somebody looks.
    """

    rows: list[list[float]]
    explain: Callable[[int, int], dict[str, float]]


class Ratings(msgspec.Struct):
    """A policy's answer.

    The score of the pair ``(p, d)`` is ``prefill[p] + decode[d] + pairs[d][p]``; of the prefill on ``d`` itself
    ``decode[d] + local[d]``; of loading from the KV store and computing the rest on ``d`` ``decode[d] + store[d]``.
    Entries of ``-inf`` cannot be had.

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
    """Scores the instances for one request. Called for every request, on the event loop: must not block."""

    name: str

    def score(self, request: Request, prefill: Side, decode: Side) -> Ratings:
        """Score both sides, either of which may be empty; changes nothing."""

    def chosen(self, request: Request, instances: Sequence[InstanceId]) -> None:
        """Tell which instances the request went to: decode first, then prefill if one was chosen."""


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
