"""How the process of a service logs and ends."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from typing import NoReturn


def set_up_logging(level: str, name: str) -> None:
    """Send log lines to standard error, each with the instance's name.

    Args:
        level: ``debug``, ``info``, ``warning`` or ``error``.
        name: What to call this process in every line.
    """
    handler = logging.StreamHandler(sys.stderr)
    form = f"%(asctime)s.%(msecs)03d %(levelname)s {name} %(name)s: %(message)s"
    handler.setFormatter(logging.Formatter(form, datefmt="%Y-%m-%dT%H:%M:%S"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for noisy in ("httpx", "urllib3", "filelock", "transformers"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


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
