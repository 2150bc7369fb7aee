"""Direct mode: places a request, signs a ticket for it, and keeps its reservation while the client runs it.

The instance reports which tickets' calls have begun and ended. Until it says that the call has begun, the room is kept
for ``ROOM_S`` and the reservation until the ticket expires, whatever the client says. Afterwards the reservation ends
when the client's last notice has come and the call has ended, or the ticket has expired: a client that says so may
still use its ticket. It ends after ``LEASE_S`` without a notice of more tokens, too: a dead client has also broken its
stream to the instance, which ends the work there.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections import Counter as Counts
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from baton.api.v1 import common_pb2, router_pb2
from baton.background import keep_running
from baton.config.pipes import BUILT_IN
from baton.errors import BatonError, InternalError, InvalidRequestError, QueueFullError, UnavailableError
from baton.rpc.convert import path_from_pb
from baton.rpc.ticket import Bearer, sign
from baton_router.metrics import Counter, GaugeFunction
from baton_router.processor.input_processor import InputProcessor
from baton_router.processor.output_processor import GenerationClock, begin_record, cached_tokens
from baton_router.processor.text_request import PreparedRequest, TextRequest
from baton_router.registry.instance import CallState
from baton_router.scheduler.decision import Decision, DecisionLog
from baton_router.types import Account

if TYPE_CHECKING:
    from baton_router.dispatch.dispatcher import PlacingDispatcher, Reserved

START_S = 30.0
"""Validity of a ticket, in seconds; clients use it immediately."""
ROOM_S = 3.0
"""Seconds for which others are not placed in the room of a request whose call has not begun."""
LEASE_S = 30.0
MIN_UNUSED = 8
"""Sequences with unused tickets that a tenant may have however little room there is."""
MAX_RESERVATIONS = 65536
_TICK_S = 1.0
_MAX_FAILED_PREFILLS = 16
_KV_MARGIN = 2.0
"""Factor for KV of another format, and of blocks that are not full."""
_MAX_GAPS = 4096
"""Most times between tokens in one notice; the rest is dropped."""
_CODES = {
    "failed": UnavailableError.code,  # the client requests the rest from a router, as a separate request
    "router_ended": UnavailableError.code,
    "expired": "cancelled",  # a client without notices has ended its stream, too
}
"""Codes of direct requests' outcomes in the metrics of all requests."""

_PIPES = frozenset(BUILT_IN) | {"files", "mooncake", "redis"}
LOCAL_REASONS = frozenset(
    {
        *("short", "cached", "no_candidates", "adapter", "prompt_logprobs", "unreadable", "connector"),
        *("prefill_busy", "prefill_failed", "lease_over", "reuse_failed"),
        *("store_miss", "store_failed", "store_resting"),
    }
)
"""Names that a client's trace may add to the metrics of all tenants."""


class _DirectRun:
    """Measures and logs one request by the reports of its client.

    An :class:`~baton_router.processor.output_processor.OutputProcessor` sees the tokens of its request. Here the client
    reports the time of the first token, the times between messages, and the trace.

    Args:
        prepared: The request.
        clock: Clock of the generation.
        log: Log of requests.
    """

    __slots__ = ("_arrived", "_clock", "_log", "_placed_s", "_prompt_tokens", "_record", "_traced")

    def __init__(self, prepared: PreparedRequest, clock: GenerationClock, log: DecisionLog) -> None:
        self._log = log
        self._clock = clock
        self._arrived = prepared.routed.arrived
        self._prompt_tokens = prepared.prompt_tokens
        self._record = begin_record(prepared, clock, log)
        self._record.direct = True
        self._placed_s = 0.0
        self._traced = False

    def placed(self, decision: Decision) -> None:
        """Record the placement; the client's clock starts here."""
        self._log.placed(self._record.request_id, decision)
        self._placed_s = time.perf_counter() - self._arrived

    def note(self, notice: router_pb2.NoteDirectRequest, generated: int) -> None:
        """Record a notice of the client.

        Args:
            notice: The notice.
            generated: Tokens so far.
        """
        first = self._placed_s + notice.first_token_us / 1e6 if notice.HasField("first_token_us") else None
        self._clock.record_report(first, [x / 1e6 for x in notice.itl_us[:_MAX_GAPS]], generated)
        if notice.HasField("trace"):
            self._log.answered(self._record, notice.trace)
            if not self._traced:
                self._traced = True
                self._clock.count_prompt(self._prompt_tokens, cached_tokens(notice.trace))

    def fail(self, error: BaseException) -> None:
        """Record that the request could not be placed, or that its client gave up before."""
        if isinstance(error, Exception):
            self.end(error.code if isinstance(error, BatonError) else InternalError.code)
        else:
            self.end("cancelled")

    def end(self, outcome: str) -> None:
        """Record the end: ``done``, ``cancelled`` or the code of an error."""
        self._clock.end(outcome)
        self._log.end(self._record, outcome)


