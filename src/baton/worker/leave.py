"""How a service's process ends once everything is closed."""

from __future__ import annotations

import atexit
import os
import sys
from typing import NoReturn


def leave(code: int) -> NoReturn:
    """End this process without taking the interpreter apart.

    What was registered for the end runs and what was printed is written. Then the kernel takes everything back: torch
    and transformers are 2,800 modules, and Python would free them one by one, which is 1.5 s of a processor for nothing
    whenever an instance ends.

    Args:
        code: The exit status.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
