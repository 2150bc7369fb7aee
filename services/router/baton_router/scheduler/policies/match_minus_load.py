"""``match_minus_load``, the default: score = KV match rate - beta * load; the highest wins, ties at random."""

from __future__ import annotations

import math
from typing import Self

import numpy as np

from baton.errors import ConfigError
from baton.native import address_of
from baton_router.scheduler import kernels
from baton_router.scheduler.policies.registry import BuiltInPolicy, PolicyContext
from baton_router.scheduler.policy import FloatArray, Pairs, Ratings, Request, Scores, Side, relative_loads
from baton_router.scheduler.speeds import Speeds

_NOISE = 0.1
"""Times within 10 % of the mean count as equal to it: the difference is noise."""
_STALL_SHARE = 0.05
"""Cost of a local prefill per sequence that decodes there, as a share of the prefill."""
_LOCAL_COST = 0.1
"""Saving, in prompts, from which decode is asked to compute one: its running sequences are delayed."""
_OWN_MATCH = 0.02
"""What prefill's own match rate adds. In replays (docs/benchmarks.md) without it KV that decode held travelled to other
prefill instances; 15 times as much took first tokens longer."""
_EVEN = 0.03
"""Most that an uneven use of prefill instances counts: more than its own match, or a prompt that all share would stay
with the first one. In replays three times as much took first tokens longer where instances differ."""
_IDLE = 1e-6
_NO_TRANSFERS = (0, 0, 0, 0.0, 0.0, 0.0, 0.0, -1.0)
"""The rest of ``kernels.PAIRS``: transfers are not counted, and no threshold."""


