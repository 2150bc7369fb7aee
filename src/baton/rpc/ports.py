"""Ports that processes of this user were given and do not listen on yet: so that no two are given the same one."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

PROMISED_S = 180.0
"""For how long a port is kept for whoever was given it: as long as a deployment may take to start on a busy machine."""
_MOST_BYTES = 1 << 20


@contextlib.contextmanager
def promised_ports() -> Iterator[dict[int, float]]:
    """Yield the ports that were given away lately, by when that was; those that the caller adds count from now on.

    No other process sees or changes them meanwhile. They are in a file; where it cannot be used there are none.
    """
    path = Path(tempfile.gettempdir()) / f"baton-ports-{os.getuid()}"
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:
        yield {}
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        now = time.time()
        promised = dict[int, float]()
        for line in os.pread(file, _MOST_BYTES, 0).decode("ascii", "replace").splitlines():
            with contextlib.suppress(ValueError):  # whatever others wrote there
                port, at = line.split()
                if now - PROMISED_S < float(at) <= now:
                    promised[int(port)] = float(at)
        yield promised
        text = "".join(f"{port} {at}\n" for port, at in promised.items())
        with contextlib.suppress(OSError):  # a full disk
            os.ftruncate(file, 0)
            os.pwrite(file, text.encode("ascii"), 0)
    finally:
        os.close(file)
