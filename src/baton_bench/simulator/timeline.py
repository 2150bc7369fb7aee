"""Virtual time: an event queue, and processors that several instances share."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count

Action = Callable[[], None]


class Event:
    """A scheduled action; :meth:`cancel` drops it."""

    __slots__ = ("action",)

    def __init__(self, action: Action) -> None:
        self.action: Action | None = action

    def cancel(self) -> None:
        self.action = None


class Timeline:
    """Events in order of time; events of equal time in the order in which they were scheduled.

    Attributes:
        now: Virtual time, in seconds.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Event]] = []
        self._order = count()

    def at(self, time: float, action: Action) -> Event:
        """Schedule an action at a time, now at the earliest."""
        event = Event(action)
        heapq.heappush(self._events, (max(time, self.now), next(self._order), event))
        return event

    def run_while(self, goes_on: Callable[[], bool]) -> None:
        """Run events in order while there are any and ``goes_on()`` is true."""
        events = self._events
        while events and goes_on():
            time, _, event = heapq.heappop(events)
            if event.action is not None:
                self.now = time
                action = event.action
                event.action = None
                action()


class Processors:
    """Processors of one machine, shared by the instances on it: processor sharing.

    As long as the threads of all that run are no more than the cores, each runs at full speed; else all of them slow
    down alike. This is the limit of a fair scheduler with short slices; caches and memory bandwidth, which instances
    on one machine share too, are not modelled.

    Args:
        timeline: Virtual time.
        cores: Number of processors.
        threads: Processors that each job keeps busy.
    """

    def __init__(self, timeline: Timeline, cores: float, threads: float = 1.0) -> None:
        self._timeline = timeline
        self._cores = cores
        self._threads = threads
        self._jobs: dict[int, tuple[float, Action]] = {}
        self._ids = count()
        self._served = 0.0
        """Seconds of work that a job would have got which runs since the start."""
        self._since = 0.0
        self._next: Event | None = None

    @property
    def _speed(self) -> float:
        return min(1.0, self._cores / (self._threads * len(self._jobs))) if self._jobs else 0.0

    def start(self, work_s: float, done: Action) -> None:
        """Run a job of ``work_s`` seconds at full speed; calls ``done`` at its end."""
        self._advance()
        self._jobs[next(self._ids)] = (self._served + work_s, done)
        self._plan()

    def _advance(self) -> None:
        now = self._timeline.now
        self._served += (now - self._since) * self._speed
        self._since = now

    def _plan(self) -> None:
        if self._next is not None:
            self._next.cancel()
            self._next = None
        if self._jobs:
            first = min(self._jobs, key=lambda each: self._jobs[each][0])
            left = max(0.0, self._jobs[first][0] - self._served)
            self._next = self._timeline.at(self._timeline.now + left / self._speed, lambda: self._done(first))

    def _done(self, number: int) -> None:
        self._advance()
        self._next = None
        _, done = self._jobs.pop(number)
        self._plan()
        done()
