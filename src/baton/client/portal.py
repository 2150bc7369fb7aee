"""Runs the asynchronous client for threads that have no event loop, in a background thread.

:class:`Portal` runs coroutines in the thread, :class:`Stream` reads an answer from it, and :class:`PortalClient` is the
handwritten part of :class:`baton.Client`, whose methods are generated.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import queue
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeAlias, TypeVar

from baton.background import BackgroundThread
from baton.client.async_client import AsyncClient
from baton.client.async_stream import AsyncStream
from baton.client.settings import CLOSED
from baton.client.types import Answered, Chunk, Generation
from baton.errors import DeadlineError, UnavailableError

T = TypeVar("T")

_FORKED = "this client was used before the process was forked: make one client in each process"
_CLOSE_S = 5.0
_MAX_WAIT_S = 1e8
"""Three years: the longest time that a thread can wait, roughly."""
_GRACE_S = 5.0
"""Seconds that a thread waits beyond the deadline of a call, which ends in the event loop."""
LONG_CALL_S = 86400.0
"""Bound of calls that have no deadline of their own."""


class Portal:
    """Runs coroutines for threads that have no event loop. May be used from several threads at once.

    The thread starts with the first call and ends with :meth:`close`. It is a daemon: an open portal does not keep the
    interpreter from exiting. A portal belongs to the process it was first used in.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._pid = 0
        self._closed = False
        self._ending = asyncio.Event()
        self._last: Callable[[], Coroutine[Any, Any, None]] | None = None

    def call(self, work: Coroutine[Any, Any, T], timeout: float) -> T:
        """Run a coroutine and return its result.

        An exception in the waiting thread (``KeyboardInterrupt``) cancels the coroutine.

        Args:
            work: The coroutine, which has a deadline of its own.
            timeout: Seconds after which the event loop counts as hung.

        Raises:
            UnavailableError: The portal is closed, or belongs to another process.
            DeadlineError: The event loop did not answer.
        """
        future = None
        try:
            future = self._submit(work)
            return future.result(min(timeout, _MAX_WAIT_S))
        except concurrent.futures.CancelledError:
            raise UnavailableError(CLOSED) from None
        except BaseException as error:
            if future is None:
                work.close()
            elif isinstance(error, TimeoutError) and not future.done():
                future.cancel()
                raise _unanswered(timeout) from error
            else:
                future.cancel()
            raise

    def get_item(self, items: queue.SimpleQueue[T], timeout: float) -> T:
        """Return the next item that a coroutine puts into a queue; waits like :meth:`call`.

        Raises:
            UnavailableError: The portal belongs to another process.
            DeadlineError: The event loop did not answer.
        """
        self._check_process()
        try:
            return items.get(timeout=min(timeout, _MAX_WAIT_S))
        except queue.Empty as error:
            raise _unanswered(timeout) from error

    def post(self, action: Callable[[], object]) -> None:
        """Run an action in the event loop without waiting; no effect once closed. Safe in finalizers."""
        loop = self._loop
        if loop is not None and self._pid == os.getpid():
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(action)

    def close(self, last: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """Cancel running coroutines, end the event loop and wait for its thread. Safe in finalizers, and idempotent.

        Args:
            last: Makes a coroutine that runs before the event loop ends.
        """
        if self._pid not in (0, os.getpid()):
            return  # after a fork there is no thread
        with self._lock:
            already_closed = self._closed
            self._closed = True
            thread = self._thread
        if thread is None:
            return
        if not already_closed:
            self._last = last
            self.post(self._ending.set)
        if thread is not threading.current_thread():
            thread.join(2 * _CLOSE_S)

    def _submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        self._check_process()  # before the lock, which another thread may have held at the fork
        with self._lock:
            if self._closed:
                raise UnavailableError(CLOSED)
            # With the lock held, so that the work is in the loop before close() ends it.
            return asyncio.run_coroutine_threadsafe(work, self._loop or self._start())

    def _check_process(self) -> None:
        if self._thread is threading.current_thread():
            raise RuntimeError("the synchronous client cannot be used in its own event loop")
        self._pid = self._pid or os.getpid()
        if self._pid != os.getpid():
            raise UnavailableError(_FORKED)

    def _start(self) -> asyncio.AbstractEventLoop:
        runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = runner.get_loop()
        # Stored before it runs: an interrupt must not leave a thread behind that nothing ends.
        self._thread = BackgroundThread("baton client", partial(self._run, runner), restart=False)
        try:
            self._thread.start()
        except RuntimeError:  # no thread can be started
            self._loop = None
            self._thread = None
            runner.close()
            raise
        return self._loop

    def _run(self, runner: asyncio.Runner) -> None:
        with runner:  # its end cancels running tasks, whose callers get an error that the client is closed
            runner.run(self._main())

    async def _main(self) -> None:
        asyncio.get_running_loop().set_exception_handler(_report)
        await self._ending.wait()
        if self._last is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._last(), _CLOSE_S)


