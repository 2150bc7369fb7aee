"""Processes that a benchmark's driver orders about: children of its own, or agents that a listener elsewhere starts.

The two speak over a control line: JSON objects, one a line, over a socket whose peer was authenticated. An agent
answers each order (``{"do": NAME, ...}``) with ``{"ok": {...}}``, or with ``{"error": ...}`` as the transport writes
errors. Objects are bounded, parsed by a parser without code, and every field is checked against its declared type.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from baton.child_process import ChildProcess, die_with_parent, start_python
from baton.errors import BatonError, InvalidRequestError, PipeClosedError, QueueFullError, TransferError
from baton.kv_transfer.streams import Stream, Wait, accept_stream, bind_tcp, close_listener, connect_tcp
from baton.kv_transfer.wire import (
    HANDSHAKE_S,
    PURPOSE_MESSAGES,
    BadFrameError,
    error_from_fields,
    greet_as_client,
    greet_or_refuse,
    parse_object,
)
from baton.rpc.addresses import join_address
from baton.rpc.service_token import Token, read_token

log = logging.getLogger(__name__)
T = TypeVar("T")
Fields = dict[str, Any]
Order = Callable[..., object]
"""Does what is ordered; its parameters are the order's fields, checked against their types."""
MAX_CONTROL_BYTES = 1 << 20
MAX_AGENTS = 64
IDLE_S = 3600.0
"""Seconds that an agent waits for its driver's next order."""
ANSWER_S = 10.0
"""Seconds to hand an answer over."""
CONNECT_S = 10.0
OPEN_S = 300.0
"""Default seconds for an order: an agent may fill an arena on a slow machine."""
_END_S = 5.0
_LAST_WORDS_S = 1.0
_CHUNK_BYTES = 1 << 16


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """An object that goes over a control line."""


def parse(kind: type[T], fields: object) -> T:
    """Rebuild an object from JSON fields, strictly: of the declared types, and for a :class:`Message` no other field.

    Raises:
        BadFrameError: Names what is wrong.
    """
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise BadFrameError(f"a control message is malformed: {error}") from error


class Line:
    """A control line: JSON objects, one a line.

    Args:
        stream: A connected socket whose peer was authenticated (a handshake, or a socket inherited from the parent).
    """

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self._received = bytearray()

    @property
    def has_received(self) -> bool:
        """Whether (the beginning of) an object that :meth:`recv` has not returned was read from the socket."""
        return bool(self._received)

    def send(self, fields: Mapping[str, Any], timeout_s: float = ANSWER_S) -> None:
        """Send an object.

        Raises:
            PipeClosedError, DeadlineError: As their names say.
            InvalidRequestError: It is over the bound.
        """
        line = msgspec.json.encode(fields) + b"\n"
        if len(line) > MAX_CONTROL_BYTES:
            raise InvalidRequestError(
                f"a control message of {len(line)} bytes is over the bound of {MAX_CONTROL_BYTES}"
            )
        self.stream.send_all([line], Wait(time.monotonic() + timeout_s), "sending a control message")

    def recv(self, timeout_s: float) -> Fields:
        """Receive an object.

        Raises:
            PipeClosedError, DeadlineError: As their names say.
            BadFrameError: Something else came; over the bound the line is closed, too.
        """
        wait = Wait(time.monotonic() + timeout_s)
        searched = 0
        while (end := self._received.find(b"\n", searched)) < 0:
            if len(self._received) >= MAX_CONTROL_BYTES:
                self.close()
                raise BadFrameError(f"a control message is over the bound of {MAX_CONTROL_BYTES} bytes")
            searched = len(self._received)
            self.stream.wait_readable(wait, "waiting for a control message")
            try:
                chunk = self.stream.sock.recv(_CHUNK_BYTES)
            except OSError as error:
                raise self.stream.end_error("receiving a control message", error) from error
            if not chunk:
                raise self.stream.end_error("receiving a control message")
            self._received += chunk
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        return parse_object(line)

    def close(self) -> None:
        self.stream.close()


