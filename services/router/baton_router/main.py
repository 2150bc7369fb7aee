"""``baton-router``: the router process."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import sys
from collections.abc import Sequence

import uvloop

from baton.config import add_flags, from_flags
from baton.errors import BatonError, ConfigError
from baton.version import __version__
from baton.worker.process import StopRequest, leave, set_up_logging
from baton_router.app import RouterApp
from baton_router.config import RouterConfig

log = logging.getLogger("baton_router.main")

_GC_THRESHOLD = 100_000
"""Allocations between two collections. A request makes a few thousand, nearly all of which reference counting frees."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a router until SIGTERM or SIGINT.

    Args:
        argv: Command line; default: the process's.

    Returns:
        The exit status: 0 after a clean end, 2 for a configuration that cannot work, 1 for any other failure. With the
        process's own command line it does not return: the process ends with that status.
    """
    code = _main(argv)
    if argv is None:
        leave(code)
    return code


def _main(argv: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(
        prog="baton-router",
        description="Route requests to prefill and decode instances; OpenAI-compatible HTTP and gRPC.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    add_flags(parser, RouterConfig)
    args = parser.parse_args(argv)
    try:
        config = from_flags(RouterConfig, args)
        set_up_logging(config.log_level, "router")
        logging.getLogger("uvicorn").setLevel(logging.ERROR)  # wrong requests of clients are no warnings for operators
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_run(config))
    except ConfigError as error:
        print(f"baton-router: error: {error.message}", file=sys.stderr)  # noqa: T201
        return 2
    except BatonError as error:
        print(f"baton-router: failed: {error.message}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


async def _run(config: RouterConfig) -> None:
    app = RouterApp(config)
    try:
        await app.start()
    except BaseException:
        await app.stop()
        raise
    gc.freeze()  # what is here now stays: no collection needs to look at it again
    gc.set_threshold(_GC_THRESHOLD)
    await StopRequest().wait()
    log.info("draining: no new requests, %d in flight", app.dispatcher.num_in_flight)
    await app.stop()
    log.info("stopped")


if __name__ == "__main__":
    sys.exit(main())
