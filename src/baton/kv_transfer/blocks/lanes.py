"""Fetches in the background: a few threads for each source, so that one that hangs does not delay the others.

A fetch that waits for its source's computation holds no thread. It is parked, and one thread of its lane waits for the
progress that comes first; when that is there this thread goes on with one of the fetches that may, and another takes
over the waiting (leader and followers, as in D. C. Schmidt et al., "Leader/Followers", PLoP 2000): where there is one
fetch, nothing changes hands.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from baton.background import BackgroundThread
from baton.errors import BatonError, CancelledError, PipeClosedError, QueueFullError
from baton.kv_transfer.pipes.base import ReadPipe
from baton.kv_transfer.streams import Wait
from baton.kv_transfer.types import FetchResult

log = logging.getLogger(__name__)
PENDING_PER_THREAD = 64
_IDLE_S = 10.0
"""Seconds after which an idle thread ends."""


@dataclass(frozen=True, slots=True, eq=False)
class ProgressWait:
    """Progress of the source that a fetch waits for.

    Attributes:
        pipe: Pipe to the source.
        value: Progress that the source has to reach.
        wait: Deadline and cancel flag of the fetch.
    """

    pipe: ReadPipe
    value: int
    wait: Wait


Steps = Generator[ProgressWait | None, int, FetchResult]
"""A fetch. It yields ``None`` once it has its connection, then what it waits for; it is sent the progress."""


@dataclass(eq=False)
class Job:
    """A fetch of a lane.

    Attributes:
        steps: Generator that does the fetch.
        wait: Deadline and cancel flag of the fetch.
        future: Result of the fetch; once it is set nothing writes any more.
        parked: Progress that the parked fetch waits for.
        progress: Progress that the source reached, or the error of waiting for it.
    """

    steps: Steps
    wait: Wait
    future: Future[FetchResult] = field(default_factory=Future)
    parked: ProgressWait | None = None
    progress: int | BaseException | None = None


class Lane:
    """The fetches from one source.

    Args:
        name: Name of the source.
        max_threads: Number of fetches that copy at once; only one until the source has answered for the first time.
    """

    def __init__(self, name: str, max_threads: int) -> None:
        self._name = name
        self._max_threads = max_threads
        self._changed = threading.Condition()
        self._queued: deque[Job] = deque()
        self._parked: list[Job] = []
        self._watched: list[int] = []
        self._threads: set[threading.Thread] = set()
        self._num_running = 0
        self._connected = self._closed = False

    @property
    def num_threads(self) -> int:
        """Threads that it has now."""
        return len(self._threads)

    @property
    def num_busy(self) -> int:
        """How many of them copy, or wait for the source's computation for all."""
        return self._num_running + len(self._watched)

    @property
    def num_parked(self) -> int:
        """Fetches that wait for the source's computation."""
        return len(self._parked)

    @property
    def unused(self) -> bool:
        """Whether it has neither fetches nor threads."""
        with self._changed:
            return not (self._threads or self._queued or self._parked)

    def submit(self, steps: Steps, wait: Wait) -> Job:
        """Begin a fetch.

        Raises:
            QueueFullError: Too many wait already.
            PipeClosedError: The lane was closed.
        """
        job = Job(steps, wait)
        with self._changed:
            if self._closed:
                raise PipeClosedError("the fetcher was closed")
            if len(self._queued) + len(self._parked) + self._num_running >= self._max_threads * PENDING_PER_THREAD:
                raise QueueFullError(f"too many fetches from {self._name} wait", retry_after_s=1.0)
            self._queued.append(job)
            try:
                self._call_on()
            except BaseException:
                self._queued.remove(job)
                raise
        return job

    def withdraw(self, job: Job) -> bool:
        """End a fetch that no thread is at; ``False``: one is, or it has ended."""
        with self._changed:
            if job in self._parked:
                self._parked.remove(job)
            elif job in self._queued:
                self._queued.remove(job)
            else:
                return False
        job.steps.close()
        job.future.cancel()
        return True

    def close(self) -> None:
        """End everything; the pipes are closed by now. Returns when no thread runs any more."""
        with self._changed:
            self._closed = True
            ended = [*self._queued, *self._parked]
            self._parked = []
            self._queued.clear()
            threads = list(self._threads)
            self._changed.notify_all()
        for job in ended:
            _throw(job, PipeClosedError("the fetcher was closed"))
        for thread in threads:
            thread.join()

    def _call_on(self) -> None:
        """Have another thread look for something to do, if there is something; under the lock."""
        if self._may_run() or self._unwatched() is not None:
            if len(self._threads) > self.num_busy:  # one is idle, or about to look
                self._changed.notify()
                return
            thread = BackgroundThread("baton-fetch", self._work, detail=self._name, is_closing=lambda: self._closed)
            self._threads.add(thread)
            try:
                thread.start()
            except BaseException:
                self._threads.discard(thread)
                if not self._threads:
                    raise
                log.warning("no further thread could be started to fetch from %s", self._name)

    def _may_run(self) -> bool:
        return bool(self._queued) and self._num_running < (self._max_threads if self._connected else 1)

    def _unwatched(self) -> ProgressWait | None:
        """Return the lowest progress waited for, unless a thread waits for it, or for less, already."""
        waits = (job.parked for job in self._parked if job.parked is not None)
        first = min(waits, key=lambda wait: wait.value, default=None)
        return None if first is None or any(value <= first.value for value in self._watched) else first

    def _work(self) -> None:
        while (task := self._next()) is not None:
            task()

    def _next(self) -> Callable[[], None] | None:
        """Wait for something to do; ``None``: the thread is not needed any more."""
        with self._changed:
            while True:
                task: Callable[[], None] | None = None
                if self._may_run():
                    self._num_running += 1
                    task = partial(self._run, self._queued.popleft())
                elif (first := self._unwatched()) is not None:
                    self._watched.append(first.value)
                    task = partial(self._watch, first)
                if task is not None:
                    self._call_on()
                    return task
                if self._closed:
                    break
                woken = self._changed.wait(_IDLE_S)
                if not (woken or self._may_run() or self._unwatched()):
                    break
            self._threads.discard(threading.current_thread())
            return None

    def _run(self, job: Job) -> None:
        """Go on with a fetch until it ends or waits for its source."""
        progress = job.progress
        job.progress = None
        parked: ProgressWait | None = None
        try:
            if isinstance(progress, BaseException):
                parked = job.steps.throw(progress)
            else:
                parked = next(job.steps) if progress is None else job.steps.send(progress)
            while parked is None:
                self._connected = True
                parked = next(job.steps)
        except StopIteration as end:
            self._stop_running(None)
            job.future.set_result(end.value)
        except BaseException as error:
            self._stop_running(None)
            job.future.set_exception(error)
        else:
            job.parked = parked
            self._stop_running(job)

    def _stop_running(self, parked: Job | None) -> None:
        with self._changed:
            self._num_running -= 1
            if parked is not None and not self._closed:
                self._parked.append(parked)
                return
        if parked is not None:
            _throw(parked, PipeClosedError("the fetcher was closed"))

    def _watch(self, first: ProgressWait) -> None:
        """Wait for a progress and queue the fetches that it lets go on."""
        reached: int | BaseException
        try:
            reached = first.pipe.wait_ready(first.value, Wait(None, _NoFetchWaits(self)))
        except BaseException as error:
            reached = error
        with self._changed:
            self._watched.remove(first.value)
            if isinstance(reached, CancelledError):
                return  # no fetch waited any more; another thread watches for those parked since
            for job in self._parked.copy():
                assert job.parked is not None
                if job.parked.value <= reached if isinstance(reached, int) else job.parked.pipe is first.pipe:
                    self._parked.remove(job)
                    job.parked = None
                    job.progress = reached
                    self._queued.append(job)

    def end_those_that_are_over(self) -> bool:
        """End parked fetches that were cancelled or whose time is over; returns whether none is left."""
        with self._changed:
            over = [(job, error) for job in self._parked if (error := _over(job.wait)) is not None]
            for job, _ in over:
                self._parked.remove(job)
            left = bool(self._parked) and not self._closed
        for job, error in over:
            _throw(job, error)
        return not left


class _NoFetchWaits:
    """Cancel flag of the thread that waits for a lane's progress; checked every tick.

    Args:
        lane: Lane whose parked fetches are checked for their deadlines at the same time.
    """

    def __init__(self, lane: Lane) -> None:
        self._lane = lane

    def is_set(self) -> bool:
        """Whether no fetch waits any more."""
        return self._lane.end_those_that_are_over()


def _over(wait: Wait) -> BatonError | None:
    try:
        wait.check("waiting for the computation")
    except BatonError as error:
        return error
    return None


def _throw(job: Job, error: BaseException) -> None:
    """End a fetch that no thread is at."""
    try:
        job.steps.throw(error)
    except StopIteration as end:
        job.future.set_result(end.value)
    except BaseException as raised:
        job.future.set_exception(raised)
    else:  # it would go on nevertheless
        with contextlib.suppress(BaseException):
            job.steps.close()
        job.future.set_exception(error)
