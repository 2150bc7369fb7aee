"""``baton up`` as a user starts it: a process, what it writes, and its end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import psutil
import pytest

from baton.rpc.server import free_ports

READY_S = 300
"""Four instances on two cores that a second test shares with them, of a disk that nobody has read."""


@dataclass
class Running:
    process: subprocess.Popen[str]
    url: str
    grpc: str
    lines: list[str]
    reader: threading.Thread | None = None

    def end(self) -> str:
        """Wait for its end by itself and return what it wrote."""
        assert self.reader is not None
        self.process.wait(240)
        self.reader.join(240)
        return "".join(self.lines)


def start(*args: str, env: dict[str, str] | None = None, ready_s: float = READY_S) -> Running:
    port, grpc = free_ports(2)
    command = [sys.executable, "-m", "baton.cli.main", "up", "--port", str(port), "--grpc-port", str(grpc), *args]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | (env or {})
    )
    running = Running(process, f"http://127.0.0.1:{port}", f"127.0.0.1:{grpc}", [])
    up = threading.Event()

    def read() -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                running.lines.append(line)
                if "Ctrl-C ends everything" in line:
                    up.set()
        up.set()

    running.reader = threading.Thread(target=read, daemon=True)
    running.reader.start()
    if not up.wait(ready_s):
        process.send_signal(signal.SIGINT)  # it ends what it has started
        pytest.fail(f"not ready after {ready_s} s:\n{running.end()}")
    return running


def stop(running: Running) -> None:
    """Ctrl-C, then nothing that was started may be left."""
    children = psutil.Process(running.process.pid).children(recursive=True)
    running.process.send_signal(signal.SIGINT)
    text = running.end()
    assert running.process.returncode == 0, text[-5000:]
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]


@contextlib.contextmanager
def running_up(*args: str, env: dict[str, str] | None = None, ready_s: float = READY_S) -> Iterator[Running]:
    """A deployment that serves; ended as users do, and where that does not help, killed."""
    running = start(*args, env=env, ready_s=ready_s)
    try:
        if running.process.poll() is not None:
            pytest.fail("".join(running.lines))
        yield running
        stop(running)
    finally:
        running.process.kill()
        running.end()