class MatchMinusLoad(BuiltInPolicy):
    """Send a request where its KV is, unless that place is too busy.

    Everything is counted in prompts like this one: a match of 1 saves computing one, a load of 1 is the time in which a
    prefill instance of mean speed computes one. A token counts by its context (``PromptWork``), so the last half of a
    long prompt counts more than the first. ``slow`` is an instance's time over the mean, ``above(x)`` is ``x - 1``,
    below 1 ``ln x``::

        prefill = 0.02 * match_rate - beta * slow * work / prompt - 0.03 * min(1, relative_load - least relative_load)
        decode  = match_rate - beta * (1 + above(relative_load * slow))
        pair    = match - beta * (slow - 1) * (1 - match)    match: the greater of both instances'
        local   = match - beta * (slow * waiting / prompt + 0.1 + (stalled - 1) * (1 - match))

    ``work`` and ``waiting`` are the prompt tokens to compute there, ``prompt`` is this prompt, ``stalled`` is
    ``slow * (1 + 0.05 * running sequences)``. The relative load includes the work of the last minutes; on a prefill
    instance it only decides among equals, which would else be as unequally used as they were at first.

    KV that either instance of a pair holds need not be computed; what decode holds need not travel either, so its match
    rate counts again, and what decode alone holds has to travel first, so prefill's counts a little more. Where prefill
    instances have queues, a decode instance may be the better place for the prompt: ``local`` takes the place of the
    prefill instance and the pair. Whether a pair's decode instance asks its prefill instance at all is left to its own
    threshold, and with ``--remote-prefill-threshold`` that alone decides.

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
        speeds = self._speeds
        tokens = float(max(1, request.tokens))
        prompt = speeds.work.of(0.0, tokens)
        times = speeds.prefill.times(prefill.ids, prompt)
        mean_ms = times.mean() if times.size else 0.0
        slow = _without_noise(times / mean_ms) if mean_ms > 0 else np.ones(times.size)
        lacking, missing = (speeds.work.of(tokens * side.match_rates, tokens) / prompt for side in (prefill, decode))
        pairs = _PairMatches(lacking, 1 + self.beta * (slow - 1), missing)
        ratings = Ratings(
            Scores.of(
                match=_OWN_MATCH * prefill.match_rates,
                load=-self.beta * slow * prefill.work / prompt,
                even=_even(prefill),
            ),
            self._score_decode(decode),
            Pairs(pairs, pairs.explain) if len(prefill) else None,
            leave=True,
            temperature=self.temperature,
        )
        if request.threshold is None and mean_ms > 0 and speeds.prefill.measured:
            ratings.local = self._score_local(prompt, missing, decode, mean_ms)
        return ratings

    def _score_decode(self, side: Side) -> Scores:
        """Score decode instances by the KV that they hold: relative load times time per token over the mean."""
        step_ms = self._speeds.decode.times(side.ids, 1 + side.sequences().mean())
        busy = relative_loads(side) * _without_noise(step_ms / step_ms.mean())
        return Scores.of(match=side.match_rates, load=-self.beta * (1 + _above_mean(busy)))

    def _score_local(self, prompt: float, missing: FloatArray, side: Side, mean_ms: float) -> Scores:
        """Score the prefill on each decode instance.

        Args:
            prompt: Work of the prompt.
            missing: Share of it that each instance misses.
            side: Decode instances.
            mean_ms: Time of the prompt on prefill instances.
        """
        beta = self.beta
        measured = self._speeds.local.measured
        slow = self._speeds.local.times(side.ids, prompt) / mean_ms if measured else np.ones(len(side))
        stalled = slow * (1 + _STALL_SHARE * side.sequences())
        return Scores.of(
            match=1 - missing,
            load=-beta * (slow * side.prompts_waiting() / prompt + _LOCAL_COST),
            speed=-beta * (stalled - 1) * missing,
        )

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
        at_prefill = address_of(prefill_scores)
        at_decode = address_of(decode_scores)
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
                speeds.work.half,
                self.beta,
                prefill.cost,
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
                "match": decode_scores["local_prefill"],
                "load": decode_scores["local_queue"],
                "speed": decode_scores["local_stall"],
            }
            local = Scores(terms, decode_scores["local_total"], kernels.DECODE_SCORE.column(at_decode, "local_total"))
        pairs = None
        if len(prefill):
            matches = _PairMatches(prefill_scores["missing"], prefill_scores["slope"], decode_scores["missing"])
            packed = kernels.PAIRS.pack(at_prefill, at_decode, 0, *_NO_TRANSFERS)
            pairs = Pairs(matches, matches.explain, decode_scores["bound"], packed)
        prefill_terms = {
            "match": prefill_scores["match"],
            "load": prefill_scores["queue"],
            "even": prefill_scores["even"],
        }
        decode_terms = {"match": decode.match_rates, "load": decode_scores["load"]}
        return Ratings(
            Scores(prefill_terms, prefill_scores["total"], kernels.PREFILL_SCORE.column(at_prefill, "total")),
            Scores(decode_terms, decode_scores["total"], kernels.DECODE_SCORE.column(at_decode, "total")),
            pairs,
            local,
            leave=True,
            temperature=self.temperature,
        )


class _PairMatches:
    """Scores of pairs: the share of the prompt that need not be computed, less what a slow instance adds to the rest.

    Args:
        missing: Share of the prompt that each prefill instance misses.
        price: What computing a whole prompt on it costs: 1 on one of mean speed.
        decode_missing: Share of the prompt that each decode instance misses.
    """

    __slots__ = ("_decode_missing", "_missing", "_price")

    def __init__(self, missing: FloatArray, price: FloatArray, decode_missing: FloatArray) -> None:
        self._missing = missing
        self._price = price
        self._decode_missing = decode_missing

    def __getitem__(self, d: int, /) -> FloatArray:
        """Return the scores of the pairs of decode instance ``d``."""
        scores: FloatArray = 1 - self._price * np.minimum(self._missing, self._decode_missing[d])
        return scores

    def explain(self, p: int, d: int) -> dict[str, float]:
        """Return the terms of a pair."""
        missing = float(min(self._missing[p], self._decode_missing[d]))
        return {"match": 1 - missing, "speed": (1 - float(self._price[p])) * missing}


def _even(side: Side) -> FloatArray:
    """Return what speaks against the prefill instances that did more than the least loaded one."""
    if not len(side):
        return np.zeros(0)
    loads = relative_loads(side)
    even: FloatArray = -_EVEN * np.minimum(1, loads - loads.min())
    return even


def _without_noise(slow: FloatArray) -> FloatArray:
    """Return 1 for times over their mean that are near 1."""
    return np.where(np.abs(slow - 1) < _NOISE, 1.0, slow)


def _above_mean(x: FloatArray) -> FloatArray:
    """Return ``x - 1``, and ``ln x`` below the mean: an idle instance is far below, but not infinitely."""
    return np.where(x >= 1, x - 1, np.log(np.maximum(x, _IDLE)))
