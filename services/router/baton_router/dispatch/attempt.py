"""One attempt to have an instance generate a group of sequences: its reservation, its call, and the merged trace.

One stream per decode instance carries the calls of all requests that run there (:class:`WorkerStreams`). This module
converts what arrives into Baton's own types, and classifies why a call ended, which decides whether it is retried.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterable
from typing import Protocol
from weakref import WeakKeyDictionary

import grpc
import msgspec

from baton.api.v1 import common_pb2, worker_pb2
from baton.errors import (
    BatonError,
    CancelledError,
    DeadlineError,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    QueueFullError,
    UnavailableError,
)
from baton.rpc.convert import add_to, finish_from_pb, logprob_from_pb, prompt_logprobs_from_pb
from baton.rpc.multiplex import ANY_TOKEN, Call, CallEnded, CallStream, Reader, TokenWriter
from baton.tokenizer import TokenDelta
from baton.types import FinishReason
from baton_router.dispatch.event_loop import END, RECEIVE, TurnBatcher
from baton_router.dispatch.interface import ChunkSink, RoutedChunk
from baton_router.registry.instance import Instance
from baton_router.scheduler.placement import Placement

_FINAL = (InvalidRequestError, NotFoundError, DeadlineError)
"""Errors that another instance would repeat, or that leave no time for another attempt."""
_BROKEN = frozenset({"unavailable", "cancelled", "broken", "lost", "short", "draining"})
"""Failure reasons that mean that the connection or the instance went away."""
_ABORT = FinishReason.ABORT  # looking up a member of an enumeration is slow
_ERROR = FinishReason.ERROR
_END_GRACE_S = 1.0
"""Seconds that an instance may take to end its call after the last token."""
_SUMMED_FIELDS = (
    "kv_bytes",
    "transfer_us",
    "exposed_us",
    "transferred_tokens",
    "recomputed_tokens",
    "num_preemptions",
    "reloaded_tokens",
    "repeated_tokens",
    "drafted_tokens",
    "accepted_tokens",
)


class WorkerStreams:
    """The router's streams to decode instances. Each is opened on first use and ends when its instance is closed.

    Args:
        steps: The router's turn batcher.
    """

    def __init__(self, steps: TurnBatcher) -> None:
        self._streams: WeakKeyDictionary[Instance, CallStream] = WeakKeyDictionary()
        self._silent: frozenset[str] = frozenset()
        self._schedule_delivery = functools.partial(steps.schedule, RECEIVE, CallStream.deliver)
        self._schedule_end = functools.partial(steps.schedule, END, Call.deliver_end)

    def send_silent(self, addresses: frozenset[str]) -> None:
        """Send all decode instances the addresses of the prefill instances that do not answer now."""
        self._silent = addresses
        for stream in self._streams.values():
            stream.send_silent(addresses)

    def start(self, instance: Instance, request: worker_pb2.GenerateRequest, reader: Reader) -> Call:
        """Start a call on an instance; see :meth:`CallStream.start`. A stream that broke is opened again."""
        stream = self._streams.get(instance)
        if stream is None or stream.broken:
            stream = CallStream(
                instance.dialer,
                instance.instance_id,
                self._schedule_delivery,
                self._schedule_end,
                vocab_size=_vocab_size(instance),
            )
            self._streams[instance] = stream
            if self._silent:
                stream.send_silent(self._silent)
        return stream.start(request, reader)


def _vocab_size(instance: Instance) -> int:
    return ANY_TOKEN if instance.info is None else instance.info.vocab_size


class AttemptFailed(Exception):
    """A decode instance did not finish a group.

    Attributes:
        error: Error for the caller if no other instance can finish the group.
        reason: Short label for metrics.
        final: Whether no other instance could do better.
        broken: Whether the connection or the instance went away, so that the instance may return.
    """

    def __init__(self, error: BatonError, reason: str) -> None:
        super().__init__(error.message)
        self.error = error
        self.reason = reason
        self.final = isinstance(error, _FINAL)
        self.broken = reason in _BROKEN


class InstanceLost(CallEnded):
    """The instance was declared dead while its connections were still open."""


class RequestExpired(CallEnded):
    """The request's own time is over, which is no instance's fault."""


def classify_end(end: CallEnded) -> AttemptFailed:
    """Return the failure of an attempt whose call ended with an error."""
    error = end.error
    if isinstance(error, NotFoundError) and end.code is not grpc.StatusCode.NOT_FOUND:
        error = InternalError(error.message)
    elif isinstance(error, CancelledError):  # the server was stopped: calls that this router cancels report no end
        error = UnavailableError("the instance ended the call itself", retry_after_s=1.0)
    elif isinstance(error, DeadlineError) and not isinstance(end, RequestExpired):
        # A request's time is counted here alone. If this were final, the instance would end every request.
        error = InternalError(f"the instance gave the call up: {error.message}")
    return AttemptFailed(error, "lost" if isinstance(end, InstanceLost) else end.code.name.lower())


def read_response(message: worker_pb2.GenerateResponse, indices: list[int], instance: Instance) -> RoutedChunk:
    """Convert a message of a call to a chunk with the request's sequence numbers.

    Args:
        message: Message of the instance.
        indices: Index within the request of each sequence of the call.
        instance: Sender of the message.

    Raises:
        AttemptFailed: The message ends the attempt, or is malformed.
    """
    try:
        deltas = [_delta(item, indices, instance) for item in message.deltas]
        items = message.prompt_logprobs
        prompt_logprobs = prompt_logprobs_from_pb(list(items)) if items else None
    except BatonError as error:
        raise AttemptFailed(error, "protocol") from error
    trace = None
    if message.HasField("trace"):
        trace = message.trace
        if not trace.decode_instance:
            trace.decode_instance = instance.instance_id
    return RoutedChunk(deltas, trace, prompt_logprobs=prompt_logprobs)


def _delta(item: worker_pb2.SequenceDelta, indices: list[int], instance: Instance) -> TokenDelta:
    index = item.index
    token_ids = item.token_ids[:]
    if token_ids and max(token_ids) >= _vocab_size(instance):
        raise InternalError(f"{instance.instance_id} sent token {max(token_ids)}, which is not in the vocabulary")
    if index >= len(indices):
        raise InternalError(f"{instance.instance_id} sent tokens of sequence {index}, which was not asked for")
    finish = finish_from_pb(item.finish_reason)
    if finish is _ERROR:
        raise AttemptFailed(InternalError(f"{instance.instance_id}: {item.error or 'the request failed'}"), "error")
    if finish is _ABORT and instance.load.draining:
        raise AttemptFailed(UnavailableError(f"{instance.instance_id} is draining"), "draining")
    return TokenDelta(
        indices[index],
        token_ids,
        [logprob_from_pb(x) for x in logprobs] if (logprobs := item.logprobs) else [],
        finish,
        item.stop_token_id if item.HasField("stop_token_id") else None,
    )


class Sequence(msgspec.Struct):
    """One of the request's sequences, as far as it was delivered to the sink."""

    index: int
    token_ids: list[int] = msgspec.field(default_factory=list)
    finished: bool = False


