"""A placement and what spoke for it, and the log of the latest ones.

A decision over 16 x 16 instances has 32 candidates with several terms each. As a protobuf message that costs more than
the decision itself, and most are never looked at. So :class:`Decision` has the message's fields under the message's
names, as the policy's own numbers, and :meth:`Decision.to_pb` makes the message.

:class:`DecisionLog` is what ``/debug/decisions``, ``baton explain`` and the console show. Kept per request: a reference
to each placement's decision, to the latest trace and to its clock, so that a request pays for a few assignments and
nothing is written out before it is asked for. Never kept: prompts, token ids, cache salts.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple, Protocol

import msgspec

from baton.api.v1 import common_pb2, router_pb2
from baton.rpc.convert import path_to_pb, role_to_pb
from baton.types import PrefillPath, Role
from baton_router.scheduler.policy import Choice, FloatArray, Ratings, Side, best_option, relative_loads

RUNNING = "running"
_MAX_RECORDS = 1000
_MAX_NUMBERS = 200_000
"""Candidates in all remembered decisions, about 100 bytes each, and scores of pairs unless they are computed when they
are read; with hundreds of instances fewer decisions are remembered."""


class Term(NamedTuple):
    """A named part of a score."""

    name: str
    value: float


class DecisionCandidate(NamedTuple):
    """One instance that was scored; see ``RouteCandidate``.

    Attributes:
        instance_id: Name of the instance.
        role: Role of the instance.
        match_rate: Matched prompt tokens / prompt tokens.
        tiers: Prompt tokens that it can load from slower tiers and the KV store, by tier.
        load: Load relative to the mean of the role.
        score: Score of the instance, or of the best pair with it where the policy rates pairs.
        terms: Terms that add up to the score.
        partner: Where the policy rates pairs, the other instance of that pair, or ``local`` or ``store``; else empty.
        own: Terms of the instance itself.
        partner_terms: Terms of the partner; with those of the instance and the pair they are ``terms``.
        pair_terms: Terms of the pair.
    """

    instance_id: str
    role: common_pb2.Role.ValueType
    match_rate: float
    tiers: dict[str, int]
    load: float
    score: float
    terms: list[Term]
    partner: str
    own: list[Term]
    partner_terms: list[Term]
    pair_terms: list[Term]


class Decision(msgspec.Struct, eq=False):
    """The chosen instances and all candidates; its fields are those of ``RouteDecision``.

    Attributes:
        prompt_tokens: Number of prompt tokens of the request.
        policy: Name of the policy.
        prefill: Prefill instances as the policy saw them.
        decode: Decode instances as the policy saw them.
        ratings: Answer of the policy.
        choice: The option chosen by the ratings.
        path: Where the prompt is to be computed; ``None``: the decode instance decides by its threshold.
        prefill_order: Positions of the prefill instances to use, best first.
        prefill_addresses: Addresses of these.
        index_state: The worst index state of the chosen instances.
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
    _loads: dict[Role, FloatArray] | None = None

    @property
    def prefill_instance(self) -> str:
        """Name of the first prefill instance; empty: none is to be used."""
        if not self.prefill_order or self.path in (PrefillPath.LOCAL, PrefillPath.STORE):
            return ""
        return self.prefill.ids[self.prefill_order[0]]

    @property
    def decode_instance(self) -> str:
        """Name of the decode instance."""
        return self.decode.ids[self.choice.decode]

    @property
    def score(self) -> float:
        return self.choice.score

    @property
    def terms(self) -> list[Term]:
        """Terms that add up to the score."""
        return _named(self._option_terms(self.choice.decode, self.choice.prefill, self.choice.path))

    @property
    def candidates(self) -> list[DecisionCandidate]:
        """All instances that were scored, prefill instances first."""
        return [self._candidate(side, at) for side in (self.prefill, self.decode) for at in range(len(side.ids))]

    def _candidate(self, side: Side, at: int) -> DecisionCandidate:
        partner, own, others, pair = self._parts_of(side.role, at)
        return DecisionCandidate(
            instance_id=side.ids[at],
            role=role_to_pb(side.role),
            match_rate=float(side.match_rates[at]),
            tiers={} if side.tiers is None else side.tiers[at],
            load=float(self.loads(side.role)[at]),
            score=self.score_of(side.role, at),
            terms=self.terms_of(side.role, at),
            partner=partner,
            own=_named(own),
            partner_terms=_named(others),
            pair_terms=_named(pair),
        )

    def _parts_of(self, role: Role, at: int) -> tuple[str, dict[str, float], dict[str, float], dict[str, float]]:
        """Return a candidate's partner, and the terms of itself, of the partner and of the pair."""
        if not self.ratings.couples:
            scores = self.ratings.prefill if role is Role.PREFILL else self.ratings.decode
            return "", scores.explain(at), {}, {}
        if role is Role.PREFILL:
            partner, own, pair = self._option_parts(self.choice.decode, at, PrefillPath.REMOTE)
            return self.decode_instance, own, partner, pair
        prefill, path, _ = best_option(self.ratings, at)
        own, others, pair = self._option_parts(at, prefill, path)
        return (path.value if path else "") if prefill is None else self.prefill.ids[prefill], own, others, pair

    def match_rate_of(self, instance_id: str) -> float:
        """Return the match rate of a candidate; 0 for other instances."""
        for side in (self.decode, self.prefill):
            for at, name in enumerate(side.ids):
                if name == instance_id:
                    return float(side.match_rates[at])
        return 0.0

    def loads(self, role: Role) -> FloatArray:
        """Return the relative loads of a role."""
        known = self._loads
        if known is None:
            known = self._loads = {}
        loads = known.get(role)
        if loads is None:
            loads = known[role] = relative_loads(self.prefill if role is Role.PREFILL else self.decode)
        return loads

    def score_of(self, role: Role, at: int) -> float:
        if role is Role.DECODE:
            return best_option(self.ratings, at)[2] if self.ratings.couples else float(self.ratings.decode.totals[at])
        if not self.ratings.couples:
            return float(self.ratings.prefill.totals[at])
        return sum(self._option_terms(self.choice.decode, at, PrefillPath.REMOTE).values())

    def terms_of(self, role: Role, at: int) -> list[Term]:
        """Return the terms that add up to a candidate's score."""
        if not self.ratings.couples:
            scores = self.ratings.prefill if role is Role.PREFILL else self.ratings.decode
            return _named(scores.explain(at))
        if role is Role.PREFILL:
            return _named(self._option_terms(self.choice.decode, at, PrefillPath.REMOTE))
        prefill, path, _ = best_option(self.ratings, at)
        return _named(self._option_terms(at, prefill, path))

    def _option_terms(self, d: int, p: int | None, path: PrefillPath | None) -> dict[str, float]:
        terms: dict[str, float] = {}
        for part in self._option_parts(d, p, path):
            for name, value in part.items():
                terms[name] = terms.get(name, 0.0) + value
        return terms

    def _option_parts(
        self, d: int, p: int | None, path: PrefillPath | None
    ) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
        """Return the terms of a decode instance, of where the prompt is computed, and of the pair."""
        ratings = self.ratings
        decode = ratings.decode.explain(d)
        if p is not None:
            pair = ratings.pairs.explain(p, d) if ratings.pairs is not None else {}
            return decode, ratings.prefill.explain(p), pair
        if path is PrefillPath.LOCAL and ratings.local is not None:
            return decode, ratings.local.explain(d), {}
        if path is PrefillPath.STORE and ratings.store is not None:
            return decode, ratings.store.explain(d), {}
        return decode, {}, {}

    def to_pb(self) -> router_pb2.RouteDecision:
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


