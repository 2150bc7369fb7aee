"""How long an operation may wait, and what ends the wait early."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, TypeVar

from baton.errors import CancelledError, DeadlineError

T = TypeVar("T")
TICK_S = 0.02
"""Longest time (seconds) between two looks at a cancel flag while blocked in the kernel."""


class Flag(Protocol):
    """What can be asked whether to stop, e.g. a ``threading.Event``."""

    def is_set(self) -> bool:
        """Whether to stop."""
        ...


class EitherFlag:
    """An event, or another flag.

    Args:
        other: The other flag; ``None``: there is none.
        event: The event; default: a new one.
    """

    def __init__(self, other: Flag | None, event: threading.Event | None = None) -> None:
        self._other, self._mine = other, event or threading.Event()

    def is_set(self) -> bool:
        """Whether either is set."""
        return self._mine.is_set() or (self._other is not None and self._other.is_set())

    def set(self) -> None:
        """Set the event."""
        self._mine.set()


@dataclass(frozen=True, slots=True)
class Wait:
    """A deadline and a cancel flag.

    Attributes:
        deadline: ``time.monotonic()`` seconds; ``None``: no limit, for servers that wait for their
            peer's next word.
        cancelled: Set by another thread to end the wait.
    """

    deadline: float | None = None
    cancelled: Flag | None = None

    def check(self, what: str) -> None:
        """Raise if the wait is over.

        Raises:
            DeadlineError: The deadline has passed.
            CancelledError: The flag is set.
        """
        if self.cancelled is not None and self.cancelled.is_set():
            raise CancelledError(f"cancelled while {what}")
        if self.deadline is not None and time.monotonic() >= self.deadline:
            raise DeadlineError(f"deadline passed while {what}")

    def remaining(self) -> float | None:
        """Seconds to the deadline, at least 0; ``None`` without one."""
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic())

    def nap(self) -> float | None:
        """Seconds to block before looking again: to the deadline, and at most a tick where there is a flag."""
        left = self.remaining()
        if self.cancelled is None:
            return left
        return TICK_S if left is None else min(TICK_S, left)


def run_together(mine: Callable[[], T], others: Sequence[Future[T]], siblings: EitherFlag) -> list[T]:
    """Run one share of a work here, and wait for the others; afterwards none runs any more.

    Args:
        mine: The share for this thread.
        others: Shares that were given to other threads; those that are cancelled by the end of ``mine`` are left out.
        siblings: Set if one of them fails.

    Raises:
        BaseException: The failure that came first.
    """
    results: list[T] = []
    failure: BaseException | None = None
    for result in itertools.chain((mine,), (other.result for other in others if not other.cancelled())):
        try:
            results.append(result())
        except BaseException as error:
            siblings.set()
            # A sibling that was told to stop says "cancelled"; the reason is the other's.
            if failure is None or isinstance(failure, CancelledError):
                failure = error
    if failure is not None:
        raise failure
    return results
