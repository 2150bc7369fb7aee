"""One try to have an instance generate a group of sequences: what it holds there, its call, and the merged trace.

One stream per decode instance carries the calls of all requests that run there (:class:`WorkerStreams`). What comes is
read into Baton's own types here, and why a call ended is put into the words that decide what follows.
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
from baton.rpc.multiplex import Call, CallEnded, CallStream, FastPath, Reader
from baton.tokenizer import TokenDelta
from baton.types import FinishReason
from baton_router.dispatch.event_loop import END, TAKE, TurnBatcher
from baton_router.dispatch.interface import ChunkSink, LeftPath, RoutedChunk
from baton_router.registry.instance import Instance
from baton_router.scheduler.placement import Placement

_FINAL = (InvalidRequestError, NotFoundError, DeadlineError)
"""Trying elsewhere would give the same answer, or there is no time left for it."""
_BROKEN = frozenset({"unavailable", "cancelled", "broken", "lost", "short", "draining"})
_ABORT, _ERROR = FinishReason.ABORT, FinishReason.ERROR  # once: a look at an enumeration takes long
_END_GRACE_S = 1.0
"""How long an instance may take to end its call after the last token."""
_SUMS = (
    *("kv_bytes", "transfer_us", "exposed_us", "transferred_tokens", "recomputed_tokens"),
    *("num_preemptions", "reloaded_tokens", "repeated_tokens", "drafted_tokens", "accepted_tokens"),
)


class WorkerStreams:
    """The streams of one router, opened when they are needed. Each ends when its instance is closed.

    Args:
        steps: Of this router's requests.
    """

    def __init__(self, steps: TurnBatcher) -> None:
        self._streams: WeakKeyDictionary[Instance, CallStream] = WeakKeyDictionary()
        self._silent: frozenset[str] = frozenset()
        self._deliver = functools.partial(steps.later, TAKE, CallStream.flush)
        self._deliver_end = functools.partial(steps.later, END, Call.tell_end)

    def tell_silent(self, addresses: frozenset[str]) -> None:
        """Tell all decode instances which prefill instances do not answer now."""
        self._silent = addresses
        for stream in self._streams.values():
            stream.tell_silent(addresses)

    def start(self, instance: Instance, request: worker_pb2.GenerateRequest, reader: Reader) -> Call:
        """Begin a call on an instance; see :meth:`CallStream.start`. A stream that broke is opened again."""
        stream = self._streams.get(instance)
        if stream is None or stream.broken:
            stream = self._streams[instance] = CallStream(
                instance.dialer, instance.instance_id, self._deliver, self._deliver_end
            )
            if self._silent:
                stream.tell_silent(self._silent)
        return stream.start(request, reader)


class AttemptFailed(Exception):
    """A decode instance did not bring a request to its end.

    Attributes:
        error: What to tell the caller if no other instance can.
        reason: Short label for metrics.
        final: Whether no other instance could do better.
        broken: Whether the connection or the instance went away, so that it may come back as another.
    """

    def __init__(self, error: BatonError, reason: str) -> None:
        super().__init__(error.message)
        self.error = error
        self.reason = reason
        self.final = isinstance(error, _FINAL)
        self.broken = reason in _BROKEN


class Lost(CallEnded):
    """The instance was found dead without its connections breaking."""


def failed(end: CallEnded) -> AttemptFailed:
    """Return why an attempt failed whose call has ended."""
    error = end.error
    if isinstance(error, NotFoundError) and end.code is not grpc.StatusCode.NOT_FOUND:
        error = InternalError(error.message)
    elif isinstance(error, CancelledError):  # by a server that is stopped; what this router cancels is not told any end
        error = UnavailableError("the instance ended the call itself", retry_after_s=1.0)
    return AttemptFailed(error, "lost" if isinstance(end, Lost) else end.code.name.lower())


def read_response(message: worker_pb2.GenerateResponse, indices: list[int], instance: Instance) -> RoutedChunk:
    """Read a message of a call; what it brings has the request's own sequence numbers.

    Args:
        message: The message.
        indices: The request's sequence number of each of the call's sequences.
        instance: Who sent it.

    Raises:
        AttemptFailed: It ends the call, or makes no sense.
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
    if index >= len(indices):
        raise InternalError(f"{instance.instance_id} sent tokens of sequence {index}, which was not asked for")
    finish = finish_from_pb(item.finish_reason)
    if finish is _ERROR:
        raise AttemptFailed(InternalError(f"{instance.instance_id}: {item.error or 'the request failed'}"), "error")
    if finish is _ABORT and instance.load.draining:
        raise AttemptFailed(UnavailableError(f"{instance.instance_id} is draining"), "draining")
    return TokenDelta(
        indices[index],
        item.token_ids[:],
        [logprob_from_pb(x) for x in logprobs] if (logprobs := item.logprobs) else [],
        finish,
        item.stop_token_id if item.HasField("stop_token_id") else None,
    )


