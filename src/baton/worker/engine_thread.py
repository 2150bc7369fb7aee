"""One engine in one thread, used from one event loop.

The engine's thread owns the :class:`EngineCore`. The loop sends it commands through a queue and gets its outputs once
per step, whatever the number of sequences: one ``call_soon_threadsafe`` carries all outputs of a step.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from baton.background import BackgroundThread, keep_running
from baton.engine.core import EngineCore
from baton.engine.executor.base import ExecutorLostError
from baton.engine.request import EngineRequest, SequenceOutput
from baton.errors import InternalError, InvalidRequestError, UnavailableError
from baton.types import RequestId

log = logging.getLogger(__name__)
T = TypeVar("T")

STATS_INTERVAL_S = 0.02
IDLE_WAIT_S = 1.0
"""Longest wait in seconds; commands and the connector wake the engine earlier."""


class EngineThread:
    """Runs an engine in a thread of its own.

    Args:
        core: The engine; after :meth:`start` only its own thread touches it.
        loop: Event loop that outputs are delivered to.
        on_failure: Called in the loop when the engine fails and cannot continue.
        step_timeout_s: Seconds after which a step has failed that has not ended; 0: never.

    Attributes:
        core: The engine; use it through :meth:`call` only.
        stats: Statistics of the engine, at most ``STATS_INTERVAL_S`` older than the last step; any thread may read
            them.
        steps: Number of engine steps.
        step_seconds: Time spent in engine steps, in seconds.
        failure: The error that ended the engine, if one did.
        hangs: Whether a step has failed that has not ended, so that the thread cannot be ended either.
    """

    def __init__(
        self,
        core: EngineCore,
        loop: asyncio.AbstractEventLoop,
        on_failure: Callable[[], None] | None = None,
        *,
        step_timeout_s: float = 0.0,
    ) -> None:
        self.core = core
        self._loop = loop
        self._commands: deque[Callable[[], object]] = deque()
        self._wakeup = threading.Event()
        self._on_failure = on_failure
        self._step_timeout_s = step_timeout_s
        self._step_began: float | None = None
        self._watch: asyncio.Task[None] | None = None
        self._stopping = False
        self._streams: dict[RequestId, RequestStream] = {}
        self._calls: set[Future[Any]] = set()
        self._thread = BackgroundThread("engine", self._run, restart=False)
        self.stats = core.stats()
        self._stats_due = 0.0
        self.step_seconds = 0.0
        self.steps = 0
        self.failure: BaseException | None = None
        self.hangs = False

    def start(self) -> None:
        """Start the thread; call this in the event loop."""
        self._thread.start()
        if self._step_timeout_s:
            self._watch = keep_running(self._watch_steps, "engine watch")

    def wake(self) -> None:
        """Make the engine poll its connector; any thread may call this."""
        self._wakeup.set()

    def fail(self, error: Exception) -> None:
        """End the engine with an error, as if a step had raised it; any thread may call this."""

        def raise_error() -> None:
            raise error

        self._post(raise_error)

    async def submit(self, request: EngineRequest) -> RequestStream:
        """Add a request and return the stream of its outputs.

        Raises:
            InvalidRequestError: The engine refuses the request.
            QueueFullError: The engine's queue is full.
            UnavailableError: The engine has stopped.
        """
        stream = RequestStream(self, request.request_id)

        def add() -> None:
            self.core.add_request(request)

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
        """Abort a request; unknown ids are ignored."""
        self._post(lambda: self.core.abort(request_id))

    def abort_all(self) -> None:
        """Abort all running requests."""
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
        """Stop the thread; streams that are still open end with an error."""
        self._stopping = True
        self._wakeup.set()
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        if not self.hangs:
            await asyncio.to_thread(self._thread.join, 30.0)
        for stream in list(self._streams.values()):
            stream.fail(UnavailableError("the engine has stopped"))
        self._end_calls()

    def forget(self, request_id: RequestId, stream: RequestStream) -> None:
        """Drop a stream that is no longer read, without aborting its request."""
        if self._streams.get(request_id) is stream:
            del self._streams[request_id]

    def _post(self, command: Callable[[], object]) -> None:
        self._commands.append(command)
        self._wakeup.set()

    def _run(self) -> None:
        try:
            while not self._stopping and not self.hangs:
                self._wakeup.clear()
                while self._commands:
                    self._commands.popleft()()
                if self.core.has_work():
                    self._step()
                # Also idle with work: when all of it waits for the connector, which wakes us.
                idle = not self.core.made_progress
                now = time.monotonic()
                if idle or now >= self._stats_due:
                    self.stats = self.core.stats()
                    self._stats_due = now + STATS_INTERVAL_S
                if idle:
                    self._wakeup.wait(IDLE_WAIT_S)
        except BaseException as error:
            self.failure = error
            if isinstance(error, ExecutorLostError):  # no traceback: the cause is in another process
                log.critical("the engine stops: %s", error.message)
            else:
                log.critical("the engine failed and stops", exc_info=error)
            self._loop.call_soon_threadsafe(self._fail_all, error)

    def _step(self) -> None:
        started = self._step_began = time.perf_counter()
        outputs = self.core.step()
        self._step_began = None
        if outputs:
            self._loop.call_soon_threadsafe(self._deliver, outputs)
        self.steps += 1
        self.step_seconds += time.perf_counter() - started

    async def _watch_steps(self) -> None:
        """Notice a step that does not end: a device or a library has stopped, and health checks do not see that."""
        while self.failure is None:
            await asyncio.sleep(min(1.0, self._step_timeout_s / 4))
            began = self._step_began
            if began is not None and time.perf_counter() - began > self._step_timeout_s:
                error = ExecutorLostError(f"a step has not ended within {self._step_timeout_s:g} s")
                self.failure, self.hangs = error, True
                frame = sys._current_frames().get(self._thread.ident or 0)
                stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
                log.critical("the engine hangs: %s; it is at\n%s", error.message, stack)
                self._fail_all(error)

    def _deliver(self, outputs: list[SequenceOutput]) -> None:
        by_request: dict[RequestId, list[SequenceOutput]] = {}
        for output in outputs:
            by_request.setdefault(output.request_id, []).append(output)
        for request_id, items in by_request.items():
            stream = self._streams.get(request_id)
            if stream is not None:
                stream.feed(items)

    def _fail_all(self, error: BaseException) -> None:
        """End all streams; after the loss of a rank, requests are retryable as if the whole instance had died."""
        lost = isinstance(error, ExecutorLostError)
        try:
            for stream in list(self._streams.values()):
                stream.fail(
                    UnavailableError(f"the instance ended: {error}", retry_after_s=1.0)
                    if lost
                    else InternalError(f"the engine failed: {type(error).__name__}: {error}")
                )
            self._end_calls()
        finally:
            if self._on_failure is not None:
                self._on_failure()

    def _end_calls(self) -> None:
        """Fail the calls that the thread did not run before its end."""
        for future in list(self._calls):
            if not (future.running() or future.done()):
                future.set_exception(UnavailableError("the engine has stopped"))


class RequestStream:
    """Outputs of one request; each item is the outputs of its sequences in one step."""

    def __init__(self, engine: EngineThread, request_id: RequestId) -> None:
        self._engine = engine
        self._items: deque[list[SequenceOutput]] = deque()
        self._ready = asyncio.Event()
        self._error: Exception | None = None
        self.request_id = request_id

    def feed(self, items: list[SequenceOutput]) -> None:
        self._items.append(items)
        self._ready.set()

    def fail(self, error: Exception) -> None:
        """End the stream with an error, after the outputs that arrived before it."""
        self._error = error
        self._ready.set()

    async def next(self) -> list[SequenceOutput]:
        """Wait for outputs; those of several unread steps are joined in order."""
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
        """Yield outputs until all sequences have finished."""
        finished = 0
        while finished < num_sequences:
            outputs = await self.next()
            finished += sum(output.finish_reason is not None for output in outputs)
            yield outputs

    def close(self) -> None:
        """Close the stream, and abort the request if it still runs."""
        self._engine.forget(self.request_id, self)
        self._engine.abort(self.request_id)
