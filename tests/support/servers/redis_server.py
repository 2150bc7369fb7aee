"""A redis-server of a test's own, without persistence."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from tests.support.servers.listening import ListeningProcess

from baton.rpc.redis import open_redis
from baton.rpc.server import free_port


def missing_redis() -> str | None:
    """Return why there is no Redis; ``None``: there is one."""
    if shutil.which("redis-server") is None:
        return "no redis-server on this machine (apt-get install redis-server)"
    return None


class RedisServer(ListeningProcess):
    """One redis-server.

    Args:
        options: More of its command line.
    """

    def __init__(self, *options: str) -> None:
        super().__init__()
        self.options = options

    @property
    def url(self) -> str:
        """Where it is."""
        return f"redis://127.0.0.1:{self.port}/0"

    def _command(self) -> Sequence[str]:
        where = ("--port", str(self.port), "--bind", "127.0.0.1")
        return ("redis-server", *where, "--save", "", "--appendonly", "no", *self.options)


_SLOTS = 16384


@contextlib.asynccontextmanager
async def redis_cluster(folder: Path, count: int = 3) -> AsyncIterator[list[RedisServer]]:
    """Run a cluster of masters for the time of a block.

    Args:
        folder: For the nodes' files.
        count: How many.
    """
    servers = []
    for i in range(count):
        # The port of their own bus is bound to loopback with the rest; by default it is the other plus 10000.
        options = ("--cluster-enabled", "yes", "--cluster-port", str(free_port()))
        servers.append(RedisServer(*options, "--cluster-config-file", str(folder / f"{i}.conf")))
    try:
        for server in servers:
            await server.start()
        await _join(servers)
        yield servers
    finally:
        for server in servers:
            await server.kill()


async def _join(servers: list[RedisServer]) -> None:
    """Give each node its share of the slots, have them meet, and wait until all agree."""
    clients: list[Any] = [open_redis(server.url) for server in servers]
    try:
        share = -(-_SLOTS // len(servers))
        for i, client in enumerate(clients):
            await client.execute_command("CLUSTER", "ADDSLOTSRANGE", i * share, min(_SLOTS, (i + 1) * share) - 1)
            await client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", i + 1)
        for server in servers[1:]:
            bus = server.options[server.options.index("--cluster-port") + 1]
            await clients[0].execute_command("CLUSTER", "MEET", "127.0.0.1", server.port, bus)
        for client in clients:
            while b"cluster_state:ok" not in await client.execute_command("CLUSTER", "INFO"):
                await asyncio.sleep(0.02)
    finally:
        for client in clients:
            await client.aclose()
