"""Runs one Python target under atheris: ``python -m tests.fuzz.python_child TARGET LIBFUZZER_FLAGS...``."""

from __future__ import annotations

import logging
import resource
import signal
import sys
from collections.abc import Callable
from types import FrameType

LONGEST_CPU_S = 20.0
"""Of one input, processor time: it hangs."""
MOST_GROWTH_KB = 512 * 1024
"""Of the process in one input of 4 KiB."""


class FoundError(Exception):
    """What an input did that is no answer and no documented error."""


def _too_long(number: int, frame: FrameType | None) -> None:
    raise FoundError(f"more than {LONGEST_CPU_S:g} s of processor time")


def watched(target: Callable[[bytes], None]) -> Callable[[bytes], None]:
    """Return a target that also fails for time and memory."""

    def run(data: bytes) -> None:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        signal.setitimer(signal.ITIMER_VIRTUAL, LONGEST_CPU_S)
        try:
            target(data)
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        if (more := resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) > MOST_GROWTH_KB:
            raise FoundError(f"grew by {more} KiB")

    signal.signal(signal.SIGVTALRM, _too_long)
    return run


def main() -> None:
    """Fuzz until libFuzzer's flags say stop."""
    import atheris  # of an environment of its own

    with atheris.instrument_imports(include=["baton", "baton_router", "baton_kvstore"], enable_loader_override=False):
        from tests.fuzz import python_targets  # after the instrumentation has begun

        target = python_targets.load(sys.argv[1])
    logging.disable(logging.CRITICAL)
    atheris.Setup([sys.argv[0], *sys.argv[2:]], watched(target))
    atheris.Fuzz()


if __name__ == "__main__":
    main()
