"""Time in which nothing of a process ran does not count, where whoever is waited for is in the same process."""

from __future__ import annotations

import asyncio
import time


def take_standstills_out(loop: asyncio.AbstractEventLoop, most_s: float) -> None:
    """Have a loop's clock advance by at most ``most_s`` seconds between two looks at it.

    On a busy machine a process may stand still for seconds, and with it both sides of what a test has in one process.
    Then limits of time pass for all that is on its way; a loop that looks at its clock often enough does not see that.
    """
    last = passed = time.monotonic()

    def steady() -> float:
        nonlocal last, passed
        now = time.monotonic()
        passed += min(now - last, most_s)
        last = now
        return passed

    loop.time = steady  # type: ignore[method-assign]