class Agent:
    """The driver's hold on an agent; orders are answered in turn.

    Args:
        name: For error messages.
        line: Control line to the agent.
        child: Its process, if it is one of ours.
    """

    def __init__(self, name: str, line: Line, child: ChildProcess | None = None) -> None:
        self.name = name
        self._line = line
        self._child = child

    def send_order(self, do: str, /, **fields: object) -> None:
        """Send an order; :meth:`answer` waits for its answer."""
        try:
            self._line.send({"do": do, **fields})
        except PipeClosedError as error:
            raise self._gone_error(error) from error

    def answer(self, kind: type[T], timeout_s: float) -> T:
        """Wait for an order's answer.

        Raises:
            BatonError: The agent refused or failed; or it is gone.
        """
        try:
            answer = self._line.recv(timeout_s)
        except PipeClosedError as error:
            raise self._gone_error(error) from error
        if isinstance(answer.get("error"), dict):  # may be a closed pipe too: one of the agent's own
            raise error_from_fields(answer["error"])
        return parse(kind, answer.get("ok"))

    def ask(self, do: str, kind: type[T], timeout_s: float = OPEN_S, /, **fields: object) -> T:
        """Send an order and wait for its answer."""
        self.send_order(do, **fields)
        return self.answer(kind, timeout_s)

    def close(self) -> None:
        """Close its line; see that a child ends."""
        self._line.close()
        if self._child is not None:
            self._child.stop(_END_S, None)

    def _gone_error(self, error: BatonError) -> BatonError:
        words = "" if self._child is None else self._child.last_words(_LAST_WORDS_S)
        return TransferError(f"{self.name} is gone ({error.message})" + (f": {words}" if words else ""))


def ask_all(
    agents: Sequence[Agent],
    do: str,
    kind: type[T],
    timeout_s: float = OPEN_S,
    /,
    *,
    each: Sequence[Mapping[str, object]] | None = None,
    **fields: object,
) -> list[T]:
    """Give each agent its order at once and collect all answers.

    Args:
        agents: Who is asked.
        do: The order.
        kind: Type of the answers.
        timeout_s: For each of them.
        each: Fields for each agent alone, in the order of ``agents``.
        fields: Fields for all agents.

    Raises:
        BatonError: The first failure, after every agent has answered.
    """
    for agent, own in zip(agents, each or [{}] * len(agents), strict=True):
        agent.send_order(do, **fields, **own)
    answers: list[T] = []
    failure: BatonError | None = None
    for agent in agents:
        try:
            answers.append(agent.answer(kind, timeout_s))
        except BatonError as error:
            failure = failure or error
    if failure is not None:
        raise failure
    return answers


def _spawn(
    line: socket.socket,
    module: str,
    *,
    host: str,
    token_file: str,
    env: Mapping[str, str] | None = None,
    output: int | None = subprocess.PIPE,
) -> ChildProcess:
    arguments = ["--fd", str(line.fileno()), "--parent", str(os.getpid()), "--host", host]
    if token_file:
        arguments += ["--token-file", token_file]
    variables = {**os.environ, **(env or {})}
    return ChildProcess(start_python(module, arguments, env=variables, pass_fds=[line.fileno()], output=output))


def start_agent(
    name: str, module: str, *, host: str = "127.0.0.1", token_file: str = "", env: Mapping[str, str] | None = None
) -> Agent:
    """Start an agent here; it ends with the thread that calls this, so call it on the main thread.

    Args:
        name: For error messages.
        module: Module to run, which calls :func:`serve_agent`.
        host: Address that its sockets bind to.
        token_file: File with the shared token; empty: none.
        env: Variables to set for it.
    """
    driver_end, agent_end = socket.socketpair()
    try:
        child = _spawn(agent_end, module, host=host, token_file=token_file, env=env)
    except BaseException:
        driver_end.close()
        raise
    finally:
        agent_end.close()
    return Agent(name, Line(Stream(driver_end, peer=name)), child)


def connect_agent(name: str, address: str, token: Token | None) -> tuple[Agent, str]:
    """Have a listener on another host start an agent; returns it, and this machine's address as that host sees it.

    Raises:
        PipeClosedError: No process listens there.
        UnauthenticatedError: The tokens differ.
    """
    wait = Wait(time.monotonic() + CONNECT_S)
    stream = connect_tcp(address, wait)
    try:
        greet_as_client(stream, token, wait, purpose=PURPOSE_MESSAGES, facts=None)
        # The agent's process says hello once it is up; until then the line is not read.
        return Agent(name, Line(stream)), str(stream.sock.getsockname()[0])
    except BaseException:
        stream.close()
        raise


