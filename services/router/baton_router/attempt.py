"""One call of a decode instance: its messages in Baton's own types, and why it ended."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import grpc

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
from baton.types import FinishReason, TokenLogprob
from baton_router.core import RoutedDelta
from baton_router.instance import Instance
from baton_router.session import Call, CallEnded, Sessions

_FINAL = (InvalidRequestError, NotFoundError, DeadlineError)
"""Trying elsewhere would give the same answer, or there is no time left for it."""

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


@dataclass(slots=True)
class Message:
    """One message of a decode instance, with the request's own sequence numbers."""

    deltas: list[RoutedDelta]
    trace: common_pb2.RequestTrace | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None


class Attempt:
    """A running ``Generate``; :meth:`close` it, whatever happens.

    Args:
        sessions: Where calls run.
        instance: The decode instance.
        request: What to send.
        indices: The request's sequence number of each of the call's sequences.
        timeout_s: Deadline of the whole call.
    """

    __slots__ = ("_call", "_first", "_indices", "_instance", "_timer", "_undo")

    def __init__(
        self,
        sessions: Sessions,
        instance: Instance,
        request: worker_pb2.GenerateRequest,
        indices: list[int],
        *,
        timeout_s: float,
    ) -> None:
        self._instance, self._indices, self._first = instance, indices, indices[0]
        call = self._call = sessions.start(instance, request)
        self._undo = instance.on_lost(self._lose)
        self._timer = asyncio.get_running_loop().call_later(timeout_s, _expire, call)

    async def next(self) -> Message | None:
        """Return the next message; ``None``: the call has ended well.

        Raises:
            AttemptFailed: The instance refused, broke off or did not answer any more.
        """
        try:
            item = await self._call.read()
        except CallEnded as end:
            raise _failed(end, self._instance) from end
        if type(item) is list:
            return Message([RoutedDelta(self._first, item)])
        return None if item is None else _read(item, self._indices, self._instance)  # type: ignore[arg-type]

    @property
    def has_ended(self) -> bool:
        """Whether no message is left to wait for."""
        return self._call.has_ended

    def close(self) -> None:
        """Abort the call if it still runs."""
        self._timer.cancel()
        self._undo()
        self._call.close()

    def _lose(self) -> None:
        error = UnavailableError(f"{self._instance.instance_id} does not answer any more")
        self._call.fail(_Lost(error, grpc.StatusCode.UNAVAILABLE))


class _Lost(CallEnded):
    """The instance was found dead without its connections breaking."""


def _expire(call: Call) -> None:
    call.fail(CallEnded(DeadlineError("the request's time is over"), grpc.StatusCode.DEADLINE_EXCEEDED))


def _failed(end: CallEnded, instance: Instance) -> AttemptFailed:
    error = end.error
    if isinstance(error, NotFoundError) and end.code is not grpc.StatusCode.NOT_FOUND:
        error = InternalError(error.message)
    return AttemptFailed(error, "lost" if isinstance(end, _Lost) else end.code.name.lower())


def _read(message: worker_pb2.GenerateResponse, indices: list[int], instance: Instance) -> Message:
    deltas = []
    for item in message.deltas:
        if item.index >= len(indices):
            text = f"{instance.instance_id} sent tokens of sequence {item.index}, which nobody asked for"
            raise AttemptFailed(InternalError(text), "protocol")
        finish = finish_from_pb(item.finish_reason) if item.finish_reason else None
        if finish is FinishReason.ERROR:
            raise AttemptFailed(InternalError(f"{instance.instance_id}: {item.error or 'the request failed'}"), "error")
        if finish is FinishReason.ABORT and instance.load.draining:
            raise AttemptFailed(UnavailableError(f"{instance.instance_id} is draining"), "draining")
        deltas.append(
            RoutedDelta(
                index=indices[item.index],
                token_ids=list(item.token_ids),
                logprobs=[logprob_from_pb(x) for x in item.logprobs],
                finish_reason=finish,
                stop_token_id=item.stop_token_id if item.HasField("stop_token_id") else None,
            )
        )
    trace = None
    if message.HasField("trace"):
        trace = message.trace
        trace.decode_instance = trace.decode_instance or instance.instance_id
    prompt_logprobs = prompt_logprobs_from_pb(list(message.prompt_logprobs)) if message.prompt_logprobs else None
    return Message(deltas, trace, prompt_logprobs)


async def last_message(attempt: Attempt) -> Message | None:
    """Return the next message, or ``None`` at the end; nothing is needed any more, so it doesn't wait long."""
    if attempt.has_ended:
        return await attempt.next()
    try:
        async with asyncio.timeout(_END_GRACE_S):
            return await attempt.next()
    except TimeoutError:
        return None
