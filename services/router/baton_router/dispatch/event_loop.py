"""What all requests of a router share of its event loop: their steps are taken together, and so are their deadlines.

A request's way through a router is far more code and data than a processor's first caches hold: one that goes all the
way at once finds them full of what came before, at every step. Where a router has more to do than it can, a turn of
the loop brings many requests; then the first of them has a step's misses, and those behind it find code and data where
they are wanted. Packet processors work on vectors of packets for the same reason (FD.io's VPP: "Vector Packet
Processing"). Where a turn brings one request, its steps follow each other when the turn has read everything.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

log = logging.getLogger(__name__)

_T = TypeVar("_T")

_STEPS = range(7)
TAKE, END, RESPOND, PREPARE, START, PLACE, SEND = _STEPS
"""Steps, in the order in which a turn takes them. First the answers, whose ends make room: take what instances say of
calls, let those that have ended leave, write their answers; then the new requests: tokenize, admit, choose instances,
and send."""


class TurnBatcher:
    """What is to be done in this turn of the event loop; used in one loop at a time."""

    def __init__(self) -> None:
        self._due: list[list[tuple[Callable[[Any], None], Any]]] = [[] for _ in _STEPS]
        self._loop: asyncio.AbstractEventLoop | None = None
        """Whose turn is waited for; ``None``: none."""

    def later(self, step: int, do: Callable[[_T], None], what: _T) -> None:
        """Have something done when everybody else is at the same step.

        Done in this turn, if it is not yet beyond that step, else in the next one; in the order of the calls.

        Args:
            step: Which.
            do: Must not block; what it raises is logged and does not hinder others.
            what: Its argument.
        """
        self._due[step].append((do, what))
        if self._loop is None:
            self._begin()

    def _begin(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.call_soon(self._run)

    def _run(self) -> None:
        due = self._due
        for step in _STEPS:
            if not due[step]:
                continue
            now, due[step] = due[step], []
            for do, what in now:
                try:
                    do(what)
                except (Exception, asyncio.CancelledError):  # whatever it is: the others' steps must come
                    log.exception("a request's step failed")
        self._loop = None
        if any(due):
            self._begin()


class Expiring(Protocol):
    """Something whose time can be over."""

    def expire(self) -> None:
        """Its time is over."""


class Deadlines:
    """Calls :meth:`Expiring.expire` of what was added so many seconds ago and not taken out again: one timer for all.

    Args:
        seconds: How long everybody has.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._due: dict[Expiring, float] = {}  # in order: everybody has the same time
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        """How many wait for their end."""
        return len(self._due)

    def add(self, item: Expiring) -> None:
        """Begin an item's time."""
        loop = asyncio.get_running_loop()
        self._due[item] = loop.time() + self._seconds
        if self._timer is None:
            self._timer = loop.call_later(self._seconds, self._look)

    def discard(self, item: Expiring) -> None:
        """Forget an item; one that was not added is no error."""
        self._due.pop(item, None)

    def _look(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        while self._due:
            item, due = next(iter(self._due.items()))
            left = due - loop.time()
            if left > 0:
                self._timer = loop.call_later(left, self._look)
                return
            del self._due[item]
            item.expire()