class Clock(Protocol):
    """Times and tokens of a running request.

    Attributes:
        first_token_s: Seconds from arrival to the first token; ``None``: there is none yet.
        generated: Number of tokens generated so far.
    """

    first_token_s: float | None
    generated: int


_PREFIXES = ("chatcmpl", "cmpl", "msg")
"""Prefixes of answers' ids, before the id of the HTTP request."""


class DecisionRecord(msgspec.Struct):
    """One request: where it was placed and how it went.

    Attributes:
        request_id: Id of the request, as in the instances' logs.
        began: Time of arrival, in seconds since 1970.
        prompt_tokens: Number of prompt tokens.
        placements: Seconds after ``began`` and the decision, for every time it was placed.
        trace: Latest trace from the instances; ``None``: none yet.
        tenant: Name of the tenant.
        clock: Time to first token and number of tokens; ``None``: not measured.
        outcome: ``running``, ``done``, ``cancelled`` or an error's code.
        duration_s: Duration in seconds; ``None`` while it runs.
        kept: Whether it is still among the remembered requests.
        numbers: Approximate count of numbers in its decisions.
        direct: Whether its client gets the tokens from the decode instance directly.
        grammar: Kind and digest of the grammar that its answer follows; empty: none.
        tools: Description of the tools that it may or must call; empty: none.
        thinking_budget: Maximum number of reasoning tokens; ``None``: unlimited.
        answer_id: Identifier of the answer, if the caller gave the request another; else empty.
        session: Name of its conversation; empty: unknown.
    """

    request_id: str
    began: float
    prompt_tokens: int
    placements: list[tuple[float, Decision]] = msgspec.field(default_factory=list)
    trace: common_pb2.RequestTrace | None = None
    clock: Clock | None = None
    tenant: str = ""
    outcome: str = RUNNING
    duration_s: float | None = None
    kept: bool = True
    numbers: int = 0
    direct: bool = False
    grammar: str = ""
    tools: str = ""
    thinking_budget: int | None = None
    answer_id: str = ""
    session: str = ""

    @property
    def decision(self) -> Decision | None:
        """The latest decision; ``None``: it was never placed."""
        return self.placements[-1][1] if self.placements else None

    def is_named(self, name: str) -> bool:
        """Whether this is its whole id, the one that its client gave, its answer's ``id``, or ``x-request-id``."""
        if name == self.request_id:
            return True
        own = self.request_id.rpartition("-")[0]
        if name == own:
            return True
        answer = self.answer_id or own
        prefix, _, http_id = answer.partition("-")
        if prefix.startswith("resp_"):  # the unguessable id of a response, and the client's name for it
            return name in (answer, prefix, http_id)
        return name == answer or (prefix in _PREFIXES and name == http_id)


