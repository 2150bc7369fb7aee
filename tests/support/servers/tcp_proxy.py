"""A TCP proxy that can do to a connection what networks and dying hosts do."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import Awaitable, Callable

from baton.rpc.server import free_port


class TcpProxy:
    """Forwards ``port`` to a target, until told to reset or to freeze its connections.

    Args:
        target_port: Port on 127.0.0.1 to forward to.
        host: Address to listen on.
        port: Port to listen on; 0: a free one.

    Attributes:
        disturb: Gets every piece of bytes and whether it goes to the target; returns what to forward. It may wait.
        passed: Bytes forwarded.
    """

    def __init__(self, target_port: int, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self._target_port, self._host = target_port, host
        self.disturb: Callable[[bytes, bool], Awaitable[bytes]] | None = None
        self.passed = 0
        self._server: asyncio.Server | None = None
        self._starting = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self.port = port

    async def start(self) -> int:
        """Listen (on the port of before, after :meth:`cut`), unless it does, and return the port."""
        async with self._starting:
            if self._server is None:  # else it was cut twice at once: the first to end ends both
                self._server = await self._listen()
                self.port = self._server.sockets[0].getsockname()[1]
            return self.port

    async def _listen(self) -> asyncio.Server:
        while not self.port:
            try:
                return await asyncio.start_server(self._accept, self._host, free_port())
            except OSError as error:
                if error.errno != errno.EADDRINUSE:  # which it is where another process took it meanwhile
                    raise
        return await asyncio.start_server(self._accept, self._host, self.port)

    def reset(self) -> None:
        """Break every connection as a crash would: with RST, without a goodbye."""
        for writer in list(self._writers):
            writer.transport.abort()

    async def cut(self) -> None:
        """Break every connection and accept none."""
        if self._server is not None:
            self._server.close()
            self.reset()
            await self._server.wait_closed()
            self._server = None

    def freeze(self) -> None:
        """Forward nothing any more, but keep the connections: what a hung host looks like."""
        self._flowing.clear()

    def thaw(self) -> None:
        """Forward again."""
        self._flowing.set()

    async def stop(self) -> None:
        """Close everything."""
        await self.cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            writer.transport.abort()
            return
        finally:
            self._tasks.discard(task)
        self._writers.add(back)
        pumps = [
            asyncio.create_task(self._pump(reader, back, to_target=True)),
            asyncio.create_task(self._pump(there, writer, to_target=False)),
        ]
        self._tasks.update(pumps)
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in (writer, back):
                self._writers.discard(one)
                one.transport.abort()
            for pump in pumps:
                pump.cancel()
                self._tasks.discard(pump)
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, to_target: bool) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                await self._flowing.wait()
                if self.disturb is not None:
                    data = await self.disturb(data, to_target)
                self.passed += len(data)
                writer.write(data)
                await writer.drain()
