"""``cost_ms``: the pair that will be done soonest, by speeds learnt from requests that were served."""

from __future__ import annotations

import math
from collections.abc import Sequence

from baton.types import InstanceId
from baton_router.policy.base import Pairs, Ratings, Request, Scores, Side
from baton_router.speeds import Speeds

_STALL_SHARE = 0.1
"""What a millisecond of local prefill costs per sequence that decodes there, in milliseconds of this request: their
steps carry the prompt's chunks, so they all wait for it."""


class CostMs:
    """Predict each candidate's time and take the shortest: score = -predicted milliseconds.

    Candidates are every pair, the prefill on each decode instance itself ("local"), and, where something lies in
    slower tiers or in the KV store, loading that and computing the rest on the decode instance ("store")::

        pair(p, d) = queue_p + prefill_p(missing of p and d) + transfer_pd(bytes that d misses) + decode_d
        local(d)   = queue_d + prefill_d(missing of d) * (1 + 0.1 * running_d) + decode_d
        store(d)   = queue_d + load_d(bytes from the store) + prefill_d(missing after it) * (...) + decode_d
        decode_d   = time per token with one more batch on d * tokens that the request will generate

    What decode holds and prefill misses is fetched, not computed, so a pair misses what neither has. All speeds are
    learnt (see ``baton_router.speeds``): nobody configures hardware. Conditional disaggregation needs no threshold: a
    short or mostly cached prompt is cheaper where it will be decoded. ``--remote-prefill-threshold`` still overrides.

    Risks: predictions are as good as the latest requests. Before the first ones are done everybody looks alike, and
    load alone decides. An estimate that nobody confirmed for a minute is forgotten.

    Args:
        speeds: What is known; somebody else feeds it.
    """

    name = "cost_ms"

    def __init__(self, speeds: Speeds) -> None:
        self._speeds = speeds

    def score(self, request: Request, prefill: Side, decode: Side) -> Ratings:
        """Score both sides, their pairs, and what decode can do by itself."""
        speeds, now = self._speeds, self._speeds.now()
        computing = [speeds.prefill.get(name, now) for name in prefill.ids]
        queue = [-work * fit.slope for work, fit in zip(prefill.work, computing, strict=True)]
        expected = speeds.output_tokens
        if request.max_tokens is not None:
            expected = min(expected, request.max_tokens)
        running = [book.requests + request.sequences for book in decode.books] or [request.sequences] * len(decode)
        per_token = [speeds.decode.get(name, now) for name in decode.ids]
        decoding = [-expected * (f.base + f.slope * r) for f, r in zip(per_token, running, strict=True)]
        return Ratings(
            prefill=Scores.of(queue_ms=queue),
            decode=Scores.of(decode_ms=decoding),
            pairs=self._pairs(request, prefill, decode) if prefill.ids else None,
            local=self._local(request, decode, running, now),
            store=self._store(request, decode, running, now) if decode.loadable is not None else None,
        )

    def chosen(self, request: Request, instances: Sequence[InstanceId]) -> None:
        """Nothing to remember."""

    def _pairs(self, request: Request, prefill: Side, decode: Side) -> Pairs:
        speeds, now, kv = self._speeds, self._speeds.now(), request.kv_bytes_per_token
        computing = [(m, *speeds.prefill.get(name, now)) for name, m in zip(prefill.ids, prefill.matched, strict=True)]
        transfer, names, total = speeds.transfer.get, prefill.ids, request.tokens

        def parts(p: int, d: int) -> tuple[float, float]:
            matched, base, slope = computing[p]
            held = decode.matched[d]
            moving = transfer((names[p], decode.ids[d]), now)
            return (
                -(base + slope * (total - (matched if matched > held else held))),
                -(moving.base + moving.slope * kv * (total - held)),
            )

        rows = []
        for d in range(len(decode)):
            if request.threshold is not None and total - decode.matched[d] < request.threshold:
                rows.append([-math.inf] * len(names))
            else:
                rows.append([sum(parts(p, d)) for p in range(len(names))])

        def explain(p: int, d: int) -> dict[str, float]:
            if rows[d][p] == -math.inf:
                return {"below_threshold": -math.inf}
            computed, moved = parts(p, d)
            return {"prefill_ms": computed, "transfer_ms": moved}

        return Pairs(rows, explain)

    def _local(self, request: Request, decode: Side, running: list[int], now: float) -> Scores:
        queue, computed, stalled = [], [], []
        for at, name in enumerate(decode.ids):
            missing = request.tokens - decode.matched[at]
            fit = self._speeds.local.get(name, now)
            ms = fit.at(missing) if request.threshold is None or missing < request.threshold else math.inf
            queue.append(-_waiting(decode, at) * fit.slope)
            computed.append(-ms)
            stalled.append(-_STALL_SHARE * (running[at] - request.sequences) * fit.slope * missing)
        return Scores.of(queue_ms=queue, prefill_ms=computed, stall_ms=stalled)

    def _store(self, request: Request, decode: Side, running: list[int], now: float) -> Scores:
        queue, loaded, computed, stalled = [], [], [], []
        loadable = decode.loadable or decode.matched
        for at, name in enumerate(decode.ids):
            more = loadable[at] - decode.matched[at]
            fit, missing = self._speeds.local.get(name, now), request.tokens - loadable[at]
            moving = self._speeds.store.get(name, now)
            queue.append(-_waiting(decode, at) * fit.slope)
            loaded.append(-moving.at(more * request.kv_bytes_per_token) if more > 0 else -math.inf)
            computed.append(-fit.at(missing))
            stalled.append(-_STALL_SHARE * (running[at] - request.sequences) * fit.slope * missing)
        return Scores.of(queue_ms=queue, load_ms=loaded, prefill_ms=computed, stall_ms=stalled)


def _waiting(decode: Side, at: int) -> float:
    """Return the prompt tokens that a decode instance is already to compute by itself."""
    return decode.books[at].prompts_waiting if decode.books else 0.0
