"""An answer that is read while it comes, in an event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio

from baton.client.resume import Rest, rest_of
from baton.client.routers import Opening
from baton.client.settings import CLOSED, Budget
from baton.client.structured import AnswerParser
from baton.client.types import Answer, Answered, Chunk, Generation
from baton.errors import UnavailableError
from baton.rpc.errors import from_rpc_error, readable


async def wait_for_event(event: asyncio.Event, seconds: float) -> None:
    """Wait for an event for so long at most."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)


def task_is_cancelled() -> bool:
    """Whether this task was cancelled; grpc reports a call that was cancelled in the same way."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class AsyncStream(Answered, AsyncIterator[Chunk]):
    """An answer as it comes: iterate over its chunks with ``async for``.

    Leaving it before its end (``cancel``, the end of an ``async with`` block, cancelling the task that reads, dropping
    the last reference) cancels the request on the server.

    Attributes:
        reader: The task that reads it for a synchronous :class:`baton.client.Stream`.
    """

    reader: asyncio.Task[None] | None = None

    def __init__(self, opening: Opening, n: int, budget: Budget, parse: AnswerParser | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._cancelled, self._aborted = asyncio.Event(), asyncio.Event()
        self._done = False
        self._call: Any = None
        self._opening, self._budget = opening, budget
        self._rest: Rest | None = None
        self.answer = Answer(n, parse)
        self._pending: deque[Chunk] = deque()
        self._call = opening.open(budget.remaining())

    async def __anext__(self) -> Chunk:
        while self._cancelled.is_set() or not self._pending:
            chunks = await self.next_chunks()
            if chunks is None:
                raise StopAsyncIteration
            self._pending.extend(chunks)
        return self._pending.popleft()

    async def next_chunks(self) -> list[Chunk] | None:
        """Return what the next message brings, which may be nothing; ``None`` at the end.

        Raises:
            BatonError: See :meth:`baton.Client.generate`.
        """
        if self._done or self._cancelled.is_set():
            return None
        try:
            message = readable(await self._call.read())
        except asyncio.CancelledError:
            if self._cancelled.is_set() and not task_is_cancelled():
                return None
            self.cancel()
            if task_is_cancelled():
                raise
            raise UnavailableError(CLOSED) from None
        except grpc.RpcError as error:
            if self.answer.started and not self._opening.resumes:
                self._done = True
                raise from_rpc_error(error) from error
            await self._try_again(error)
            return []
        if message is not grpc.aio.EOF:  # type: ignore[attr-defined]
            if self._rest is None:
                return self.answer.feed(message)
            chunks = self.answer.feed_rest(message, self._rest.index, self._rest.repeated)
            self._rest = replace(self._rest, repeated=0) if chunks else self._rest
            return chunks
        if self._rest is not None and not self.answer.complete:  # another sequence's turn
            self._go_on()
            return []
        self._done = True
        self.answer.require_complete()
        return None

    async def collect(self) -> Generation:
        """Read to the end and return everything that came, chunks taken before included."""
        async with self:
            async for _ in self:
                pass
        return self.result()

    def result(self) -> Generation:
        """Return what has come so far."""
        return self.answer.result()

    def cancel(self) -> None:
        """End the request; the iteration stops."""
        self._cancelled.set()
        self.abort()

    def abort(self) -> None:
        """End the request because the client is closed, as who reads is told."""
        self._aborted.set()
        if self._call is not None and not self._done:
            self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cancel()

    def __del__(self) -> None:
        # Whatever thread drops the last reference, calls are cancelled in their loop.
        if self._call is not None and not (self._done or self._cancelled.is_set()):
            with contextlib.suppress(RuntimeError):  # the loop is closed, and its calls are
                self._loop.call_soon_threadsafe(self._call.cancel)

    async def _try_again(self, error: grpc.RpcError) -> None:
        try:
            delay = self._budget.after(error)
            self._opening.failed()
            await wait_for_event(self._aborted, delay)
            if not self._cancelled.is_set():
                self._go_on()
        except BaseException:
            self._done = True
            raise

    def _go_on(self) -> None:
        """Ask again: from the beginning, or, once tokens have come, for what is missing of a sequence."""
        self._rest = rest_of(self._opening.request, self.answer) if self.answer.started else None
        rest = None if self._rest is None else self._rest.request
        self._call = self._opening.open(self._budget.remaining(), rest)
