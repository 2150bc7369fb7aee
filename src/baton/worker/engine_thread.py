"""One engine in one thread, used from one event loop.

The engine's thread owns the :class:`EngineCore`; the loop talks to it through a queue of commands and hears from it
once per step, whatever the number of sequences: one ``call_soon_threadsafe`` carries all outputs of a step.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from baton.engine.core import EngineCore
from baton.engine.executor.base import ExecutorLostError
from baton.engine.request import EngineRequest, SequenceOutput
from baton.errors import InternalError, InvalidRequestError, UnavailableError
from baton.types import RequestId

log = logging.getLogger(__name__)
T = TypeVar("T")

STATS_INTERVAL_S = 0.02
IDLE_WAIT_S = 1.0
"""A bound on every wait; the engine is woken by commands and by its connector."""


class EngineThread:
    """Runs an engine.

    Args:
        core: The engine; after :meth:`start` only its own thread touches it.
        loop: The loop that outputs are delivered to.
        on_failure: Called in the loop when the engine cannot go on.

    Attributes:
        stats: The engine's statistics, as of the last step but for 20 ms; safe to read from any thread.
    """

    def __init__(
        self, core: EngineCore, loop: asyncio.AbstractEventLoop, on_failure: Callable[[], None] | None = None
    ) -> None:
        self._core = core
        self._loop = loop
        self._commands: deque[Callable[[], object]] = deque()
        self._wakeup = threading.Event()
        self._on_failure = on_failure
        self._stopping = False
        self._streams: dict[RequestId, RequestStream] = {}
        self._calls: set[Future[Any]] = set()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.stats = core.stats()
        self._stats_due = 0.0
        self.step_seconds = 0.0
        self.steps = 0
        self.failure: BaseException | None = None

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Make the engine look at its connector; any thread may call this."""
        self._wakeup.set()

    def fail(self, error: Exception) -> None:
        """End the engine with an error, as if a step had raised it; any thread may call this."""

        def end() -> None:
            raise error

        self._post(end)

    async def submit(self, request: EngineRequest) -> RequestStream:
        """Hand a request in.

        Raises:
            InvalidRequestError: The engine refuses it.
            QueueFullError: The queue is full.
            UnavailableError: The engine has stopped.
        """
        stream = RequestStream(self, request.request_id)

        def add() -> None:
            self._core.add_request(request)

        if request.request_id in self._streams:
            raise InvalidRequestError(f"request id {request.request_id!r} is in use", field="request_id")
        self._streams[request.request_id] = stream
        try:
            await self.call(add)
        except asyncio.CancelledError:
            self.abort(request.request_id)
            self._streams.pop(request.request_id, None)
            raise
        except Exception:
            self._streams.pop(request.request_id, None)
            raise
        return stream

    def abort(self, request_id: RequestId) -> None:
        """End a request; unknown ids are no error."""
        self._post(lambda: self._core.abort(request_id))

    def abort_all(self) -> None:
        """End every request that has not ended."""
        for request_id in list(self._streams):
            self.abort(request_id)

    async def call(self, function: Callable[[], T]) -> T:
        """Run a function in the engine's thread, between two steps.

        Raises:
            UnavailableError: The engine has stopped.
        """
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        if self._stopping or self.failure is not None:
            raise UnavailableError("the engine has stopped")
        self._calls.add(future)
        future.add_done_callback(self._calls.discard)
        self._post(run)
        # A cancelled caller must not cancel the command: whether it ran would be unknown.
        return await asyncio.shield(asyncio.wrap_future(future, loop=self._loop))

    async def stop(self) -> None:
        """End the thread; streams still open end with an error."""
        self._stopping = True
        self._wakeup.set()
        await asyncio.to_thread(self._thread.join, 30.0)
        for stream in list(self._streams.values()):
            stream.fail(UnavailableError("the engine has stopped"))
        self._end_calls()

    def forget(self, request_id: RequestId, stream: RequestStream) -> None:
        """Drop a stream that nobody reads any more."""
        if self._streams.get(request_id) is stream:
            del self._streams[request_id]

    @property
    def core(self) -> EngineCore:
        """The engine; use it through :meth:`call` only."""
        return self._core

    def _post(self, command: Callable[[], object]) -> None:
        self._commands.append(command)
        self._wakeup.set()

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._wakeup.clear()
                while self._commands:
                    self._commands.popleft()()
                if self._core.has_work():
                    self._step()
                # Also idle with work: when all of it waits for the connector, which wakes us.
                idle = not self._core.made_progress
                now = time.monotonic()
                if idle or now >= self._stats_due:
                    self.stats = self._core.stats()
                    self._stats_due = now + STATS_INTERVAL_S
                if idle:
                    self._wakeup.wait(IDLE_WAIT_S)
        except BaseException as error:
            self.failure = error
            if isinstance(error, ExecutorLostError):  # nothing of ours to trace
                log.critical("the engine stops: %s", error.message)
            else:
                log.critical("the engine failed and stops", exc_info=error)
            self._loop.call_soon_threadsafe(self._fail_all, error)

    def _step(self) -> None:
        started = time.perf_counter()
        outputs = self._core.step()
        if outputs:
            self._loop.call_soon_threadsafe(self._deliver, outputs)
        self.steps += 1
        self.step_seconds += time.perf_counter() - started

    def _deliver(self, outputs: list[SequenceOutput]) -> None:
        by_request: dict[RequestId, list[SequenceOutput]] = {}
        for output in outputs:
            by_request.setdefault(output.request_id, []).append(output)
        for request_id, items in by_request.items():
            stream = self._streams.get(request_id)
            if stream is not None:
                stream.feed(items)

    def _fail_all(self, error: BaseException) -> None:
        """End all streams; where a process was lost they may go on elsewhere, as if all of the instance had died."""
        lost = isinstance(error, ExecutorLostError)
        for stream in list(self._streams.values()):
            stream.fail(
                UnavailableError(f"the instance ended: {error}", retry_after_s=1.0)
                if lost
                else InternalError(f"the engine failed: {type(error).__name__}: {error}")
            )
        self._end_calls()
        if self._on_failure is not None:
            self._on_failure()

    def _end_calls(self) -> None:
        """Answer those that came too late for the thread to run them; it has ended."""
        for future in list(self._calls):
            if not (future.running() or future.done()):
                future.set_exception(UnavailableError("the engine has stopped"))


