"""One request from its arrival to its last token, over as many decode instances as it takes.

A request waits for *admission*, is *placed*, *runs*, perhaps is placed again, and has *ended* when every sequence has,
or with an error, or when its caller cancels it. ``RequestRun`` is its one owner on the way.

A *group* is the set of sequences that one ``Generate`` call carries; an *attempt* is a group on one instance. A request
begins as one group. When its call breaks before any token arrived the group is simply placed again. When tokens have
arrived every unfinished sequence becomes a group of its own and goes on with prompt + tokens so far: a sequence depends
on its seed, its parameters and its own tokens alone (``baton.seeds``), so the next token is the one that would have
come. What was handed on was recorded in the same step: a break repeats nothing and leaves nothing out.

Nothing here waits: what comes from an instance is handed on at once, from where it is read. Tasks wait for instances.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from baton.api.v1 import worker_pb2
from baton.config.router import RouterConfig
from baton.errors import BatonError, DeadlineError, InternalError, QueueFullError, UnavailableError
from baton.rpc.channel import Backoff
from baton.rpc.convert import sampling_to_pb
from baton.seeds import sequence_seed
from baton.token_ids import pack_ids, token_ids
from baton.tokenizer import TokenDelta
from baton.types import FinishReason, Order, Role, SamplingParams
from baton_router.admission.gate import Admission, Ticket
from baton_router.dispatch.attempt import Attempt, AttemptFailed, Group, Sequence, TraceMerge, WorkerStreams
from baton_router.dispatch.event_loop import PLACE, SEND, Deadlines, TurnBatcher
from baton_router.dispatch.interface import ChunkSink, RoutedChunk
from baton_router.dispatch.metrics import DispatchMetrics
from baton_router.dispatch.prefill_first import PrefillFirst, PrefillFirstCalls
from baton_router.dispatch.retry import Breakers, RetryBudget
from baton_router.dispatch.spans import end_span
from baton_router.registry.instance import Instance
from baton_router.registry.registry import Registry
from baton_router.scheduler.decision import Decision, DecisionLog
from baton_router.scheduler.placement import Placement, PlacementRequest
from baton_router.scheduler.placer import Placer
from baton_router.types import RoutedRequest

log = logging.getLogger(__name__)
_T = TypeVar("_T")

_SAME_AGAIN_S = 0.5
"""After a connection broke: how long an instance that is still ready then is not tried again if there is no other."""
_MAX_ID_CHARS = 240
"""Of a request's id that instances see: they take 256, with room for the number of the call."""


@dataclass(frozen=True, slots=True)
class RequestContext:
    """What all requests of a router share.

    Attributes:
        left: Called once with each request that has ended.
        slow: Returns the decode instances that are too slow for a request's ``itl_ms``.
    """

    registry: Registry
    placer: Placer
    metrics: DispatchMetrics
    config: RouterConfig
    admission: Admission
    breakers: Breakers
    budget: RetryBudget
    streams: WorkerStreams
    deadlines: Deadlines
    steps: TurnBatcher
    prefill_first: PrefillFirstCalls
    left: Callable[[RequestRun], None]
    slow: Callable[[RoutedRequest], Iterable[Instance]]
    decisions: DecisionLog


