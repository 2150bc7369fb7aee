"""KV store nodes as processes of a test's own, which can be killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator

from baton.rpc.channel import check_health

_START_S = 60.0


class StoreProcess:
    """One ``baton-kvstore`` on a free port of 127.0.0.1; :meth:`start` again after :meth:`kill`: empty, same port.

    Args:
        flags: Of its command line.
        env: Its environment; default: this process's.
    """

    def __init__(self, *flags: str, env: dict[str, str] | None = None) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        self._flags, self._env = flags, env
        self._process: asyncio.subprocess.Process | None = None

    @property
    def address(self) -> str:
        """``host:port``."""
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Start it and wait until it serves.

        Raises:
            RuntimeError: It ended instead, or took too long.
        """
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "baton_kvstore.main", "--port", str(self.port), "--log-level", "warning", *self._flags),
            env=os.environ | (self._env or {}),
        )
        deadline = time.monotonic() + _START_S
        while not await check_health(self.address):
            if self._process.returncode is not None or time.monotonic() > deadline:
                raise RuntimeError("the KV store did not start")
            await asyncio.wait([asyncio.ensure_future(self._process.wait())], timeout=0.05)

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal, if it still runs."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def kill(self) -> None:
        """End it by SIGKILL: everything in memory is lost."""
        self.signal(signal.SIGKILL)
        if self._process is not None:
            await self._process.wait()
            self._process = None


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
