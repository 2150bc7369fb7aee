"""Direct mode: places a request, signs a ticket for it, and holds its share while the client runs it by itself.

The share ends with the client's notice, or when it has said nothing for ``LEASE_S``: a client that died has broken its
stream to the decode instance too, and the work there has ended with it.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from baton.api.v1 import router_pb2
from baton.errors import BatonError, InternalError, InvalidRequestError, UnavailableError
from baton.rpc.ticket import Bearer, sign
from baton_router.metrics.fast_metrics import Counter, GaugeFunction
from baton_router.processor.input_processor import InputProcessor
from baton_router.processor.output_processor import GenerationClock, cached_tokens
from baton_router.processor.text_request import PreparedRequest, TextRequest
from baton_router.scheduler.decision import Decision, DecisionLog

if TYPE_CHECKING:
    from baton_router.dispatch.dispatcher import PlacingDispatcher, Reserved

START_S = 30.0
"""How long a ticket counts: the client asks for it when it is about to use it."""
LEASE_S = 30.0
MAX_RESERVATIONS = 65536
_TICK_S = 1.0
_MAX_GAPS = 4096
"""Times between tokens that are taken from one notice; the rest is dropped."""
_CODES = {
    "failed": UnavailableError.code,  # what remained was asked of a router, as a request of its own
    "router_ended": UnavailableError.code,
    "expired": "cancelled",  # a client that says nothing any more has ended its stream, too
}
"""What the outcomes of direct requests are called where those of all requests are counted."""


class _DirectRun:
    """Times and remembers one request, from its arrival to its end, by what its client reports.

    An :class:`~baton_router.processor.output_processor.OutputProcessor` sees the tokens of its request; here the client
    reports when the first one came, how long the times between messages were, and how the KV got where it was needed.

    Args:
        prepared: The request.
        clock: Times it.
        log: Remembers it.
    """

    __slots__ = ("_arrived", "_clock", "_log", "_placed_s", "_prompt_tokens", "_record", "_traced")

    def __init__(self, prepared: PreparedRequest, clock: GenerationClock, log: DecisionLog) -> None:
        routed = prepared.routed
        self._log = log
        self._clock = clock
        self._arrived = routed.arrived
        self._prompt_tokens = prepared.prompt_tokens
        self._record = log.begin(routed.request_id, prepared.prompt_tokens, clock, tenant=routed.tenant)
        self._record.grammar = routed.sampling.grammar
        asked = prepared.request
        if asked.tool_use.mode != "none":
            self._record.tools = str(asked.tool_use)
        self._record.thinking_budget = asked.thinking_budget
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
        self._clock.record_report(first, [x / 1e6 for x in notice.itl_us[:_MAX_GAPS]], generated)
        if notice.HasField("trace"):
            self._log.answered(self._record, notice.trace)
            if not self._traced:
                self._traced = True
                self._clock.count_prompt(self._prompt_tokens, cached_tokens(notice.trace))

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


@dataclass(slots=True)
class _Open:
    """A reservation; ``most``: tokens that its request can have at all, whatever its client says."""

    reserved: Reserved
    run: _DirectRun
    ends_at: float
    most: int
    tokens: int = 0


class TicketDesk:
    """Gives tickets out and keeps their reservations.

    Args:
        key: Shared with the decode instances; ``None``: there is no direct mode.
        processor: Checks and tokenizes.
        dispatcher: Places.
        metrics: Takes the metrics.
        now: Monotonic clock.
    """

    def __init__(
        self,
        key: bytes | None,
        processor: InputProcessor,
        dispatcher: PlacingDispatcher,
        metrics: CollectorRegistry,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._key = key
        self._processor = processor
        self._dispatcher = dispatcher
        self._now = now
        self._open: dict[str, _Open] = {}
        self._ticker: asyncio.Task[None] | None = None
        self._ended = Counter(
            "baton_router_direct_requests",
            "Requests that ran by a ticket, by how they ended",
            ["outcome"],
            metrics,
        )
        GaugeFunction(
            "baton_router_direct_open",
            "Reservations of requests that run by a ticket",
            metrics,
            lambda: len(self._open),
        )

    def start(self) -> None:
        """Begin to watch the leases; needs a running loop."""
        if self._key is not None:
            self._ticker = asyncio.create_task(self._tick(), name="tickets")

    async def close(self) -> None:
        """End every reservation."""
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)
        for name in list(self._open):
            self._end(name, "router_ended")

    async def place(self, request: TextRequest) -> router_pb2.RouteResponse:
        """Place a request and sign a ticket for it.

        Raises:
            InvalidRequestError: This router has no key for tickets, or the request is wrong; names the field.
            QueueFullError: Everybody is full.
            UnavailableError: No instance is ready.
        """
        if self._key is None:
            raise InvalidRequestError("this router gives no tickets: it has no --ticket-key-file", field="direct")
        if len(self._open) >= MAX_RESERVATIONS:
            raise UnavailableError("too many requests run by tickets", retry_after_s=1.0)
        prepared = await self._processor.prepare(request)
        run = _DirectRun(prepared, self._processor.clock(prepared), self._processor.decisions)
        try:
            reserved = await self._dispatcher.reserve(prepared.routed)
        except BaseException as error:
            run.fail(error)
            raise
        run.placed(reserved.placement.decision)
        message = reserved.message
        decode = reserved.placement.decode
        assert decode.info is not None  # it was chosen, so it said who it is
        sign(self._key, message, Bearer(decode.instance_id, decode.info.epoch, decode.address), life_s=START_S)
        most = message.sampling.n * message.sampling.max_tokens
        self._open[message.request_id] = _Open(reserved, run, self._now() + max(START_S, LEASE_S), most)
        return router_pb2.RouteResponse(
            decision=reserved.placement.decision.to_pb(),
            direct=router_pb2.DirectPlacement(
                address=decode.address,
                request=message,
                start_ms=int(1000 * START_S),
                lease_ms=int(1000 * LEASE_S),
                model_path=prepared.info.path,
            ),
        )

    def note(self, request: router_pb2.NoteDirectRequest) -> bool:
        """Take a client's notice of its own request.

        Returns:
            ``False``: there is no such reservation any more, or the caller was not given its ticket.
        """
        found = self._open.get(request.request_id)
        if found is None or not hmac.compare_digest(found.reserved.message.ticket.mac, request.ticket_mac):
            return False
        found.ends_at = self._now() + LEASE_S
        tokens = min(request.num_tokens, found.most)
        if tokens > found.tokens:
            found.reserved.grow(tokens - found.tokens, first=not found.tokens)
            found.tokens = tokens
        found.run.note(request, found.tokens)
        if request.ended:
            if request.HasField("trace"):
                self._dispatcher.observe_trace(request.trace)
            self._end(request.request_id, _outcome(request))
        return True

    def expire(self) -> None:
        """End the reservations of clients that said nothing for too long."""
        now = self._now()
        for name in [name for name, found in self._open.items() if found.ends_at <= now]:
            self._end(name, "expired")

    def _end(self, name: str, outcome: str) -> None:
        found = self._open.pop(name)
        status = _CODES.get(outcome, outcome)
        found.reserved.end("ok" if status == "done" else status)
        found.run.end(status)
        self._ended.labels(outcome).inc()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self.expire()


def _outcome(notice: router_pb2.NoteDirectRequest) -> str:
    if notice.failed:
        return "failed"
    return "cancelled" if notice.cancelled else "done"
