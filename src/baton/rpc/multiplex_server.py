"""``GenerateMany``, server side: the calls of one stream. ``baton.rpc.multiplex`` is the client side.

Each call runs in a task of its own, as it would on a stream of its own. Everything that the calls send in one turn of
the event loop leaves as one message: an engine delivers the tokens of a step in one turn, so a step is one message.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import grpc
import grpc.aio

from baton.api.v1 import worker_pb2
from baton.errors import INTERNAL_TEXT, BatonError, InvalidRequestError, QueueFullError
from baton.rpc.errors import status_code, status_details
from baton.rpc.server import MAX_MESSAGE_BYTES

log = logging.getLogger(__name__)

Generate = Callable[[worker_pb2.GenerateRequest, Any], AsyncIterator[worker_pb2.GenerateResponse]]

MAX_CALLS = 65536
"""Most concurrent calls of a stream, unless its server says otherwise."""

MAX_RESPONSE_BYTES = MAX_MESSAGE_BYTES - 2**20
"""Most bytes of one response: together with what other calls send it has to fit into one message."""
_TOKEN_BYTES = 8
"""Bytes of a call number and a token, roughly."""


async def generate_many(
    generate: Generate,
    requests: AsyncIterator[worker_pb2.GenerateManyRequest],
    context: Any,
    on_silent: Callable[[frozenset[str]], None] = lambda addresses: None,
    *,
    max_calls: int = MAX_CALLS,
) -> AsyncGenerator[worker_pb2.GenerateManyResponse, None]:
    """Serve ``GenerateMany`` with the implementation of ``Generate``.

    Args:
        generate: Serves one call; its exceptions end that call alone.
        requests: Messages of the caller; running calls are completed after their end.
        context: Context of the stream, passed to ``generate``.
        on_silent: Called with the addresses of the prefill instances that do not answer the caller, on changes.
        max_calls: Most concurrent calls; further ones are refused before anything is begun for them.
    """
    calls = _ServerCalls(generate, context, on_silent, max_calls)
    reader = asyncio.create_task(calls.read(requests))
    try:
        while (message := await calls.outbox.next()) is not None:
            yield message
        await reader
    finally:
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        await calls.abort()


class Outbox:
    """Gathers what calls send into one message per turn of the event loop.

    Unread output is bounded by the size of a message. Beyond it the outbox is overfull: it drops its content and
    accepts nothing more.

    Args:
        on_overfull: Called once when the outbox becomes overfull.
    """

    def __init__(self, on_overfull: Callable[[], None] | None = None) -> None:
        self._message = worker_pb2.GenerateManyResponse()
        self._last_delta: dict[int, worker_pb2.SequenceDelta | None] = {}
        """Per call with a response in the message: the delta that more tokens of sequence 0 may join, if any."""
        self._filled = asyncio.Event()
        self._closed = False
        self._on_overfull = on_overfull
        self._bytes = 0
        self._overfull = False

    def token(self, call: int, token_id: int) -> None:
        """Send one token of sequence 0, without anything else."""
        if call not in self._last_delta:
            self._message.token_calls.append(call)
            self._message.token_ids.append(token_id)
            self._fill(_TOKEN_BYTES)
            return
        # Responses follow the tokens of a message: to keep the order, the token joins the call's latest response.
        delta = self._last_delta[call]
        if delta is None:
            delta = self._message.messages.add(call=call).response.deltas.add()
            self._last_delta[call] = delta
        delta.token_ids.append(token_id)
        self._fill(4 * _TOKEN_BYTES)

    def send(self, call: int, response: worker_pb2.GenerateResponse) -> None:
        """Send a response of a call.

        Raises:
            InvalidRequestError: The response is too large; nothing is sent.
        """
        token_id = _only_a_token(response)
        if token_id is not None:
            self.token(call, token_id)
            return
        size = response.ByteSize()
        if size > MAX_RESPONSE_BYTES:
            # Only log probabilities take so much, on any instance.
            raise InvalidRequestError(f"the answer has {size} bytes, {MAX_RESPONSE_BYTES} bytes are possible at a time")
        sent = self._message.messages.add(call=call, response=response).response
        delta = sent.deltas[0] if len(sent.deltas) == 1 else None
        self._last_delta[call] = delta if delta is not None and _is_only_tokens(delta) else None
        self._fill(size + _TOKEN_BYTES)

    def end(self, call: int, code: int = 0, message: str = "", details: bytes = b"") -> None:
        """Send the end of a call."""
        self._message.ends.add(call=call, code=code, message=message, details=details)
        self._fill(len(message) + len(details) + _TOKEN_BYTES)

    def close(self) -> None:
        """End the stream after what was sent."""
        self._closed = True
        self._filled.set()

    def _fill(self, size: int) -> None:
        self._bytes += size
        if self._overfull or self._bytes > MAX_MESSAGE_BYTES:
            self._swap_message()
            if not self._overfull:
                self._overfull = True
                log.warning("a stream of calls ends: its caller left more than %d bytes unread", MAX_MESSAGE_BYTES)
                if self._on_overfull is not None:
                    self._on_overfull()
        self._filled.set()

    def _swap_message(self) -> worker_pb2.GenerateManyResponse:
        message = self._message
        self._message = worker_pb2.GenerateManyResponse()
        self._bytes = 0
        self._last_delta.clear()
        return message

    async def next(self) -> worker_pb2.GenerateManyResponse | None:
        """Return the next message, when there is something to send; ``None`` once closed and empty.

        Raises:
            QueueFullError: The outbox is overfull.
        """
        # Filling the outbox schedules this task behind all others that the same engine step has woken.
        await self._filled.wait()
        if self._overfull:
            raise QueueFullError(f"more than {MAX_MESSAGE_BYTES} bytes of answers were left unread")
        if not self._closed:
            self._filled.clear()
        message = self._swap_message()
        return message if message.token_calls or message.messages or message.ends else None


class _ServerCalls:
    """The running calls of one stream."""

    def __init__(
        self, generate: Generate, context: Any, on_silent: Callable[[frozenset[str]], None], max_calls: int
    ) -> None:
        self._max_calls = max_calls
        self._generate = generate
        self._context = context
        self._on_silent = on_silent
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._reading = True
        self.outbox = Outbox(self._cancel)

    async def read(self, requests: AsyncIterator[worker_pb2.GenerateManyRequest]) -> None:
        """Start and cancel calls, until the caller's messages end or cannot be read."""
        try:
            async for message in requests:
                if message.HasField("silent"):
                    self._on_silent(frozenset(message.silent.addresses))
                for start in message.starts:
                    self._start(start.call, start.request)
                for call in message.cancels:
                    if (task := self._tasks.get(call)) is not None:
                        task.cancel()
        except Exception:
            self._cancel()  # nothing will read the answers of the calls
            raise
        finally:
            self._reading = False
            self._close_if_done()

    async def abort(self) -> None:
        """Cancel running calls and wait for their end."""
        tasks = list(self._tasks.values())
        self._cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _cancel(self) -> None:
        for task in self._tasks.values():
            task.cancel()

    def _start(self, call: int, request: worker_pb2.GenerateRequest) -> None:
        if call in self._tasks or len(self._tasks) >= self._max_calls:
            code = grpc.StatusCode.RESOURCE_EXHAUSTED
            text = f"this stream has {self._max_calls} calls already"
            if call in self._tasks:
                code = grpc.StatusCode.ALREADY_EXISTS
                text = f"call {call} is running"
            self.outbox.end(call, code.value[0], text)
            return
        task = self._tasks[call] = asyncio.create_task(self._run(call, request))
        task.add_done_callback(functools.partial(self._forget_call, call))

    def _forget_call(self, call: int, task: asyncio.Task[None]) -> None:
        # Not part of the task: one that is cancelled before its first step runs no code.
        self._tasks.pop(call, None)
        if not task.cancelled() and (error := task.exception()) is not None:  # no answer could be made of its error
            log.error("a call failed", exc_info=error)
            self.outbox.end(call, grpc.StatusCode.INTERNAL.value[0], INTERNAL_TEXT)
        self._close_if_done()

    async def _run(self, call: int, request: worker_pb2.GenerateRequest) -> None:
        outbox = self.outbox
        try:
            responses: Any = self._generate(request, self._context)
            async with aclosing(responses):
                async for response in responses:
                    outbox.send(call, response)
            outbox.end(call)
        except BatonError as error:
            outbox.end(call, status_code(error).value[0], error.message, status_details(error))
        except asyncio.CancelledError:
            outbox.end(call, grpc.StatusCode.CANCELLED.value[0], "the call was cancelled")
        except Exception:
            log.exception("a call failed")
            outbox.end(call, grpc.StatusCode.INTERNAL.value[0], INTERNAL_TEXT)

    def _close_if_done(self) -> None:
        if not self._reading and not self._tasks:
            self.outbox.close()


def _only_a_token(response: worker_pb2.GenerateResponse) -> int | None:
    """Return the token of a response that is nothing but one token of sequence 0."""
    deltas = response.deltas
    if len(deltas) != 1 or response.HasField("trace") or response.prompt_logprobs:
        return None
    delta = deltas[0]
    return delta.token_ids[0] if len(delta.token_ids) == 1 and _is_only_tokens(delta) else None


def _is_only_tokens(delta: worker_pb2.SequenceDelta) -> bool:
    """Whether a delta brings nothing but tokens of sequence 0."""
    return not (delta.index or delta.finish_reason or delta.logprobs or delta.error or delta.HasField("stop_token_id"))
