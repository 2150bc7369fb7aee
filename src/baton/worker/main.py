"""A prefill or decode process from its flags to its end."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from collections.abc import Sequence

from baton.config import EngineConfig, add_flags, from_flags
from baton.config.worker import WorkerConfig
from baton.errors import BatonError, ConfigError
from baton.types import Role
from baton.version import __version__
from baton.worker.instance import WorkerInstance
from baton.worker.process import StopRequest, leave, set_up_logging

log = logging.getLogger(__name__)


def main(role: Role, argv: Sequence[str] | None = None) -> int:
    """Run an instance until it is told to end.

    Args:
        role: In which it starts.
        argv: Command line; default: the process's.

    Returns:
        The exit status: 0 after a clean end, 2 for a configuration that cannot work, 1 for any other failure. With the
        process's own command line it does not return: the process ends with that status.
    """
    code = _main(role, argv)
    if argv is None:
        leave(code)
    return code


def _main(role: Role, argv: Sequence[str] | None) -> int:
    name = f"baton-{role}"
    parser = argparse.ArgumentParser(prog=name, description=f"Run a {role} instance.")
    parser.add_argument("--version", action="version", version=__version__)
    add_flags(parser, WorkerConfig)
    add_flags(parser, EngineConfig)
    args = parser.parse_args(argv)
    try:
        config, engine_config = from_flags(WorkerConfig, args), from_flags(EngineConfig, args)
        set_up_logging(config.log_level, config.instance_id or role)
        return asyncio.run(_run(role, config, engine_config))
    except ConfigError as error:
        print(f"{name}: error: {error.message}", file=sys.stderr)  # noqa: T201
        return 2
    except BatonError as error:
        print(f"{name}: failed: {error.message}", file=sys.stderr)  # noqa: T201
        return 1


async def _run(role: Role, config: WorkerConfig, engine_config: EngineConfig) -> int:
    stop = StopRequest()
    instance = WorkerInstance(role, config, engine_config, on_failure=stop.fail)
    await instance.start()
    await stop.wait()
    await instance.stop(config.drain_timeout_s if stop.exit_code == 0 else 0.0)
    return stop.exit_code