class RequestRun:
    """Runs one request once; a :class:`~baton_router.dispatch.interface.Running`.

    Args:
        context: Shared parts.
        request: The request; ``seed`` and ``max_tokens`` of its sampling are set.
        sink: Takes what comes; ``None``: the client runs the request (see :meth:`place`).
    """

    __slots__ = (
        *("_attempts", "_begun", "_context", "_deadline", "_ended", "_held", "_num_attempts"),
        *("_num_open", "_prefill_first", "_request", "_sequences", "_tasks", "_ticket", "_traces", "sink"),
    )

    def __init__(self, context: RequestContext, request: RoutedRequest, sink: ChunkSink | None = None) -> None:
        self._context, self._request, self.sink = context, request, sink
        self._deadline = 0.0  # from its admission on
        self._ticket: Ticket | None = None
        self._traces = TraceMerge()
        self._sequences = [Sequence(i, list(request.output_token_ids)) for i in range(request.sampling.n)]
        self._num_open = len(self._sequences)
        self._num_attempts = 0
        self._begun = self._ended = self._held = False
        self._prefill_first: PrefillFirst | None = None
        if (request.order or context.config.order) == Order.PREFILL_FIRST and not request.output_token_ids:
            self._prefill_first = PrefillFirst(context.prefill_first, request)
        self._attempts: set[Attempt] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    # --- what its caller calls ---

    def start(self) -> None:
        """Admit, place and run the request. The sink hears of everything, also of a failure to do that."""
        self._context.steps.later(PLACE, RequestRun._enter, self)

    def cancel(self) -> None:
        """End everything that runs; the sink gets nothing more."""
        if not self._ended:
            self._context.metrics.closed_early.inc()
            self._end("cancelled")

    def finish(self, error: Exception | None) -> None:
        """End the request, with an error if it cannot go on; the sink is told, unless the request has ended."""
        if self._ended:
            return
        code = "ok"
        if error is not None:
            code = error.code if isinstance(error, BatonError) else InternalError.code
            self._context.metrics.failures.labels(code).inc()
        sink = self.sink
        self._end(code)
        if sink is not None:
            sink.on_end(error)

    def hold(self, held: bool) -> None:
        """Let what comes wait in the streams, or go on: for a client who does not read."""
        self._held = held
        for attempt in list(self._attempts):
            attempt.hold(held)

    def expire(self) -> None:
        """The request's time is over."""
        for attempt in list(self._attempts):
            attempt.expire()

    async def place(self, ticket: Ticket) -> tuple[Placement, worker_pb2.GenerateRequest]:
        """Select and reserve for a client that runs the request itself; returns what it is to send."""
        self._admit(ticket)
        self._prefill_first = None  # a ticket names a decode instance: that comes first
        group = Group(self._sequences)
        placement = self._choose(group) or await self._place(group)
        return placement, self._message(group, placement, 1)

    # --- admission and end ---

    def _enter(self) -> None:
        """Take room and a place in one step: until it has a place, no instance's load counts a request."""
        if self._ended:
            return
        try:
            ticket = self._context.admission.enter_now(self._request)
            if ticket is not None:
                self._run(ticket)
            else:
                self._request.span.event("queued")
                self._wait_for(self._context.admission.enter(self._request), self._run)
        except Exception as error:
            self.finish(error)

    def _run(self, ticket: Ticket) -> None:
        self._admit(ticket)
        self._context.deadlines.add(self)
        self.go_on(Group(self._sequences))

    def _admit(self, ticket: Ticket) -> None:
        self._ticket = ticket
        self._request.span.event("admitted")
        self._deadline = time.monotonic() + self._context.config.request_timeout_s
        self._traces.router_queue_us = int(1e6 * ticket.waited_s)
        self._context.budget.count_request()

    def _wait_for(self, waiting: Coroutine[Any, Any, _T], then: Callable[[_T], None]) -> None:
        """Go on with what is waited for, in a task that ends with the request."""

        async def wait() -> None:
            try:
                result = await waiting
                self._tasks.discard(task)
                then(result)
            except Exception as error:
                self._tasks.discard(task)
                self.finish(error)

        task = asyncio.get_running_loop().create_task(wait())
        self._tasks.add(task)

    def _end(self, status: str) -> None:
        self._ended = True
        self.sink = None  # breaks the reference cycle: all of it is freed at once
        context = self._context
        context.deadlines.discard(self)
        for attempt in list(self._attempts):
            attempt.close()
        for task in self._tasks:
            task.cancel()
        if self._prefill_first is not None:
            self._prefill_first.abandon()
        for trace in self._traces.attempts():
            context.metrics.observe_trace(trace)
        end_span(self._request, self._traces, self._sequences, status)
        context.left(self)
        if self._ticket is not None:
            context.admission.leave(self._ticket)

    # --- placing ---

    def go_on(self, group: Group) -> None:
        """Bring a group on its way, at once or when an instance takes it; end the run if nothing is left to do.

        Sequences that have begun go on each by itself.
        """
        if len(group.sequences) > 1 and group.started and group.has_open():
            for s in [s for s in group.sequences if not s.finished]:
                self.go_on(Group([s], set(group.excluded), group.full, group.last, group.failures, group.sampler))
            return
        try:
            while not self._ended and group.has_open():
                if exhausted := self._exhausted(group):
                    self._emit(RoutedChunk(exhausted))
                    continue
                self._check_time()
                if (placement := self._choose(group)) is not None:
                    self._serve(group, placement)
                else:
                    self._wait_for(self._place(group), lambda placement: self._serve(group, placement))
                return
        except Exception as error:
            self.finish(error)
            return
        if not self._num_open and not self._attempts:
            self.finish(None)

    def _serve(self, group: Group, placement: Placement) -> None:
        """Send a group to its decode instance, or its prompt to a prefill instance if that comes first."""
        first = self._prefill_first
        if first is None or not first.pending:
            self._num_attempts += 1
            attempt = Attempt(self, group, placement, self._num_attempts)
            self._attempts.add(attempt)
            self._context.steps.later(SEND, self._send, attempt)
            return
        self._context.breakers.ended(placement.decode, well=False)  # it gets nothing yet
        if first.applies(placement):
            left_s = self._deadline - time.monotonic()
            computing = first.compute(placement, self._sampling(group), left_s)
            self._wait_for(computing, lambda _: self.go_on(group))
        else:
            placement.release()
            self.go_on(group)

    async def _place(self, group: Group) -> Placement:
        """Wait a little for an instance after :meth:`_choose` found none; select and reserve.

        Raises:
            QueueFullError: All that are ready are full.
            UnavailableError: None became ready in time.
            DeadlineError: The request's time is over.
        """
        config, registry = self._context.config, self._context.registry
        give_up_at = time.monotonic() + config.no_instance_wait_s
        same_again_at = time.monotonic() + _SAME_AGAIN_S
        backoff = None
        while True:
            if group.full is not None and not group.started:
                raise group.full
            if group.last is not None and not group.last.broken and registry.ready(Role.DECODE):
                raise group.last.error  # those that are ready all failed it; no new one is to be expected
            left = min(give_up_at, self._deadline) - time.monotonic()
            if left <= 0:
                last = group.why_given_up(group.last, registry.ready(Role.DECODE)) if group.last is not None else None
                raise group.full or last or registry.none_free()
            if group.full is not None:
                # A stream that has begun waits for room: its client is reading it.
                backoff = backoff or Backoff(1.0, random.Random())
                await asyncio.sleep(min(backoff.next_s(), left))
                group.excluded.clear()
            else:
                await registry.wait_changed(min(left, max(0.0, same_again_at - time.monotonic()) or left))
                if group.last is not None and group.last.broken and time.monotonic() >= same_again_at:
                    group.excluded.clear()  # what is still ready has lost a connection, not its life
            self._check_time()
            placement = self._choose(group)
            if placement is not None:
                return placement

    def _choose(self, group: Group) -> Placement | None:
        """Select and reserve, past instances whose breakers are open unless there are no others."""
        context = self._context
        refused = context.breakers.refused(context.registry.ready(Role.DECODE))
        if self._request.itl_ms is not None:
            refused = refused | {x.identity for x in context.slow(self._request)}
        placement = context.placer.place(self._ask(group, group.excluded | refused if refused else group.excluded))
        if placement is None and refused:
            placement = context.placer.place(self._ask(group, group.excluded))
        if placement is not None:
            self._request.span.event("placed", placement.decode.instance_id)
            context.breakers.begin(placement.decode)
        return placement

    def _ask(self, group: Group, exclude: set[tuple[str, int]]) -> PlacementRequest:
        tokens = self._request.prompt_token_ids
        if len(group.sequences) == 1 and group.sequences[0].token_ids:
            tokens = token_ids([*tokens, *group.sequences[0].token_ids])
        first = self._prefill_first
        return PlacementRequest(
            token_ids=tokens,
            cache_salt=self._request.cache_salt,
            num_sequences=len(group.sequences),
            session=self._request.session,
            max_tokens=self._request.sampling.max_tokens,
            local_only=self._wants_prompt_logprobs(),
            exclude=group.excluding(exclude, self._context.registry.ready(Role.DECODE)),
            prefill_only=first is not None and first.pending,
            prefilled=None if first is None else first.prefilled,
            guided=self._request.sampling.grammar is not None,
        )

    def _wants_prompt_logprobs(self) -> bool:
        return self._request.sampling.prompt_logprobs is not None and not self._begun

    def _check_time(self) -> None:
        if time.monotonic() >= self._deadline:
            raise DeadlineError(f"the request took longer than {self._context.config.request_timeout_s:g} s")

    # --- sending ---

    def _send(self, attempt: Attempt) -> None:
        if attempt.closed:
            return
        try:
            self._context.decisions.placed(self._request.request_id, attempt.placement.decision)
            message = self._message(attempt.group, attempt.placement, attempt.number)
            attempt.start(self._context.streams, message)
        except Exception as error:
            self.finish(error)
            return
        if self._held:
            attempt.hold(True)

    def _message(self, group: Group, placement: Placement, number: int) -> worker_pb2.GenerateRequest:
        """Return what a decode instance is sent in attempt ``number``. What is empty isn't set, which takes time."""
        request, first = self._request, group.sequences[0]
        # Unique among live requests, also beside a call of ours that its instance has not yet seen cancelled.
        request_id = request.request_id[-_MAX_ID_CHARS:]
        message = worker_pb2.GenerateRequest(
            request_id=request_id if number == 1 else f"{request_id}~{number}",
            prompt_token_ids=pack_ids(request.prompt_token_ids),
            sampling=sampling_to_pb(self._sampling(group)),
        )
        if len(group.sequences) == 1 and first.token_ids:
            message.output_token_ids.extend(first.token_ids)
        if placement.prefill:
            message.prefill_candidates.extend([x.address for x in placement.prefill])
        if request.cache_salt:
            message.cache_salt = request.cache_salt
        if request.priority:
            message.priority = request.priority
        if request.account is not None and request.account.message is not None:
            message.tenant.CopyFrom(request.account.message)
        if request.span.context is not None:
            message.trace_context["traceparent"] = request.span.traceparent
        if (threshold := placement.remote_threshold) is not None:
            message.remote_prefill_threshold = threshold
        if self._prefill_first is not None:
            self._prefill_first.fill(message)
        return message

    def _sampling(self, group: Group) -> SamplingParams:
        """Return the sampling parameters of a group: a sequence that goes on alone has its own seed."""
        sampling = self._request.sampling
        if len(group.sequences) < sampling.n:
            sampling = sampling.replace(n=1, seed=sequence_seed(sampling.seed or 0, group.sequences[0].index))
        if sampling.prompt_logprobs is not None and not self._wants_prompt_logprobs():
            sampling = sampling.replace(prompt_logprobs=None)
        return sampling

    # --- what an attempt tells ---

    def on_message(self, attempt: Attempt, chunk: RoutedChunk) -> None:
        """Take a message and hand it on."""
        group, placement = attempt.group, attempt.placement
        group.full = None
        trace = chunk.trace
        if trace is not None:  # the first message, and the last
            first = self._prefill_first
            trace.order = Order.DECODE_FIRST if first is None else first.answered(trace)
            self._traces.update(attempt.number, trace)
            placement.trace = trace
            self._context.breakers.answered(placement.decode)
        chunk.deltas = self._record(chunk.deltas, placement)
        if chunk.deltas or not self._begun or not self._num_open:
            self._emit(chunk, placement.decision)

    def judge(self, attempt: Attempt, failure: AttemptFailed | None) -> None:
        """An attempt's call has ended: see whether its group may go on, if it has to.

        Raises:
            BatonError: It may not.
        """
        if attempt.group.has_open():
            if failure is None:
                failure = AttemptFailed(UnavailableError("the stream ended before the request had"), "short")
            if self._prefill_first is not None:
                self._prefill_first.failed(failure.error)
            self._note_failure(attempt, failure)

    def on_left(self, attempt: Attempt) -> None:
        """A group leaves its instance."""
        self._attempts.discard(attempt)
        self._context.breakers.ended(attempt.placement.decode, well=not attempt.group.has_open())

    def _record(self, deltas: list[TokenDelta], placement: Placement) -> list[TokenDelta]:
        """Note what is about to be handed on; drops what came after a sequence's end."""
        kept = []
        for delta in deltas:
            sequence = self._sequences[delta.index]
            if sequence.finished:
                continue
            sequence.token_ids.extend(delta.token_ids)
            if delta.finish_reason is not None:
                self._close(sequence)
            placement.grow(len(delta.token_ids))
            kept.append(delta)
        if kept:
            placement.prefilled()
        return kept

    def _exhausted(self, group: Group) -> list[TokenDelta]:
        """End sequences that have all their tokens but broke off before they were told to have ended."""
        limit, deltas = self._request.sampling.max_tokens, []
        for s in group.sequences:
            if limit is not None and len(s.token_ids) >= limit and not s.finished:
                self._close(s)
                deltas.append(TokenDelta(s.index, [], finish_reason=FinishReason.LENGTH))
        return deltas

    def _close(self, sequence: Sequence) -> None:
        sequence.finished = True
        self._num_open -= 1

    def _emit(self, chunk: RoutedChunk, decision: Decision | None = None) -> None:
        """Hand a chunk on, with what the first and the last one have beside their tokens."""
        first, self._begun = not self._begun, True
        if first:
            chunk.decision = decision
            if self._ticket is not None:
                self._request.span.event("first_token")
                self._context.admission.first_token(self._ticket)
        else:
            chunk.prompt_logprobs = None
        chunk.trace = self._traces.merged() if first or not self._num_open else None
        if self.sink is not None:
            self.sink.on_chunk(chunk)

    # --- failures ---

    def _note_failure(self, attempt: Attempt, failure: AttemptFailed) -> None:
        """Decide whether the group may try again.

        Raises:
            BatonError: It may not.
        """
        group, instance, error = attempt.group, attempt.placement.decode, failure.error
        if failure.final:
            raise error
        group.excluded.add(instance.identity)
        if isinstance(error, QueueFullError):
            group.full = error
        else:
            group.failures += 1
            group.last = failure
            self._context.breakers.failed(instance)
        may_go_on = group.may_retry(failure, self._context.config.max_retries, self._context.budget.take)
        log.warning(
            "request %s: %s failed (%s: %s), %s",
            *(self._request.request_id, instance.instance_id, failure.reason, error.message),
            "going on elsewhere" if may_go_on else "giving up",
            extra={"request_id": self._request.request_id},
        )
        if not may_go_on:
            raise group.why_given_up(failure, self._context.registry.ready(Role.DECODE))
        self._request.span.event("failed", failure.reason)
        metrics = self._context.metrics
        if group.num_tokens > attempt.tokens_before:
            self._traces.num_migrations += 1
            metrics.migrations.labels(failure.reason).inc()
        else:
            metrics.retries.labels(failure.reason).inc()
