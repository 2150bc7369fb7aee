"""``baton-prefill``: an instance that starts as a prefill instance; all else is ``baton.worker``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from baton.interrupts import ended_by_interrupt


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    with ended_by_interrupt():  # imports take seconds
        from baton.types import Role
        from baton.worker.instance import main as run_worker
    return run_worker(Role.PREFILL, argv)


if __name__ == "__main__":
    sys.exit(main())
