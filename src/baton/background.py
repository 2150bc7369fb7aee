"""Long-lived threads and tasks, none of which ends unseen.

What its work raises is logged with a traceback and counted (the metric ``baton_background_failures``), and the work
runs again after a pause, which doubles while it goes on failing. Where it cannot run again, its owner's handler is
called. A test walks over the source and refuses threads and tasks that are started in another way, apart from those
that it lists.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, Final, Literal

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.1
LAST_PAUSE_S = 5.0
Outcome = Literal["restarted", "ended"]


class FailureCounts:
    """Number of failures by name of the thread or task and by what became of it. Thread safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, Outcome]] = Counter()

    def record(self, name: str, outcome: Outcome, error: BaseException, detail: str = "") -> None:
        """Count a failure, and log it with its traceback."""
        with self._lock:
            self._counts[name, outcome] += 1
        what = "it is started again" if outcome == "restarted" else "it has ended"
        log.critical("%s failed, %s", f"{name} {detail}".strip(), what, exc_info=error)

    def snapshot(self) -> dict[tuple[str, Outcome], int]:
        """Return the counts by name and outcome."""
        with self._lock:
            return dict(self._counts)


FAILURES: Final = FailureCounts()
"""Failures of this process, as there is one log of it."""


class BackgroundThread(threading.Thread):
    """A daemon thread that runs its work again when that fails; it ends when the work returns.

    Args:
        name: Name for metrics and logs, one of few.
        work: Called in the thread.
        detail: Distinguishes threads of the same name in logs.
        restart: Whether the work can run again after a failure.
        is_closing: Whether the owner wants the thread to end; then a failure ends it.
        on_failure: Called in the thread with each failure, for example to answer those who wait for the thread.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[], object],
        *,
        detail: str = "",
        restart: bool = True,
        is_closing: Callable[[], bool] = lambda: False,
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> None:
        super().__init__(name=f"{name} {detail}".strip(), daemon=True)
        self._label = name
        self._detail = detail
        self._work = work
        self._restart = restart
        self._is_closing = is_closing
        self._on_failure = on_failure

    def run(self) -> None:
        pauses = _Pauses()
        while True:
            pauses.begin()
            try:
                self._work()
                return
            except BaseException as error:
                again = self._restart and not self._is_closing()
                FAILURES.record(self._label, "restarted" if again else "ended", error, self._detail)
                self._report(error)
                if not again:
                    return
            time.sleep(pauses.next_s())

    def _report(self, error: BaseException) -> None:
        if self._on_failure is not None:
            try:
                self._on_failure(error)
            except Exception:
                log.exception("%s: its owner's handler of failures failed", self.name)


def keep_running(work: Callable[[], Coroutine[Any, Any, None]], name: str, *, detail: str = "") -> asyncio.Task[None]:
    """Start a task that runs its work again when that fails, until the work returns or the task is cancelled.

    Args:
        work: Creates the coroutine to run.
        name: Name for metrics and logs, one of few.
        detail: Distinguishes tasks of the same name in logs.
    """

    async def run() -> None:
        pauses = _Pauses()
        while True:
            pauses.begin()
            try:
                return await work()
            except asyncio.CancelledError as error:
                if is_cancelled():
                    raise
                FAILURES.record(name, "restarted", error, detail)  # of a library: gRPC raises it on a closed channel
            except Exception as error:
                FAILURES.record(name, "restarted", error, detail)
            await asyncio.sleep(pauses.next_s())

    return asyncio.get_running_loop().create_task(run(), name=f"{name} {detail}".strip())


def create_task(
    work: Coroutine[Any, Any, None],
    name: str,
    *,
    detail: str = "",
    on_failure: Callable[[BaseException], None] | None = None,
) -> asyncio.Task[None]:
    """Start a task for work that ends, whose failure is logged and counted although no caller may wait for the task.

    Args:
        work: The coroutine to run.
        name: Name for metrics and logs, one of few.
        detail: Distinguishes tasks of the same name in logs.
        on_failure: Called with the exception that ended the task, which is a :class:`asyncio.CancelledError` if a
            library raised one while the task was not cancelled.
    """

    def end(task: asyncio.Task[None]) -> None:
        if task.cancelled() and task.cancelling():
            return
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is not None:
            FAILURES.record(name, "ended", error, detail)
            if on_failure is not None:
                on_failure(error)

    task = asyncio.get_running_loop().create_task(work, name=f"{name} {detail}".strip())
    task.add_done_callback(end)
    return task


def is_cancelled() -> bool:
    """Whether the current task was cancelled, so that a :class:`asyncio.CancelledError` is not a library's own.

    gRPC raises that error in calls whose channel is closed.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def report_uncaught() -> None:
    """Log and count what ends threads of others, for example of libraries, for the rest of this process's life."""

    def report(arguments: threading.ExceptHookArgs) -> None:
        if arguments.exc_value is not None and not issubclass(arguments.exc_type, SystemExit):
            name = arguments.thread.name if arguments.thread is not None else ""
            FAILURES.record("other thread", "ended", arguments.exc_value, name)

    threading.excepthook = report


class _Pauses:
    """Pauses before work runs again: they double until the work has run longer than the longest of them."""

    def __init__(self) -> None:
        self._pause_s = FIRST_PAUSE_S
        self._began = 0.0

    def begin(self) -> None:
        """Note that the work begins now."""
        self._began = time.monotonic()

    def next_s(self) -> float:
        """Return the pause after a failure, in seconds."""
        if time.monotonic() - self._began > LAST_PAUSE_S:
            self._pause_s = FIRST_PAUSE_S
        pause_s = self._pause_s
        self._pause_s = min(2 * pause_s, LAST_PAUSE_S)
        return pause_s
