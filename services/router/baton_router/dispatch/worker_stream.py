"""The router's streams to decode instances: one per instance carries the calls of all requests that run there.

What comes is read into Baton's own types here, and why a call ended is put into the words that decide what follows.
"""

from __future__ import annotations

import functools
from weakref import WeakKeyDictionary

import grpc
import msgspec

from baton.api.v1 import common_pb2, worker_pb2
from baton.errors import (
    BatonError,
    DeadlineError,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    UnavailableError,
)
from baton.rpc.convert import finish_from_pb, logprob_from_pb, prompt_logprobs_from_pb
from baton.rpc.multiplex import Call, CallEnded, CallStream, Reader
from baton.types import FinishReason, TokenLogprob
from baton_router.dispatch.interface import RoutedDelta
from baton_router.dispatch.turn_batching import END, TAKE, Steps
from baton_router.registry.instance import Instance

_FINAL = (InvalidRequestError, NotFoundError, DeadlineError)
"""Trying elsewhere would give the same answer, or there is no time left for it."""
_BROKEN = frozenset({"unavailable", "cancelled", "broken", "lost", "short", "draining"})
_ABORT, _ERROR = FinishReason.ABORT, FinishReason.ERROR  # once: a look at an enumeration takes long


class WorkerStreams:
    """The streams of one router, opened when they are needed. Each ends with its instance's channel.

    Args:
        steps: Of this router's requests.
    """

    def __init__(self, steps: Steps) -> None:
        self._streams: WeakKeyDictionary[Instance, CallStream] = WeakKeyDictionary()
        self._deliver = functools.partial(steps.later, TAKE, Call.flush)
        self._deliver_end = functools.partial(steps.later, END, Call.tell_end)

    def start(self, instance: Instance, request: worker_pb2.GenerateRequest, reader: Reader) -> Call:
        """Begin a call on an instance; see :meth:`CallStream.start`. A stream that broke is opened again."""
        stream = self._streams.get(instance)
        if stream is None or stream.broken:
            stream = self._streams[instance] = CallStream(
                instance.channel, instance.instance_id, self._deliver, self._deliver_end
            )
        return stream.start(request, reader)


class Message(msgspec.Struct):
    """One message of a decode instance, with the request's own sequence numbers."""

    deltas: list[RoutedDelta]
    trace: common_pb2.RequestTrace | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None


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
    return AttemptFailed(error, "lost" if isinstance(end, Lost) else end.code.name.lower())


def read_response(message: worker_pb2.GenerateResponse, indices: list[int], instance: Instance) -> Message:
    """Read a message of a call.

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
    return Message(deltas, trace, prompt_logprobs)


def _delta(item: worker_pb2.SequenceDelta, indices: list[int], instance: Instance) -> RoutedDelta:
    index = item.index
    if index >= len(indices):
        raise InternalError(f"{instance.instance_id} sent tokens of sequence {index}, which was not asked for")
    finish = finish_from_pb(item.finish_reason)
    if finish is _ERROR:
        raise AttemptFailed(InternalError(f"{instance.instance_id}: {item.error or 'the request failed'}"), "error")
    if finish is _ABORT and instance.load.draining:
        raise AttemptFailed(UnavailableError(f"{instance.instance_id} is draining"), "draining")
    return RoutedDelta(
        indices[index],
        item.token_ids[:],
        [logprob_from_pb(x) for x in logprobs] if (logprobs := item.logprobs) else [],
        finish,
        item.stop_token_id if item.HasField("stop_token_id") else None,
    )
