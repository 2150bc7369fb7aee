"""SIGINT while a process starts: it ends with status 130, and says nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType


def end_at_interrupt() -> None:
    """End this process with status 130 at SIGINT, until another handler is set: it serves nothing yet."""
    signal.signal(signal.SIGINT, _end)


@contextlib.contextmanager
def ended_by_interrupt() -> Iterator[None]:
    """End this process with status 130 at SIGINT while the context is open: it has started nothing yet."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(130)