@dataclass(slots=True)
class _Open:
    """A reservation.

    Attributes:
        reserved: Reservation on the chosen instances.
        run: The request's record.
        nonce: Nonce of its ticket.
        ends_at: End of its lease, on the desk's clock.
        expires_at: End of its ticket, on the desk's clock.
        most: Bound of the tokens that its client can report.
        tenant: Name of its account; ``None`` without API keys.
        began: When it was reserved, on the desk's clock.
        prompt_tokens: Number of prompt tokens.
        kv_bytes_per_token: Size of a token's KV on the decode instance.
        tokens: Tokens that its client has reported.
        outcome: How it ended, by its client's last notice; empty: it has not come.
        call_begun: Whether the instance has said that the ticket's call has begun, or cannot say so any more.
        call_ended: Whether the instance has ended the ticket's call.
    """

    reserved: Reserved
    run: _DirectRun
    nonce: bytes
    ends_at: float
    expires_at: float
    most: int
    tenant: str | None
    began: float
    prompt_tokens: int
    kv_bytes_per_token: float
    tokens: int = 0
    outcome: str = ""
    call_begun: bool = False
    call_ended: bool = False

    def bounded(self, trace: common_pb2.RequestTrace, now: float) -> common_pb2.RequestTrace:
        """Return a client's trace with no more than such a request can have: it counts in metrics of all tenants."""
        most = self.prompt_tokens
        return common_pb2.RequestTrace(
            path=trace.path if path_from_pb(trace.path) else common_pb2.PREFILL_PATH_UNSPECIFIED,
            pipe=_known(trace.pipe, _PIPES),
            local_reason=_known(trace.local_reason.partition(":")[0], LOCAL_REASONS),
            cached_tokens=min(trace.cached_tokens, most),
            transferred_tokens=min(trace.transferred_tokens, most),
            recomputed_tokens=min(trace.recomputed_tokens, most),
            failed_prefills=trace.failed_prefills[:_MAX_FAILED_PREFILLS],
            kv_bytes=min(trace.kv_bytes, int(_KV_MARGIN * most * self.kv_bytes_per_token)),
            transfer_us=min(trace.transfer_us, int(1e6 * max(0.0, now - self.began))),
        )


