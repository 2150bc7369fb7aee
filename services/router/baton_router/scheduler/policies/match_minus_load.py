"""``match_minus_load``, the default: score = KV match rate - beta * relative load; the highest wins, ties at random."""

from __future__ import annotations

import math
from typing import Self

from baton.errors import ConfigError
from baton_router.scheduler.policies.registry import BuiltInPolicy, PolicyContext
from baton_router.scheduler.policy import Ratings, Request, Scores, Side, relative_loads

_IDLE = 1e-6


class MatchMinusLoad(BuiltInPolicy):
    """Send a request where its KV is, unless that place is too busy.

    Algorithm, for each role by itself::

        match_i = matched prompt tokens on i / prompt tokens
        load_i  = (work on i + s) / (mean work of the role + s)
        score_i = match_i - beta * load_i                where load_i >= 1
        score_i = match_i - beta * (1 + ln load_i)       below the mean

    with s a quarter of the work that this very request would be if nothing matched. Work is counted in tokens: for a
    prefill instance the prompt tokens it still has to compute, for a decode instance the tokens whose KV it holds, and
    for both a share of what they did in the last minutes (see ``baton_router.registry.load``). The pair's score is
    the sum of both, so the best of each role is the best pair. Decode's own match counts like prefill's: what decode
    holds need not travel, and if little is missing it computes the rest itself.

    ``beta`` is the price of imbalance: with 0.5 a full match gives way once its instance carries 3 times the mean
    (1 / 0.5 + 1), or to an instance that carries an eighth of the mean. The logarithm is what spreads a prefix that
    all requests share: however large the match, from some point on an idle instance should compute it once more.

    Risks: with ``beta = 0`` everything goes to the instance that first served a common prefix. A very large ``beta``
    is ``least_loaded``. With little to do at all (a request now and then) there is little to balance, and a hot prefix
    stays on few instances, which is wanted. Match rates of a stale index can be too high; they cost recomputation on a
    prefill instance, never a wrong answer.

    Args:
        beta: Weight of load, 0 to 100.
        temperature: Softmax temperature, 0 to 100; 0: the best wins. With several routers that see the same scores,
            0.05 keeps them from all choosing the same instance at once.

    Raises:
        ConfigError: One is out of range.
    """

    name = "match_minus_load"

    def __init__(self, beta: float = 0.5, temperature: float = 0.0) -> None:
        for field, value in (("beta", beta), ("temperature", temperature)):
            if not (math.isfinite(value) and 0.0 <= value <= 100.0):
                raise ConfigError(f"{field} must be between 0 and 100, got {value}", field=field)
        self.beta = beta
        self.temperature = temperature

    @classmethod
    def make(cls, context: PolicyContext) -> Self:
        """Build it with the configured weights."""
        return cls(context.beta, context.temperature)

    def score(self, request: Request, prefill: Side, decode: Side) -> Ratings:
        """Score both roles."""
        return Ratings(self._score(prefill), self._score(decode), temperature=self.temperature)

    def _score(self, side: Side) -> Scores:
        price, rates, loads, totals = -self.beta, side.match_rates, [], []
        for at, x in enumerate(relative_loads(side)):
            load = price * (x if x >= 1.0 else 1.0 + math.log(max(x, _IDLE)))
            loads.append(load)
            totals.append(rates[at] + load)
        return Scores({"match": rates, "load": loads}, totals)
