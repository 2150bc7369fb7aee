"""``cost_ms``: the pair that will be done soonest, by speeds learnt from requests that were served."""

from __future__ import annotations

import math
from typing import Self

from baton_router.scheduler.policies.registry import BuiltInPolicy, PolicyContext
from baton_router.scheduler.policy import Pairs, Ratings, Request, Scores, Side, relative_loads
from baton_router.scheduler.speeds import Fit, Speeds

_STALL_SHARE = 0.1
"""What a millisecond of local prefill costs per sequence that decodes there, in milliseconds of this request: their
steps carry the prompt's chunks, so they all wait for it."""

_EVEN_SHARE = 0.1
"""Of the shortest prefill, at most: about what a prediction is off by. In replays (docs/bench-router.md) 0.02 to 0.2
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
        computing = speeds.prefill.get(prefill.ids)
        expected = speeds.output_tokens
        if request.max_tokens is not None:
            expected = min(expected, request.max_tokens)
        running = [tracker.requests + request.sequences for tracker in decode.trackers] or [request.sequences] * len(
            decode
        )
        per_token = speeds.decode.get(decode.ids)
        return Ratings(
            prefill=Scores.of(
                queue_ms=[-work * fit.slope for work, fit in zip(prefill.work, computing, strict=True)],
                even_ms=_even(request, prefill, decode, computing),
            ),
            decode=Scores.of(
                decode_ms=[-expected * fit.at(count) for fit, count in zip(per_token, running, strict=True)]
            ),
            pairs=self._pairs(request, prefill, decode, computing) if prefill.ids else None,
            local=self._alone(request, decode, running),
            store=self._alone(request, decode, running, decode.loadable) if decode.loadable is not None else None,
        )

    def _pairs(self, request: Request, prefill: Side, decode: Side, computing: list[Fit]) -> Pairs:
        total, kv = request.tokens, request.kv_bytes_per_token
        instances = [(matched, *fit) for matched, fit in zip(prefill.matched, computing, strict=True)]
        moving = self._speeds.transfer.get([(p, d) for d in decode.ids for p in prefill.ids])
        rows = []
        for at, held in enumerate(decode.matched):
            if request.threshold is not None and total - held < request.threshold:
                rows.append([-math.inf] * len(prefill))
                continue
            moved = kv * (total - held)
            fits = moving[at * len(prefill) : (at + 1) * len(prefill)]
            rows.append(
                [
                    -(base + slope * (total - (matched if matched > held else held)) + fixed + per_byte * moved)
                    for (matched, base, slope), (fixed, per_byte) in zip(instances, fits, strict=True)
                ]
            )

        def explain(p: int, d: int) -> dict[str, float]:
            if rows[d][p] == -math.inf:
                return {"below_threshold": -math.inf}
            transfer_ms = moving[d * len(prefill) + p].at(kv * (total - decode.matched[d]))
            return {"prefill_ms": rows[d][p] + transfer_ms, "transfer_ms": -transfer_ms}

        return Pairs(rows, explain)

    def _alone(self, request: Request, decode: Side, running: list[int], loadable: list[int] | None = None) -> Scores:
        """Score the prefill on the decode instance itself, of what is missing after it loaded what it can."""
        held = decode.matched if loadable is None else loadable
        queue, computed, stalled = [], [], []
        for at, fit in enumerate(self._speeds.local.get(decode.ids)):
            missing = request.tokens - held[at]
            allowed = loadable is not None or request.threshold is None or missing < request.threshold
            queue.append(-fit.slope * (decode.trackers[at].prompts_waiting if decode.trackers else 0))
            computed.append(-fit.at(missing) if allowed else -math.inf)
            stalled.append(-_STALL_SHARE * (running[at] - request.sequences) * fit.slope * missing)
        if loadable is None:
            return Scores.of(queue_ms=queue, prefill_ms=computed, stall_ms=stalled)
        loaded = [
            -fit.at(request.kv_bytes_per_token * (loadable[at] - decode.matched[at]))
            if loadable[at] > decode.matched[at]
            else -math.inf
            for at, fit in enumerate(self._speeds.store.get(decode.ids))
        ]
        return Scores.of(queue_ms=queue, load_ms=loaded, prefill_ms=computed, stall_ms=stalled)


def _even(request: Request, prefill: Side, decode: Side, computing: list[Fit]) -> list[float]:
    """Return what it counts against each prefill instance that it has done more than another one."""
    if not prefill.ids:
        return []
    held = max(decode.matched, default=0)
    times = zip(computing, prefill.matched, strict=True)
    shortest = min(fit.at(request.tokens - max(matched, held)) for fit, matched in times)
    loads = relative_loads(prefill)
    least = min(loads)
    return [_EVEN_SHARE * shortest * max(-1.0, least - load) for load in loads]
