"""The books of a request that runs by a ticket: its client has the tokens from the instance, and tells of them."""

from __future__ import annotations

import time

from baton.api.v1 import router_pb2
from baton.errors import BatonError, InternalError
from baton_router.metrics.generation_metrics import GenerationClock, cached_tokens
from baton_router.processor.text_request import PreparedRequest
from baton_router.scheduler.decision import Decision
from baton_router.scheduler.decision_log import DecisionLog

_MAX_GAPS = 4096
"""Of one notice: whoever tells of more is not believed the rest."""


class DirectRun:
    """One request, from its arrival to its end.

    What :class:`~baton_router.processor.output_processor.TextRun` sees of its requests, this is told: when the first
    token came, how long the times between messages were, and how KV got where it was needed.

    Args:
        prepared: The request.
        clock: Times it.
        log: Remembers it.
    """

    __slots__ = ("_arrived", "_clock", "_log", "_placed_s", "_prompt_tokens", "_record", "_traced")

    def __init__(self, prepared: PreparedRequest, clock: GenerationClock, log: DecisionLog) -> None:
        routed = prepared.routed
        self._log, self._clock, self._arrived = log, clock, prepared.arrived
        self._prompt_tokens = prepared.prompt_tokens
        self._record = log.begin(routed.request_id, prepared.prompt_tokens, clock, tenant=routed.tenant)
        self._record.direct = True
        self._placed_s = 0.0
        self._traced = False

    def placed(self, decision: Decision) -> None:
        """Take where it was placed: from here on its client's clock runs."""
        self._log.placed(self._record.request_id, decision)
        self._placed_s = time.perf_counter() - self._arrived

    def note(self, notice: router_pb2.NoteDirectRequest, generated: int) -> None:
        """Take a notice of its client; ``generated``: its tokens so far."""
        first = self._placed_s + notice.first_token_us / 1e6 if notice.HasField("first_token_us") else None
        self._clock.told(first, [x / 1e6 for x in notice.itl_us[:_MAX_GAPS]], generated)
        if notice.HasField("trace"):
            self._log.answered(self._record, notice.trace)
            if not self._traced:
                self._traced = True
                self._clock.prompt(self._prompt_tokens, cached_tokens(notice.trace))

    def fail(self, error: BaseException) -> None:
        """It could not be placed, or its client gave up before it was."""
        if isinstance(error, Exception):
            self.end(error.code if isinstance(error, BatonError) else InternalError.code)
        else:
            self.end("cancelled")

    def end(self, outcome: str) -> None:
        """Take its end: ``done``, ``cancelled`` or an error's code."""
        self._clock.end(outcome)
        self._log.end(self._record, outcome)