def _unanswered(timeout: float) -> DeadlineError:
    return DeadlineError(f"the client's event loop did not answer within {timeout:g} s")


def _report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    # grpc wakes every event loop of the process through one socket; the loops that find it empty raise this.
    if not isinstance(context.get("exception"), BlockingIOError):
        loop.default_exception_handler(context)


class PortalClient:
    """Base of :class:`baton.Client`: owns the asynchronous client and the portal that runs it.

    Args:
        core: The asynchronous client, not connected yet.
        timeout: Deadline of calls that have no time-out of their own, in seconds.
    """

    def __init__(self, core: AsyncClient, timeout: float) -> None:
        self._core = core
        self._timeout = timeout
        self._portal = Portal()
        # Ends the thread of a client that is dropped, and of one that is open when the interpreter exits.
        self._finalizer = weakref.finalize(self, self._portal.close, core.close)

    def close(self) -> None:
        """Cancel all calls, close the connections and end the background thread."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, work: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        return self._portal.call(work, self._patience_s(timeout))

    def _iterate(self, items: AsyncGenerator[T, None], timeout: float | None) -> Iterator[T]:
        try:
            while (item := self._call(_next_item(items), timeout)) is not None:
                yield item
        finally:
            self._call(_close(items), timeout)

    def _open_stream(self, opening: Coroutine[Any, Any, AsyncStream], timeout: float | None) -> Stream:
        messages: queue.SimpleQueue[_Message] = queue.SimpleQueue()
        try:
            core = self._call(_start_reading(opening, messages, self._portal), timeout)
        except BaseException:
            del messages  # ends the request: the traceback would keep the queue alive
            raise
        return Stream(self, core, messages, timeout)

    def _patience_s(self, timeout: float | None) -> float:
        """Return how long a thread waits for the event loop, in seconds."""
        return (self._timeout if timeout is None else timeout) + _GRACE_S


async def _next_item(items: AsyncGenerator[T, None]) -> T | None:
    return await anext(items, None)


async def _close(items: AsyncGenerator[Any, None]) -> None:
    await items.aclose()


_Message: TypeAlias = Chunk | Exception | None
"""Item from the event loop to a stream: a chunk, the error that ended it, or ``None`` at its end."""


async def _start_reading(
    opening: Coroutine[Any, Any, AsyncStream], messages: queue.SimpleQueue[_Message], portal: Portal
) -> AsyncStream:
    core = await opening
    # The request lives as long as its queue: the caller may be interrupted before it has a stream.
    weakref.finalize(messages, portal.post, core.cancel).atexit = False
    core.reader = asyncio.create_task(_read(core, weakref.ref(messages)))
    return core


async def _read(core: AsyncStream, messages: weakref.ref[queue.SimpleQueue[_Message]]) -> None:
    """Put chunks into a queue, from which a thread gets them without a turn of the event loop per chunk."""

    def put_message(message: _Message) -> None:
        items = messages()
        if items is not None:
            items.put(message)

    try:
        while (chunks := await core.next_chunks()) is not None:
            for chunk in chunks:
                put_message(chunk)
        put_message(None)
    except asyncio.CancelledError:
        put_message(UnavailableError(CLOSED))
        raise
    except Exception as error:
        put_message(error)  # raised in the thread that reads


class Stream(Answered, Iterator[Chunk]):
    """A streamed answer: iterate over its chunks.

    Returned by :meth:`baton.Client.generate` with ``stream=True``. The request ends with the stream: :meth:`cancel`,
    leaving a ``with`` block, and dropping the last reference all cancel it on the server. Chunks are read ahead of the
    iteration, up to the whole answer::

        with client.generate("def main():", stream=True) as stream:
            for chunk in stream:
                print(chunk.text, end="")

    Attributes:
        answer: The answer so far.
    """

    def __init__(
        self, client: PortalClient, core: AsyncStream, messages: queue.SimpleQueue[_Message], timeout: float | None
    ) -> None:
        self._client = client  # a client that is dropped while its stream is read must not close
        self._core = core
        self._messages = messages
        self._timeout = timeout
        self.answer = core.answer
        self._ended = False

    def __next__(self) -> Chunk:
        if self._ended:
            raise StopIteration
        message = self._client._portal.get_item(self._messages, self._client._patience_s(self._timeout))
        cancelled = self._ended
        self._ended = cancelled or not isinstance(message, Chunk)
        if isinstance(message, Chunk) and not cancelled:
            return message
        self._messages.put(None)  # for other threads that read
        if isinstance(message, Exception) and not cancelled:
            raise message
        raise StopIteration

    def collect(self) -> Generation:
        """Read to the end and return the whole answer, including chunks that were read before.

        Raises:
            BatonError: See :meth:`baton.Client.generate`.
        """
        with self:
            for _ in self:
                pass
        return self.answer.result()

    def cancel(self) -> None:
        """Cancel the request; the iteration stops. May be called from another thread."""
        self._ended = True
        self._client._portal.post(self._core.cancel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cancel()
