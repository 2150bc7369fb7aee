"""Loads that run beside the engine: started and polled in its thread, at work in an event loop.

Whatever ends a load (success, failure, cancel), its update comes exactly once, and only when its work has ended:
no load writes into the engine's blocks any more.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from baton.errors import BatonError
from baton.kv_cache.connector import KVConnector, LoadUpdate
from baton.types import RequestId

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Outcome(Generic[T]):
    """Outcome of a load's work.

    Attributes:
        value: Return value of the work; ``None`` if it raised or was cancelled.
        failure: Exception that the work raised.
        cancelled: Whether the work was cancelled before it returned.
        unwanted: Whether the load's end was requested, even if the work returned.
    """

    value: T | None = None
    failure: BaseException | None = None
    cancelled: bool = False
    unwanted: bool = False

    @property
    def error(self) -> str | None:
        """Error message; ``None`` if the work returned."""
        if isinstance(self.failure, BatonError):
            return self.failure.message
        if self.failure is not None:
            return f"{type(self.failure).__name__}: {self.failure}"
        return "cancelled" if self.cancelled else None


@dataclass(eq=False)
class _Job:
    unwanted: threading.Event = field(default_factory=threading.Event)
    cancel: Callable[[], object] = lambda: None


class BackgroundLoads(Generic[T]):
    """The running loads of one connector. Used in the engine's thread, except for :meth:`wait_ended`.

    Args:
        loop: Event loop in which coroutines run.
        wake: Makes the engine poll; called from any thread.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, wake: Callable[[], None]) -> None:
        self._loop = loop
        self._wake = wake
        self._jobs: dict[RequestId, _Job] = {}
        self._tasks: set[asyncio.Task[T]] = set()
        self._done: deque[LoadUpdate] = deque()

    def __len__(self) -> int:
        return len(self._jobs)

    def start(
        self,
        request_id: RequestId,
        work: Callable[[threading.Event], Coroutine[Any, Any, T]],
        report: Callable[[Outcome[T]], LoadUpdate],
    ) -> None:
        """Run a coroutine in the loop.

        Args:
            request_id: Id of the request to load.
            work: Creates the coroutine. When the load is not wanted any more, the event is set and the task cancelled.
            report: Called in the loop, when the task has ended.

        Raises:
            RuntimeError: The loop is closed; there is no load then.
        """
        job = _Job()

        def begin() -> None:
            task = self._loop.create_task(work(job.unwanted), name=f"load {request_id}")
            job.cancel = task.cancel
            self._tasks.add(task)
            # Not at the end of the coroutine: a task that is cancelled before its first step never enters it.
            task.add_done_callback(lambda task: self._record_outcome(request_id, job, task, report))

        self._jobs[request_id] = job
        try:
            self._loop.call_soon_threadsafe(begin)
        except BaseException:
            del self._jobs[request_id]
            raise

    def end(self, update: LoadUpdate) -> None:
        """Report a load that ended before it began."""
        self._jobs[update.request_id] = _Job()
        self._done.append(update)
        self._wake()

    def cancel(self, request_id: RequestId) -> None:
        """Stop a load; its update still comes."""
        job = self._jobs.get(request_id)
        if job is not None:
            self._stop(job)

    def cancel_all(self) -> None:
        """Stop all loads; their updates still come."""
        for job in list(self._jobs.values()):
            self._stop(job)

    def poll(self) -> list[LoadUpdate]:
        """Return the loads that ended since the last call."""
        updates = []
        while self._done:
            update = self._done.popleft()
            self._jobs.pop(update.request_id, None)
            updates.append(update)
        return updates

    async def wait_ended(self) -> None:
        """Wait until no coroutine runs any more; in the loop, after :meth:`cancel_all`."""
        await asyncio.sleep(0)  # what the loop was asked to do comes first
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _stop(self, job: _Job) -> None:
        job.unwanted.set()
        # In the loop: a task that was asked for before exists by then, and only there may tasks be cancelled.
        self._loop.call_soon_threadsafe(lambda: job.cancel())

    def _record_outcome(
        self,
        request_id: RequestId,
        job: _Job,
        ended: asyncio.Task[T],
        report: Callable[[Outcome[T]], LoadUpdate],
    ) -> None:
        self._tasks.discard(ended)
        unwanted = job.unwanted.is_set()
        if ended.cancelled():
            outcome: Outcome[T] = Outcome(cancelled=True, unwanted=unwanted)
        elif (failure := ended.exception()) is not None:
            if not isinstance(failure, BatonError):
                log.error("load of %s failed", request_id, exc_info=failure, extra={"request_id": request_id})
            outcome = Outcome(failure=failure, unwanted=unwanted)
        else:
            outcome = Outcome(ended.result(), unwanted=unwanted)
        self._done.append(report(outcome))
        self._wake()


class LoadingConnector(KVConnector):
    """A connector whose loads run in the background."""

    _loads: BackgroundLoads[Any]

    def cancel_load(self, request_id: RequestId) -> None:
        self._loads.cancel(request_id)

    def poll_loads(self) -> list[LoadUpdate]:
        return self._loads.poll()

    def has_pending(self) -> bool:
        return len(self._loads) > 0

    def close(self) -> None:
        self._loads.cancel_all()


async def run_all(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T | BatonError]:
    """Run calls at the same time. When this returns or raises, all have ended; other errors than Baton's are raised."""
    answers = await asyncio.gather(*calls, return_exceptions=True)
    results: list[T | BatonError] = []
    for answer in answers:
        if isinstance(answer, BaseException) and not isinstance(answer, BatonError):
            raise answer
        results.append(answer)
    return results
