"""``cost_ms``: the pair that will be done soonest, by speeds learnt from requests that were served."""

from __future__ import annotations

import math
from typing import Self

import numpy as np
import numpy.typing as npt

from baton.native import address_of
from baton_router.scheduler import kernels
from baton_router.scheduler.policies.registry import BuiltInPolicy, PolicyContext
from baton_router.scheduler.policy import FloatArray, Pairs, Ratings, Request, Scores, Side, relative_loads
from baton_router.scheduler.speeds import Lines, Speeds

_STALL_SHARE = 0.1
"""Cost of a millisecond of local prefill per sequence that decodes there, in milliseconds of this request: their steps
carry the prompt's chunks, so they are all delayed."""
_EVEN_SHARE = 0.1
"""Maximum cost of an uneven load as a share of the shortest prefill: about the error of a prediction. In replays
(docs/benchmarks.md) 0.02 to 0.2 gave the same time to first token."""


class CostMs(BuiltInPolicy):
    """Predict each candidate's time and take the shortest: score = -predicted milliseconds, but for ``even_ms``.

    Candidates are every pair, the prefill on each decode instance itself ("local"), and, where slower tiers or the KV
    store hold something, loading that and computing the rest on the decode instance ("store"). :meth:`plain_score` has
    the formulas.

    KV that decode holds and prefill lacks is fetched, not computed, so a pair computes what neither has. All speeds are
    learnt (see ``baton_router.scheduler.speeds``): no hardware is configured. Conditional disaggregation needs no
    threshold: a short or mostly cached prompt is cheaper where it will be decoded. ``--remote-prefill-threshold`` still
    overrides.

    ``even_ms`` is no time: among instances that are as fast as each other, one that was measured a little faster would
    get all the work of a cluster with little to do. It is a tenth of the shortest pair's prefill times the relative
    load above the least loaded instance, whose pairs compare with local and store unchanged. Loads are those of the
    last minutes (see ``baton_router.registry.load``).

    Risks: predictions are as good as the latest requests. Before the first ones are done all instances look alike, and
    load alone decides. An estimate that was not confirmed for a minute is forgotten.

    Args:
        speeds: Speeds learnt from served requests; the router updates it.
    """

    name = "cost_ms"

    def __init__(self, speeds: Speeds) -> None:
        self._speeds = speeds

    @classmethod
    def make(cls, context: PolicyContext) -> Self:
        return cls(context.speeds)

    def plain_score(self, request: Request, prefill: Side, decode: Side) -> Ratings:
        """Score both sides, their pairs, and what decode can do by itself: the definition of :meth:`score`."""
        speeds = self._speeds
        threshold = request.threshold
        work = speeds.work
        lacks = request.tokens - decode.matched
        missing = work.of(decode.matched, request.tokens)
        steps = speeds.decode.times(decode.ids, decode.sequences() + request.sequences)
        local = self._score_local(decode, missing)
        if threshold is not None:
            prefill_ms = np.where(lacks < threshold, local.terms["prefill_ms"], -np.inf)
            local = Scores.of(**local.terms | {"prefill_ms": prefill_ms})
        store = None
        if decode.loadable is not None:
            more = decode.loadable - decode.matched
            load_ms = speeds.store.times(decode.ids, request.kv_bytes_per_token * more)
            rest = self._score_local(decode, work.of(decode.loadable, request.tokens)).terms
            store = Scores.of(
                queue_ms=rest["queue_ms"],
                load_ms=np.where(more > 0, -load_ms, -np.inf),
                prefill_ms=rest["prefill_ms"],
                stall_ms=rest["stall_ms"],
            )
        pairs = None
        if len(prefill):
            moving = speeds.transfer.lines(prefill.ids, decode.ids)
            computing = (work.of(prefill.matched, request.tokens), *speeds.prefill.columns(prefill.ids))
            costs = _PairCosts(computing, missing, lacks, moving, request.kv_bytes_per_token, threshold)
            pairs = Pairs(costs, costs.explain)
        return Ratings(
            prefill=self._score_prefill(request, prefill, decode),
            decode=Scores.of(decode_ms=-self._expected_tokens(request) * steps),
            pairs=pairs,
            local=local,
            store=store,
        )

    def _score_prefill(self, request: Request, prefill: Side, decode: Side) -> Scores:
        if not len(prefill):
            return Scores.of(queue_ms=[], even_ms=[])
        base, slope = self._speeds.prefill.columns(prefill.ids)
        held = np.maximum(prefill.matched, decode.matched.max(initial=0.0))
        shortest_ms = (base + slope * self._speeds.work.of(held, request.tokens)).min()
        loads = relative_loads(prefill)
        uneven = np.minimum(1, loads - loads.min())
        return Scores.of(queue_ms=-slope * prefill.work, even_ms=-_EVEN_SHARE * shortest_ms * uneven)

    def _score_local(self, decode: Side, missing: FloatArray) -> Scores:
        """Score computing so much work (see ``PromptWork``) on each decode instance."""
        base, slope = self._speeds.local.columns(decode.ids)
        return Scores.of(
            queue_ms=-slope * decode.prompts_waiting(),
            prefill_ms=-(base + slope * missing),
            stall_ms=-_STALL_SHARE * decode.sequences() * slope * missing,
        )

    def _expected_tokens(self, request: Request) -> float:
        expected = self._speeds.output_tokens if request.expected_tokens is None else request.expected_tokens
        return expected if request.max_tokens is None else min(expected, request.max_tokens)

    def score(self, request: Request, prefill: Side, decode: Side) -> Ratings:
        """Score both sides in C, with the result of :meth:`plain_score`."""
        speeds = self._speeds
        prefill_rows = prefill.packed()
        decode_rows = decode.packed()
        prefill_scores = np.empty(len(prefill), kernels.PREFILL_SCORE.dtype)
        decode_scores = np.empty(len(decode), kernels.DECODE_SCORE.dtype)
        computing = speeds.prefill.lines(prefill.ids)
        decoding = speeds.decode.lines(decode.ids)
        local_lines = speeds.local.lines(decode.ids)
        loading = speeds.store.lines(decode.ids)
        moving = speeds.transfer.lines(prefill.ids, decode.ids)
        loadable = None if decode.loadable is None else np.ascontiguousarray(decode.loadable, np.float64)
        threshold = -1.0 if request.threshold is None else float(request.threshold)
        at_prefill = address_of(prefill_scores)
        at_decode = address_of(decode_scores)
        kernels.score_cost(
            kernels.COST_ARGS.pack(
                address_of(prefill_rows),
                address_of(decode_rows),
                0 if loadable is None else address_of(loadable),
                len(prefill),
                len(decode),
                *computing.packed(),
                *decoding.packed(),
                *local_lines.packed(),
                *loading.packed(),
                moving.addresses[2],
                *moving.like,
                float(request.tokens),
                speeds.work.half,
                request.sequences,
                self._expected_tokens(request),
                request.kv_bytes_per_token,
                prefill.cost,
                threshold,
                at_prefill,
                at_decode,
            )
        )
        pairs = None
        if len(prefill):
            costs = _PairCosts(
                (prefill_scores["missing"], prefill_scores["base"], prefill_scores["slope"]),
                decode_scores["missing"],
                decode_scores["lacks"],
                moving,
                request.kv_bytes_per_token,
                request.threshold,
            )
            packed = kernels.PAIRS.pack(
                at_prefill,
                at_decode,
                moving.addresses[1],
                0,  # no row: each decode instance has one
                0,
                moving.addresses[0],
                *moving.like,
                moving.oldest,
                request.kv_bytes_per_token,
                threshold,
            )
            pairs = Pairs(costs, costs.explain, decode_scores["bound"], packed)
        prefill_terms = {"queue_ms": prefill_scores["queue"], "even_ms": prefill_scores["even"]}
        decode_total = decode_scores["total"]
        return Ratings(
            prefill=Scores(prefill_terms, prefill_scores["total"], kernels.PREFILL_SCORE.column(at_prefill, "total")),
            decode=Scores({"decode_ms": decode_total}, decode_total, kernels.DECODE_SCORE.column(at_decode, "total")),
            pairs=pairs,
            local=_scores_of(decode_scores, at_decode, "local", ("queue", "prefill", "stall")),
            store=None
            if loadable is None
            else _scores_of(decode_scores, at_decode, "store", ("queue", "load", "prefill", "stall")),
        )


