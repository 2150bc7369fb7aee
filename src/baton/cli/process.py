"""One child process: its command, its log lines, its readiness, its end."""

from __future__ import annotations

import asyncio
import ctypes
import signal
import sys
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from baton.errors import UnavailableError
from baton.rpc.channel import check_health
from baton.rpc.tls import Tls

HEALTH_INTERVAL_S = 0.05
TAIL_LINES = 20
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """What to run.

    Attributes:
        name: In front of each log line.
        module: Python module with a ``main``.
        args: Its command line.
        health_address: gRPC address whose health check tells that it is ready.
        role: Word for the table: ``router``, ``prefill``, ``decode``, ``kvstore``.
        listens: What listens where, for the table.
    """

    name: str
    module: str
    args: tuple[str, ...]
    health_address: str
    role: str
    listens: tuple[tuple[str, str], ...] = ()
    env: dict[str, str] = field(default_factory=dict)


class Child(Protocol):
    """A started process, as ``asyncio`` has them; ``stdout`` has what it writes, errors too."""

    @property
    def pid(self) -> int:
        """Process id."""

    @property
    def returncode(self) -> int | None:
        """Exit status, or ``None`` while it runs."""

    @property
    def stdout(self) -> asyncio.StreamReader | None:
        """What it writes."""

    async def wait(self) -> int:
        """Wait for its end; returns the exit status."""

    def send_signal(self, signal: int) -> None:
        """Send it a signal."""


Start = Callable[[ProcessSpec, dict[str, str]], Awaitable[Child]]
"""Starts what a spec says, in an environment."""


async def start_python(spec: ProcessSpec, env: dict[str, str]) -> Child:
    """Start a Python in a session of its own, so that a terminal's Ctrl-C reaches only us, who then end it in order."""
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        spec.module,
        *spec.args,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=env,
        start_new_session=True,
        preexec_fn=die_with_parent,
    )


class ManagedProcess:
    """A running child.

    Args:
        spec: What to run.
        emit: Gets each line the child writes.
        tls: Certificates, if the services use some.
        start: How it is started.
    """

    def __init__(
        self,
        spec: ProcessSpec,
        emit: Callable[[str, str], None],
        *,
        tls: Tls | None = None,
        start: Start = start_python,
    ) -> None:
        self.spec, self._tls = spec, tls
        self._emit, self._start = emit, start
        self._process: Child | None = None
        self._reader: asyncio.Task[None] | None = None
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)

    @property
    def pid(self) -> int:
        """Process id."""
        if self._process is None:
            raise UnavailableError(f"{self.spec.name} was not started")
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit status, or ``None`` while it runs."""
        return None if self._process is None else self._process.returncode

    async def start(self, env: dict[str, str]) -> None:
        """Start it in an environment, beside the spec's own."""
        self._process = await self._start(self.spec, {**env, **self.spec.env})
        self._reader = asyncio.create_task(self._read(self._process))

    async def wait_ready(self, timeout_s: float) -> None:
        """Wait until its health check answers SERVING.

        Raises:
            UnavailableError: It ended, or was not ready in time; the message has its last lines.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    ready = await check_health(self.spec.health_address, timeout_s=1.0, tls=self._tls)
                    if ready or self.returncode is not None:
                        break
                    await asyncio.sleep(HEALTH_INTERVAL_S)
        except TimeoutError:
            raise UnavailableError(f"{self.spec.name} was not ready within {timeout_s:g} s") from None
        if self.returncode is not None:  # whoever answers at its address is not it
            await self.wait()
            raise UnavailableError(f"{self.spec.name} ended with status {self.returncode} before it was ready")

    async def wait(self) -> int:
        """Wait for its end and for its last line; returns the exit status."""
        if self._process is None or self._reader is None:
            raise UnavailableError(f"{self.spec.name} was not started")
        code = await self._process.wait()
        await self._reader
        return code

    async def end(self, grace_s: float) -> None:
        """Ask it to drain; kill it when the time is up."""
        if self._process is None or self._process.returncode is not None:
            return
        self.send(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_s):
                await self.wait()
        except TimeoutError:
            self._emit(self.spec.name, f"did not end within {grace_s:g} s and is killed")
            self.send(signal.SIGKILL)
            await self.wait()

    def send(self, number: signal.Signals) -> None:
        """Send a signal to this process alone."""
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    async def _read(self, process: Child) -> None:
        stream = process.stdout
        if stream is None:
            return
        while True:
            try:
                line = await stream.readline()
            except ValueError:  # a line longer than the reader's buffer: drop that line, keep reading
                continue
            if not line:
                return
            text = line.decode(errors="replace").rstrip("\n")
            self.tail.append(text)
            self._emit(self.spec.name, text)


def die_with_parent() -> None:
    """Have the kernel end the child if we are killed: nothing may be left running."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
