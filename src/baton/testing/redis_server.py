"""A redis-server of a test's own: on a free port of 127.0.0.1, without persistence, ended by its process."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
from collections.abc import AsyncIterator


def missing_redis() -> str | None:
    """Return why there is no Redis; ``None``: there is one."""
    if shutil.which("redis-server") is None:
        return "no redis-server on this machine (apt-get install redis-server)"
    return None


class RedisServer:
    """One redis-server; :meth:`start` again after :meth:`kill` brings back an empty one on the same port."""

    def __init__(self) -> None:
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