class TicketDesk:
    """Issues tickets and keeps their reservations.

    Args:
        key: Key shared with the decode instances; ``None`` disables direct mode.
        processor: Checks and tokenizes requests.
        dispatcher: Places requests.
        metrics: Registry for the metrics.
        now: Monotonic clock, in seconds.
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
        self._unused: Counts[str] = Counts()
        """Sequences of each tenant that wait for their placement, or whose calls have not begun."""
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
        """Start to watch the leases; needs a running event loop."""
        if self._key is not None:
            self._ticker = keep_running(self._tick, "tickets")

    async def close(self) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)
        for name, reservation in list(self._open.items()):
            self._end(name, reservation.outcome or "router_ended")

    async def place(self, request: TextRequest) -> router_pb2.RouteResponse:
        """Place a request and sign a ticket for it.

        Raises:
            InvalidRequestError: This router has no key for tickets, or the request is wrong; names the field.
            QueueFullError: All instances are full; or, with the field ``direct``, the tenant has too many tickets that
                it has not used, and may have the request run by this router.
            UnavailableError: No instance is ready.
        """
        if self._key is None:
            raise InvalidRequestError("this router gives no tickets: it has no --ticket-key-file", field="direct")
        if len(self._open) >= MAX_RESERVATIONS:
            raise UnavailableError("too many requests run by tickets", retry_after_s=1.0)
        prepared = await self._processor.prepare(request)
        account, sequences = prepared.routed.account, prepared.routed.sampling.n
        tenant = None if account is None else account.name
        self._check_unused(tenant, sequences)
        run = _DirectRun(prepared, self._processor.clock(prepared), self._processor.decisions)
        reserved = None
        self._count_unused(tenant, sequences)
        try:
            reserved = await self._dispatcher.reserve(prepared.routed)
            return self._issue(self._key, prepared, run, reserved, tenant)
        except BaseException as error:
            self._count_unused(tenant, -sequences)
            run.fail(error)
            if reserved is not None:
                reserved.end(InternalError.code)
            raise

    def _check_unused(self, tenant: str | None, sequences: int) -> None:
        """Refuse a tenant whose unused tickets would take more than half of the free room.

        Raises:
            QueueFullError: It has too many.
        """
        admission = self._dispatcher.admission
        unused = 0 if tenant is None else self._unused[tenant]
        if tenant is not None and unused + sequences > max(MIN_UNUSED, admission.free_sequences()):
            message = f"{unused} sequences of this tenant wait for a placement or have tickets that are not used yet"
            error = QueueFullError(message, field="direct", retry_after_s=1.0)
            raise admission.count_refusal(error, "tenant_share")

    def _count_unused(self, tenant: str | None, sequences: int) -> None:
        if tenant is not None:
            self._unused[tenant] += sequences
            if not self._unused[tenant]:
                del self._unused[tenant]

    def _issue(
        self, key: bytes, prepared: PreparedRequest, run: _DirectRun, reserved: Reserved, tenant: str | None
    ) -> router_pb2.RouteResponse:
        """Sign a ticket for a reservation, and keep the reservation."""
        run.placed(reserved.placement.decision)
        message = reserved.message
        decode = reserved.placement.decode
        assert decode.info is not None  # known of every instance that can be chosen
        bearer = Bearer(decode.instance_id, decode.info.epoch, decode.address)
        nonce = sign(key, message, bearer, life_s=START_S, tenant=tenant)
        most = message.sampling.n * message.sampling.max_tokens
        now = self._now()
        fingerprint = decode.info.fingerprint
        kv_bytes = fingerprint.block_bytes / fingerprint.block_size
        response = router_pb2.RouteResponse(
            decision=reserved.placement.decision.to_pb(),
            direct=router_pb2.DirectPlacement(
                address=decode.address,
                request=message,
                start_ms=int(1000 * START_S),
                lease_ms=int(1000 * LEASE_S),
                model_path=prepared.info.path,
            ),
        )
        name = message.request_id
        ends_at = now + max(START_S, LEASE_S)
        self._open[name] = _Open(
            reserved, run, nonce, ends_at, now + START_S, most, tenant, now, prepared.prompt_tokens, kv_bytes
        )
        decode.open_tickets[nonce] = partial(self._update_call, name)
        return response

    def note(self, request: router_pb2.NoteDirectRequest, account: Account | None = None) -> bool:
        """Record a client's notice of its request.

        Args:
            request: The notice.
            account: Account of the caller's API key; ``None`` without API keys.

        Returns:
            Whether there is such a reservation of this tenant's, and the caller has its ticket.
        """
        reservation = self._open.get(request.request_id)
        if reservation is None or reservation.outcome:
            return False
        if reservation.tenant != (None if account is None else account.name):
            return False
        if not hmac.compare_digest(reservation.reserved.message.ticket.mac, request.ticket_mac):
            return False
        tokens = min(request.num_tokens, reservation.most)
        if tokens > reservation.tokens:  # else nothing may run: notices alone must not keep others waiting
            reservation.ends_at = self._now() + LEASE_S
            reservation.reserved.grow(tokens - reservation.tokens, first=not reservation.tokens)
            reservation.tokens = tokens
        reservation.run.note(request, reservation.tokens)
        if request.ended:
            if request.HasField("trace"):
                self._dispatcher.metrics.observe_trace(reservation.bounded(request.trace, self._now()))
            reservation.outcome = _outcome(request)
            reservation.ends_at = reservation.expires_at
            if reservation.call_ended or reservation.ends_at <= self._now():
                self._end(request.request_id, reservation.outcome)
        return True

    def _update_call(self, name: str, state: CallState) -> None:
        """Record the state of a ticket's call; one that has ended cannot be used any more."""
        reservation = self._open[name]
        if state is not CallState.ENDED and not reservation.call_begun:
            reservation.call_begun = True
            self._count_unused(reservation.tenant, -reservation.reserved.ticket.sequences)
        if state is not CallState.BEGUN:
            reservation.call_ended = True
            if reservation.outcome:
                self._end(name, reservation.outcome)

    def expire(self) -> None:
        """End the reservations whose leases have expired, or whose tickets have and were not used."""
        now = self._now()
        for name, reservation in list(self._open.items()):
            if reservation.ends_at <= now or (not reservation.call_begun and reservation.expires_at <= now):
                self._end(name, reservation.outcome or "expired")
            elif not reservation.call_begun and reservation.began + ROOM_S <= now:
                reservation.reserved.release_room()

    def _end(self, name: str, outcome: str) -> None:
        reservation = self._open.pop(name)
        reservation.reserved.placement.decode.open_tickets.pop(reservation.nonce, None)
        if not reservation.call_begun:
            self._count_unused(reservation.tenant, -reservation.reserved.ticket.sequences)
        status = _CODES.get(outcome, outcome)
        try:
            reservation.reserved.end("ok" if status == "done" else status)
        finally:
            reservation.run.end(status)
        self._ended.labels(outcome).inc()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self.expire()


def _known(name: str, names: frozenset[str]) -> str:
    return name if not name or name in names else "other"


def _outcome(notice: router_pb2.NoteDirectRequest) -> str:
    if notice.failed:
        return "failed"
    return "cancelled" if notice.cancelled else "done"