class Group(msgspec.Struct):
    """Sequences that share a call, and the failures that they have met so far.

    Attributes:
        sequences: The sequences; at least one.
        excluded: Identities of instances that failed the group.
        full: Latest refusal for lack of capacity; ``None`` once an instance has accepted the group.
        last: Latest other failure.
        failures: Number of other failures.
        sampler: Version of the sampler that drew the tokens so far; empty if unknown.
    """

    sequences: list[Sequence]
    excluded: set[tuple[str, int]] = msgspec.field(default_factory=set)
    full: QueueFullError | None = None
    last: AttemptFailed | None = None
    failures: int = 0
    sampler: str = ""

    def has_open(self) -> bool:
        """Whether any sequence has not ended."""
        return any(not sequence.finished for sequence in self.sequences)

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences that were delivered."""
        return sum([len(sequence.token_ids) for sequence in self.sequences])

    @property
    def started(self) -> bool:
        """Whether anything was delivered."""
        return any(sequence.token_ids or sequence.finished for sequence in self.sequences)

    def with_other_samplers(self, excluded: set[tuple[str, int]], ready: Iterable[Instance]) -> set[tuple[str, int]]:
        """Return ``excluded`` and the instances whose samplers would continue a started group differently."""
        if not self.sampler or not self.started:
            return excluded
        others = {x.identity for x in ready if x.info is not None and x.info.sampler not in ("", self.sampler)}
        return excluded | others

    def record_sampler(self, instance: Instance) -> None:
        """Remember the sampler of the instance that will draw the group's first tokens."""
        if not self.started and instance.info is not None:
            self.sampler = instance.info.sampler

    def may_retry(self, failure: AttemptFailed, max_retries: int, try_spend: Callable[[str], bool]) -> bool:
        """Return whether the group may have another attempt.

        Args:
            failure: Failure of the latest attempt.
            max_retries: Most retries per group.
            try_spend: Takes a retry from the budget, where the budget applies; gets the failure's reason.
        """
        if self.failures > max_retries:
            return False
        if isinstance(failure.error, QueueFullError) and self.started:
            return True  # a stream that has started waits for capacity, with pauses
        if failure.broken and self.failures == 1:
            return True  # its load went away with the instance
        return try_spend(failure.reason)

    def final_error(self, failure: AttemptFailed, ready: Iterable[Instance]) -> BatonError:
        """Return the error for the caller of a group that has no other attempt."""
        if not failure.broken or any(instance.identity not in self.excluded for instance in ready):
            return failure.error
        message = f"no decode instance is left that could go on: {failure.error.message}"
        return UnavailableError(message, retry_after_s=1.0)


