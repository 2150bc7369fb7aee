"""``match_minus_load``, the default: score = KV match rate - beta * load; the highest wins, ties at random."""

from __future__ import annotations

import math
from typing import Self

import numpy as np

from baton.errors import ConfigError
from baton.native import address_of
from baton_router.scheduler import kernels
from baton_router.scheduler.policies.registry import BuiltInPolicy, PolicyContext
from baton_router.scheduler.policy import Ratings, Request, Scores, Side
from baton_router.scheduler.speeds import Speeds


class MatchMinusLoad(BuiltInPolicy):
    """Send a request where its KV is, unless that place is too busy.

    Everything is counted in prompts like this one: a match rate of 1 saves computing one, a load of 1 is the time in
    which a prefill instance of mean speed computes one. ``native/placement.c`` computes it all. For a prefill
    instance::

        match_p = matched prompt tokens on p / prompt tokens
        slow_p  = time of a prompt of this length on p / mean of all, as served requests have taught; 1 if within 10 %
        load_p  = slow_p * prompt tokens still to compute on p / prompt tokens
        score_p = match_p - beta * (load_p + (slow_p - 1) * (1 - match_p) + above(lately_p))

    ``lately_p`` is what p did in the last minutes (see ``baton_router.registry.load``), in time, over the mean of all;
    ``above(x)`` is ``x - 1``, and ``ln x`` below the mean. It spreads work, and a prefix that all share, among
    instances that have nothing to do: however large the match, from some point on an idle instance should compute the
    prefix once more. For a decode instance the load is that of its role, times its time per token over the mean::

        load_d  = (tokens whose KV d holds + s) / (mean + s)        with s = a quarter of this request's
        score_d = match_d - beta * (1 + above(load_d))

    The pair's score is the sum of both. Decode's own match counts like prefill's: what decode holds need not travel.
    Where prefill instances have queues a decode instance may be the better place for the prompt::

        local_d = match_d - beta * (slow_d * prompt tokens waiting on d / prompt tokens + 0.1
                                    + (slow_d * (1 + running_d / 20) - 1) * (1 - match_d))

    takes the place of ``score_p`` (without ``lately_p``): decode computes what that saves at least a tenth of a
    prompt's time with, and the less the more sequences it runs.
    Whether a pair's decode instance asks its prefill instance at all is left to its own threshold, and with
    ``--remote-prefill-threshold`` that alone decides.

    ``beta`` is the price of load: with 1 the score is the predicted time, with less, hits are worth more than they
    save at once, because a prefix that is computed again takes the place of others. On traces (docs/bench/router.md)
    0.5 keeps 99 % of the possible hits in the same time to first token.

    Risks: with ``beta = 0`` everything goes to the instance that first served a common prefix. Speeds are those of the
    latest requests; before the first ones are done all instances count as equal, and no prompt goes to decode. Match
    rates of a stale index can be too high; they cost recomputation on a prefill instance, never a wrong answer.

    Args:
        beta: Weight of load, 0 to 100.
        temperature: Softmax temperature, 0 to 100; 0: the best wins. With several routers that see the same scores,
            0.05 keeps them from all choosing the same instance at once.
        speeds: What served requests have taught.

    Raises:
        ConfigError: One is out of range.
    """

    name = "match_minus_load"

    def __init__(self, beta: float = 0.5, temperature: float = 0.0, speeds: Speeds | None = None) -> None:
        for field, value in (("beta", beta), ("temperature", temperature)):
            if not (math.isfinite(value) and 0.0 <= value <= 100.0):
                raise ConfigError(f"{field} must be between 0 and 100, got {value}", field=field)
        self.beta = beta
        self.temperature = temperature
        self._speeds = speeds or Speeds()

    @classmethod
    def make(cls, context: PolicyContext) -> Self:
        """Build it with the configured weights."""
        return cls(context.beta, context.temperature, context.speeds)

    def score(self, request: Request, prefill: Side, decode: Side) -> Ratings:
        """Score both roles, and the prefill on decode instances."""
        speeds = self._speeds
        size = len(prefill)
        others = len(decode)
        lines = speeds.prefill.lines(prefill.ids), speeds.decode.lines(decode.ids), speeds.local.lines(decode.ids)
        sides = prefill.packed(), decode.packed()
        out = np.empty(4 * size + 5 * others)
        at = address_of(out)
        with_local = kernels.score_match(
            (sides[0][1], sides[1][1], size, others),
            (lines[0].packed(), lines[1].packed(), lines[2].packed()),
            (float(max(1, request.tokens)), self.beta, decode.cost),
            (request.threshold is None and speeds.prefill.measured, speeds.local.measured),
            at,
        )
        load, speed, lately, totals = out[: 4 * size].reshape(4, size)
        decode_load, decode_totals, *rest = out[4 * size :].reshape(5, others)
        at += 8 * 3 * size
        local = None
        if with_local:
            terms = {"match": decode.match_rates, "load": rest[0], "speed": rest[1]}
            local = Scores(terms, rest[2], at + 8 * (size + 4 * others))
        terms = {"match": prefill.match_rates, "load": load, "speed": speed, "lately": lately}
        return Ratings(
            Scores(terms, totals, at),
            Scores({"match": decode.match_rates, "load": decode_load}, decode_totals, at + 8 * (size + others)),
            local=local,
            leave=True,
            temperature=self.temperature,
        )
