"""``session``: a conversation stays where it is; requests without a session go by match and load."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Self

import numpy as np

from baton.errors import ConfigError
from baton.types import InstanceId
from baton_router.scheduler.policies.match_minus_load import MatchMinusLoad
from baton_router.scheduler.policies.registry import BuiltInPolicy, PolicyContext
from baton_router.scheduler.policy import Policy, Ratings, Request, Scores, Side

_STICKS = 1000.0
"""Above the sum of all other terms."""


class Session(BuiltInPolicy):
    """Send every request of a session to the same pair.

    Algorithm: rendezvous hashing. Each instance gets a pseudo-random rank for the session, and the first in that order
    is its home, unless more is in flight there than ``overload`` times its role's mean and this request: then the next
    one is. When an instance is removed, only its sessions move; when one is added, only those that now prefer it. There
    is no state, so a restarted router, or another one beside it, sends the session to the same place.

    A session is named by the ``x-baton-session`` header or the ``session_id`` field. Requests without one are scored by
    the inner policy alone, which also orders the instances that come after the home.

    Risk: ignores prefixes that sessions share; each home computes them once.

    Args:
        inner: Policy that scores requests without a session.
        overload: Maximum load of a home relative to the mean, above 1.

    Raises:
        ConfigError: ``overload`` is not above 1; names ``session_overload``.
    """

    name = "session"

    def __init__(self, inner: Policy, overload: float = 3.0) -> None:
        if not (math.isfinite(overload) and overload > 1.0):
            raise ConfigError(f"session_overload must be above 1, got {overload}", field="session_overload")
        self._inner = inner
        self._overload = overload

    @classmethod
    def make(cls, context: PolicyContext) -> Self:
        return cls(MatchMinusLoad.make(context), context.session_overload)

    def score(self, request: Request, prefill: Side, decode: Side) -> Ratings:
        ratings = self._inner.score(request, prefill, decode)
        if request.session:
            ratings.prefill = self._at_home(request.session, prefill, ratings.prefill)
            ratings.decode = self._at_home(request.session, decode, ratings.decode)
            ratings.temperature = 0.0
        return ratings

    def chosen(self, request: Request, instances: Sequence[InstanceId]) -> None:
        self._inner.chosen(request, instances)

    def _at_home(self, session: str, side: Side, scores: Scores) -> Scores:
        limit = self._overload * (float(side.work.sum()) / max(1, len(side)) + side.cost)
        free = np.flatnonzero(side.work <= limit).tolist() or range(len(side))
        sticky = [0.0] * len(side)
        if side.ids:
            sticky[max(free, key=lambda at: _rank(session, side.ids[at]))] = _STICKS
        return Scores.of(**scores.terms, session=sticky)


def _rank(session: str, name: InstanceId) -> bytes:
    text = f"{len(session)}:{session}{name}".encode(errors="surrogatepass")
    return hashlib.blake2b(text, digest_size=8).digest()
