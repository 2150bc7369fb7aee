"""One request from its arrival to its last token, across as many decode instances as it takes.

A request waits for *admission*, is *placed*, *runs*, may be placed again, and *ends*: when every sequence has ended,
with an error, or when its caller cancels it. :class:`RequestRun` owns it all the way.

A *group* is the set of sequences that one ``Generate`` call carries; an *attempt* is a group on one instance. A request
starts as one group. If its call breaks before any token arrived, the group is placed again. If tokens have arrived,
every unfinished sequence becomes a group of its own and continues with prompt + tokens so far: a sequence depends only
on its seed, its parameters and its own tokens (``baton.seeds``), so the next token is the one that would have come.
Tokens are recorded in the same step in which they are delivered, so a break neither repeats nor omits any.

Nothing here blocks: what arrives from an instance is delivered from where it is read. Only waiting for instances uses
tasks.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry

from baton.api.v1 import common_pb2, worker_pb2
from baton.background import is_cancelled
from baton.config.router import RouterConfig
from baton.errors import BatonError, DeadlineError, InternalError, QueueFullError, UnavailableError
from baton.rpc.channel import Backoff
from baton.rpc.convert import path_from_pb, sampling_to_pb, trace_attributes
from baton.seeds import sequence_seed
from baton.token_ids import pack_ids, token_ids
from baton.tokenizer import TokenDelta
from baton.types import FinishReason, Order, Role, SamplingParams
from baton_router.admission.gate import Admission, Ticket
from baton_router.dispatch.attempt import Attempt, AttemptFailed, Group, Sequence, TraceMerge, WorkerStreams
from baton_router.dispatch.event_loop import PLACE, SEND, Deadlines, TurnBatcher
from baton_router.dispatch.interface import ChunkSink, RoutedChunk
from baton_router.dispatch.prefill_first import PrefillFirst, PrefillFirstCalls
from baton_router.dispatch.retry import Breakers, RetryBudget
from baton_router.metrics import Amount, Counter, Histogram, LabelNames
from baton_router.registry.instance import Instance
from baton_router.registry.registry import Registry
from baton_router.scheduler.decision import Decision, DecisionLog
from baton_router.scheduler.placement import Placement, PlacementRequest
from baton_router.scheduler.placer import Placer
from baton_router.types import RoutedRequest

log = logging.getLogger(__name__)
_T = TypeVar("_T")

_RECONNECT_S = 0.5
"""Seconds after a broken connection before an instance that is still ready is tried again, if there is no other."""
_NAME = "baton_router_"
_MAX_LABELS = 100
_MAX_LABEL_CHARS = 64
_TRANSFER_S = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0)
_MAX_ID_CHARS = 240
"""Characters of a request's id that are sent to instances: they accept 256, which leaves room for the call's number."""


class DispatchMetrics:
    """Counts dispatched requests.

    Args:
        registry: Registry for the metrics.

    Attributes:
        migrations: Streams that continued on another decode instance, by reason.
        retries: Requests placed again before their first token, by reason.
        prefill_first: Prompts in the order ``prefill_first``, by outcome.
        failures: Requests that failed, by error code.
        closed_early: Streams closed by their reader.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._paths = Counter(
            _NAME + "prefill_path",
            "Requests per decode instance that ran them, by where their KV came from and why",
            ["path", "pipe", "reason"],
            registry,
        )
        tokens = Counter(_NAME + "prompt_tokens", "Prompt tokens, by how decode got their KV", ["source"], registry)
        self._cached, self._transferred, self._recomputed = map(tokens.labels, ("cached", "transferred", "recomputed"))
        self._kv_bytes = Counter(_NAME + "kv_bytes", "KV bytes fetched by decode instances", ["pipe"], registry)
        self._transfer_time = Histogram(
            _NAME + "transfer_seconds", "Time in fetches, per request", ["pipe"], registry, buckets=_TRANSFER_S
        )
        self._failed_prefills = Counter(_NAME + "failed_prefills", "Prefill candidates that failed", [], registry)
        self.migrations = Counter(
            _NAME + "migrations", "Streams that went on on another decode instance", ["reason"], registry
        )
        self.retries = Counter(
            _NAME + "retries", "Requests placed again before their first token", ["reason"], registry
        )
        self.prefill_first = Counter(
            _NAME + "prefill_first", "Prompts in the order prefill_first, by what came of them", ["outcome"], registry
        )
        self.failures = Counter(_NAME + "request_failures", "Requests that failed, by error code", ["code"], registry)
        self.closed_early = Counter(
            _NAME + "streams_closed_early", "Streams closed by their reader: disconnects, stop strings", [], registry
        )
        self._by_path: dict[tuple[int, str, str], Amount] = {}
        self._names = LabelNames(_MAX_LABELS, _MAX_LABEL_CHARS)  # clients send traces, too

    def observe_trace(self, trace: common_pb2.RequestTrace) -> None:
        """Count where a request's KV came from on one decode instance."""
        pipe = trace.pipe
        key = trace.path, pipe, trace.local_reason.partition(":")[0]
        path = self._by_path.get(key)
        if path is None:
            path = self._paths.labels(path_from_pb(key[0]) or "unknown", *map(self._names.label, key[1:]))
            if len(self._by_path) < _MAX_LABELS:
                self._by_path[key] = path
        path.inc()
        self._cached.inc(trace.cached_tokens)
        self._transferred.inc(trace.transferred_tokens)
        self._recomputed.inc(trace.recomputed_tokens)
        if failed := trace.failed_prefills:
            self._failed_prefills.inc(len(failed))
        if pipe:
            pipe = self._names.label(pipe)
            self._kv_bytes.labels(pipe).inc(trace.kv_bytes)
            self._transfer_time.labels(pipe).observe(trace.transfer_us / 1e6)


