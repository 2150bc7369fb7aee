"""Waiting for the next message awake, where that is sooner there than this side would wake."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from baton.kv_transfer.protocol.deadline import Wait
from baton.kv_transfer.protocol.sockets import Stream

SPIN_S = 200e-6
"""Longest time (seconds) that a message is waited for awake."""
SOON_S = 600e-6
"""A message that came within this time tells of a peer that is busy with this pipe."""
MAX_REST = 256
"""Messages that are waited for asleep, at most, before it is tried again."""


class Pace:
    """Waits for a pipe's messages, one thread at a time: awake at first where the one before came soon.

    To wake a sleeping core takes as long as a small message and its answer together. Whoever waits awake takes a core
    for at most ``SPIN_S`` per message, offers it to others all the time, and goes to sleep if nobody writes; where it
    was in vain, ever more messages are waited for asleep before it is tried again. With one core there is nobody to
    wait for.

    Args:
        clock: Seconds.
        cores: That this process may use; ``None``: as the kernel says.
    """

    def __init__(self, *, clock: Callable[[], float] = time.perf_counter, cores: int | None = None) -> None:
        self._clock = clock
        self._alone = (len(os.sched_getaffinity(0)) if cores is None else cores) < 2
        self._soon = False
        self._rest, self._left = 1, 0

    def wait(self, line: Stream, wait: Wait) -> None:
        """Block until something can be received.

        Raises:
            DeadlineError, CancelledError, PipeClosedError: As their names say.
        """
        start = self._clock()
        if self._soon and not self._alone:
            if self._left:
                self._left -= 1
            elif line.spin_readable(SPIN_S):
                self._rest = max(1, self._rest // 2)
                return
            else:  # nothing came, or another process had this core meanwhile
                self._rest = self._left = min(4 * self._rest, MAX_REST)
        line.wait_readable(wait, "waiting for a message")
        self._soon = self._clock() - start < SOON_S
