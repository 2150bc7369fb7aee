"""``cost_ms``: the pair that will be done soonest, by speeds learnt from requests that were served."""

from __future__ import annotations

import math
from typing import Self

import numpy as np

from baton.native import address_of
from baton_router.scheduler import kernels
from baton_router.scheduler.policies.registry import BuiltInPolicy, PolicyContext
from baton_router.scheduler.policy import FloatArray, Pairs, Ratings, Request, Scores, Side
from baton_router.scheduler.speeds import Lines, Speeds


class CostMs(BuiltInPolicy):
    """Predict each candidate's time and take the shortest: score = -predicted milliseconds, but for ``even_p``.

    Candidates are every pair, the prefill on each decode instance itself ("local"), and, where something lies in
    slower tiers or in the KV store, loading that and computing the rest on the decode instance ("store")::

        pair(p, d) = queue_p + prefill_p(missing of p and d) + transfer_pd(bytes that d misses) + decode_d + even_p
        local(d)   = queue_d + prefill_d(missing of d) * (1 + 0.1 * running_d) + decode_d
        store(d)   = queue_d + load_d(bytes from the store) + prefill_d(missing after it) * (...) + decode_d
        decode_d   = time per token with one more batch on d * tokens that the request will generate
        even_p     = a tenth of the shortest pair's prefill * min(1, relative load of p - the least of them)

    What decode holds and prefill misses is fetched, not computed, so a pair misses what neither has. All speeds are
    learnt (see ``baton_router.scheduler.speeds``): no hardware is configured. Conditional disaggregation needs no
    threshold: a short or mostly cached prompt is cheaper where it will be decoded. ``--remote-prefill-threshold`` still
    overrides.
    The last term is no time: among instances that are as fast as each other, one that was measured a little faster
    would get all the work of a cluster with little to do. Loads are those of the last minutes (see
    ``baton_router.registry.load``). Nothing counts against the least loaded instance: its pairs compare with local
    and store as they are.

    Risks: predictions are as good as the latest requests. Before the first ones are done all instances look alike, and
    load alone decides. An estimate that was not confirmed for a minute is forgotten.

    Args:
        speeds: What served requests have taught; the router feeds it.
    """

    name = "cost_ms"

    def __init__(self, speeds: Speeds) -> None:
        self._speeds = speeds

    @classmethod
    def make(cls, context: PolicyContext) -> Self:
        """Build it with the speeds learnt."""
        return cls(context.speeds)

    def score(self, request: Request, prefill: Side, decode: Side) -> Ratings:
        """Score both sides, their pairs, and what decode can do by itself."""
        speeds = self._speeds
        size = len(prefill)
        others = len(decode)
        expected = speeds.output_tokens
        if request.max_tokens is not None:
            expected = min(expected, request.max_tokens)
        lines = [x.lines(decode.ids).packed() for x in (speeds.decode, speeds.local, speeds.store)]
        computing = speeds.prefill.lines(prefill.ids)
        moving = speeds.transfer.lines(prefill.ids, decode.ids)
        sides = prefill.packed(), decode.packed()
        loadable = None if decode.loadable is None else np.ascontiguousarray(decode.loadable, np.float64)
        threshold = -1.0 if request.threshold is None else float(request.threshold)
        num_rows = 7 if loadable is None else 12
        out = np.empty(6 * size + num_rows * others)
        at = address_of(out)
        kernels.score_cost(
            (sides[0][1], sides[1][1], 0 if loadable is None else address_of(loadable), size, others),
            (computing.packed(), lines[0], lines[1], lines[2]),
            (moving.places[2], *moving.like),
            (float(request.tokens), request.sequences, expected, request.kv_bytes_per_token, prefill.cost, threshold),
            at,
        )
        rows = out[6 * size :].reshape(num_rows, others)
        end = at + 8 * 6 * size
        pairs = None
        if size:
            costs = _PairCosts(out[: 3 * size].reshape(3, size), rows[0], moving, request.kv_bytes_per_token, threshold)
            packed = kernels.pack_pairs(
                (at, at + 8 * size, at + 16 * size, end, end + 8 * others),
                moving.places[1],
                (0, 0, moving.places[0], *moving.like, moving.oldest),
                request.kv_bytes_per_token,
                threshold,
            )
            pairs = Pairs(costs, costs.explain, rows[1], packed)
        queue, even, totals = out[3 * size : 6 * size].reshape(3, size)
        store = None
        if loadable is not None:
            terms = dict(zip(("queue_ms", "load_ms", "prefill_ms", "stall_ms"), rows[7:], strict=False))
            store = Scores(terms, rows[11], end + 8 * 11 * others)
        return Ratings(
            prefill=Scores({"queue_ms": queue, "even_ms": even}, totals, at + 8 * 5 * size),
            decode=Scores({"decode_ms": rows[2]}, rows[2], end + 8 * 2 * others),
            pairs=pairs,
            local=Scores(
                {"queue_ms": rows[3], "prefill_ms": rows[4], "stall_ms": rows[5]}, rows[6], end + 8 * 6 * others
            ),
            store=store,
        )


class _PairCosts:
    """Milliseconds of pairs, a row per decode instance when it is asked for.

    Args:
        computing: Per prefill instance the prompt tokens that it misses, and base and slope of computing.
        needed: Per decode instance, prompt tokens that it misses.
        moving: Of transfers.
        kv_bytes: Of a token.
        threshold: Missing tokens below which decode is not paired; -1: none.
    """

    __slots__ = ("_computing", "_kv_bytes", "_moving", "_needed", "_threshold")

    def __init__(
        self, computing: FloatArray, needed: FloatArray, moving: Lines, kv_bytes: float, threshold: float
    ) -> None:
        self._computing = computing
        self._needed = needed
        self._moving = moving
        self._kv_bytes = kv_bytes
        self._threshold = threshold

    def _allowed(self, d: int) -> bool:
        return self._threshold < 0 or bool(self._needed[d] >= self._threshold)

    def _parts(self, d: int) -> tuple[FloatArray, FloatArray]:
        """Return what prefill and transfer take with each prefill instance."""
        missing, base, slope = self._computing
        fixed, per_byte = self._moving.row(d)
        computed = base + slope * np.minimum(missing, self._needed[d])
        return computed, fixed + per_byte * (self._kv_bytes * self._needed[d])

    def __getitem__(self, d: int, /) -> FloatArray:
        """Return the scores of a decode instance's pairs: what neither has is computed, what decode misses travels."""
        if not self._allowed(d):
            return np.full(self._computing.shape[1], -np.inf)
        computed, moved = self._parts(d)
        return -(computed + moved)

    def explain(self, p: int, d: int) -> dict[str, float]:
        """Return the terms of a pair."""
        if not self._allowed(d):
            return {"below_threshold": -math.inf}
        computed, moved = self._parts(d)
        return {"prefill_ms": -float(computed[p]), "transfer_ms": -float(moved[p])}
