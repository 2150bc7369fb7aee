"""A background thread with an event loop: how synchronous code uses the asynchronous client."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from baton.client.call_state import CLOSED
from baton.errors import DeadlineError, UnavailableError

T = TypeVar("T")

_FORKED = "this client was used before the process was forked: make one client in each process"
_START_S = 30.0
_CLOSE_S = 5.0


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

    def call(self, work: Callable[[], Coroutine[Any, Any, T]], timeout: float) -> T:
        """Run a coroutine to its end and return its result.

        An exception in this thread meanwhile (``KeyboardInterrupt``) cancels it.

        Args:
            work: Makes the coroutine.
            timeout: Seconds after which the loop is given up; the work has a deadline of its own.

        Raises:
            UnavailableError: The portal is closed, or belongs to another process.
            DeadlineError: The event loop did not answer.
        """
        future = self._submit(work)
        try:
            return future.result(timeout)
        except concurrent.futures.CancelledError:
            raise UnavailableError(CLOSED) from None
        except TimeoutError as error:
            future.cancel()
            raise _unanswered(timeout) from error
        except BaseException:
            future.cancel()
            raise

    def take(self, items: SimpleQueue[T], timeout: float) -> T:
        """Return the next item that a coroutine puts into a queue; wait as :meth:`call` does.

        Raises:
            UnavailableError: The portal belongs to another process.
            DeadlineError: The event loop did not answer.
        """
        self._check_process()
        try:
            return items.get(timeout=timeout)
        except Empty as error:
            raise _unanswered(timeout) from error

    def post(self, action: Callable[[], object]) -> None:
        """Have something done in the loop and do not wait; a closed portal drops it. Safe in finalizers."""
        loop = self._loop
        if loop is not None and self._pid == os.getpid():
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(action)

    def close(self, last: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """Cancel what runs, end the loop and wait for its thread. May be called twice and in finalizers.

        Args:
            last: Makes a coroutine that is run before.
        """
        if self._thread is not None and self._pid != os.getpid():
            return  # after a fork there is no thread
        with self._lock:
            already, self._closed = self._closed, True
            loop, thread = self._loop, self._thread
        if loop is None or thread is None:
            return
        if not already:
            self.post(lambda: self._ending.set_result(last))
        if thread is not threading.current_thread():
            thread.join(2 * _CLOSE_S)

    def _submit(self, work: Callable[[], Coroutine[Any, Any, T]]) -> concurrent.futures.Future[T]:
        self._check_process()  # before the lock, which another thread may have held at the fork
        with self._lock:
            if self._closed:
                raise UnavailableError(CLOSED)
            loop = self._loop or self._start()
            # With the lock held: what is submitted is in the loop before close() ends it.
            return asyncio.run_coroutine_threadsafe(work(), loop)

    def _check_process(self) -> None:
        if self._thread is threading.current_thread():
            raise RuntimeError("the synchronous client cannot be used in its own event loop")
        if self._thread is not None and self._pid != os.getpid():
            raise UnavailableError(_FORKED)

    def _start(self) -> asyncio.AbstractEventLoop:
        started: concurrent.futures.Future[asyncio.AbstractEventLoop] = concurrent.futures.Future()
        self._pid = os.getpid()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._main(started)), name="baton client", daemon=True
        )
        self._thread.start()
        self._loop = started.result(_START_S)
        return self._loop

    async def _main(self, started: concurrent.futures.Future[asyncio.AbstractEventLoop]) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(_report)
        self._ending: asyncio.Future[Callable[[], Coroutine[Any, Any, None]] | None] = loop.create_future()
        started.set_result(loop)
        last = await self._ending
        if last is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(last(), _CLOSE_S)
        # asyncio.run cancels the tasks that still run, whose callers are told that the client is closed.


def _unanswered(timeout: float) -> DeadlineError:
    return DeadlineError(f"the client's event loop did not answer within {timeout:g} s")


def _report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    # grpc wakes every event loop of the process through one socket; the loops that come too late to read it raise this.
    if not isinstance(context.get("exception"), BlockingIOError):
        loop.default_exception_handler(context)