class AttemptOwner(Protocol):
    """The owner of an attempt: a :class:`~baton_router.dispatch.request.RequestRun`.

    Attributes:
        sink: Receives the answer; ``None`` once the request has ended.
    """

    sink: ChunkSink | None

    def on_chunk(self, attempt: Attempt, chunk: RoutedChunk) -> None:
        """Record a chunk and pass it to the sink."""

    def check_end(self, attempt: Attempt, failure: AttemptFailed | None) -> None:
        """Raise if the end of the attempt's call ends the request."""

    def on_closed(self, attempt: Attempt) -> None:
        """Forget an attempt that was closed."""

    def continue_group(self, group: Group) -> None:
        """Continue with a group whose attempt is closed."""

    def finish(self, error: Exception | None) -> None:
        """End the request."""


class Attempt:
    """A group on one instance: its reservation and its call. Must be closed with :meth:`close`.

    Args:
        run: Owner of the attempt.
        group: Sequences to generate.
        placement: Reservation on the instance.
        number: Number of this attempt within the request, from 1.

    Attributes:
        tokens_before: Tokens that the group had when the attempt started.
        started: Whether the attempt has delivered tokens.
        closed: Whether :meth:`close` was called.
    """

    __slots__ = (
        "_call",
        "_first",
        "_grace",
        "_run",
        "closed",
        "group",
        "number",
        "placement",
        "started",
        "tokens_before",
    )

    def __init__(self, run: AttemptOwner, group: Group, placement: Placement, number: int) -> None:
        self._run = run
        self.group = group
        self.placement = placement
        self.number = number
        group.record_sampler(placement.decode)
        self._first = group.sequences[0]
        self.tokens_before = group.num_tokens
        self._call: Call | None = None
        self._grace: asyncio.TimerHandle | None = None
        self.started = False
        self.closed = False

    def start(self, streams: WorkerStreams, request: worker_pb2.GenerateRequest) -> None:
        self._call = streams.start(self.placement.decode, request, self)
        self.placement.decode.add_call(self)

    def set_paused(self, paused: bool) -> None:
        """Keep back what arrives from now on, or deliver it again."""
        if self._call is not None:
            self._call.set_paused(paused)

    def close(self) -> None:
        """Abort the call if it still runs and release the reservation. Only the first call has an effect."""
        if self.closed:
            return
        self.closed = True
        if self._grace is not None:
            self._grace.cancel()
        try:
            if self._call is not None:
                self.placement.decode.remove_call(self)
                self._call.close()
            self._run.on_closed(self)
        finally:
            self.placement.release()

    def expire(self) -> None:
        """Fail: the request's deadline has passed."""
        error = DeadlineError("the request's time is over")
        if self._call is not None:
            self._call.fail(RequestExpired(error, grpc.StatusCode.DEADLINE_EXCEEDED))
        else:  # the call is not sent yet
            self._end(AttemptFailed(error, "deadline_exceeded"))

    def lose(self) -> None:
        """Fail: the instance was declared dead while its connections were still open."""
        assert self._call is not None  # only instances with a call know the attempt
        error = UnavailableError(f"{self.placement.decode.instance_id} does not answer any more")
        self._call.fail(InstanceLost(error, grpc.StatusCode.UNAVAILABLE))

    # --- called by the worker stream ---

    def on_tokens(self, token_ids: list[int]) -> None:
        """Deliver tokens of the first sequence."""
        self._deliver(RoutedChunk([TokenDelta(self._first.index, token_ids)], plain=self.started))

    def on_message(self, response: worker_pb2.GenerateResponse) -> None:
        try:
            chunk = read_response(response, [s.index for s in self.group.sequences], self.placement.decode)
        except AttemptFailed as failure:  # ends this call alone: other calls share its stream
            self._end(failure)
        else:
            self._deliver(chunk)

    def on_end(self, failure: CallEnded | None) -> None:
        self._end(None if failure is None else classify_end(failure))

    def token_writer(self) -> TokenWriter | None:
        """Return a writer for the tokens that follow, if the group is the request's only sequence."""
        sink = self._run.sink
        if self.closed or not self.started or self._first.finished or sink is None or len(self.group.sequences) > 1:
            return None
        return sink.token_writer(self._first.token_ids, self.placement.grow)

    def _deliver(self, chunk: RoutedChunk) -> None:
        if self.closed:
            return
        try:
            self._run.on_chunk(self, chunk)
        except Exception as error:  # a fault here or in the sink ends this request alone
            self._run.finish(error)
            return
        if chunk.plain:
            return
        self.started |= bool(chunk.deltas)
        if not self.closed and self._grace is None and not self.group.has_open():
            # Nothing more is needed: the call counts as ended unless its end arrives soon.
            self._grace = asyncio.get_running_loop().call_later(_END_GRACE_S, self._end, None)

    def _end(self, failure: AttemptFailed | None) -> None:
        if self.closed:
            return
        error: Exception | None = None
        try:
            self._run.check_end(self, failure)
        except Exception as refusal:
            error = refusal
        try:
            self.close()
        except Exception as fault:
            error = fault
        if error is not None:
            self._run.finish(error)
        else:
            self._run.continue_group(self.group)


