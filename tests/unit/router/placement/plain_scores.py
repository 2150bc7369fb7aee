"""What policies score and how the winner is taken, written as plainly as their descriptions: one number at a time."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from baton.types import PrefillPath
from baton_router.scheduler.policy import Choice, Request, Side
from baton_router.scheduler.speeds import Fit, Speeds

Column = list[float]


@dataclass
class PlainRatings:
    """Scores of both sides and of what couples them; ``pairs[d][p]``."""

    prefill: Column
    decode: Column
    pairs: list[Column] | None = None
    local: Column | None = None
    store: Column | None = None
    leave: bool = False


def relative(side: Side) -> Column:
    smoothing = side.cost / 4
    mean = sum(side.loads) / max(1, len(side)) + smoothing
    return [(x + smoothing) / mean if mean > 0 else 1.0 for x in side.loads]


def apart(x: float) -> float:
    return 1.0 if abs(x - 1.0) < 0.1 else x


def above(x: float) -> float:
    return x - 1.0 if x >= 1.0 else math.log(max(x, 1e-6))


def match_minus_load(speeds: Speeds, beta: float, request: Request, prefill: Side, decode: Side) -> PlainRatings:
    tokens = max(1, request.tokens)
    times = [fit.at(tokens) for fit in speeds.prefill.get(prefill.ids)]
    mean = sum(times) / max(1, len(times))
    slow = [apart(x / mean) if mean > 0 else 1.0 for x in times]
    done = [(load - w) * s for load, w, s in zip(prefill.loads, prefill.work, slow, strict=True)]
    mean_done = sum(done) / max(1, len(done)) + tokens / 4
    now, total = [], []
    for match, work, s, d in zip(prefill.match_rates, prefill.work, slow, done, strict=True):
        now.append(match - beta * (s * work / tokens + (s - 1) * (1 - match)))
        total.append(now[-1] - beta * above((d + tokens / 4) / mean_done))
    shift = max(now) - max(total) if now else 0.0
    running = sum(decode.sequences()) / len(decode)
    steps = [fit.at(1 + running) for fit in speeds.decode.get(decode.ids)]
    loads = [x * apart(t * len(steps) / sum(steps)) for x, t in zip(relative(decode), steps, strict=True)]
    rated = PlainRatings(
        [x + shift for x in total],
        [m - beta * (1 + above(x)) for m, x in zip(decode.match_rates, loads, strict=True)],
        leave=True,
    )
    if mean > 0 and request.threshold is None and speeds.prefill.measured:
        rated.local = []
        for d, fit in enumerate(speeds.local.get(decode.ids)):
            here = fit.at(tokens) / mean if speeds.local.measured else 1.0
            waits = here * decode.prompts_waiting()[d] / tokens + 0.1
            stalled = here * (1 + decode.sequences()[d] / 20) - 1
            match = decode.match_rates[d]
            rated.local.append(match - beta * (waits + stalled * (1 - match)))
    return rated


def cost_ms(speeds: Speeds, request: Request, prefill: Side, decode: Side) -> PlainRatings:
    expected = min(speeds.output_tokens, math.inf if request.max_tokens is None else request.max_tokens)
    computing, held = speeds.prefill.get(prefill.ids), max([*decode.matched, 0.0])
    loads = relative(prefill)
    shortest = min(
        (f.at(request.tokens - max(m, held)) for f, m in zip(computing, prefill.matched, strict=True)), default=0.0
    )
    needed = [request.tokens - x for x in decode.matched]
    running, waiting = decode.sequences(), decode.prompts_waiting()

    def too_short(missing: float) -> bool:
        return request.threshold is not None and missing < request.threshold

    def pair(p: int, d: int) -> float:
        if too_short(needed[d]):
            return -math.inf
        (move,) = speeds.transfer.get([(prefill.ids[p], decode.ids[d])])
        computed = computing[p].at(min(request.tokens - prefill.matched[p], needed[d]))
        return -computed - move.at(request.kv_bytes_per_token * needed[d])

    def alone(d: int, own: Fit, missing: float) -> float:
        stalled = 0.1 * running[d] * own.slope * missing
        return -own.slope * waiting[d] - own.at(missing) - stalled

    def loaded(d: int, own: Fit, fetch: Fit, loadable: float) -> float:
        more = loadable - decode.matched[d]
        if more <= 0:
            return -math.inf
        return alone(d, own, request.tokens - loadable) - fetch.at(request.kv_bytes_per_token * more)

    own = speeds.local.get(decode.ids)
    return PlainRatings(
        [
            -work * fit.slope - 0.1 * shortest * min(1.0, load - min(loads))
            for work, fit, load in zip(prefill.work, computing, loads, strict=True)
        ],
        [
            -expected * fit.at(running[d] + request.sequences)
            for d, fit in enumerate(speeds.decode.get(decode.ids))
        ],
        pairs=[[pair(p, d) for p in range(len(prefill))] for d in range(len(decode))] if len(prefill) else None,
        local=[
            -math.inf if request.threshold is not None and not too_short(needed[d]) else alone(d, own[d], needed[d])
            for d in range(len(decode))
        ],
        store=None
        if decode.loadable is None
        else [
            loaded(d, own[d], fetch, decode.loadable[d]) for d, fetch in enumerate(speeds.store.get(decode.ids))
        ],
    )  # fmt: skip


def options(rated: PlainRatings, d: int) -> list[tuple[float, int | None, PrefillPath | None]]:
    """Everything that a decode instance can be chosen with."""
    remote = PrefillPath.REMOTE if rated.local is not None and not rated.leave else None
    found: list[tuple[float, int | None, PrefillPath | None]] = [
        (x + (rated.pairs[d][p] if rated.pairs is not None else 0.0) + rated.decode[d], p, remote)
        for p, x in enumerate(rated.prefill)
    ]
    if rated.local is not None or not rated.prefill:
        found.append(((rated.local[d] if rated.local is not None else 0.0) + rated.decode[d], None, PrefillPath.LOCAL))
    if rated.store is not None:
        found.append((rated.store[d] + rated.decode[d], None, PrefillPath.STORE))
    return found


def draw(ties: list[int], rng: random.Random) -> int:
    return ties[0 if len(ties) == 1 else int(rng.random() * len(ties))]


def best_of(values: Column, rng: random.Random) -> int:
    return draw([i for i, x in enumerate(values) if x == max(values)], rng)


def choose_plainly(rated: PlainRatings, rng: random.Random) -> Choice:
    """Take the best of all options. Equal ones by draw: first the decode instance, or where pairs are rated of all."""
    everything = [options(rated, d) for d in range(len(rated.decode))]
    if rated.pairs is not None:
        best = max(x[0] for row in everything for x in row)
        # Decode instances come in the order of the best that they may have.
        order = sorted(range(len(everything)), key=lambda d: -max(x[0] for x in everything[d]))
        ties = [(d, i) for d in order for i, x in enumerate(everything[d]) if x[0] == best]
        d, at = ties[int(rng.random() * len(ties))]
    elif rated.local is None and rated.store is None:
        d = best_of(rated.decode, rng)
        at = best_of(rated.prefill, rng) if rated.prefill else 0
    else:
        d = best_of([max(x[0] for x in row) for row in everything], rng)
        at = best_of([x[0] for x in everything[d]], rng)
    score, p, path = everything[d][at]
    return Choice(d, p, path, score)


def order_plainly(rated: PlainRatings, choice: Choice, limit: int, rng: random.Random) -> list[int]:
    """Prefill instances for the chosen decode instance: the chosen one, then the best, equal ones from a draw on."""
    count = len(rated.prefill)
    if not count or limit <= 0:
        return []
    if limit == 1 and choice.prefill is not None:
        return [choice.prefill]
    first = int(rng.random() * count)
    row = [0.0] * count if rated.pairs is None else rated.pairs[choice.decode]
    values = [a + b for a, b in zip(rated.prefill, row, strict=True)]
    best = sorted(((first + i) % count for i in range(count)), key=lambda p: -values[p])
    chosen = [] if choice.prefill is None else [choice.prefill]
    if chosen and best[0] == chosen[0]:
        chosen = []
    return [*chosen, *(p for p in best if p not in chosen)][:limit]
