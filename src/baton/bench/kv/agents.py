"""The driver's hold on its agents: child processes here, or agents that a listener on another host starts."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any

from baton.bench.kv.control import Fields, Line, unwrap
from baton.errors import BatonError, PipeClosedError, TransferError
from baton.kv_transfer.protocol.connect import connect_tcp
from baton.kv_transfer.protocol.deadline import Wait
from baton.kv_transfer.protocol.handshake import PURPOSE_MESSAGES, greet_as_client
from baton.kv_transfer.protocol.sockets import Stream

CONNECT_S = 10.0
START_S = 60.0
"""Seconds that an agent has to come up: it may import a big library first."""
OPEN_S = 300.0
"""Seconds to allocate and fill an arena, on a slow machine too."""
_END_S = 5.0
_TAIL_BYTES = 2000


class Agent:
    """One agent; orders are answered in turn.

    Args:
        name: For error messages.
        line: Its control line.
    """

    def __init__(self, name: str, line: Line) -> None:
        self.name, self._line = name, line

    def tell(self, do: str, **fields: object) -> None:
        """Send an order; :meth:`answer` gets what comes of it."""
        try:
            self._line.send({"do": do, **fields})
        except PipeClosedError as error:
            raise self._gone(error) from error

    def answer(self, timeout_s: float) -> Fields:
        """Wait for an order's answer.

        Raises:
            BatonError: The agent refused or failed; or it is gone.
        """
        try:
            answer = self._line.recv(timeout_s)
        except PipeClosedError as error:
            raise self._gone(error) from error
        return unwrap(answer)  # may be a closed pipe too: one of the agent's own

    def ask(self, do: str, timeout_s: float = OPEN_S, **fields: object) -> Fields:
        """Send an order and wait for its answer."""
        self.tell(do, **fields)
        return self.answer(timeout_s)

    def close(self) -> None:
        """Let it go."""
        self._line.close()

    def last_words(self) -> str:
        """What it wrote before it ended, as far as it is known."""
        return ""

    def _gone(self, error: BatonError) -> BatonError:
        # An agent's own refusals come as answers; here its line broke.
        words = self.last_words()
        return TransferError(f"{self.name} is gone ({error.message})" + (f": {words}" if words else ""))


class LocalAgent(Agent):
    """A child process of this one.

    Args:
        name: For error messages.
        host: Address that its sources bind to.
        token_file: File with the shared token; empty: none.
        env: Variables to set for it.
        module: What to run.
    """

    def __init__(
        self,
        name: str,
        *,
        host: str = "127.0.0.1",
        token_file: str = "",
        env: Mapping[str, str] | None = None,
        module: str = "baton.bench.kv.agent",
    ) -> None:
        mine, theirs = socket.socketpair()
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the agent
        try:
            self._process = spawn(theirs, self._output, host=host, token_file=token_file, env=env, module=module)
        except BaseException:
            mine.close()
            self._output.close()
            raise
        finally:
            theirs.close()
        super().__init__(name, Line(Stream(mine, peer=name)))

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def close(self) -> None:
        """Close its line, and see that it ends."""
        super().close()
        end(self._process)
        self._output.close()

    def last_words(self) -> str:
        """The end of what it wrote."""
        with contextlib.suppress(subprocess.TimeoutExpired):  # still running: then what it wrote so far
            self._process.wait(1.0)
        size = self._output.seek(0, os.SEEK_END)
        self._output.seek(max(0, size - _TAIL_BYTES))
        return self._output.read().decode(errors="replace").strip()


def spawn(
    line: socket.socket,
    output: IO[bytes] | None,
    *,
    host: str,
    token_file: str,
    env: Mapping[str, str] | None = None,
    module: str = "baton.bench.kv.agent",
) -> subprocess.Popen[bytes]:
    """Start an agent process on one end of a socket; its session is its own, so that a Ctrl-C reaches only its driver.

    It must be called on the main thread: the kernel ends the child with the thread that started it.
    """
    variables = ["env", *(f"{name}={value}" for name, value in env.items())] if env else []
    arguments = ["--fd", str(line.fileno()), "--parent", str(os.getpid()), "--host", host]
    if token_file:
        arguments += ["--token-file", token_file]
    return subprocess.Popen(
        [*variables, sys.executable, "-m", module, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=output if output is not None else subprocess.DEVNULL,
        stderr=subprocess.STDOUT if output is not None else None,
        pass_fds=[line.fileno()],
        start_new_session=True,
    )


def end(process: subprocess.Popen[bytes]) -> None:
    """Wait for a process whose line is closed; kill it if it does not end."""
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(_END_S)


def connect_agent(name: str, address: str, token: str | None) -> tuple[Agent, str]:
    """Have a listener on another host start an agent; returns it, and this machine's address as that host sees it.

    Raises:
        PipeClosedError: Nobody listens there.
        UnauthenticatedError: The tokens differ.
    """
    wait = Wait(time.monotonic() + CONNECT_S)
    stream = connect_tcp(address, wait)
    try:
        greet_as_client(stream, token, wait, purpose=PURPOSE_MESSAGES, facts=None)
        # The agent's process says hello once it is up; until then nobody reads the line.
        return Agent(name, Line(stream)), str(stream.sock.getsockname()[0])
    except BaseException:
        stream.close()
        raise


def ask_all(agents: Sequence[Agent], do: str, timeout_s: float, fields: Sequence[Mapping[str, Any]]) -> list[Fields]:
    """Give each agent its order at once and collect all answers.

    Raises:
        BatonError: The first failure, after every agent has answered.
    """
    for agent, own in zip(agents, fields, strict=True):
        agent.tell(do, **own)
    answers: list[Fields] = []
    failure: BatonError | None = None
    for agent in agents:
        try:
            answers.append(agent.answer(timeout_s))
        except BatonError as error:
            failure = failure or error
    if failure is not None:
        raise failure
    return answers
