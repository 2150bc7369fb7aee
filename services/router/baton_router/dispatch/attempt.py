"""One call of a decode instance: its messages in Baton's own types, and why it ended."""

from __future__ import annotations

import asyncio
from typing import Protocol

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
from baton.rpc.multiplex import CallEnded
from baton.types import FinishReason, TokenLogprob
from baton_router.dispatch.interface import RoutedDelta
from baton_router.dispatch.worker_stream import WorkerStreams
from baton_router.registry.instance import Instance

_FINAL = (InvalidRequestError, NotFoundError, DeadlineError)
"""Trying elsewhere would give the same answer, or there is no time left for it."""

_ABORT, _ERROR = FinishReason.ABORT, FinishReason.ERROR  # once: a look at an enumeration takes long
_END_GRACE_S = 1.0
"""How long an instance may take to end its call after the last token."""

_BROKEN = frozenset({"unavailable", "cancelled", "broken", "lost", "short", "draining"})


class AttemptFailed(Exception):
    """A decode instance did not bring a request to its end.

    Attributes:
        error: What to tell the caller if nobody else can.
        reason: Short label for metrics.
        final: Whether nobody else could do better.
        broken: Whether the connection or the instance went away, so that it may come back as another.
    """

    def __init__(self, error: BatonError, reason: str) -> None:
        super().__init__(error.message)
        self.error = error
        self.reason = reason
        self.final = isinstance(error, _FINAL)
        self.broken = reason in _BROKEN


def out_of_time() -> AttemptFailed:
    """Return the failure of an attempt whose request has taken all of its time."""
    return AttemptFailed(DeadlineError("the request's time is over"), "deadline_exceeded")


class Message(msgspec.Struct):
    """One message of a decode instance, with the request's own sequence numbers."""

    deltas: list[RoutedDelta]
    trace: common_pb2.RequestTrace | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None


class Listener(Protocol):
    """Takes what an attempt brings, in order."""

    def on_message(self, message: Message) -> None:
        """Take a message."""

    def on_end(self, failure: AttemptFailed | None) -> None:
        """Take the end, the last thing there is; ``None``: the call has ended well."""


class Attempt:
    """A running ``Generate``; :meth:`close` it, whatever happens.

    Args:
        streams: Where calls run.
        instance: The decode instance.
        request: What to send, serialized.
        indices: The request's sequence number of each of the call's sequences.
        listener: Takes what comes, from the next turn of the event loop on.
    """

    __slots__ = ("_call", "_first", "_grace", "_indices", "_instance", "_listener")

    def __init__(
        self,
        streams: WorkerStreams,
        instance: Instance,
        request: bytes,
        indices: list[int],
        listener: Listener,
    ) -> None:
        self._instance, self._indices, self._first = instance, indices, indices[0]
        self._listener = listener
        self._call = streams.start(instance, request, self)
        instance.began(self)
        self._grace: asyncio.TimerHandle | None = None

    # --- what the stream calls ---

    def on_tokens(self, token_ids: list[int]) -> None:
        """Take tokens of the first sequence."""
        self._listener.on_message(Message([RoutedDelta(self._first, token_ids)]))

    def on_message(self, response: worker_pb2.GenerateResponse) -> None:
        """Take a message."""
        try:
            message = _read(response, self._indices, self._instance)
        except (AttemptFailed, BatonError) as error:  # this call's end alone: others share its stream
            self._call.close()
            failure = error if isinstance(error, AttemptFailed) else AttemptFailed(error, "protocol")
            self._listener.on_end(failure)
            return
        self._listener.on_message(message)

    def on_end(self, failure: CallEnded | None) -> None:
        """Take the call's end."""
        self._listener.on_end(None if failure is None else _failed(failure, self._instance))

    # --- what its owner calls ---

    def expect_end(self) -> None:
        """Nothing is needed any more: the end counts as come unless it comes soon."""
        if not self._call.ended and self._grace is None:
            self._grace = asyncio.get_running_loop().call_later(_END_GRACE_S, self._give_up)

    def hold(self, held: bool) -> None:
        """Keep what comes from now on, or go on handing it on."""
        self._call.hold(held)

    def close(self) -> None:
        """Abort the call if it still runs; nothing is handed on any more."""
        if self._grace is not None:
            self._grace.cancel()
        self._instance.ended(self)
        self._call.close()
        self._grace = None

    def expire(self) -> None:
        """The request's time is over."""
        self._call.fail(CallEnded(out_of_time().error, grpc.StatusCode.DEADLINE_EXCEEDED))

    def lose(self) -> None:
        """The instance was found dead without its connections breaking."""
        error = UnavailableError(f"{self._instance.instance_id} does not answer any more")
        self._call.fail(_Lost(error, grpc.StatusCode.UNAVAILABLE))

    def _give_up(self) -> None:
        self._call.close()
        self._listener.on_end(None)


class _Lost(CallEnded):
    """The instance was found dead without its connections breaking."""


def _failed(end: CallEnded, instance: Instance) -> AttemptFailed:
    error = end.error
    if isinstance(error, NotFoundError) and end.code is not grpc.StatusCode.NOT_FOUND:
        error = InternalError(error.message)
    return AttemptFailed(error, "lost" if isinstance(end, _Lost) else end.code.name.lower())


def _read(message: worker_pb2.GenerateResponse, indices: list[int], instance: Instance) -> Message:
    deltas = []
    for item in message.deltas[:]:  # a list of what a repeated field holds is quicker to walk than the field
        index = item.index
        if index >= len(indices):
            text = f"{instance.instance_id} sent tokens of sequence {index}, which nobody asked for"
            raise AttemptFailed(InternalError(text), "protocol")
        finish = finish_from_pb(item.finish_reason)
        if finish is _ERROR:
            raise AttemptFailed(InternalError(f"{instance.instance_id}: {item.error or 'the request failed'}"), "error")
        if finish is _ABORT and instance.load.draining:
            raise AttemptFailed(UnavailableError(f"{instance.instance_id} is draining"), "draining")
        deltas.append(
            RoutedDelta(
                indices[index],
                item.token_ids[:],
                [logprob_from_pb(x) for x in logprobs] if (logprobs := item.logprobs) else [],
                finish,
                item.stop_token_id if item.HasField("stop_token_id") else None,
            )
        )
    trace = None
    if message.HasField("trace"):
        trace = message.trace
        if not trace.decode_instance:
            trace.decode_instance = instance.instance_id
    prompt_logprobs = message.prompt_logprobs
    return Message(deltas, trace, prompt_logprobs_from_pb(list(prompt_logprobs)) if prompt_logprobs else None)
