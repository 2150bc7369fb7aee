"""What dispatch offers to the text side: tokenized requests go in, chunks of tokens come back through a callback.

There is one path for tokens: the worker stream delivers what a turn of the event loop brought to a request as one
chunk; dispatch records it, the output processor turns it into text, and the endpoint's formatter writes it. Nearly all
chunks are *plain*: tokens of one sequence and nothing else. Each stage has a short branch for them. Where the formatter
writes each plain token as its text between a constant prefix and suffix, it lends the worker stream a writer that does
that at once (:meth:`ChunkSink.token_writer`): a paced token costs about a fifth less CPU time with it.

:class:`ChunkQueue` turns the callbacks into an asynchronous iterator. What is created per request or per token is a
``msgspec.Struct``: a dataclass takes two to four times as long to create.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Generic, Protocol, TypeVar

import msgspec

from baton.api.v1 import common_pb2
from baton.rpc.multiplex import TokenWriter
from baton.tokenizer import TokenDelta
from baton.types import TokenLogprob
from baton_router.scheduler.decision import Decision
from baton_router.types import ModelInfo, RoutedRequest

T = TypeVar("T")
_MAX_QUEUED = 8
"""Chunks in a :class:`ChunkQueue` from which on its request is paused."""


class RoutedChunk(msgspec.Struct):
    """What one message of a decode instance brought to a request.

    Attributes:
        deltas: New tokens, at most one entry per sequence and message of the instance.
        trace: Merged trace; with the first chunk and with the last one.
        decision: Placement of the request; with the first chunk.
        prompt_logprobs: Log probabilities of the prompt, if asked for; with the first chunk. Entry 0 is ``None``.
        plain: Whether the chunk is tokens of one sequence after the first chunk, and nothing else: ``deltas`` has one
            entry, without log probabilities and end.
    """

    deltas: list[TokenDelta]
    trace: common_pb2.RequestTrace | None = None
    decision: Decision | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    plain: bool = False


class ChunkSink(Protocol):
    """Receives what a request brings, in order. It may cancel the request from inside these calls."""

    def on_chunk(self, chunk: RoutedChunk) -> None:
        """Receive a chunk."""

    def on_end(self, error: Exception | None) -> None:
        """Receive the end; nothing follows. ``None`` means that every sequence has ended."""

    def token_writer(self, token_ids: list[int], count_tokens: Callable[[int], None]) -> TokenWriter | None:
        """Return a writer for the plain tokens of a request's only sequence, until something else arrives.

        Args:
            token_ids: Tokens of the sequence so far; the writer appends those that it takes.
            count_tokens: Called now and then with the number of tokens taken since the last call.
        """


class Running(Protocol):
    """A request that was started."""

    def cancel(self) -> None:
        """End the request on all instances; the sink receives nothing more. No effect after the end."""

    def set_paused(self, paused: bool) -> None:
        """Keep back what arrives from now on, or deliver it again."""


class Dispatcher(Protocol):
    """Places requests on instances and streams their tokens, across failures of instances."""

    def model_info(self) -> ModelInfo:
        """Return the model that the instances serve.

        Raises:
            UnavailableError: No instance is ready.
        """

    def start(self, request: RoutedRequest, sink: ChunkSink) -> Running:
        """Start a request.

        Chunks, the end and all errors go to the sink, possibly before this returns. Errors are:

        * ``QueueFullError``: all instances are full; it has a time to retry after.
        * ``OverloadedError``: the request would wait too long, or longer than it allows; likewise.
        * ``UnavailableError``: no decode instance is left.
        * ``InvalidRequestError``: an instance refused the request; it names the field.

        Args:
            request: The tokenized request.
            sink: Receives the answer.
        """
        ...

    async def route(self, request: RoutedRequest) -> Decision:
        """Return where the request would be placed now; nothing is reserved."""


class ChunkQueue(Generic[T]):
    """A sink whose chunks are read by one task."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._running: Running | None = None
        self._changed = asyncio.Event()
        self._paused = False
        self._ended = False
        self._error: Exception | None = None

    def on_chunk(self, chunk: T) -> None:
        """Queue a chunk; the request is paused while too many are queued."""
        self._items.append(chunk)
        self._changed.set()
        if len(self._items) >= _MAX_QUEUED and self._running is not None and not self._paused:
            self._paused = True
            self._running.set_paused(True)

    def on_end(self, error: Exception | None) -> None:
        """End the iteration after the queued chunks."""
        self._ended = True
        self._error = error
        self._changed.set()

    def token_writer(self, *_: object) -> None:
        """Return no writer: the task reads chunks."""

    @asynccontextmanager
    async def read_chunks(self, running: Running) -> AsyncIterator[AsyncGenerator[T, None]]:
        """Yield an iterator over the chunks of a request; leaving the block cancels the request.

        Args:
            running: The request, which was started with this queue as its sink.
        """
        self._running = running
        try:
            async with aclosing(self._read()) as chunks:
                yield chunks
        finally:
            running.cancel()

    async def _read(self) -> AsyncGenerator[T, None]:
        while True:
            while self._items:
                yield self._items.popleft()
            if self._paused and self._running is not None:
                self._paused = False
                self._running.set_paused(False)
                continue
            if self._ended:
                if self._error is not None:
                    raise self._error
                return
            self._changed.clear()
            await self._changed.wait()