class RequestStream:
    """The outputs of one request: each item is what one step gave to its sequences."""

    def __init__(self, engine: EngineThread, request_id: RequestId) -> None:
        self._engine = engine
        self._items: deque[list[SequenceOutput]] = deque()
        self._ready = asyncio.Event()
        self._error: Exception | None = None
        self.request_id = request_id

    def feed(self, items: list[SequenceOutput]) -> None:
        """Add a step's outputs."""
        self._items.append(items)
        self._ready.set()

    def fail(self, error: Exception) -> None:
        """End the stream with an error once what came before is read."""
        self._error = error
        self._ready.set()

    async def next(self) -> list[SequenceOutput]:
        """Wait for the next step's outputs; steps that piled up are joined, in order."""
        while not self._items:
            if self._error is not None:
                raise self._error
            self._ready.clear()
            await self._ready.wait()
        joined = self._items.popleft()
        while self._items:
            joined = joined + self._items.popleft()
        return joined

    async def until_finished(self, num_sequences: int) -> AsyncIterator[list[SequenceOutput]]:
        """Yield outputs until every sequence has ended."""
        finished = 0
        while finished < num_sequences:
            outputs = await self.next()
            finished += sum(output.finish_reason is not None for output in outputs)
            yield outputs

    def close(self) -> None:
        """Stop listening; aborts the request if it still runs."""
        self._engine.forget(self.request_id, self)
        self._engine.abort(self.request_id)
