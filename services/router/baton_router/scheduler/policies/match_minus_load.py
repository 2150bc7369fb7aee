"""``match_minus_load``, the default: score = KV match rate - beta * load; the highest wins, ties at random."""

from __future__ import annotations

import math
from typing import Self

import numpy as np

from baton.errors import ConfigError
from baton.native import address_of
from baton_router.scheduler import kernels
from baton_router.scheduler.policies.registry import BuiltInPolicy, PolicyContext
from baton_router.scheduler.policy import FloatArray, Ratings, Request, Scores, Side, relative_loads
from baton_router.scheduler.speeds import Speeds

_NOISE = 0.1
"""Times within 10 % of the mean count as equal to it: the difference is noise."""
_STALL_SHARE = 0.05
"""Cost of a local prefill per sequence that decodes there, as a share of the prefill."""
_LOCAL_COST = 0.1
"""Saving, in prompts, from which decode is asked to compute one: its running sequences are delayed."""
_IDLE = 1e-6


class MatchMinusLoad(BuiltInPolicy):
    """Send a request where its KV is, unless that place is too busy.

    Everything is counted in prompts like this one: a match rate of 1 saves computing one, a load of 1 is the time in
    which a prefill instance of mean speed computes one. ``slow`` is an instance's time over the mean, ``above(x)`` is
    ``x - 1``, below 1 ``ln x``::

        prefill = match - beta * (slow * work / tokens + (slow - 1) * (1 - match) + above(recent_work))
        decode  = match - beta * (1 + above(relative_load * slow))
        local   = match - beta * (slow * waiting / tokens + 0.1 + (stalled - 1) * (1 - match))

    ``work`` and ``waiting`` are prompt tokens to compute, ``recent_work`` is that of the last minutes over the mean,
    ``stalled`` is ``slow * (1 + 0.05 * running sequences)``.

    The pair's score is the sum of both instances'. Decode's own match counts like prefill's: KV that decode holds need
    not travel. Where prefill instances have queues, a decode instance may be the better place for the prompt: the score
    of the prefill there takes the place of the prefill instance's. Whether a pair's decode instance asks its prefill
    instance at all is left to its own threshold, and with ``--remote-prefill-threshold`` that alone decides.

    ``beta`` is the price of load: with 1 the score is the predicted time, with less, hits are worth more than they
    save at once, because a prefix that is computed again takes the place of others.

    Risks: with ``beta = 0`` everything goes to the instance that first served a common prefix. Speeds are those of the
    latest requests; before the first ones are done all instances count as equal, and no prompt goes to decode. Match
    rates of a stale index can be too high; they cost recomputation on a prefill instance, never a wrong answer.

    Args:
        beta: Weight of load, 0 to 100.
        temperature: Softmax temperature, 0 to 100; 0: the best wins. With several routers that see the same scores,
            0.05 keeps them from all choosing the same instance at once.
        speeds: Speeds learnt from served requests.

    Raises:
        ConfigError: ``beta`` or ``temperature`` is out of range.
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
        return cls(context.beta, context.temperature, context.speeds)

    def plain_score(self, request: Request, prefill: Side, decode: Side) -> Ratings:
        """Score both sides: the definition of :meth:`score`."""
        tokens = max(1, request.tokens)
        times = self._speeds.prefill.times(prefill.ids, tokens)
        mean_ms = times.mean() if times.size else 0.0
        ratings = Ratings(
            self._score_prefill(tokens, prefill, times / mean_ms if mean_ms > 0 else np.ones(times.size)),
            self._score_decode(decode),
            leave=True,
            temperature=self.temperature,
        )
        if request.threshold is None and mean_ms > 0 and self._speeds.prefill.measured:
            ratings.local = self._score_local(tokens, decode, mean_ms)
        return ratings

    def _score_prefill(self, tokens: int, side: Side, slow: FloatArray) -> Scores:
        """Score prefill instances; ``slow``: time of this prompt on each over the mean of all.

        ``lately`` is the time of the work that each did in the last minutes, over the mean. It spreads work, and a
        prefix that all share, among instances that have nothing to do: however large the match, from some point on an
        idle instance should compute the prefix once more. It delays no prompt, so the best prefill instance's total is
        shifted to its score without the term, for comparison with the prefill on decode instances.
        """
        if not len(side):
            return Scores.of(match=[], load=[], speed=[], lately=[])
        beta = self.beta
        slow = _without_noise(slow)
        match = side.match_rates
        load = -beta * slow * side.work / tokens
        speed = -beta * (slow - 1) * (1 - match)
        done = slow * (side.loads - side.work)
        smoothing = tokens / 4
        lately = -beta * _above_mean((done + smoothing) / (done.mean() + smoothing))
        now = match + load + speed
        return Scores.of(match=match, load=load, speed=speed, lately=lately + now.max() - (now + lately).max())

    def _score_decode(self, side: Side) -> Scores:
        """Score decode instances by the KV that they hold: relative load times time per token over the mean."""
        step_ms = self._speeds.decode.times(side.ids, 1 + side.sequences().mean())
        busy = relative_loads(side) * _without_noise(step_ms / step_ms.mean())
        return Scores.of(match=side.match_rates, load=-self.beta * (1 + _above_mean(busy)))

    def _score_local(self, tokens: int, side: Side, mean_ms: float) -> Scores:
        """Score the prefill on each decode instance; ``mean_ms``: time of this prompt on prefill instances."""
        beta = self.beta
        match = side.match_rates
        measured = self._speeds.local.measured
        slow = self._speeds.local.times(side.ids, tokens) / mean_ms if measured else np.ones(len(side))
        stalled = slow * (1 + _STALL_SHARE * side.sequences())
        return Scores.of(
            match=match,
            load=-beta * (slow * side.prompts_waiting() / tokens + _LOCAL_COST),
            speed=-beta * (stalled - 1) * (1 - match),
        )

    def score(self, request: Request, prefill: Side, decode: Side) -> Ratings:
        """Score both sides in C, with the result of :meth:`plain_score`."""
        speeds = self._speeds
        prefill_rows = prefill.packed()
        decode_rows = decode.packed()
        prefill_scores = np.empty(len(prefill), kernels.MATCH_PREFILL.dtype)
        decode_scores = np.empty(len(decode), kernels.MATCH_DECODE.dtype)
        at_prefill = address_of(prefill_scores)
        at_decode = address_of(decode_scores)
        computing = speeds.prefill.lines(prefill.ids)
        decoding = speeds.decode.lines(decode.ids)
        local_lines = speeds.local.lines(decode.ids)
        with_local = kernels.score_match(
            kernels.MATCH_ARGS.pack(
                address_of(prefill_rows),
                address_of(decode_rows),
                len(prefill),
                len(decode),
                *computing.packed(),
                *decoding.packed(),
                *local_lines.packed(),
                float(max(1, request.tokens)),
                self.beta,
                decode.cost,
                request.threshold is None and speeds.prefill.measured,
                speeds.local.measured,
                at_prefill,
                at_decode,
            )
        )
        local = None
        if with_local:
            terms = {
                "match": decode.match_rates,
                "load": decode_scores["local_load"],
                "speed": decode_scores["local_speed"],
            }
            local = Scores(terms, decode_scores["local_total"], kernels.MATCH_DECODE.column(at_decode, "local_total"))
        prefill_terms = {
            "match": prefill.match_rates,
            "load": prefill_scores["load"],
            "speed": prefill_scores["speed"],
            "lately": prefill_scores["lately"],
        }
        decode_terms = {"match": decode.match_rates, "load": decode_scores["load"]}
        return Ratings(
            Scores(prefill_terms, prefill_scores["total"], kernels.MATCH_PREFILL.column(at_prefill, "total")),
            Scores(decode_terms, decode_scores["total"], kernels.MATCH_DECODE.column(at_decode, "total")),
            local=local,
            leave=True,
            temperature=self.temperature,
        )


def _without_noise(slow: FloatArray) -> FloatArray:
    """Return 1 for times over their mean that are near 1."""
    return np.where(np.abs(slow - 1) < _NOISE, 1.0, slow)


def _above_mean(x: FloatArray) -> FloatArray:
    """Return ``x - 1``, and ``ln x`` below the mean: an idle instance is far below, but not infinitely."""
    return np.where(x >= 1, x - 1, np.log(np.maximum(x, _IDLE)))
