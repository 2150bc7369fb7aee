"""Log lines of a service: time, level, instance, logger, message."""

from __future__ import annotations

import logging
import sys


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
