"""A placement and what spoke for it: kept as the policy's own numbers, written out only when it is read.

A decision over 16 x 16 instances has 32 candidates with several terms each. As a protobuf message that costs more than
the decision itself, and most are never looked at. So this has the message's fields under the message's names, and
:meth:`Decision.to_pb` makes the message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from baton.api.v1 import common_pb2, router_pb2
from baton.rpc.convert import path_to_pb, role_to_pb
from baton.types import PrefillPath, Role
from baton_router.scheduler.policy import Choice, Ratings, Side, best_option, relative_loads


class Term(NamedTuple):
    """A named part of a score."""

    name: str
    value: float


class DecisionCandidate:
    """One instance that was looked at; see ``RouteCandidate``."""

    __slots__ = ("_at", "_decision", "_side")

    def __init__(self, decision: Decision, side: Side, at: int) -> None:
        self._decision = decision
        self._side = side
        self._at = at

    @property
    def instance_id(self) -> str:
        """Its name."""
        return self._side.ids[self._at]

    @property
    def role(self) -> common_pb2.Role.ValueType:
        """Its role."""
        return role_to_pb(self._side.role)

    @property
    def match_rate(self) -> float:
        """Matched prompt tokens / prompt tokens."""
        return self._side.match_rates[self._at]

    @property
    def tiers(self) -> dict[str, int]:
        """Prompt tokens that it can load from slower tiers and the KV store, by tier."""
        return {} if self._side.tiers is None else self._side.tiers[self._at]

    @property
    def load(self) -> float:
        """Relative to the mean of its role."""
        return self._decision.loads(self._side.role)[self._at]

    @property
    def score(self) -> float:
        """Its own, or of the best pair with it where the policy rates pairs."""
        return self._decision.score_of(self._side.role, self._at)

    @property
    def terms(self) -> list[Term]:
        """What adds up to the score."""
        return self._decision.terms_of(self._side.role, self._at)


class Decision(msgspec.Struct, eq=False):
    """What was chosen, from what; field by field as in ``RouteDecision``.

    Attributes:
        prompt_tokens: Of the request.
        policy: Name of the policy.
        prefill: Prefill instances as the policy saw them.
        decode: Decode instances as the policy saw them.
        ratings: Its answer.
        choice: What came of that.
        path: Where the prompt is to be computed; ``None``: the decode instance decides by its threshold.
        prefill_addresses: Prefill instances in order, best first.
        index_state: The worst of those that were chosen.
    """

    prompt_tokens: int
    policy: str
    prefill: Side
    decode: Side
    ratings: Ratings
    choice: Choice
    path: PrefillPath | None
    prefill_order: list[int]
    prefill_addresses: Sequence[str]
    index_state: str
    _loads: dict[Role, list[float]] | None = None
    _candidates: list[DecisionCandidate] | None = None

    @property
    def prefill_instance(self) -> str:
        """Name of the prefill instance, the first in order; empty: none is to be used."""
        if not self.prefill_order or self.path in (PrefillPath.LOCAL, PrefillPath.STORE):
            return ""
        return self.prefill.ids[self.prefill_order[0]]

    @property
    def decode_instance(self) -> str:
        """Name of the decode instance."""
        return self.decode.ids[self.choice.decode]

    @property
    def score(self) -> float:
        """Of what was chosen."""
        return self.choice.score

    @property
    def terms(self) -> list[Term]:
        """What adds up to the score."""
        return _named(self._option_terms(self.choice.decode, self.choice.prefill, self.choice.path))

    @property
    def candidates(self) -> list[DecisionCandidate]:
        """All instances that were scored, prefill instances first."""
        if self._candidates is None:
            self._candidates = [
                DecisionCandidate(self, side, at) for side in (self.prefill, self.decode) for at in range(len(side))
            ]
        return self._candidates

    @property
    def couples(self) -> bool:
        """Whether the policy rates pairs, beyond prefill and decode instances each by itself."""
        return not (self.ratings.pairs is None and self.ratings.local is None and self.ratings.store is None)

    def match_rate_of(self, instance_id: str) -> float:
        """Return the match rate of an instance that was looked at; 0 for others."""
        for side in (self.decode, self.prefill):
            for at, name in enumerate(side.ids):
                if name == instance_id:
                    return side.match_rates[at]
        return 0.0

    def loads(self, role: Role) -> list[float]:
        """Return the relative loads of a role."""
        known = self._loads
        if known is None:
            known = self._loads = {}
        loads = known.get(role)
        if loads is None:
            loads = known[role] = relative_loads(self.prefill if role is Role.PREFILL else self.decode)
        return loads

    def score_of(self, role: Role, at: int) -> float:
        """Return a candidate's score."""
        if role is Role.DECODE:
            return best_option(self.ratings, at)[2] if self.couples else self.ratings.decode.totals[at]
        if not self.couples:
            return self.ratings.prefill.totals[at]
        return sum(self._option_terms(self.choice.decode, at, PrefillPath.REMOTE).values())

    def terms_of(self, role: Role, at: int) -> list[Term]:
        """Return what adds up to a candidate's score."""
        if not self.couples:
            scores = self.ratings.prefill if role is Role.PREFILL else self.ratings.decode
            return _named(scores.explain(at))
        if role is Role.PREFILL:
            return _named(self._option_terms(self.choice.decode, at, PrefillPath.REMOTE))
        prefill, path, _ = best_option(self.ratings, at)
        return _named(self._option_terms(at, prefill, path))

    def score_terms(self, role: Role, at: int) -> dict[str, float]:
        """Return a candidate's match rate, relative load and score, and every other term of its score."""
        side = self.prefill if role is Role.PREFILL else self.decode
        basics = {
            "match": side.match_rates[at],
            "load": self.loads(role)[at],
            "score": self.score_of(role, at),
        }
        return {**dict(self.terms_of(role, at)), **basics}

    def _option_terms(self, d: int, p: int | None, path: PrefillPath | None) -> dict[str, float]:
        ratings = self.ratings
        found = [ratings.decode.explain(d)]
        if p is not None:
            found.append(ratings.prefill.explain(p))
            if ratings.pairs is not None:
                found.append(ratings.pairs.explain(p, d))
        elif path is PrefillPath.LOCAL and ratings.local is not None:
            found.append(ratings.local.explain(d))
        elif path is PrefillPath.STORE and ratings.store is not None:
            found.append(ratings.store.explain(d))
        terms: dict[str, float] = {}
        for part in found:
            for name, value in part.items():
                terms[name] = terms.get(name, 0.0) + value
        return terms

    def to_pb(self) -> router_pb2.RouteDecision:
        """Return the message."""
        message = router_pb2.RouteDecision(
            prefill_instance=self.prefill_instance,
            decode_instance=self.decode_instance,
            prompt_tokens=self.prompt_tokens,
            policy=self.policy,
            prefill_addresses=self.prefill_addresses,
            index_state=self.index_state,
            path=path_to_pb(self.path) if self.path is not None else common_pb2.PREFILL_PATH_UNSPECIFIED,
            score=self.score,
            terms=[router_pb2.ScoreTerm(name=term.name, value=term.value) for term in self.terms],
        )
        for candidate in self.candidates:
            message.candidates.add(
                instance_id=candidate.instance_id,
                role=candidate.role,
                match_rate=candidate.match_rate,
                load=candidate.load,
                score=candidate.score,
                terms=[router_pb2.ScoreTerm(name=term.name, value=term.value) for term in candidate.terms],
            )
        return message


def _named(terms: dict[str, float]) -> list[Term]:
    return [Term(name, value) for name, value in terms.items()]