class DecisionLog:
    """A bounded memory of requests, newest last.

    Attributes:
        on_begin: Called whenever a request begins.
        on_placed: Called with every placement of a request.
        on_trace: Called with a request's trace and the KV bytes that are new in it.
        on_end: Called whenever a request has ended.
        num_begun: Number of requests recorded since the start.

    Args:
        max_records: Maximum number of requests.
        max_numbers: Maximum number of candidates and pairs in all of them.
        now: Wall clock, in seconds since 1970.
    """

    def __init__(
        self,
        *,
        max_records: int = _MAX_RECORDS,
        max_numbers: int = _MAX_NUMBERS,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.on_begin: Callable[[], None] | None = None
        self.on_placed: Callable[[Decision], None] | None = None
        self.on_trace: Callable[[common_pb2.RequestTrace, int], None] | None = None
        self.on_end: Callable[[], None] | None = None
        self._max_records = max_records
        self._max_numbers = max_numbers
        self._now = now
        self._records: deque[DecisionRecord] = deque()
        self._running: dict[str, DecisionRecord] = {}
        self._numbers = 0
        self.num_begun = 0

    @property
    def num_running(self) -> int:
        """Requests that have not ended."""
        return len(self._running)

    def begin(
        self, request_id: str, prompt_tokens: int, clock: Clock | None = None, *, tenant: str = ""
    ) -> DecisionRecord:
        """Remember a request until later ones displace it; :meth:`end` must be called when it ends."""
        record = self._running[request_id] = self._append(request_id, prompt_tokens)
        record.clock = clock
        record.tenant = tenant
        if self.on_begin is not None:
            self.on_begin()
        return record

    def placed(self, request_id: str, decision: Decision) -> None:
        """Record a placement of a request, the first or a later one; an unknown request is remembered from here on."""
        record = self._running.get(request_id) or self._append(request_id, decision.prompt_tokens)
        record.placements.append((self._now() - record.began, decision))
        if record.kept:
            size = len(decision.prefill.ids) + len(decision.decode.ids)
            if (pairs := decision.ratings.pairs) is not None and pairs.packed is None:
                size += len(decision.prefill.ids) * len(decision.decode.ids)
            record.numbers += size
            self._numbers += size
        while self._numbers > self._max_numbers and len(self._records) > 1:
            self._forget_oldest()
        if self.on_placed is not None:
            self.on_placed(decision)

    def answered(self, record: DecisionRecord, trace: common_pb2.RequestTrace) -> None:
        """Record a request's trace; a later one is more complete."""
        known = record.trace.kv_bytes if record.trace is not None else 0
        if self.on_trace is not None and (record.trace is None or trace.kv_bytes > known):
            self.on_trace(trace, trace.kv_bytes - known)
        record.trace = trace

    def end(self, record: DecisionRecord, outcome: str) -> None:
        """Record how a request ended."""
        self._running.pop(record.request_id, None)
        record.outcome = outcome
        record.duration_s = self._now() - record.began
        if self.on_end is not None:
            self.on_end()

    def recent(self, limit: int, *, containing: str = "", tenant: str | None = None) -> list[DecisionRecord]:
        """Return up to ``limit`` requests, newest first, whose id contains a text; with ``tenant`` only that one's."""
        matches = (x for x in reversed(self._records) if containing in x.request_id and _is_of(x, tenant))
        return list(islice(matches, limit))

    def find(self, name: str, *, tenant: str | None = None) -> list[DecisionRecord]:
        """Return the requests with a name, newest first; an answer to several prompts has several."""
        return [x for x in reversed(self._records) if x.is_named(name) and _is_of(x, tenant)]

    def __iter__(self) -> Iterator[DecisionRecord]:
        """Iterate over the remembered requests, oldest first."""
        return iter(self._records)

    def _append(self, request_id: str, prompt_tokens: int) -> DecisionRecord:
        record = DecisionRecord(request_id, self._now(), prompt_tokens)
        self._records.append(record)
        self.num_begun += 1
        if len(self._records) > self._max_records:
            self._forget_oldest()
        return record

    def _forget_oldest(self) -> None:
        oldest = self._records.popleft()
        oldest.kept = False
        self._numbers -= oldest.numbers


def _is_of(record: DecisionRecord, tenant: str | None) -> bool:
    return tenant is None or record.tenant == tenant