class TraceMerge:
    """Merges the traces of the attempts of a request.

    Fields that describe the request (path, prompt and cached tokens, TTFT) are those of the first attempt that
    answered. Costs are summed. ``decode_instance`` is the last one, ``pipe`` the first that was used.

    Attributes:
        num_migrations: Times that the request continued on another decode instance after tokens had arrived.
        router_queue_us: Time that the request waited before the first attempt, in microseconds.
    """

    __slots__ = ("_latest", "num_migrations", "router_queue_us")

    def __init__(self) -> None:
        self._latest: dict[int, common_pb2.RequestTrace] = {}
        self.num_migrations = 0
        self.router_queue_us = 0

    def update(self, attempt: int, trace: common_pb2.RequestTrace) -> None:
        """Store the trace of an attempt, by its number; replaces an earlier one."""
        self._latest[attempt] = trace

    def attempts(self) -> list[common_pb2.RequestTrace]:
        """Return the latest trace of each attempt that answered, in order."""
        return [trace for _, trace in sorted(self._latest.items())]

    def merged(self) -> common_pb2.RequestTrace:
        """Return the request's trace so far."""
        if len(self._latest) == 1:
            (out,) = self._latest.values()
        else:
            out = self._sum()
        out.num_migrations = self.num_migrations
        out.router_queue_us = self.router_queue_us
        return out

    def _sum(self) -> common_pb2.RequestTrace:
        out = common_pb2.RequestTrace()
        for index, trace in enumerate(self.attempts()):
            if index == 0:
                out.CopyFrom(trace)
                continue
            for name in _SUMMED_FIELDS:
                add_to(out, name, getattr(trace, name))
            out.failed_prefills.extend(trace.failed_prefills)
            out.decode_instance = trace.decode_instance
            if not out.pipe and trace.pipe:
                out.pipe = trace.pipe  # the KV bytes summed above came over it
        return out