def _scores_of(rows: npt.NDArray[np.void], address: int, kind: str, terms: tuple[str, ...]) -> Scores:
    """Return the scores of one kind of option from rows of ``kernels.DECODE_SCORE``."""
    total = f"{kind}_total"
    columns = {f"{term}_ms": rows[f"{kind}_{term}"] for term in terms}
    return Scores(columns, rows[total], kernels.DECODE_SCORE.column(address, total))


class _PairCosts:
    """Milliseconds of pairs, a row per decode instance that is computed when it is read.

    Args:
        computing: Work that each prefill instance misses (see ``PromptWork``), and base and slope of computing it.
        missing: Work that each decode instance misses.
        lacks: Prompt tokens that each decode instance lacks.
        moving: Learnt transfer times.
        kv_bytes: Bytes of a token's KV.
        threshold: Missing tokens below which a decode instance is not paired; ``None``: it always is.
    """

    __slots__ = ("_computing", "_kv_bytes", "_lacks", "_missing", "_moving", "_threshold")

    def __init__(
        self,
        computing: tuple[FloatArray, FloatArray, FloatArray],
        missing: FloatArray,
        lacks: FloatArray,
        moving: Lines,
        kv_bytes: float,
        threshold: int | None,
    ) -> None:
        self._computing = computing
        self._missing = missing
        self._lacks = lacks
        self._moving = moving
        self._kv_bytes = kv_bytes
        self._threshold = threshold

    def _is_allowed(self, d: int) -> bool:
        return self._threshold is None or bool(self._lacks[d] >= self._threshold)

    def _parts(self, d: int) -> tuple[FloatArray, FloatArray]:
        """Return the times of prefill and transfer with each prefill instance.

        Tokens that neither instance has are computed, those that decode lacks travel.
        """
        missing, base, slope = self._computing
        fixed, per_byte = self._moving.row(d)
        computed = base + slope * np.minimum(missing, self._missing[d])
        return computed, fixed + per_byte * (self._kv_bytes * self._lacks[d])

    def __getitem__(self, d: int, /) -> FloatArray:
        """Return the scores of the pairs of decode instance ``d``."""
        if not self._is_allowed(d):
            return np.full(self._computing[0].size, -np.inf)
        computed, moved = self._parts(d)
        return -(computed + moved)

    def explain(self, p: int, d: int) -> dict[str, float]:
        """Return the terms of a pair."""
        if not self._is_allowed(d):
            return {"below_threshold": -math.inf}
        computed, moved = self._parts(d)
        return {"prefill_ms": -float(computed[p]), "transfer_ms": -float(moved[p])}
