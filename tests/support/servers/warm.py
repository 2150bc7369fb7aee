"""Processes that start warm: forked from one that has imported what they need.

Most of the start of an instance or of a rank is the import of torch and transformers, some 5 s of a processor. A test
that needs many of them, to kill them, saves that; in all else they are processes as any others, each with the
command line, environment and output of its own.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import logging
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Sequence
from typing import IO, Any, NoReturn

from tests.support.readable import readable

from baton.child_process import die_with_parent
from baton.cli.supervisor import ProcessSpec
from baton.worker.process import end_process

log = logging.getLogger(__name__)

_MAX_REQUEST = 128 * 1024
_STATUS_BYTES = 4


class WarmProcess:
    """A process that was started warm; what of ``subprocess.Popen`` is needed.

    Attributes:
        pid: Its id.
        status: The pipe that its status comes from; readable from its end on.
        stdout: The pipe that its output comes from, if it is read here.
    """

    def __init__(self, pid: int, status: int) -> None:
        """Know it by its id and by the pipe that its status comes from."""
        self.pid, self.status = pid, status
        self.stdout: IO[bytes] | None = None
        weakref.finalize(self, os.close, status)
        self._lock = threading.Lock()
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return its exit status, negative for a signal, or ``None`` while it runs."""
        with self._lock:
            if self._code is None and readable(self.status, timeout_s=0):
                told = os.read(self.status, _STATUS_BYTES)
                # Nothing: whoever would have told was killed, and its children with it.
                self._code = int.from_bytes(told, "little", signed=True) if told else -signal.SIGKILL
            return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end and return its exit status.

        Raises:
            subprocess.TimeoutExpired: It runs on.
        """
        if self.poll() is None:
            readable(self.status, timeout_s=timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it still runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # its end is about to be told
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End it by SIGKILL."""
        self.send_signal(signal.SIGKILL)


class WarmStarter:
    """Starts processes as forks of one that has imported modules already.

    Args:
        modules: What to import.
    """

    def __init__(self, *modules: str) -> None:
        self._modules, self._lock = modules, threading.Lock()
        self._line, self._server = self._launch()

    def _launch(self) -> tuple[socket.socket, subprocess.Popen[bytes]]:
        line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", "tests.support.servers.warm", str(theirs.fileno()), *self._modules]
            return line, subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True)

    def start(
        self, module: str, args: Sequence[str], *, env: dict[str, str] | None = None, output: int = 1, errors: int = 2,
        keep: int | None = None,
    ) -> WarmProcess:  # fmt: skip
        """Run a module as ``python -m`` would.

        Args:
            module: Its name.
            args: Its command line.
            env: Its environment; default: this process's.
            output: File descriptor that becomes its standard output.
            errors: That becomes its standard error.
            keep: One that it has under the same number.

        Raises:
            RuntimeError: There is no process to fork from, not even a new one.
        """
        request = {"module": module, "args": list(args), "env": dict(os.environ if env is None else env), "keep": keep}
        status, theirs = os.pipe()
        try:
            descriptors = [theirs, output, errors, *([] if keep is None else [keep])]
            with self._lock:
                pid = self._ask(json.dumps(request).encode(), descriptors)
                if pid == 0:  # somebody killed it: whoever started before is lost, but not who starts now
                    self._line.close()
                    log.warning("the process that others are forked from ended with status %d", self._server.wait())
                    self._line, self._server = self._launch()
                    pid = self._ask(json.dumps(request).encode(), descriptors)
        finally:
            os.close(theirs)
        if pid == 0:
            os.close(status)
            raise RuntimeError("the process that others are forked from ends at once")
        return WarmProcess(pid, status)

    def _ask(self, request: bytes, descriptors: list[int]) -> int:
        """Have a process forked; returns its id, or 0 if there is nobody to fork it."""
        try:
            socket.send_fds(self._line, [request], descriptors)
            return int.from_bytes(self._line.recv(_STATUS_BYTES), "little")
        except (BrokenPipeError, ConnectionResetError):
            return 0

    def spawn(self, spec: ProcessSpec, env: dict[str, str]) -> WarmProcess:
        """Start what a spec says, for :class:`baton.cli.supervisor.Supervisor`."""
        output, theirs = os.pipe()
        try:
            process = self.start(spec.module, spec.args, env=env, output=theirs, errors=theirs)
        finally:
            os.close(theirs)
        process.stdout = os.fdopen(output, "rb")
        return process

    def close(self) -> None:
        """End what was started and still runs, and the process that it was forked from."""
        self._line.close()
        self._server.wait()


def serve(line: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork whatever is asked for and tell how it ends; returns in each fork, with what it is to do."""
    children: dict[int, int] = {}
    awake, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    while True:
        ready = readable(line.fileno(), awake)
        if awake in ready:
            os.read(awake, 4096)
            _reap(children)
        if line.fileno() not in ready:
            continue
        message, descriptors, _, _ = socket.recv_fds(line, _MAX_REQUEST, 4)
        if not message:
            for pid in children:
                os.kill(pid, signal.SIGKILL)
            end_process(0)
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for descriptor in (awake, wakes, *children.values(), descriptors[0]):
                os.close(descriptor)
            line.close()
            return json.loads(message), descriptors[1:]
        children[pid] = descriptors[0]
        for descriptor in descriptors[1:]:
            os.close(descriptor)
        line.send(pid.to_bytes(_STATUS_BYTES, "little"))


def _reap(children: dict[int, int]) -> None:
    for pid, status in list(children.items()):
        ended, how = os.waitpid(pid, os.WNOHANG)
        if ended:
            del children[pid]
            code = os.waitstatus_to_exitcode(how)
            try:
                os.write(status, code.to_bytes(_STATUS_BYTES, "little", signed=True))
            except BrokenPipeError:  # nobody wants to know
                continue
            finally:
                os.close(status)


def become(request: dict[str, Any], descriptors: list[int]) -> NoReturn:
    """Be the process that was asked for, to its end."""
    os.setsid()
    die_with_parent(signal.SIGTERM)
    inputs = os.open(os.devnull, os.O_RDONLY)
    for old, new in ((inputs, 0), (descriptors[0], 1), (descriptors[1], 2)):
        os.dup2(old, new)
        os.close(old)
    if request["keep"] is not None and descriptors[2] != request["keep"]:
        os.dup2(descriptors[2], request["keep"])
        os.close(descriptors[2])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv = [request["module"], *request["args"]]
    sys.modules.pop(request["module"], None)  # it runs as __main__, and is nobody else's
    try:
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        end_process(end.code if isinstance(end.code, int) else int(end.code is not None))
    except BaseException:
        traceback.print_exc()
        end_process(1)
    end_process(0)


def main(argv: Sequence[str]) -> NoReturn:
    """Import what the command line names, then fork whatever the other end of the inherited socket asks for."""
    # Not die_with_parent: the kernel means the thread that started us, which may end long before its process does. When
    # the process ends, so does the line.
    line = socket.socket(fileno=int(argv[1]))
    for module in argv[2:]:
        importlib.import_module(module)
    gc.freeze()  # no collection in a fork touches, and so copies, what all of them share
    become(*serve(line))


if __name__ == "__main__":
    main(sys.argv)
