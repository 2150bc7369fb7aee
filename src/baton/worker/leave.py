"""How a service's process ends once everything is closed."""

from __future__ import annotations

import atexit
import os
import sys
from typing import NoReturn


def leave(code: int) -> NoReturn:
    """End this process without taking the interpreter apart.

    What was registered for the end runs and what was printed is written. Then the kernel takes everything back. Python
    would free torch and transformers module by module, 1.5 s of a processor whenever an instance ends; and once gRPC
    has used TLS it would wait for 2 s.

    Args:
        code: The exit status.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
