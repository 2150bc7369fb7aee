"""A deployment under ``baton up``'s supervisor; what dies in a test comes back at once."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator

from tests.support.servers.warm import WarmStarter

from baton.cli.supervisor import DeploymentPlan, Supervisor


@contextlib.asynccontextmanager
async def supervised(plan: DeploymentPlan, starter: WarmStarter) -> AsyncIterator[Supervisor]:
    """Run a plan; its last lines of log are printed at the end, which pytest shows with a failure."""
    lines: list[str] = []
    # Whoever dies here has done nothing wrong, so it may come back at once, however often that happens.
    supervisor = Supervisor(
        plan, lambda name, line: lines.append(f"{time.monotonic():.3f} {name} | {line}"), backoff_s=(0.05, 0.05)
    )
    supervisor.spawn = starter.spawn
    try:
        async with supervisor:
            yield supervisor
    finally:
        print("\n".join(lines[-500:]))  # noqa: T201
