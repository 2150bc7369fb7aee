"""``baton-kvstore``: a store of KV blocks."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from baton.interrupts import ended_by_interrupt

if TYPE_CHECKING:
    from baton.config.kvstore import KVStoreConfig

log = logging.getLogger("baton_kvstore.main")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a store until SIGTERM or SIGINT; see :func:`~baton.worker.process.run_service`."""
    with ended_by_interrupt():  # imports take a second
        from baton.config.kvstore import KVStoreConfig
        from baton.worker.process import run_service
    return run_service("kvstore", "Run a store of KV blocks.", (KVStoreConfig,), _serve, argv)


async def _serve(config: KVStoreConfig) -> int:
    from baton.worker.process import StopRequest
    from baton_kvstore.server import KVStoreServer

    server = KVStoreServer(config)
    await server.start()
    await StopRequest().wait()
    log.info("stopping")
    await server.stop(config.drain_timeout_s)
    log.info("stopped")
    return 0


if __name__ == "__main__":
    sys.exit(main())
