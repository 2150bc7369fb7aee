"""Entry point of prefill and decode processes."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from baton.config import EngineConfig
from baton.config.worker import WorkerConfig
from baton.types import Role
from baton.worker.instance import WorkerInstance
from baton.worker.process import StopRequest, run_service


def main(role: Role, argv: Sequence[str] | None = None) -> int:
    """Run an instance until it is asked to stop; see :func:`~baton.worker.process.run_service`.

    Args:
        role: Role in which the instance starts.
        argv: Command line; ``None``: the process's own.
    """
    serve = functools.partial(_serve, role)
    return run_service(role, f"Run a {role} instance.", (WorkerConfig, EngineConfig), serve, argv)


async def _serve(role: Role, config: WorkerConfig, engine_config: EngineConfig) -> int:
    stop = StopRequest()
    instance = WorkerInstance(role, config, engine_config, on_failure=stop.fail)
    await instance.start()
    await stop.wait()
    await instance.stop(config.drain_timeout_s if stop.exit_code == 0 else 0.0)
    return stop.exit_code
