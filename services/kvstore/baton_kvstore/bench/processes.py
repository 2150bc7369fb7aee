"""The servers that are measured, each a process of its own that ends with this one."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import IO

import psutil

from baton.errors import ConfigError, UnavailableError
from baton.rpc.channel import check_health

READY_S = 60.0
_END_S = 30.0
_PR_SET_PDEATHSIG = 1
_TAIL_BYTES = 2000


class Server:
    """A process that listens on a port of 127.0.0.1. Must be started on the main thread, with which it ends."""

    def __init__(self, name: str, command: Sequence[str], port: int) -> None:
        self.name, self.port = name, port
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )

    @property
    def address(self) -> str:
        """``host:port``."""
        return f"127.0.0.1:{self.port}"

    def cpu_s(self) -> float:
        """CPU seconds that it has used; 0 if it has ended."""
        with contextlib.suppress(psutil.NoSuchProcess):
            times = psutil.Process(self._process.pid).cpu_times()
            return float(times.user + times.system)
        return 0.0

    def read_bytes(self) -> int:
        """Bytes that it has read of files; 0 if it has ended."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return int(psutil.Process(self._process.pid).io_counters().read_chars)
        return 0

    def wait_ready(self) -> None:
        """Wait until it answers.

        Raises:
            UnavailableError: It ended, or took too long.
        """
        deadline = time.monotonic() + READY_S
        while not self._answers():
            if self._process.poll() is not None:
                raise UnavailableError(f"{self.name} ended: {self._last_words()}")
            if time.monotonic() >= deadline:
                raise UnavailableError(f"{self.name} was not ready within {READY_S:g} s")
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.05)

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._output.close()

    def _answers(self) -> bool:
        return asyncio.run(check_health(self.address))

    def _last_words(self) -> str:
        size = self._output.seek(0, os.SEEK_END)
        self._output.seek(max(0, size - _TAIL_BYTES))
        return self._output.read().decode(errors="replace").strip()


class StoreServer(Server):
    """``baton-kvstore`` with some flags."""

    def __init__(self, name: str, flags: Sequence[str]) -> None:
        port = free_port()
        own = ("--port", str(port), "--instance-id", name, "--log-level", "warning")
        super().__init__(name, [sys.executable, "-m", "baton_kvstore.main", *own, *flags], port)


class RedisServer(Server):
    """``redis-server`` without persistence."""

    def __init__(self) -> None:
        port = free_port()
        flags = ("--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no")
        super().__init__("redis-server", ["redis-server", *flags], port)

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1.0):
            return True
        return False


def redis_obstacle() -> str:
    """Return why Redis cannot be measured here; empty: it can."""
    if shutil.which("redis-server") is None:
        return "no redis-server on this machine (apt-get install redis-server)"
    try:
        import redis  # noqa: F401
    except ImportError:
        return "its Python client is missing: pip install 'baton-serve[redis]'"
    return ""


def free_port() -> int:
    """Return a free port.

    Raises:
        ConfigError: There is none.
    """
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return int(probe.getsockname()[1])
    except OSError as error:
        raise ConfigError(f"no port can be had on 127.0.0.1: {error.strerror}", field="port") from error


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
