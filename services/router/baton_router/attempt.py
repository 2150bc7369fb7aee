"""One call of a decode instance: its messages in Baton's own types, and why it ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

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
from baton.rpc.errors import from_rpc_error
from baton.types import FinishReason, TokenLogprob
from baton_router.core import RoutedDelta
from baton_router.instance import Instance

_FINAL = (InvalidRequestError, NotFoundError, DeadlineError)
"""Trying elsewhere would give the same answer, or there is no time left for it."""

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


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a decode instance, with the request's own sequence numbers."""

    deltas: list[RoutedDelta]
    trace: common_pb2.RequestTrace | None
    prompt_logprobs: list[TokenLogprob | None] | None


async def run_attempt(
    instance: Instance, request: worker_pb2.GenerateRequest, indices: list[int], timeout_s: float
) -> AsyncGenerator[Message, None]:
    """Call ``Generate`` and yield its messages; closing the generator cancels the call at once.

    Args:
        instance: The decode instance.
        request: What to send.
        indices: The request's sequence number of each of the call's sequences.
        timeout_s: Deadline of the whole call.

    Raises:
        AttemptFailed: The instance refused, broke off or did not answer any more.
    """
    call: Any = instance.stub.Generate(request, timeout=timeout_s)
    lost = False

    def lose() -> None:
        nonlocal lost
        lost = True
        call.cancel()

    ended = instance.on_lost(lose)
    try:
        while True:
            message = await call.read()
            if message is grpc.aio.EOF:  # type: ignore[attr-defined]
                break
            yield _read(message, indices, instance)
        if await call.code() is not grpc.StatusCode.OK:
            raise AttemptFailed(UnavailableError(await call.details() or "the stream broke"), "broken")
    except grpc.aio.AioRpcError as error:
        raise _failed(error, instance) from error
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if lost and not (task is not None and task.cancelling()):
            error_text = f"{instance.instance_id} does not answer any more"
            raise AttemptFailed(UnavailableError(error_text), "lost") from None
        raise
    finally:
        ended()
        call.cancel()


def _failed(error: grpc.aio.AioRpcError, instance: Instance) -> AttemptFailed:
    reason = error.code().name.lower()
    rebuilt = from_rpc_error(error)
    if error.code() is grpc.StatusCode.UNAUTHENTICATED:
        # The caller can do nothing about the token between router and instance.
        rebuilt = UnavailableError(f"{instance.instance_id} refuses this router's token")
    elif isinstance(rebuilt, NotFoundError) and error.code() is not grpc.StatusCode.NOT_FOUND:
        rebuilt = InternalError(rebuilt.message)
    return AttemptFailed(rebuilt, reason)


def _read(message: worker_pb2.GenerateResponse, indices: list[int], instance: Instance) -> Message:
    deltas = []
    for item in message.deltas:
        if item.index >= len(indices):
            text = f"{instance.instance_id} sent tokens of sequence {item.index}, which nobody asked for"
            raise AttemptFailed(InternalError(text), "protocol")
        finish = finish_from_pb(item.finish_reason)
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
