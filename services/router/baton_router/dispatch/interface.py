"""What dispatch offers to the text side: requests in tokens go in, chunks of tokens come back through callbacks.

:class:`ChunkQueue` turns the callbacks into an asynchronous iterator. What is made per request or token is a
``msgspec.Struct``: a dataclass takes two to four times as long to make.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Generic, Protocol, TypeVar

import msgspec

from baton.api.v1 import common_pb2
from baton.rpc.multiplex import FastPath
from baton.tokenizer import TokenDelta
from baton.types import TokenLogprob
from baton_router.scheduler.decision import Decision
from baton_router.types import ModelInfo, RoutedRequest

T = TypeVar("T")
_HELD_FROM = 8
"""Chunks that may wait here; what comes after them waits where it came from."""


class RoutedChunk(msgspec.Struct):
    """What one message of the decode instance brought.

    Attributes:
        trace: With the first chunk and with the last one.
        decision: With the first chunk.
        prompt_logprobs: With the first chunk, if asked for; entry 0 is ``None``.
    """

    deltas: list[TokenDelta]
    trace: common_pb2.RequestTrace | None = None
    decision: Decision | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None


class LeftPath(FastPath, Protocol):
    """A fast path that is left when something else comes."""

    def leave(self) -> None:
        """Send and count what it was given."""


class ChunkSink(Protocol):
    """Takes what a request brings, in order. It may cancel the request from inside of these calls."""

    def on_chunk(self, chunk: RoutedChunk) -> None:
        """Take a chunk."""

    def on_tokens(self, index: int, token_ids: list[int]) -> None:
        """Take tokens of a sequence that brought nothing else, behind the first chunk: nearly all that ever comes."""

    def on_end(self, error: Exception | None) -> None:
        """Take the end, the last thing there is; ``None``: every sequence has ended."""

    def fast_path(self, token_ids: list[int], counted: Callable[[int], None]) -> LeftPath | None:
        """Return what takes the tokens of a request of one sequence from now on, until anything else comes.

        Args:
            token_ids: The sequence's so far; each token that is taken is added.
            counted: To be called now and then with how many were added since.
        """


class Running(Protocol):
    """A request that was begun."""

    def cancel(self) -> None:
        """End it everywhere; the sink gets nothing more. One that has ended is not disturbed."""

    def hold(self, held: bool) -> None:
        """Keep what comes from now on, or go on handing it on."""


class Dispatcher(Protocol):
    """Places requests on instances and carries their streams, over the death of instances too."""

    def model_info(self) -> ModelInfo:
        """Return what is served.

        Raises:
            UnavailableError: No instance is ready.
        """

    def start(self, request: RoutedRequest, sink: ChunkSink) -> Running:
        """Begin a request; all that becomes of it the sink is told, errors too, perhaps before this returns.

        Errors are:
            QueueFullError: Everybody is full; says when to try again.
            OverloadedError: It would wait too long, or longer than it allows; says when to try again.
            UnavailableError: No decode instance is left.
            InvalidRequestError: An instance refused the request; names the field.
        """
        ...

    async def route(self, request: RoutedRequest) -> Decision:
        """Say where the request would go, and reserve nothing."""


class ChunkQueue(Generic[T]):
    """A sink whose chunks are read by one task."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._running: Running | None = None
        self._filled = asyncio.Event()
        self._held = self._ended = False
        self._error: Exception | None = None

    def on_chunk(self, chunk: T) -> None:
        """Take a chunk."""
        self._items.append(chunk)
        self._filled.set()
        if len(self._items) >= _HELD_FROM and self._running is not None and not self._held:
            self._held = True
            self._running.hold(True)

    def on_end(self, error: Exception | None) -> None:
        """Take the end."""
        self._ended, self._error = True, error
        self._filled.set()

    def fast_path(self, *_: object) -> None:
        """Chunks have to be read one by one."""

    @asynccontextmanager
    async def of(self, running: Running) -> AsyncIterator[AsyncGenerator[T, None]]:
        """Yield the chunks of a request that was begun with this sink; it is cancelled when the block is left."""
        self._running = running
        try:
            async with aclosing(self._read()) as items:
                yield items
        finally:
            running.cancel()

    async def _read(self) -> AsyncGenerator[T, None]:
        while True:
            while self._items:
                yield self._items.popleft()
            if self._held and self._running is not None:
                self._held = False
                self._running.hold(False)
                continue
            if self._ended:
                if self._error is not None:
                    raise self._error
                return
            self._filled.clear()
            await self._filled.wait()
