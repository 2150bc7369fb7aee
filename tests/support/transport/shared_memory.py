"""What is left in ``/dev/shm``, on a machine where others come and go."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil

_FOLDER = Path("/dev/shm")
_OWN = ("ucx_shm_", "torch_", "psm_", "sem.", "baton", "nixl", "gloo")
"""What segments of Baton, and of the libraries that its pipes use, are called: other programs make files there, too."""
_PATIENCE_S = 240.0


def segments() -> set[str]:
    """Return the names of all segments that may be ours."""
    return {each.name for each in os.scandir(_FOLDER) if each.name.startswith(_OWN) and not each.is_dir()}


def left_behind(before: set[str]) -> set[str]:
    """Return the names of segments that were not there ``before`` and that nobody else uses.

    A segment of another process that lives, a test beside this one, say, is no leak of ours; what has its name for a
    moment only is waited for.
    """
    deadline = time.monotonic() + _PATIENCE_S
    while new := segments() - before - _used_by_others():
        if time.monotonic() > deadline:
            return new
        time.sleep(0.05)
    return set()


def _used_by_others() -> set[str]:
    """Return the names of segments that processes beside this one and its children have open or mapped."""
    own = psutil.Process()
    ours = {own.pid, *(child.pid for child in own.children(recursive=True))}
    found: set[str] = set()
    for pid in set(psutil.pids()) - ours:
        try:
            lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
            used = [line.split(maxsplit=5)[-1] for line in lines]
            used += [os.readlink(f"/proc/{pid}/fd/{each}") for each in os.listdir(f"/proc/{pid}/fd")]
        except OSError:  # it has ended, or is another user's
            continue
        found.update(Path(path).name for path in used if path.startswith(f"{_FOLDER}/"))
    return found
