"""Child processes: they end with their parent, their output is read line by line, and they can be stopped or killed."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import IO, Protocol

from baton.background import BackgroundThread

PARENT_VARIABLE = "BATON_PARENT_PID"
"""Environment variable with the id of the process that a service's process ends with."""
_PR_SET_PDEATHSIG = 1
_MAX_LINE_BYTES = 1 << 16


def die_with_parent(number: int) -> None:
    """Have the kernel send this process a signal when the thread that started it ends (``prctl(2)``)."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def end_with_parent() -> None:
    """Have the kernel send SIGTERM to this process when its parent ends, if ``BATON_PARENT_PID`` names the parent.

    The child calls this itself, not the parent between fork and exec: no Python may run there beside threads, one of
    which may hold a lock that the child would wait for without limit, and its parent with it.
    """
    parent = os.environ.pop(PARENT_VARIABLE, "")
    if parent:
        die_with_parent(signal.SIGTERM)
        if os.getppid() != int(parent):  # the parent ended before the call to prctl
            signal.raise_signal(signal.SIGTERM)


def start_python(
    module: str,
    args: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
    end_with_thread: bool = False,
    output: int | IO[bytes] | None = None,
) -> subprocess.Popen[bytes]:
    """Start ``python -m module`` in a session of its own, so that a terminal's Ctrl-C reaches only the parent.

    Args:
        module: Module to run.
        args: Command line.
        env: Environment; ``None``: this process's.
        pass_fds: File descriptors that the child inherits.
        end_with_thread: End the child with this process, and with the thread that calls this, if the module calls
            :func:`end_with_parent` (services do).
        output: Standard output and error, as for ``subprocess.Popen``; ``None``: this process's.
    """
    environment = dict(os.environ if env is None else env)
    if end_with_thread:
        environment[PARENT_VARIABLE] = str(os.getpid())
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *args],  # -P: no modules of the working directory
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=None if output is None else subprocess.STDOUT,
        env=environment,
        pass_fds=pass_fds,
        start_new_session=True,
    )


class RunningProcess(Protocol):
    """The part of ``subprocess.Popen[bytes]`` that :class:`ChildProcess` needs."""

    @property
    def pid(self) -> int:
        """Process id."""

    @property
    def stdout(self) -> IO[bytes] | None:
        """Pipe with the output, if it is read here."""

    def poll(self) -> int | None:
        """Return the exit status, or ``None`` while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit status; raises ``subprocess.TimeoutExpired`` after ``timeout`` seconds."""

    def send_signal(self, sig: int) -> None:
        """Send a signal, if it still runs."""


class ChildProcess:
    """A child process.

    Args:
        process: The started process. If its output is a pipe, a thread reads it to the end.
        on_line: Called in that thread with each line of the output, decoded and without its line end.

    Attributes:
        last_line: Last line of the output that is not blank.
    """

    def __init__(self, process: RunningProcess, on_line: Callable[[str], None] = lambda line: None) -> None:
        self.last_line = ""
        self._process = process
        self._on_line = on_line
        self._exit: Future[int] = Future()
        self._reader: threading.Thread | None = None
        if process.stdout is not None:
            self._reader = BackgroundThread("child-output", partial(self._read, process.stdout))
            self._reader.start()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit status, negative for a signal; ``None`` while the process runs."""
        return self._process.poll()

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to this process alone, if it still runs."""
        self._process.send_signal(number)

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait for the end of the process; returns its exit status, or ``None`` after ``timeout_s`` seconds."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        """Kill the process and wait for its end."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def stop(self, grace_s: float, number: signal.Signals | None = signal.SIGTERM) -> int | None:
        """Ask the process to end, and kill it if it does not.

        Args:
            grace_s: Seconds that the process has to end.
            number: Signal to ask with; ``None``: it was asked already, as by a closed pipe.

        Returns:
            The exit status; ``None``: the process was killed.
        """
        if number is not None:
            self._process.send_signal(number)
        code = self.wait(grace_s)
        if code is None:
            self.kill()
        return code

    def last_words(self, timeout_s: float) -> str:
        """Return the last line of the output, which must be a pipe: at its end, or after ``timeout_s`` seconds."""
        with contextlib.suppress(TimeoutError):
            self._exit.result(timeout_s)
        return self.last_line

    async def wait_closed(self) -> int:
        """Wait for the end of the process and of its output, which must be a pipe; returns the exit status."""
        return await asyncio.shield(asyncio.wrap_future(self._exit))

    def _read(self, output: IO[bytes]) -> None:
        while line := output.readline(_MAX_LINE_BYTES):  # after a failure it is read on: the child must not block
            text = line.decode(errors="replace").rstrip("\n")
            self.last_line = text.strip() or self.last_line
            self._on_line(text)
        output.close()
        self._exit.set_result(self._process.wait())
