"""A redis-server of a test's own: on a free port of 127.0.0.1, without persistence, ended by its process."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from baton.rpc.redis_client import open_redis


def missing_redis() -> str | None:
    """Return why there is no Redis; ``None``: there is one."""
    if shutil.which("redis-server") is None:
        return "no redis-server on this machine (apt-get install redis-server)"
    return None


class RedisServer:
    """One redis-server; :meth:`start` again after :meth:`kill` brings back an empty one on the same port.

    Args:
        options: More of its command line.
    """

    def __init__(self, *options: str) -> None:
        self.options = options
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        self._process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        """Where it is."""
        return f"redis://127.0.0.1:{self.port}/0"

    async def start(self) -> None:
        """Start it and wait until it listens.

        Raises:
            RuntimeError: It ended instead.
        """
        self._process = await asyncio.create_subprocess_exec(
            *("redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"),
            *self.options,
            stdout=asyncio.subprocess.DEVNULL,
            cwd="/tmp",
        )
        while self._process.returncode is None:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", self.port)
            except ConnectionRefusedError:
                await asyncio.wait([asyncio.ensure_future(self._process.wait())], timeout=0.01)
                continue
            writer.close()
            await writer.wait_closed()
            return
        raise RuntimeError("redis-server ended")

    async def kill(self) -> None:
        """End it by SIGKILL: everything in it is lost."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
            self._process = None


@contextlib.asynccontextmanager
async def redis_server() -> AsyncIterator[RedisServer]:
    """Run one for the time of a block."""
    server = RedisServer()
    await server.start()
    try:
        yield server
    finally:
        await server.kill()


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
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            bus = str(free.getsockname()[1])
        options = (
            "--cluster-enabled",
            "yes",
            "--cluster-port",
            bus,
            "--cluster-config-file",
            str(folder / f"{i}.conf"),
        )
        servers.append(RedisServer(*options))
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
            while b"cluster_state:ok" not in await client.execute_command("CLUSTER", "INFO"):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
    finally:
        for client in clients:
            await client.aclose()