class Sequence(msgspec.Struct):
    """One of the request's sequences: what was handed on of it."""

    index: int
    token_ids: list[int] = msgspec.field(default_factory=list)
    finished: bool = False


class Group(msgspec.Struct):
    """Sequences that travel together, and what went wrong with them so far.

    Attributes:
        excluded: Identities of instances that failed them.
        full: The latest refusal for lack of room, until an instance took the group.
        last: The latest other failure.
        failures: How many others there were.
        sampler: Version of the sampler that chose their tokens so far; empty: not known.
    """

    sequences: list[Sequence]
    excluded: set[tuple[str, int]] = msgspec.field(default_factory=set)
    full: QueueFullError | None = None
    last: AttemptFailed | None = None
    failures: int = 0
    sampler: str = ""

    def has_open(self) -> bool:
        """Whether any of them has not ended."""
        for s in self.sequences:  # noqa: SIM110  once per token, and a generator costs more than the look
            if not s.finished:
                return True
        return False

    @property
    def num_tokens(self) -> int:
        """Tokens that were handed on of all of them."""
        return sum([len(s.token_ids) for s in self.sequences])

    @property
    def started(self) -> bool:
        """Whether anything was handed on."""
        return any(s.token_ids or s.finished for s in self.sequences)

    def excluding(self, excluded: set[tuple[str, int]], ready: Iterable[Instance]) -> set[tuple[str, int]]:
        """Return these and the instances on which it would not go on as it began: their samplers draw otherwise."""
        if not self.sampler or not self.started:
            return excluded
        others = {x.identity for x in ready if x.info is not None and x.info.sampler not in ("", self.sampler)}
        return excluded | others

    def begin_on(self, instance: Instance) -> None:
        """Take note of who is going to choose its tokens."""
        if not self.started and instance.info is not None:
            self.sampler = instance.info.sampler

    def may_retry(self, failure: AttemptFailed, max_retries: int, budget: Callable[[str], bool]) -> bool:
        """Whether another try may be made; asks the budget where that applies."""
        if self.failures > max_retries:
            return False
        if isinstance(failure.error, QueueFullError) and self.started:
            return True  # a stream that has begun waits for room, with pauses
        if failure.broken and self.failures == 1:
            return True  # its load went away with the instance
        return budget(failure.reason)

    def why_given_up(self, failure: AttemptFailed, ready: Iterable[Instance]) -> BatonError:
        """Return what to tell of a group that has no other try: that all instances are gone, where that is so."""
        if not failure.broken or any(instance.identity not in self.excluded for instance in ready):
            return failure.error
        message = f"no decode instance is left that could go on: {failure.error.message}"
        return UnavailableError(message, retry_after_s=1.0)


class AttemptOwner(Protocol):
    """Whose attempt it is: :class:`~baton_router.dispatch.request.RequestRun`.

    Attributes:
        sink: Takes what comes; ``None``: the request has ended.
    """

    sink: ChunkSink | None

    def on_message(self, attempt: Attempt, chunk: RoutedChunk) -> None:
        """Take what came."""

    def judge(self, attempt: Attempt, failure: AttemptFailed | None) -> None:
        """Take note of how the attempt ended; raises where that ends the request."""

    def on_left(self, attempt: Attempt) -> None:
        """Take note that the attempt is closed."""

    def go_on(self, group: Group) -> None:
        """Go on with a group whose attempt is closed."""

    def finish(self, error: Exception | None) -> None:
        """End the request."""


