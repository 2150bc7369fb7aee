"""A process that ends with the one that started it, also where that one is killed and can tell nobody."""

from __future__ import annotations

import ctypes
import os
import signal

PARENT = "BATON_PARENT_PID"
"""Variable with the id of the process that a service's process ends with."""
_PR_SET_PDEATHSIG = 1


def die_with_parent(number: int) -> None:
    """Have the kernel send this process a signal when the thread that started it ends (``prctl(2)``)."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def end_with_parent() -> None:
    """Have the kernel ask this process to end when the one that ``BATON_PARENT_PID`` names ends; nothing without it.

    Asked for here and not between fork and exec, where no Python may run beside threads: one of them may have held a
    lock, and the fork would wait for it for ever, its parent with it.
    """
    parent = os.environ.pop(PARENT, "")
    if parent:
        die_with_parent(signal.SIGTERM)
        if os.getppid() != int(parent):  # it ended before we could ask to be told
            signal.raise_signal(signal.SIGTERM)
