"""An answer that is read as it arrives, in an event loop.

An answer whose router went out of reach continues on another router. A sequence depends only on its seed and its own
tokens, so the next token is the one that would have come. The other router detokenizes the earlier tokens too, and
leaves out as many characters as the caller has.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio

from baton.api.v1 import router_pb2
from baton.background import is_cancelled
from baton.client.request import AnswerParser
from baton.client.settings import CLOSED, Budget, Opening
from baton.client.types import Answer, Answered, Chunk, Generation
from baton.errors import InternalError, UnavailableError
from baton.rpc.errors import from_rpc_error, readable
from baton.seeds import sequence_seed


async def wait_for_event(event: asyncio.Event, seconds: float) -> None:
    """Wait for an event, for at most so many seconds."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)


class AsyncStream(Answered, AsyncIterator[Chunk]):
    """A streamed answer: iterate over its chunks with ``async for``.

    Returned by :meth:`AsyncClient.generate` with ``stream=True``. The request ends with the stream: :meth:`cancel`,
    leaving an ``async with`` block, cancelling the task that reads, and dropping the last reference all cancel it on
    the server::

        async with await client.generate("def main():", stream=True) as stream:
            async for chunk in stream:
                print(chunk.text, end="")

    Attributes:
        answer: The answer so far.
        reader: Task that reads for a synchronous :class:`baton.client.Stream`; else ``None``.
    """

    reader: asyncio.Task[None] | None = None

    def __init__(self, opening: Opening, budget: Budget, parse: AnswerParser | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._cancelled = asyncio.Event()
        self._aborted = asyncio.Event()
        self._done = False
        self._call: Any = None
        self._opening = opening
        self._budget = budget
        self._continuation: Continuation | None = None
        sampling = opening.request.sampling
        max_tokens = sampling.max_tokens if sampling.HasField("max_tokens") else None
        self.answer = Answer(sampling.n, parse, max_tokens=max_tokens)
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
        """Return the chunks of the next message, possibly none; ``None`` at the end.

        Raises:
            BatonError: See :meth:`baton.Client.generate`.
        """
        if self._done or self._cancelled.is_set():
            return None
        try:
            message = readable(await self._call.read())
        except asyncio.CancelledError:
            if self._cancelled.is_set() and not is_cancelled():
                return None
            self.cancel()
            if is_cancelled():
                raise
            raise UnavailableError(CLOSED) from None
        except grpc.RpcError as error:
            if self.answer.started and not self._opening.resumes:
                self._done = True
                raise from_rpc_error(error) from error
            await self._try_again(error)
            return []
        if message is not grpc.aio.EOF:  # type: ignore[attr-defined]
            try:
                return self._feed(message)
            except InternalError:
                self.cancel()
                raise
        if self._continuation is not None and not self.answer.complete:  # the next sequence's turn
            self._open_again()
            return []
        self._done = True
        self.answer.require_complete()
        return None

    def _feed(self, message: router_pb2.RouterGenerateResponse) -> list[Chunk]:
        continuation = self._continuation
        if continuation is None:
            return self.answer.feed(message)
        chunks = self.answer.feed_continuation(message, continuation.index, continuation.repeated)
        if chunks:
            self._continuation = replace(continuation, repeated=0)
        return chunks

    async def collect(self) -> Generation:
        """Read to the end and return the whole answer, including chunks that were read before.

        Raises:
            BatonError: See :meth:`AsyncClient.generate`.
        """
        async with self:
            async for _ in self:
                pass
        return self.result()

    def result(self) -> Generation:
        """Return what has arrived so far."""
        return self.answer.result()

    def cancel(self) -> None:
        """Cancel the request; the iteration stops."""
        self._cancelled.set()
        self.abort()

    def abort(self) -> None:
        """Cancel the request because the client is closed; the iteration raises ``UnavailableError``."""
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
        # Any thread may drop the last reference, but calls must be cancelled in their loop.
        if self._call is not None and not (self._done or self._cancelled.is_set()):
            with contextlib.suppress(RuntimeError):  # the loop is closed, and so are its calls
                self._loop.call_soon_threadsafe(self._call.cancel)

    async def _try_again(self, error: grpc.RpcError) -> None:
        try:
            delay = self._budget.delay_after(error)
            self._opening.report_failure()
            await wait_for_event(self._aborted, delay)
            if not self._cancelled.is_set():
                self._open_again()
        except BaseException:
            self._done = True
            raise

    def _open_again(self) -> None:
        """Ask again: from the beginning, or, once tokens have arrived, for the rest of a sequence."""
        self._continuation = continue_answer(self._opening.request, self.answer) if self.answer.started else None
        request = None if self._continuation is None else self._continuation.request
        self._call = self._opening.open(self._budget.remaining(), request)


@dataclass(frozen=True, slots=True)
class Continuation:
    """The request for the rest of one sequence.

    Attributes:
        index: Index of the sequence.
        request: Request for the rest.
        repeated: Tokens at the beginning of the rest that have arrived before.
    """

    index: int
    request: router_pb2.RouterGenerateRequest
    repeated: int


def continue_answer(request: router_pb2.RouterGenerateRequest, answer: Answer) -> Continuation | None:
    """Return the request for the rest of the first sequence that has not ended; ``None`` if all have.

    Args:
        request: The original request, with a seed.
        answer: The answer so far.
    """
    index = next(iter(answer.open_sequences()), None)
    if index is None:
        return None
    token_ids, chars = answer.progress(index)
    # All tokens have arrived, but not the end of the sequence: repeat the last one, and its end with it.
    repeated = int(request.sampling.HasField("max_tokens") and len(token_ids) >= request.sampling.max_tokens)
    rest = router_pb2.RouterGenerateRequest()
    rest.CopyFrom(request)
    rest.sampling.n = 1
    rest.sampling.seed = sequence_seed(request.sampling.seed, index)
    rest.ClearField("ttft_ms")
    if answer.has_prompt_logprobs:
        rest.sampling.ClearField("prompt_logprobs")
    rest.output_token_ids.extend(token_ids[: len(token_ids) - repeated])
    rest.output_chars = chars
    return Continuation(index, rest, repeated)
