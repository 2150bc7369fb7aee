"""The master of a Mooncake Store of a test's own, where its package is installed."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.util
import socket
from collections.abc import AsyncIterator
from pathlib import Path


@functools.cache
def missing_mooncake() -> str | None:
    """Return why there is no Mooncake Store; ``None``: there is one."""
    spec = importlib.util.find_spec("mooncake")
    if spec is None or spec.origin is None:
        return "the package mooncake-transfer-engine is not installed"
    try:
        importlib.import_module("mooncake.store")
    except ImportError as error:
        return f"mooncake.store cannot be imported: {error}"
    return None


class MooncakeMaster:
    """One master, on a free port of 127.0.0.1."""

    def __init__(self) -> None:
        self.port = _free_port()
        self._process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        """Where it is."""
        return f"mooncake://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Start it and wait until it listens.

        Raises:
            RuntimeError: It ended instead.
        """
        spec = importlib.util.find_spec("mooncake")
        if spec is None or spec.origin is None:
            raise RuntimeError(str(missing_mooncake()))
        flags = ("-rpc_address", "127.0.0.1", "-rpc_port", str(self.port), "-metrics_port", str(_free_port()))
        self._process = await asyncio.create_subprocess_exec(
            str(Path(spec.origin).with_name("mooncake_master")),
            *flags,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        while self._process.returncode is None:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", self.port)
            except ConnectionRefusedError:
                await asyncio.wait([asyncio.ensure_future(self._process.wait())], timeout=0.02)
                continue
            writer.close()
            await writer.wait_closed()
            return
        raise RuntimeError("mooncake_master ended")

    async def kill(self) -> None:
        """End it by SIGKILL."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
            self._process = None


@contextlib.asynccontextmanager
async def mooncake_master() -> AsyncIterator[MooncakeMaster]:
    """Run one for the time of a block."""
    master = MooncakeMaster()
    await master.start()
    try:
        yield master
    finally:
        await master.kill()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