class Attempt:
    """A group on one instance: what it holds there, and the call. :meth:`close` it, whatever happens.

    Args:
        run: Is told what comes.
        group: The sequences.
        placement: Where they are.
        number: The request's attempts so far, with this one.

    Attributes:
        tokens_before: Tokens that the group had when it came here.
        closed: Whether it has left again.
    """

    __slots__ = (
        *("_begun", "_call", "_fast", "_first", "_grace", "_run", "closed", "group", "number", "placement"),
        "tokens_before",
    )

    def __init__(self, run: AttemptOwner, group: Group, placement: Placement, number: int) -> None:
        self._run = run
        self.group, self.placement, self.number = group, placement, number
        group.begin_on(placement.decode)
        self._first = group.sequences[0]
        self.tokens_before = group.num_tokens
        self._call: Call | None = None
        self._grace: asyncio.TimerHandle | None = None
        self._begun = self.closed = False
        self._fast: LeftPath | None = None

    def start(self, streams: WorkerStreams, request: worker_pb2.GenerateRequest) -> None:
        """Begin the call."""
        self._call = streams.start(self.placement.decode, request, self)
        self.placement.decode.began(self)

    def hold(self, held: bool) -> None:
        """Keep what comes from now on, or go on handing it on."""
        if self._call is not None:
            self._call.hold(held)

    def close(self) -> None:
        """Abort the call if it still runs and give back what the group holds; once."""
        if self.closed:
            return
        self.closed = True
        self._leave_fast_path()
        if self._grace is not None:
            self._grace.cancel()
        if self._call is not None:
            self.placement.decode.ended(self)
            self._call.close()
        self._run.on_left(self)
        self.placement.release()

    def expire(self) -> None:
        """The request's time is over."""
        error = DeadlineError("the request's time is over")
        if self._call is not None:
            self._call.fail(CallEnded(error, grpc.StatusCode.DEADLINE_EXCEEDED))
        else:  # its call is not even sent
            self._end(AttemptFailed(error, "deadline_exceeded"))

    def lose(self) -> None:
        """The instance was found dead without its connections breaking."""
        assert self._call is not None  # who was not begun there is not lost
        error = UnavailableError(f"{self.placement.decode.instance_id} does not answer any more")
        self._call.fail(Lost(error, grpc.StatusCode.UNAVAILABLE))

    # --- what the stream calls ---

    def on_tokens(self, token_ids: list[int]) -> None:
        """Take tokens of the first sequence."""
        sequence, sink = self._first, self._run.sink
        self._leave_fast_path()
        if not self._begun:
            self._take(RoutedChunk([TokenDelta(sequence.index, token_ids)]))
        elif sink is not None and not self.closed and not sequence.finished:
            # What the run makes of a message, in few steps: nearly all that ever comes is such tokens.
            sequence.token_ids += token_ids
            self.placement.grow(len(token_ids))
            try:
                sink.on_tokens(sequence.index, token_ids)
            except Exception as error:  # as in _take
                self._run.finish(error)

    def on_message(self, response: worker_pb2.GenerateResponse) -> None:
        """Take a message."""
        self._leave_fast_path()
        try:
            chunk = read_response(response, [s.index for s in self.group.sequences], self.placement.decode)
        except AttemptFailed as failure:  # this call's end alone: others share its stream
            self._end(failure)
            return
        self._take(chunk)

    def on_end(self, failure: CallEnded | None) -> None:
        """Take the call's end."""
        self._end(None if failure is None else failed(failure))

    def fast_path(self) -> FastPath | None:
        """Return what takes the tokens that come next, if this is a request's only sequence."""
        self._leave_fast_path()
        sequence, sink = self._first, self._run.sink
        if self.closed or not self._begun or sequence.finished or sink is None or len(self.group.sequences) > 1:
            return None
        self._fast = sink.fast_path(sequence.token_ids, self.placement.grow)
        return self._fast

    def _leave_fast_path(self) -> None:
        if self._fast is not None:
            self._fast.leave()
            self._fast = None

    def _take(self, chunk: RoutedChunk) -> None:
        if self.closed:
            return
        self._begun |= bool(chunk.deltas)
        try:
            self._run.on_message(self, chunk)
        except Exception as error:  # of ours, or of the sink: this request's end alone
            self._run.finish(error)
            return
        if not self.closed and self._grace is None and not self.group.has_open():
            # Nothing is needed any more: the end counts as come unless it comes soon.
            self._grace = asyncio.get_running_loop().call_later(_END_GRACE_S, self._end, None)

    def _end(self, failure: AttemptFailed | None) -> None:
        if self.closed:
            return
        error: Exception | None = None
        try:
            self._run.judge(self, failure)
        except Exception as refusal:
            error = refusal
        self.close()
        if error is not None:
            self._run.finish(error)
        else:
            self._run.go_on(self.group)


class TraceMerge:
    """One trace of a request that may have run on several instances.

    What describes the request (path, prompt and cached tokens, TTFT) comes from the first attempt that answered; costs
    are summed; ``decode_instance`` is the last one, ``pipe`` the first that was used.

    Attributes:
        router_queue_us: How long the request waited before the first attempt.
    """

    __slots__ = ("_latest", "num_migrations", "router_queue_us")

    def __init__(self) -> None:
        self._latest: dict[int, common_pb2.RequestTrace] = {}
        self.num_migrations = self.router_queue_us = 0

    def update(self, attempt: int, trace: common_pb2.RequestTrace) -> None:
        """Take the trace of an attempt, by its number; a later one replaces its earlier."""
        self._latest[attempt] = trace

    def attempts(self) -> list[common_pb2.RequestTrace]:
        """Return the latest trace of each attempt that answered, in order."""
        if len(self._latest) == 1:
            return list(self._latest.values())
        return [trace for _, trace in sorted(self._latest.items())]

    def merged(self) -> common_pb2.RequestTrace:
        """Return the request's trace as far as it is known."""
        if len(self._latest) == 1:
            (out,) = self._latest.values()
        else:
            out = self._sum()
        out.num_migrations = self.num_migrations
        out.router_queue_us = self.router_queue_us
        return out

    def _sum(self) -> common_pb2.RequestTrace:
        out = common_pb2.RequestTrace()
        for at, trace in enumerate(self.attempts()):
            if at == 0:
                out.CopyFrom(trace)
                continue
            for name in _SUMS:
                add_to(out, name, getattr(trace, name))
            out.failed_prefills.extend(trace.failed_prefills)
            out.decode_instance = trace.decode_instance
            if not out.pipe and trace.pipe:
                # The KV bytes summed above came over it.
                out.pipe = trace.pipe
        return out
