"""Forks of a process that has clients: the child gets gRPC's locks and sockets as they are, and none of its threads."""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from pathlib import Path

from baton.errors import UnavailableError

_REFUSED = "the process was forked while it had an open client: close clients before, or start processes by spawn"
_GRPC_THREADS = ("event_engine", "lifeguard", "grpc_", "timer_manager", "default-exec", "resolver-exec")
_THREADS = Path("/proc/self/task")
_ENDING_S, _LOOK_S = 5.0, 0.001

_open: weakref.WeakSet[object] = weakref.WeakSet()
_waits = False
"""Whether the next fork waits for gRPC's end."""
_unsafe = False


def check() -> None:
    """Refuse a client in a child that was forked beside an open one.

    Raises:
        UnavailableError: gRPC's channels of all event loops share one socket, so this process would take what the
            other is sent.
    """
    if _unsafe:
        raise UnavailableError(_REFUSED)


def opened(client: object) -> None:
    """Note that a client has channels."""
    global _waits
    _waits = True
    _open.add(client)


def closed(client: object) -> None:
    """Note that it has none any more."""
    _open.discard(client)


def _before() -> None:
    # gRPC ends by itself some milliseconds after the last channel, and tells nobody. A child that was forked meanwhile
    # would wait for ever for threads that it does not have.
    global _waits
    if _waits and not _open:
        deadline = time.monotonic() + _ENDING_S
        while _grpc_runs() and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        _waits = False


def _after_in_child() -> None:
    global _unsafe
    _unsafe = _unsafe or bool(_open)


def _grpc_runs() -> bool:
    """Whether threads of gRPC are there; where a system does not tell: no."""
    with contextlib.suppress(OSError):
        for task in _THREADS.iterdir():
            with contextlib.suppress(OSError):  # it has ended
                if (task / "comm").read_text().startswith(_GRPC_THREADS):
                    return True
    return False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_child=_after_in_child)
