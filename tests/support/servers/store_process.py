"""KV store nodes as processes of a test's own, which can be killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Sequence

from tests.support.servers.listening import ListeningProcess

from baton.rpc.channel import check_health


class StoreProcess(ListeningProcess):
    """One ``baton-kvstore``.

    Args:
        flags: Of its command line.
        env: Its environment; default: this process's.
    """

    def __init__(self, *flags: str, env: dict[str, str] | None = None) -> None:
        super().__init__()
        self._flags, self._more_env = flags, env or {}

    @property
    def address(self) -> str:
        """``host:port``."""
        return f"127.0.0.1:{self.port}"

    @property
    def _env(self) -> dict[str, str]:
        return os.environ | self._more_env

    def _command(self) -> Sequence[str]:
        where = ("--port", str(self.port), "--log-level", "warning")
        return (sys.executable, "-m", "baton_kvstore.main", *where, *self._flags)

    async def _serves(self) -> bool:
        return await check_health(self.address)


@contextlib.asynccontextmanager
async def store_processes(
    count: int, *flags: str, env: dict[str, str] | None = None
) -> AsyncIterator[list[StoreProcess]]:
    """Run some for the time of a block."""
    nodes = [StoreProcess(*flags, env=env) for _ in range(count)]
    try:
        await asyncio.gather(*(node.start() for node in nodes))
        yield nodes
    finally:
        for node in nodes:
            await node.kill()
