"""The environment of processes that tests start: what this process's own agents have set for themselves stays here."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]


def child_env(**changes: str) -> dict[str, str]:
    """This process's environment without what UCX and NIXL were told, one thread per library, and the changes."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("UCX_", "NIXL_"))}
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    paths = [str(ROOT), *filter(None, own.get("PYTHONPATH", "").split(os.pathsep))]
    return own | threads | {"PYTHONPATH": os.pathsep.join(paths)} | changes