class Listener:
    """Listens for drivers; each connection becomes the control line of an agent process of its own.

    Args:
        host: Address to bind, and that the agents' sockets bind to.
        port: 0: any free one.
        token: Shared token.
        token_file: File with the token, for the agents.
        module: Module that agents run.

    Raises:
        ConfigError: No token off loopback, or the address cannot be bound.
    """

    def __init__(self, host: str, port: int, token: Token | None, token_file: str, module: str) -> None:
        self._host = host
        self._token = token
        self._token_file = token_file
        self._module = module
        self._socket = bind_tcp(host, port, token)
        self._socket.listen()
        self.address = join_address(host, self._socket.getsockname()[1])
        self._agents: dict[int, ChildProcess] = {}
        self._lock = threading.Lock()

    def serve(self) -> None:
        """Accept drivers until interrupted. Must run on the main thread (agents end with the thread that made them).

        Raises:
            PipeClosedError: The listener was closed.
        """
        while True:
            stream = accept_stream(self._socket, Wait(), "a driver")
            if not greet_or_refuse(stream, self._token, Wait(time.monotonic() + HANDSHAKE_S)):
                continue
            with self._lock:
                room = len(self._agents) < MAX_AGENTS
            if room:
                self._start(stream)
            else:
                self._refuse(stream)

    @staticmethod
    def _refuse(stream: Stream) -> None:
        line = Line(stream)
        with contextlib.suppress(PipeClosedError):  # a driver that is gone needs no answer
            line.send(_error_answer(QueueFullError("too many agents run here")), timeout_s=1.0)
        line.close()

    def close(self) -> None:
        """Stop listening and end the agents."""
        close_listener(self._socket)
        with self._lock:
            agents = list(self._agents.values())
        for agent in agents:
            agent.send_signal(signal.SIGTERM)
        for agent in agents:
            agent.stop(_END_S, None)

    def _start(self, stream: Stream) -> None:
        agent = _spawn(stream.sock, self._module, host=self._host, token_file=self._token_file, output=None)
        # Ours is closed without a shutdown, which would end the agent's copy too.
        os.close(stream.sock.detach())
        pid = agent.pid
        with self._lock:
            self._agents[pid] = agent
        log.info("agent %d serves a driver", pid)

        def reap() -> None:
            agent.wait()
            with self._lock:
                self._agents.pop(pid, None)

        threading.Thread(target=reap, name="bench-reap", daemon=True).start()


class OrderHandler(Protocol):
    """The part of an agent process that carries out orders."""

    def orders(self) -> Mapping[str, Order]:
        """Return what it can be ordered to do, by name."""
        ...

    def close(self) -> None: ...


def serve_agent(make: Callable[[str, Token | None, Line], OrderHandler]) -> int:
    """Be an agent process: serve one driver on the control line that the command line names; returns the exit status.

    It ends with that line, or with its parent.

    Args:
        make: Makes what the agent can do, from the host to bind to, the shared token and the control line.
    """
    parser = argparse.ArgumentParser(description="A benchmark's agent.")
    parser.add_argument("--fd", type=int, required=True, help="the control line's socket")
    parser.add_argument("--parent", type=int, required=True, help="process id of the parent")
    parser.add_argument("--host", default="127.0.0.1", help="address that sockets bind to")
    parser.add_argument("--token-file", default="", help="file with the shared token")
    args = parser.parse_args()
    die_with_parent(signal.SIGKILL)
    if os.getppid() != args.parent:  # it died before we could ask to be told
        return 1
    line = Line(Stream(socket.socket(fileno=args.fd), peer="the driver"))
    handler = make(args.host, read_token(args.token_file), line)
    try:
        serve_orders(line, handler.orders())
    except BatonError as error:
        if error.code != "pipe_closed":
            sys.stderr.write(f"baton bench: {error.message}\n")
            return 1
    finally:
        handler.close()
        line.close()
    return 0


def serve_orders(line: Line, orders: Mapping[str, Order]) -> None:
    """Answer orders until the driver hangs up.

    Raises:
        TransferError: The driver broke the protocol, or sent nothing for ``IDLE_S``.
    """
    while True:
        fields = line.recv(IDLE_S)
        order = orders.get(str(fields.pop("do", "")))
        try:
            if order is None:
                raise BadFrameError("an order that this agent does not know", field="do")
            answer: Fields = {"ok": _follow(order, fields) or {}}
        except BatonError as error:
            answer = _error_answer(error)
        line.send(answer)


def _error_answer(error: BatonError) -> Fields:
    return {"error": {"code": error.code, "message": error.message[:2000], "field": error.field}}


def _follow(order: Order, fields: Fields) -> object:
    wanted = typing.get_type_hints(order, include_extras=True)
    wanted.pop("return", None)
    if fields.keys() != wanted.keys():
        raise BadFrameError(f"an order of {', '.join(wanted) or 'nothing'} has other fields")
    return order(**{name: parse(kind, fields[name]) for name, kind in wanted.items()})
