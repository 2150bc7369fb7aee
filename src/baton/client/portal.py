"""Coroutines for threads that have no event loop: one in a background thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import queue
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from baton.client.settings import CLOSED
from baton.errors import DeadlineError, UnavailableError

T = TypeVar("T")

_FORKED = "this client was used before the process was forked: make one client in each process"
_CLOSE_S = 5.0
_LONGEST_WAIT_S = 1e8
"""Three years: a thread cannot wait much longer."""


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
        """Run a coroutine to its end and return its result.

        An exception in this thread meanwhile (``KeyboardInterrupt``) cancels it.

        Args:
            work: What to run.
            timeout: Seconds after which the loop is given up; the work has a deadline of its own.

        Raises:
            UnavailableError: The portal is closed, or belongs to another process.
            DeadlineError: The event loop did not answer.
        """
        future = None
        try:
            future = self._submit(work)
            return future.result(min(timeout, _LONGEST_WAIT_S))
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

    def take(self, items: queue.SimpleQueue[T], timeout: float) -> T:
        """Return the next item that a coroutine puts into a queue; wait as :meth:`call` does.

        Raises:
            UnavailableError: The portal belongs to another process.
            DeadlineError: The event loop did not answer.
        """
        self._check_process()
        try:
            return items.get(timeout=min(timeout, _LONGEST_WAIT_S))
        except queue.Empty as error:
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
        if self._pid not in (0, os.getpid()):
            return  # after a fork there is no thread
        with self._lock:
            already, self._closed = self._closed, True
            thread = self._thread
        if thread is None:
            return
        if not already:
            self._last = last
            self.post(self._ending.set)
        if thread is not threading.current_thread():
            thread.join(2 * _CLOSE_S)

    def _submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        self._check_process()  # before the lock, which another thread may have held at the fork
        with self._lock:
            if self._closed:
                raise UnavailableError(CLOSED)
            # With the lock held: what is submitted is in the loop before close() ends it.
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
        # Known before it runs: an interrupt meanwhile must not leave a thread behind that nothing ends.
        self._thread = threading.Thread(target=self._run, args=(runner,), name="baton client", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # the system gives no thread
            self._loop = self._thread = None
            runner.close()
            raise
        return self._loop

    def _run(self, runner: asyncio.Runner) -> None:
        with runner:  # at its end it cancels the tasks that still run, whose callers are told that the client is closed
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
    # grpc wakes every event loop of the process through one socket; the loops that come too late to read it raise this.
    if not isinstance(context.get("exception"), BlockingIOError):
        loop.default_exception_handler(context)
