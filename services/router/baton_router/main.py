"""``baton-router``: the router process."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from baton.interrupts import ended_by_interrupt

if TYPE_CHECKING:
    from baton.config.router import RouterConfig

log = logging.getLogger("baton_router.main")

_GC_THRESHOLD = 100_000
"""Allocations between two collections. A request makes a few thousand, nearly all of which reference counting frees."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a router until SIGTERM or SIGINT; see :func:`~baton.worker.process.run_service`."""
    with ended_by_interrupt():  # imports take seconds
        import uvloop

        from baton.config.router import RouterConfig
        from baton.worker.process import run_service
    description = "Route requests to prefill and decode instances; OpenAI-compatible HTTP and gRPC."
    return run_service("router", description, (RouterConfig,), _serve, argv, loop_factory=uvloop.new_event_loop)


async def _serve(config: RouterConfig) -> int:
    logging.getLogger("uvicorn").setLevel(logging.ERROR)  # wrong requests of clients are no warnings for operators
    from baton.worker.process import StopRequest
    from baton_router.app import RouterApp

    app = RouterApp(config)
    try:
        await app.start()
    except BaseException:
        await app.stop()
        raise
    gc.set_threshold(_GC_THRESHOLD)
    stop = StopRequest()
    app.on_http_failure = stop.fail
    await stop.wait()
    log.info("draining: no new requests, %d in flight", app.dispatcher.num_in_flight)
    await app.stop()
    log.info("stopped")
    return stop.exit_code


if __name__ == "__main__":
    sys.exit(main())
