"""The latest decisions and what became of them: what ``/debug/decisions``, ``baton explain`` and the console show.

Kept per request: a reference to each placement's ``RouteDecision``, to the latest trace and to its clock, so that a
request pays for a few assignments and nothing is written out before it is asked for. Never kept: prompts, token ids,
cache salts.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Protocol

import msgspec

from baton.api.v1 import common_pb2
from baton_router.scheduler.decision import Decision

RUNNING = "running"
_MAX_RECORDS = 1000
_MAX_NUMBERS = 500_000
"""What the policies said of candidates and pairs, in all decisions kept; some 30 bytes each. With hundreds of instances
there are fewer decisions."""


class Clock(Protocol):
    """What times a request.

    Attributes:
        first_token_s: Seconds from its arrival to its first token; ``None``: there is none yet.
        generated: Tokens so far.
    """

    first_token_s: float | None
    generated: int


class DecisionRecord(msgspec.Struct):
    """One request: where it was placed and how it went.

    Attributes:
        request_id: As the instances' logs have it.
        began: When it came, in seconds since 1970.
        prompt_tokens: Tokens of its prompt.
        placements: Seconds after ``began`` and the decision, for every time it was placed.
        trace: How it came to its KV, as far as is known.
        tenant: Whose it is.
        clock: Knows the time to first token and how many tokens there are.
        outcome: ``running``, ``done``, ``cancelled`` or an error's code.
        duration_s: How long it took; ``None`` while it runs.
        kept: Whether it is still among those that are remembered.
        direct: Whether its client has the tokens from the decode instance itself.
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
    direct: bool = False

    @property
    def decision(self) -> Decision | None:
        """The latest decision; ``None``: it was never placed."""
        return self.placements[-1][1] if self.placements else None

    def is_named(self, name: str) -> bool:
        """Whether a client or a log calls it so: its whole id, the answer's ``id``, or the ``x-request-id``."""
        if name == self.request_id:
            return True
        answer = self.request_id.rpartition("-")[0]
        return name in (answer, answer.removeprefix("chatcmpl-"), answer.removeprefix("cmpl-"))


class DecisionLog:
    """A bounded memory of requests, newest last.

    Attributes:
        on_placed: Called with every placement of a request.
        on_trace: Called with a request's trace and the KV bytes that are new in it.
        on_end: Called whenever a request has ended.

    Args:
        max_records: Requests kept at most.
        max_numbers: Candidates and pairs in all of them kept at most.
        now: Wall clock, in seconds; tests bring their own.
    """

    def __init__(
        self,
        *,
        max_records: int = _MAX_RECORDS,
        max_numbers: int = _MAX_NUMBERS,
        now: Callable[[], float] = time.time,
    ) -> None:
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
        """Remember a request until it has been pushed out by others; tell of its end with :meth:`end`."""
        record = self._running[request_id] = self._append(request_id, prompt_tokens)
        record.clock, record.tenant = clock, tenant
        return record

    def placed(self, request_id: str, decision: Decision) -> None:
        """Note that a request was placed, for the first time or again; an unknown one is remembered from here on."""
        record = self._running.get(request_id) or self._append(request_id, decision.prompt_tokens)
        record.placements.append((self._now() - record.began, decision))
        if record.kept:
            self._numbers += _size(decision)
        while self._numbers > self._max_numbers and len(self._records) > 1:
            self._forget_oldest()
        if self.on_placed is not None:
            self.on_placed(decision)

    def answered(self, record: DecisionRecord, trace: common_pb2.RequestTrace) -> None:
        """Take a request's trace; a later one is more complete."""
        known = record.trace.kv_bytes if record.trace is not None else 0
        if self.on_trace is not None and (record.trace is None or trace.kv_bytes > known):
            self.on_trace(trace, trace.kv_bytes - known)
        record.trace = trace

    def end(self, record: DecisionRecord, outcome: str) -> None:
        """Note how a request ended."""
        self._running.pop(record.request_id, None)
        record.outcome = outcome
        record.duration_s = self._now() - record.began
        if self.on_end is not None:
            self.on_end()

    def recent(self, limit: int, *, containing: str = "", tenant: str | None = None) -> list[DecisionRecord]:
        """Return up to ``limit`` requests, newest first, whose id contains a text; of one tenant alone if asked."""
        found = (x for x in reversed(self._records) if containing in x.request_id and _is_of(x, tenant))
        return list(islice(found, limit))

    def find(self, name: str, *, tenant: str | None = None) -> list[DecisionRecord]:
        """Return the requests of a name, newest first; an answer to several prompts has several."""
        return [x for x in reversed(self._records) if x.is_named(name) and _is_of(x, tenant)]

    def __iter__(self) -> Iterator[DecisionRecord]:
        """Go through what is remembered, oldest first."""
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
        self._numbers -= sum(_size(decision) for _, decision in oldest.placements)


def _is_of(record: DecisionRecord, tenant: str | None) -> bool:
    return tenant is None or record.tenant == tenant


def _size(decision: Decision) -> int:
    """How many numbers a decision keeps, roughly."""
    prefills, decodes = len(decision.prefill), len(decision.decode)
    return prefills + decodes + (prefills * decodes if decision.ratings.pairs is not None else 0)