@dataclass(frozen=True, slots=True)
class RequestContext:
    """What all requests of a router share.

    Attributes:
        registry: Registry of the instances.
        placer: Chooses instances and reserves capacity on them.
        metrics: Metrics of dispatch.
        config: The router's configuration.
        admission: Admits requests to the cluster.
        breakers: Circuit breakers of the decode instances.
        budget: Budget for retries.
        streams: Streams to the decode instances.
        deadlines: Deadlines of running requests.
        steps: The router's turn batcher.
        prefill_first: Shared part of the order ``prefill_first``.
        on_ended: Called once with each request that has ended.
        slow_instances: Returns the decode instances that are too slow for a request's ``itl_ms``.
        decisions: Log of placements.
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
    on_ended: Callable[[RequestRun], None]
    slow_instances: Callable[[RoutedRequest], Iterable[Instance]]
    decisions: DecisionLog


class RequestRun:
    """Runs one request once; a :class:`~baton_router.dispatch.interface.Running`.

    Args:
        context: Parts that all requests share.
        request: The request, with ``seed`` and ``max_tokens`` of its sampling set.
        sink: Receives the answer; ``None`` if the client runs the request itself (see :meth:`place`).

    Attributes:
        sink: Receives the answer; ``None`` once the request has ended.
    """

    __slots__ = (
        "_answered",
        "_attempts",
        "_context",
        "_deadline",
        "_ended",
        "_num_attempts",
        "_num_open",
        "_paused",
        "_prefill_first",
        "_request",
        "_sequences",
        "_tasks",
        "_ticket",
        "_traces",
        "sink",
    )

    def __init__(self, context: RequestContext, request: RoutedRequest, sink: ChunkSink | None = None) -> None:
        self._context = context
        self._request = request
        self.sink = sink
        self._deadline = 0.0  # set on admission
        self._ticket: Ticket | None = None
        self._traces = TraceMerge()
        self._sequences = [Sequence(i, list(request.output_token_ids)) for i in range(request.sampling.n)]
        self._num_open = len(self._sequences)
        self._num_attempts = 0
        self._answered = False
        self._ended = False
        self._paused = False
        self._prefill_first: PrefillFirst | None = None
        if (request.order or context.config.order) == Order.PREFILL_FIRST and not request.output_token_ids:
            self._prefill_first = PrefillFirst(context.prefill_first, request)
        self._attempts: set[Attempt] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    # --- called by the owner of the request ---

    def start(self) -> None:
        """Admit, place and run the request; failures of that go to the sink, too."""
        self._context.steps.schedule(PLACE, RequestRun._enter, self)

    def cancel(self) -> None:
        """End everything that runs; the sink receives nothing more."""
        if not self._ended:
            self._context.metrics.closed_early.inc()
            self._end("cancelled")

    def finish(self, error: Exception | None) -> None:
        """End the request, with an error if it cannot continue; the sink is called unless the request has ended."""
        if self._ended:
            return
        status = "ok"
        if error is not None:
            status = error.code if isinstance(error, BatonError) else InternalError.code
            self._context.metrics.failures.labels(status).inc()
        sink = self.sink
        try:
            self._end(status)
        finally:
            if sink is not None:
                sink.on_end(error)

    def set_paused(self, paused: bool) -> None:
        """Leave what arrives in the streams, or deliver it again: for clients that read slowly."""
        self._paused = paused
        for attempt in list(self._attempts):
            attempt.set_paused(paused)

    def expire(self) -> None:
        """Fail all attempts: the request's deadline has passed."""
        for attempt in list(self._attempts):
            attempt.expire()

    async def place(self, ticket: Ticket) -> tuple[Placement, worker_pb2.GenerateRequest]:
        """Select and reserve for a client that runs the request itself; returns the message that it has to send."""
        self._admit(ticket)
        self._prefill_first = None  # a ticket names a decode instance, so decode comes first
        group = Group(self._sequences)
        placement = self._choose(group) or await self._place(group)
        return placement, self._message(group, placement, 1)

    # --- admission and end ---

    def _enter(self) -> None:
        """Admit and place in one step: until a request is placed, no instance's load includes it."""
        if self._ended:
            return
        try:
            ticket = self._context.admission.enter_now(self._request)
            if ticket is not None:
                self._run(ticket)
            else:
                self._request.span.event("queued")
                self._await_then(self._context.admission.enter(self._request), self._run)
        except Exception as error:
            self.finish(error)

    def _run(self, ticket: Ticket) -> None:
        self._admit(ticket)
        self._context.deadlines.add(self)
        self.continue_group(Group(self._sequences))

    def _admit(self, ticket: Ticket) -> None:
        self._ticket = ticket
        self._request.span.event("admitted")
        self._deadline = time.monotonic() + self._context.config.request_timeout_s
        self._traces.router_queue_us = int(1e6 * ticket.waited_s)
        self._context.budget.count_request()

    def _await_then(self, work: Coroutine[Any, Any, _T], action: Callable[[_T], None]) -> None:
        """Await ``work`` in a task that ends with the request, then call ``action`` with the result."""

        async def run() -> None:
            try:
                result = await work
                self._tasks.discard(task)
                action(result)
            except asyncio.CancelledError:
                if is_cancelled():
                    raise
                self._tasks.discard(task)  # a library's: the request must not wait for good
                self.finish(InternalError("a call of the router was cancelled"))
            except Exception as error:
                self._tasks.discard(task)
                self.finish(error)

        task = asyncio.get_running_loop().create_task(run())
        self._tasks.add(task)

    def _end(self, status: str) -> None:
        self._ended = True
        self.sink = None  # breaks the reference cycle, so that everything is freed at once
        context = self._context
        context.deadlines.discard(self)
        for task in self._tasks:
            task.cancel()
        try:
            for attempt in list(self._attempts):
                attempt.close()
            if self._prefill_first is not None:
                self._prefill_first.abandon()
            for trace in self._traces.attempts():
                context.metrics.observe_trace(trace)
            self._end_span(status)
        finally:
            context.on_ended(self)
            if self._ticket is not None:
                context.admission.release(self._ticket, self._num_generated())

    def _num_generated(self) -> int:
        return sum([len(sequence.token_ids) for sequence in self._sequences]) - len(self._request.output_token_ids)

    def _end_span(self, status: str) -> None:
        """End the request's span, with its trace and OpenTelemetry's names for what all models have."""
        request = self._request
        span = request.span
        if span.recording:
            if self._traces.attempts():
                span.attributes.update(trace_attributes(self._traces.merged()))
            span.attributes["baton.request_id"] = request.request_id
            span.attributes["gen_ai.usage.input_tokens"] = len(request.prompt_token_ids)
            span.attributes["gen_ai.usage.output_tokens"] = self._num_generated()
            if request.tenant:
                span.attributes["baton.tenant"] = request.tenant
        span.end(status)

    # --- placing ---

    def continue_group(self, group: Group) -> None:
        """Place a group, at once or when an instance has capacity; finish the request if nothing is left to do.

        Sequences that have started continue in groups of their own.
        """
        if len(group.sequences) > 1 and group.started and group.has_open():
            for sequence in [s for s in group.sequences if not s.finished]:
                self.continue_group(
                    Group([sequence], set(group.excluded), group.full, group.last, group.failures, group.sampler)
                )
            return
        try:
            while not self._ended and group.has_open():
                if exhausted := self._end_exhausted(group):
                    self._emit(RoutedChunk(exhausted))
                    continue
                self._check_time()
                if (placement := self._choose(group)) is not None:
                    self._serve(group, placement)
                else:
                    self._await_then(self._place(group), lambda placement: self._serve(group, placement))
                return
        except Exception as error:
            self.finish(error)
            return
        if not self._num_open and not self._attempts:
            self.finish(None)

    def _serve(self, group: Group, placement: Placement) -> None:
        """Send a group to its decode instance, or its prompt to a prefill instance if that comes first."""
        prefill_first = self._prefill_first
        if prefill_first is None or not prefill_first.pending:
            self._num_attempts += 1
            attempt = Attempt(self, group, placement, self._num_attempts)
            self._attempts.add(attempt)
            self._context.steps.schedule(SEND, self._send, attempt)
            return
        self._context.breakers.request_ended(placement.decode, well=False)  # nothing is sent to it yet
        if prefill_first.applies(placement):
            remaining_s = self._deadline - time.monotonic()
            computing = prefill_first.compute(placement, self._sampling(group), remaining_s)
            self._await_then(computing, lambda _: self.continue_group(group))
        else:
            placement.release()
            self.continue_group(group)

    async def _place(self, group: Group) -> Placement:
        """Wait for an instance after :meth:`_choose` returned none; select and reserve.

        Raises:
            QueueFullError: All ready instances are full.
            UnavailableError: No instance became ready in time.
            DeadlineError: The request's deadline has passed.
        """
        config = self._context.config
        registry = self._context.registry
        give_up_at = time.monotonic() + config.no_instance_wait_s
        reconnect_at = time.monotonic() + _RECONNECT_S
        backoff = None
        while True:
            if group.full is not None and not group.started:
                raise group.full
            if group.last is not None and not group.last.broken and registry.ready(Role.DECODE):
                raise group.last.error  # all ready instances failed it, and no new one is expected
            remaining_s = min(give_up_at, self._deadline) - time.monotonic()
            if remaining_s <= 0:
                last = group.final_error(group.last, registry.ready(Role.DECODE)) if group.last is not None else None
                raise group.full or last or self._none_free()
            if group.full is not None:
                # A stream that has started waits for capacity: its client is reading it.
                backoff = backoff or Backoff(1.0, random.Random())
                await asyncio.sleep(min(backoff.next_s(), remaining_s))
                group.excluded.clear()
            else:
                reconnect_s = max(0.0, reconnect_at - time.monotonic())
                await registry.wait_changed(min(remaining_s, reconnect_s or remaining_s))
                if group.last is not None and group.last.broken and time.monotonic() >= reconnect_at:
                    group.excluded.clear()  # instances that are still ready lost a connection only
            self._check_time()
            placement = self._choose(group)
            if placement is not None:
                return placement

    def _none_free(self) -> BatonError:
        error = self._context.registry.none_free()
        reason = "queue_full" if isinstance(error, QueueFullError) else "no_instance"
        return self._context.admission.count_refusal(error, reason)

    def _choose(self, group: Group) -> Placement | None:
        """Select and reserve; instances whose breakers are open are avoided if there are others."""
        context = self._context
        avoided = context.breakers.refused(context.registry.ready(Role.DECODE))
        if self._request.itl_ms is not None:
            avoided = avoided | {x.identity for x in context.slow_instances(self._request)}
        placement = context.placer.place(
            self._placement_request(group, group.excluded | avoided if avoided else group.excluded)
        )
        if placement is None and avoided:
            placement = context.placer.place(self._placement_request(group, group.excluded))
        if placement is not None:
            self._request.span.event("placed", placement.decode.instance_id)
            context.breakers.begin(placement.decode)
        return placement

    def _placement_request(self, group: Group, excluded: set[tuple[str, int]]) -> PlacementRequest:
        tokens = self._request.prompt_token_ids
        if len(group.sequences) == 1 and group.sequences[0].token_ids:
            tokens = token_ids([*tokens, *group.sequences[0].token_ids])
        prefill_first = self._prefill_first
        expected = self._request.expected_tokens
        if expected is not None:
            expected = max(0, expected - max(len(sequence.token_ids) for sequence in group.sequences))
        return PlacementRequest(
            token_ids=tokens,
            cache_salt=self._request.cache_salt,
            num_sequences=len(group.sequences),
            session=self._request.session,
            max_tokens=self._request.sampling.max_tokens,
            expected_tokens=expected,
            local_only=self._wants_prompt_logprobs(),
            exclude=group.with_other_samplers(excluded, self._context.registry.ready(Role.DECODE)),
            prefill_only=prefill_first is not None and prefill_first.pending,
            prefilled=None if prefill_first is None else prefill_first.prefilled,
            guided=self._request.sampling.grammar is not None,
        )

    def _wants_prompt_logprobs(self) -> bool:
        return self._request.sampling.prompt_logprobs is not None and not self._answered

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
            if self._paused:
                attempt.set_paused(True)
        except Exception as error:
            self.finish(error)

    def _message(self, group: Group, placement: Placement, number: int) -> worker_pb2.GenerateRequest:
        """Return the message for attempt ``number``. Empty fields are not set, to save the time that it takes."""
        request = self._request
        first = group.sequences[0]
        # Unique among live requests, even if an instance has not yet seen that an earlier attempt was cancelled.
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
        if request.session:
            message.session_key = request.session_key
            message.retention_s = request.retention_s
        if request.span.context is not None:
            message.trace_context["traceparent"] = request.span.traceparent
        if (threshold := placement.remote_threshold) is not None:
            message.remote_prefill_threshold = threshold
        if self._prefill_first is not None:
            self._prefill_first.fill(message)
        return message

    def _sampling(self, group: Group) -> SamplingParams:
        """Return the sampling parameters of a group: a sequence that continues alone has its own seed."""
        sampling = self._request.sampling
        if len(group.sequences) < sampling.n:
            sampling = sampling.replace(n=1, seed=sequence_seed(sampling.seed or 0, group.sequences[0].index))
        if sampling.prompt_logprobs is not None and not self._wants_prompt_logprobs():
            sampling = sampling.replace(prompt_logprobs=None)
        return sampling

    # --- called by attempts ---

    def on_chunk(self, attempt: Attempt, chunk: RoutedChunk) -> None:
        """Record a chunk and pass it to the sink."""
        if chunk.plain:
            (delta,) = chunk.deltas
            sequence = self._sequences[delta.index]
            if self.sink is not None and not sequence.finished:
                sequence.token_ids += delta.token_ids
                attempt.placement.grow(len(delta.token_ids))
                self.sink.on_chunk(chunk)
            return
        placement = attempt.placement
        attempt.group.full = None
        trace = chunk.trace
        if trace is not None:  # with the first message and with the last one
            prefill_first = self._prefill_first
            trace.order = Order.DECODE_FIRST if prefill_first is None else prefill_first.answered(trace)
            self._traces.update(attempt.number, trace)
            placement.trace = trace
            self._context.breakers.answered(placement.decode)
        chunk.deltas = self._record(chunk.deltas, placement)
        if chunk.deltas or not self._answered or not self._num_open:
            self._emit(chunk, placement.decision)

    def check_end(self, attempt: Attempt, failure: AttemptFailed | None) -> None:
        """Check whether the group of an attempt that ended may continue, if it has to.

        Raises:
            BatonError: It may not.
        """
        if attempt.group.has_open():
            if failure is None:
                failure = AttemptFailed(UnavailableError("the stream ended before the request had"), "short")
            if self._prefill_first is not None:
                self._prefill_first.on_decode_failure(failure.error)
            self._record_failure(attempt, failure)

    def on_closed(self, attempt: Attempt) -> None:
        """Forget an attempt that was closed."""
        self._attempts.discard(attempt)
        self._context.breakers.request_ended(attempt.placement.decode, well=not attempt.group.has_open())

    def _record(self, deltas: list[TokenDelta], placement: Placement) -> list[TokenDelta]:
        """Record deltas before they are delivered; drops those of sequences that have ended."""
        recorded = []
        for delta in deltas:
            sequence = self._sequences[delta.index]
            if sequence.finished:
                continue
            sequence.token_ids.extend(delta.token_ids)
            if delta.finish_reason is not None:
                self._finish_sequence(sequence)
            placement.grow(len(delta.token_ids))
            recorded.append(delta)
        if recorded:
            placement.prefilled()
        return recorded

    def _end_exhausted(self, group: Group) -> list[TokenDelta]:
        """End sequences that have all their tokens, but whose call broke before it reported their end."""
        max_tokens = self._request.sampling.max_tokens
        deltas = []
        for sequence in group.sequences:
            if max_tokens is not None and len(sequence.token_ids) >= max_tokens and not sequence.finished:
                self._finish_sequence(sequence)
                deltas.append(TokenDelta(sequence.index, [], finish_reason=FinishReason.LENGTH))
        return deltas

    def _finish_sequence(self, sequence: Sequence) -> None:
        sequence.finished = True
        self._num_open -= 1

    def _emit(self, chunk: RoutedChunk, decision: Decision | None = None) -> None:
        """Pass a chunk to the sink, with what the first and the last chunk carry beside their tokens."""
        is_first = not self._answered
        self._answered = True
        if is_first:
            chunk.decision = decision
            if self._ticket is not None:
                self._request.span.event("first_token")
                self._context.admission.first_token(self._ticket)
        else:
            chunk.prompt_logprobs = None
        chunk.trace = self._traces.merged() if is_first or not self._num_open else None
        if self.sink is not None:
            self.sink.on_chunk(chunk)

    # --- failures ---

    def _record_failure(self, attempt: Attempt, failure: AttemptFailed) -> None:
        """Record a failure, and decide whether the group may try again.

        Raises:
            BatonError: It may not.
        """
        group = attempt.group
        instance = attempt.placement.decode
        error = failure.error
        if failure.final:
            raise error
        group.excluded.add(instance.identity)
        if isinstance(error, QueueFullError):
            group.full = error
        else:
            group.failures += 1
            group.last = failure
            self._context.breakers.failed(instance)
        may_retry = group.may_retry(failure, self._context.config.max_retries, self._context.budget.try_spend)
        log.warning(
            "request %s: %s failed (%s: %s), %s",
            self._request.request_id,
            instance.instance_id,
            failure.reason,
            error.message,
            "going on elsewhere" if may_retry else "giving up",
            extra={"request_id": self._request.request_id},
        )
        if not may_retry:
            raise group.final_error(failure, self._context.registry.ready(Role.DECODE))
        self._request.span.event("failed", failure.reason)
        metrics = self._context.metrics
        if group.num_tokens > attempt.tokens_before:
            self._traces.num_migrations += 1
            metrics.migrations.labels(failure.reason).inc()
        else:
            metrics.retries.labels(failure.reason).inc()
