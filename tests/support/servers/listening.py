"""A server of a test's own: a process on a free port of 127.0.0.1, ended by its process."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Self

from baton.rpc.server import free_port

_START_S = 240.0


class ListeningProcess(ABC):
    """One server; :meth:`start` again after :meth:`kill` brings it back on the same port, and without what it held.

    Attributes:
        port: Where it listens.
    """

    def __init__(self) -> None:
        self.port = free_port()
        self._process: asyncio.subprocess.Process | None = None

    @abstractmethod
    def _command(self) -> Sequence[str]:
        """Return its command line."""

    @property
    def _env(self) -> dict[str, str] | None:
        return None

    async def _serves(self) -> bool:
        """Whether it answers."""
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", self.port)
        except ConnectionRefusedError:
            return False
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        return True

    async def start(self) -> None:
        """Start it and wait until it listens.

        Raises:
            RuntimeError: It ended instead, or took too long.
        """
        command = self._command()
        self._process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.DEVNULL, cwd="/tmp", env=self._env
        )
        ended = asyncio.ensure_future(self._process.wait())
        try:
            deadline = time.monotonic() + _START_S
            while not await self._serves():
                if ended.done() or time.monotonic() > deadline:
                    raise RuntimeError(f"{command[0]} did not start")
                await asyncio.wait([ended], timeout=0.01)
        finally:
            ended.cancel()

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal, if it still runs."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def kill(self) -> None:
        """End it by SIGKILL: everything in its memory is lost."""
        self.signal(signal.SIGKILL)
        if self._process is not None:
            await self._process.wait()
            self._process = None

    async def __aenter__(self) -> Self:
        """Start it."""
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        """End it."""
        await self.kill()
