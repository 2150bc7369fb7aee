"""The server's end of ``GenerateMany``: the calls that come on one stream; ``baton.rpc.multiplex`` is the other end.

Each call runs in a task of its own, exactly as it would on a stream of its own. What the calls send in one turn of the
event loop leaves as one message: an engine hands out the tokens of a step in one turn, so a step is one message.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import grpc
import grpc.aio

from baton.api.v1 import worker_pb2
from baton.errors import BatonError, InvalidRequestError, QueueFullError
from baton.rpc.errors import status_code, status_details
from baton.rpc.server import MAX_MESSAGE_BYTES

log = logging.getLogger(__name__)

Generate = Callable[[worker_pb2.GenerateRequest, Any], AsyncIterator[worker_pb2.GenerateResponse]]

MAX_CALLS = 65536
"""Calls that a stream may have at a time. Instances admit far fewer; this bounds the tasks of those that wait."""

MAX_RESPONSE_BYTES = MAX_MESSAGE_BYTES - 2**20
"""Of one response of a call: with what others send meanwhile it has to fit into one message."""
_TOKEN_BYTES = 8
"""Of a call and a token, about."""


async def generate_many(
    generate: Generate,
    requests: AsyncIterator[worker_pb2.GenerateManyRequest],
    context: Any,
    on_silent: Callable[[frozenset[str]], None] = lambda addresses: None,
) -> AsyncGenerator[worker_pb2.GenerateManyResponse, None]:
    """Serve ``GenerateMany`` with what serves ``Generate``.

    Args:
        generate: Serves one call; whatever it raises ends that call alone.
        requests: What the caller sends; when that ends, running calls still go to their end.
        context: The stream's context, handed on.
        on_silent: Told which prefill instances do not answer the caller, whenever that changes.
    """
    calls = _ServerCalls(generate, context, on_silent)
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

    What a caller leaves untaken is bounded by what one message may hold. Beyond that the outbox is overfull: it drops
    what it has, and takes nothing more.

    Args:
        on_overfull: Called once when more is untaken than may be.
    """

    def __init__(self, on_overfull: Callable[[], None] | None = None) -> None:
        self._message = worker_pb2.GenerateManyResponse()
        self._last_delta: dict[int, worker_pb2.SequenceDelta | None] = {}
        """Of each call with a message: what more tokens of sequence 0 may join; ``None``: nothing."""
        self._filled = asyncio.Event()
        self._closed = False
        self._on_overfull = on_overfull
        self._bytes = 0
        self._overfull = False

    def token(self, call: int, token_id: int) -> None:
        """Send one token of sequence 0 and nothing else."""
        if call not in self._last_delta:
            self._message.token_calls.append(call)
            self._message.token_ids.append(token_id)
            self._fill(_TOKEN_BYTES)
            return
        # Messages come after tokens: to keep the order within a call, the token joins its latest message.
        delta = self._last_delta[call]
        if delta is None:
            delta = self._message.messages.add(call=call).response.deltas.add()
            self._last_delta[call] = delta
        delta.token_ids.append(token_id)
        self._fill(4 * _TOKEN_BYTES)

    def send(self, call: int, response: worker_pb2.GenerateResponse) -> None:
        """Send a message of a call.

        Raises:
            InvalidRequestError: It is larger than a message may be; nothing is sent.
        """
        token_id = _only_a_token(response)
        if token_id is not None:
            self.token(call, token_id)
            return
        size = response.ByteSize()
        if size > MAX_RESPONSE_BYTES:
            # Only log probabilities are so many, and on any instance.
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
        """No more comes."""
        self._closed = True
        self._filled.set()

    def _fill(self, size: int) -> None:
        self._bytes += size
        if self._overfull or self._bytes > MAX_MESSAGE_BYTES:
            self._take()
            if not self._overfull:
                self._overfull = True
                log.warning("a stream of calls ends: its caller left more than %d bytes unread", MAX_MESSAGE_BYTES)
                if self._on_overfull is not None:
                    self._on_overfull()
        self._filled.set()

    def _take(self) -> worker_pb2.GenerateManyResponse:
        message = self._message
        self._message = worker_pb2.GenerateManyResponse()
        self._bytes = 0
        self._last_delta.clear()
        return message

    async def next(self) -> worker_pb2.GenerateManyResponse | None:
        """Wait for something to send and return all of it; ``None`` once closed and empty.

        Raises:
            QueueFullError: More was left untaken than may be.
        """
        # Who fills it wakes this task at the end of the queue, behind all others that the same step has woken.
        await self._filled.wait()
        if self._overfull:
            raise QueueFullError(f"more than {MAX_MESSAGE_BYTES} bytes of answers were left unread")
        if not self._closed:
            self._filled.clear()
        message = self._take()
        return message if message.token_calls or message.messages or message.ends else None


class _ServerCalls:
    """The calls of one stream, as the server has them."""

    def __init__(self, generate: Generate, context: Any, on_silent: Callable[[frozenset[str]], None]) -> None:
        self._generate = generate
        self._context = context
        self._on_silent = on_silent
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._reading = True
        self.outbox = Outbox(self._cancel)

    async def read(self, requests: AsyncIterator[worker_pb2.GenerateManyRequest]) -> None:
        """Start and cancel calls as they are told, until the caller has nothing more to say or cannot be read."""
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
            self._cancel()  # calls that it begins from now on would never be heard of
            raise
        finally:
            self._reading = False
            self._close_if_done()

    async def abort(self) -> None:
        """Cancel what still runs, and wait for it."""
        tasks = list(self._tasks.values())
        self._cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _cancel(self) -> None:
        for task in self._tasks.values():
            task.cancel()

    def _start(self, call: int, request: worker_pb2.GenerateRequest) -> None:
        if call in self._tasks or len(self._tasks) >= MAX_CALLS:
            code = grpc.StatusCode.RESOURCE_EXHAUSTED
            text = f"this stream has {MAX_CALLS} calls already"
            if call in self._tasks:
                code = grpc.StatusCode.ALREADY_EXISTS
                text = f"call {call} is running"
            self.outbox.end(call, code.value[0], text)
            return
        task = self._tasks[call] = asyncio.create_task(self._run(call, request))
        task.add_done_callback(lambda _: self._ended(call))

    def _ended(self, call: int) -> None:
        # Not the task's own last words: one that is cancelled before its first step says none.
        self._tasks.pop(call, None)
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
        except Exception as error:
            log.exception("a call failed")
            outbox.end(call, grpc.StatusCode.INTERNAL.value[0], f"internal error: {type(error).__name__}: {error}")

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
