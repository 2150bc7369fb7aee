"""``cost_ms``: the pair that will be done soonest, by speeds learnt from requests that were served."""

from __future__ import annotations

import math
from typing import Self

import numpy as np
import numpy.typing as npt

from baton_router.scheduler.policies.registry import BuiltInPolicy, PolicyContext
from baton_router.scheduler.policy import FloatArray, Pairs, Ratings, Request, Scores, Side, relative_loads
from baton_router.scheduler.speeds import Lines, Speeds

_STALL_SHARE = 0.1
"""What a millisecond of local prefill costs per sequence that decodes there, in milliseconds of this request: their
steps carry the prompt's chunks, so they all wait for it."""

_EVEN_SHARE = 0.1
"""Of the shortest prefill, at most: about what a prediction is off by. In replays (docs/bench/router.md) 0.02 to 0.2
gave the same time to first token."""


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
        expected = speeds.output_tokens
        if request.max_tokens is not None:
            expected = min(expected, request.max_tokens)
        running = decode.sequences()
        base, slope = speeds.decode.arrays(decode.ids)
        computing = speeds.prefill.arrays(prefill.ids)
        queues = Scores.of(
            queue_ms=-prefill.work * computing[1],
            even_ms=_even(request, prefill, decode, computing),
        )
        return Ratings(
            prefill=queues,
            decode=Scores.of(decode_ms=-expected * (base + slope * (running + request.sequences))),
            pairs=_pairs(request, prefill, decode, computing, queues.totals, speeds) if prefill.ids else None,
            local=self._alone(request, decode, running),
            store=self._alone(request, decode, running, decode.loadable) if decode.loadable is not None else None,
        )

    def _alone(self, request: Request, decode: Side, running: FloatArray, loadable: FloatArray | None = None) -> Scores:
        """Score the prefill on the decode instance itself, of what is missing after it loaded what it can."""
        base, slope = self._speeds.local.arrays(decode.ids)
        missing = request.tokens - (decode.matched if loadable is None else loadable)
        queue, stalled = -slope * decode.prompts_waiting(), -_STALL_SHARE * running * slope * missing
        computed = -(base + slope * missing)
        if loadable is None:
            if request.threshold is not None:
                computed[missing >= request.threshold] = -np.inf
            return Scores.of(queue_ms=queue, prefill_ms=computed, stall_ms=stalled)
        base, slope = self._speeds.store.arrays(decode.ids)
        more = loadable - decode.matched
        loaded = np.where(more > 0, -(base + slope * request.kv_bytes_per_token * more), -np.inf)
        return Scores.of(queue_ms=queue, load_ms=loaded, prefill_ms=computed, stall_ms=stalled)


class _PairCosts:
    """Milliseconds of pairs, a row per decode instance when it is asked for.

    Args:
        missing: Per prefill instance, prompt tokens that it misses.
        needed: Per decode instance, prompt tokens that it misses.
        allowed: Per decode instance, whether it may be paired.
        computing: Per prefill instance, base and slope of computing.
        moving: Of transfers.
        kv_bytes: Of a token.
    """

    def __init__(
        self,
        missing: FloatArray,
        needed: FloatArray,
        allowed: npt.NDArray[np.bool_],
        computing: tuple[FloatArray, FloatArray],
        moving: Lines,
        kv_bytes: float,
    ) -> None:
        self._missing, self._needed, self._allowed = missing, needed, allowed
        self._computing, self._moving, self._kv_bytes = computing, moving, kv_bytes

    def parts(self, d: int) -> tuple[FloatArray, FloatArray]:
        """Return what prefill and transfer take with each prefill instance."""
        base, slope = self._computing
        fixed, per_byte = self._moving.row(d)
        computed = base + slope * np.minimum(self._missing, self._needed[d])
        return computed, fixed + per_byte * (self._kv_bytes * self._needed[d])

    def __getitem__(self, d: int, /) -> FloatArray:
        """Return the scores of a decode instance's pairs."""
        if not self._allowed[d]:
            return np.full(self._missing.size, -np.inf)
        computed, moved = self.parts(d)
        return -(computed + moved)


def _pairs(
    request: Request,
    prefill: Side,
    decode: Side,
    computing: tuple[FloatArray, FloatArray],
    queues: FloatArray,
    speeds: Speeds,
) -> Pairs:
    """Score pairs: what neither has is computed, what decode misses travels."""
    moving = speeds.transfer.lines(prefill.ids, decode.ids)
    needed = request.tokens - decode.matched
    allowed = np.full(needed.size, True) if request.threshold is None else needed >= request.threshold
    rows = _PairCosts(request.tokens - prefill.matched, needed, allowed, computing, moving, request.kv_bytes_per_token)
    # What a pair scores at most, transfer aside, depends on decode by what it misses alone: a few different numbers.
    depths, which = np.unique(needed, return_inverse=True)
    base, slope = computing
    computed = queues - base - slope * np.minimum(request.tokens - prefill.matched, depths[:, None])
    most = np.where(allowed, computed.max(axis=1)[which], -np.inf)

    def explain(p: int, d: int) -> dict[str, float]:
        if not allowed[d]:
            return {"below_threshold": -math.inf}
        computed, moved = rows.parts(d)
        return {"prefill_ms": -float(computed[p]), "transfer_ms": -float(moved[p])}

    fixed, per_byte = moving.least()
    return Pairs(rows, explain, most - fixed - per_byte * request.kv_bytes_per_token * needed)


def _even(request: Request, prefill: Side, decode: Side, computing: tuple[FloatArray, FloatArray]) -> FloatArray:
    """Return what it counts against each prefill instance that it has done more than another one."""
    if not prefill.ids:
        return np.zeros(0)
    base, slope = computing
    held = decode.matched.max(initial=0.0)
    shortest = float((base + slope * (request.tokens - np.maximum(prefill.matched, held))).min())
    loads = relative_loads(prefill)
    behind: FloatArray = np.maximum(-1.0, loads.min() - loads)
    return _EVEN_SHARE * shortest * behind
