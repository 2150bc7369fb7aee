"""``baton-kvstore``: a store of KV blocks."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from collections.abc import Sequence

from baton.config import add_flags, from_flags
from baton.errors import ConfigError
from baton.version import __version__
from baton.worker.process import StopRequest, leave, set_up_logging
from baton_kvstore.config import KVStoreConfig
from baton_kvstore.server import KVStoreServer

log = logging.getLogger("baton_kvstore.main")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a store until SIGTERM or SIGINT.

    Args:
        argv: Command line; default: the process's.

    Returns:
        The exit status: 0 after a clean end, 2 for a configuration that cannot work. With the
        process's own command line it does not return: the process ends with that status.
    """
    code = _main(argv)
    if argv is None:
        leave(code)
    return code


def _main(argv: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(prog="baton-kvstore", description="Run a store of KV blocks.")
    parser.add_argument("--version", action="version", version=__version__)
    add_flags(parser, KVStoreConfig)
    args = parser.parse_args(argv)
    try:
        config = from_flags(KVStoreConfig, args)
        set_up_logging(config.log_level, config.instance_id or "kvstore")
        asyncio.run(_run(config))
    except ConfigError as error:
        print(f"baton-kvstore: error: {error.message}", file=sys.stderr)  # noqa: T201
        return 2
    return 0


async def _run(config: KVStoreConfig) -> None:
    server = KVStoreServer(config)
    await server.start()
    await StopRequest().wait()
    log.info("stopping")
    await server.stop(config.drain_timeout_s)
    log.info("stopped")


if __name__ == "__main__":
    sys.exit(main())
