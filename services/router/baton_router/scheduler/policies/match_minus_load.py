"""``match_minus_load``, the default: score = KV match rate - beta * load; the highest wins, ties at random."""

from __future__ import annotations

import math
from typing import Self

import numpy as np

from baton.errors import ConfigError
from baton_router.scheduler.policies.registry import BuiltInPolicy, PolicyContext
from baton_router.scheduler.policy import FloatArray, Ratings, Request, Scores, Side, relative_loads
from baton_router.scheduler.speeds import Speeds

_IDLE = 1e-6
_ALIKE = 0.1
"""Instances whose measured times differ from the mean by less count as equal: that much is noise."""
_STALL_SHARE = 0.05
"""What a local prefill costs per sequence that decodes there, in prefills."""
_ASIDE = 0.1
"""What must be saved, in prompts, before decode is asked to compute one: its other sequences wait for that."""


class MatchMinusLoad(BuiltInPolicy):
    """Send a request where its KV is, unless that place is too busy.

    Everything is counted in prompts like this one: a match rate of 1 saves computing one, a load of 1 is the time in
    which a prefill instance of mean speed computes one. For a prefill instance::

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
        tokens, size = max(1, request.tokens), len(prefill)
        base, slope = self._speeds.prefill.arrays(prefill.ids)
        times = base + slope * tokens
        mean = float(np.add.reduce(times)) / size if size else 0.0
        local = None
        if mean > 0 and request.threshold is None and self._speeds.prefill.measured:
            local = self._local(decode, tokens, mean)
        return Ratings(
            self._prefill(prefill, tokens, _apart(times / mean) if mean > 0 else np.ones(size)),
            self._decode(decode),
            local=local,
            leave=True,
            temperature=self.temperature,
        )

    def _prefill(self, side: Side, tokens: int, slow: FloatArray) -> Scores:
        match, beta = side.match_rates, self.beta
        if not match.size:
            return Scores({"match": match}, match)
        load = side.work * slow * (-beta / tokens)
        speed = (slow - 1.0) * (match - 1.0) * beta
        lately = _above(_relative((side.loads - side.work) * slow, tokens)) * -beta
        now = match + load + speed
        totals = now + lately
        # Who did less goes first; but what was done makes no prompt late, so beside a decode instance the best counts.
        shift = float(now.max() - totals.max())
        return Scores({"match": match, "load": load, "speed": speed, "lately": lately + shift}, totals + shift)

    def _decode(self, side: Side) -> Scores:
        match, size = side.match_rates, len(side)
        if not size:
            return Scores({"match": match}, match)
        base, slope = self._speeds.decode.arrays(side.ids)
        times = base + slope * (1.0 + sum(x.requests for x in side.trackers) / size)
        x = relative_loads(side) * _apart(times * (size / float(np.add.reduce(times))))
        load = -self.beta * (1.0 + _above(x))
        return Scores({"match": match, "load": load}, match + load)

    def _local(self, side: Side, tokens: int, mean: float) -> Scores:
        """Score the prefill on decode instances; ``mean``: milliseconds of the prompt on a prefill instance."""
        beta, match = self.beta, side.match_rates
        slow = np.ones(len(side))
        if self._speeds.local.measured:
            base, slope = self._speeds.local.arrays(side.ids)
            slow = (base + slope * tokens) / mean
        load = (slow * side.prompts_waiting() + _ASIDE * tokens) * (-beta / tokens)
        speed = (slow * (1.0 + _STALL_SHARE * side.sequences()) - 1.0) * (match - 1.0) * beta
        return Scores({"match": match, "load": load, "speed": speed}, match + load + speed)


def _apart(slow: FloatArray) -> FloatArray:
    """Return times over their mean, those that are about the mean as 1."""
    return np.where(np.abs(slow - 1.0) < _ALIKE, 1.0, slow)


def _relative(values: FloatArray, tokens: int) -> FloatArray:
    """Return values over their mean, smoothed by a quarter of the prompt as ``relative_loads`` is."""
    smoothing = tokens / 4
    relative: FloatArray = (values + smoothing) / (float(np.add.reduce(values)) / values.size + smoothing)
    return relative


def _above(x: FloatArray) -> FloatArray:
    """Return what relative loads are above 1, by their logarithm below."""
    return np.where(x >= 1.0, x - 1.0, np.log(np.maximum(x, _IDLE)))
