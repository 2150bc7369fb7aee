"""Work that all requests of a router share per turn of the event loop: batched steps, and one timer for deadlines.

A request's way through a router touches more code and data than a processor's first-level caches hold. If each request
went all the way at once, every step would miss the cache. Under load one turn of the event loop brings many requests,
so all of them take the same step one after the other: the first pays for the misses, the others find code and data in
the cache. Packet processors handle vectors of packets for the same reason (FD.io's VPP: "Vector Packet Processing").
A turn with a single request takes its steps one after the other once everything has been read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

log = logging.getLogger(__name__)

_T = TypeVar("_T")

_STEPS = range(7)
RECEIVE, END, RESPOND, PREPARE, START, PLACE, SEND = _STEPS
"""Steps of a turn, in their order. Answers come first, because their ends free capacity: RECEIVE delivers what
instances sent, END finishes calls that succeeded, RESPOND writes to clients. New requests follow: PREPARE tokenizes,
START hands them to dispatch, PLACE admits them and chooses instances, SEND starts their calls."""


class TurnBatcher:
    """Runs the steps of all requests together, once per turn of the event loop. Used in one loop at a time."""

    def __init__(self) -> None:
        self._due: list[list[tuple[Callable[[Any], None], Any]]] = [[] for _ in _STEPS]
        self._loop: asyncio.AbstractEventLoop | None = None
        """Loop whose turn is waited for; ``None`` if nothing is scheduled."""

    def schedule(self, step: int, action: Callable[[_T], None], argument: _T) -> None:
        """Run an action with the others of the same step, in the order of the calls.

        It runs in this turn if the turn has not passed the step yet, else in the next one.

        Args:
            step: Index of the step, such as ``RESPOND``.
            action: Callable that must not block. Exceptions are logged and do not affect other actions.
            argument: The only argument of ``action``.
        """
        self._due[step].append((action, argument))
        if self._loop is None:
            self._schedule_turn()

    def _schedule_turn(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.call_soon(self._run)

    def _run(self) -> None:
        due = self._due
        for step in _STEPS:
            if not due[step]:
                continue
            actions = due[step]
            due[step] = []
            for action, argument in actions:
                try:
                    action(argument)
                except (Exception, asyncio.CancelledError):  # the other requests' steps must still run
                    log.exception("a request's step failed")
        self._loop = None
        if any(due):
            self._schedule_turn()


class Expiring(Protocol):
    """Something with a deadline."""

    def expire(self) -> None:
        """End it: its deadline has passed."""


class Deadlines:
    """Calls :meth:`Expiring.expire` on items that were not discarded in time. One timer serves all items.

    Args:
        seconds: Time that each item has from :meth:`add` on, in seconds.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._due: dict[Expiring, float] = {}  # in order, because all items have the same time
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        """Number of items with a running deadline."""
        return len(self._due)

    def add(self, item: Expiring) -> None:
        loop = asyncio.get_running_loop()
        self._due[item] = loop.time() + self._seconds
        if self._timer is None:
            self._timer = loop.call_later(self._seconds, self._expire_due)

    def discard(self, item: Expiring) -> None:
        """Remove an item; unknown items are ignored."""
        self._due.pop(item, None)

    def _expire_due(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        while self._due:
            item, due = next(iter(self._due.items()))
            remaining = due - loop.time()
            if remaining > 0:
                self._timer = loop.call_later(remaining, self._expire_due)
                return
            del self._due[item]
            try:
                item.expire()
            except Exception:  # the others' deadlines pass, too
                log.exception("an item could not be ended at its deadline")
