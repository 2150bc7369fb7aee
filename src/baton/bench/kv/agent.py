"""A process that holds sources and targets for a driver: ``python -m baton.bench.kv.agent --fd N``.

It is started with its control line as an inherited socket, and ends with that line, or with its parent.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import logging
import os
import platform
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import psutil

from baton.bench.kv.agents import end, spawn
from baton.bench.kv.control import Fields, Handler, Line, from_fields, serve_orders, to_fields
from baton.bench.kv.source import Source
from baton.bench.kv.specs import OverlapSpec, RunSpec, SourceSpec, TargetSpec
from baton.bench.kv.target import Target
from baton.errors import BatonError, InvalidRequestError, QueueFullError
from baton.kv_transfer.protocol.connect import accept_stream, bind_tcp, close_listener, join_address
from baton.kv_transfer.protocol.deadline import Wait
from baton.kv_transfer.protocol.frames import send_error
from baton.kv_transfer.protocol.handshake import HANDSHAKE_S, greet_or_refuse
from baton.kv_transfer.protocol.sockets import Stream
from baton.rpc.auth import read_token
from baton.version import __version__

_PR_SET_PDEATHSIG = 1
MAX_SAMPLES = 20_000


class Handlers(Protocol):
    """What an agent process can be made of."""

    def handlers(self) -> Mapping[str, Handler]:
        """Return the orders by name."""
        ...

    def close(self) -> None:
        """Close what is open."""
        ...


class Agent:
    """What an agent can be ordered to do.

    Args:
        host: Address that sources bind to.
        token: Shared token.
    """

    def __init__(self, host: str, token: str | None) -> None:
        self._host, self._token = host, token
        self._source: Source | None = None
        self._target: Target | None = None

    def handlers(self) -> Mapping[str, Handler]:
        """Return the orders by name."""
        return {
            "hello": self._hello,
            "open_source": self._open_source,
            "open_target": self._open_target,
            "run": lambda order: self._the_target().run(from_fields(RunSpec, order.get("run"))),
            "overlap": lambda order: self._the_target().overlap(from_fields(OverlapSpec, order.get("overlap"))),
            "reads": self._reads,
            "fetches": self._fetches,
            "round_trips": self._round_trips,
            "cpu": lambda _: {"cpu": time.process_time()},
            "close": self._close,
        }

    def close(self) -> None:
        """Close what is open."""
        target, self._target = self._target, None
        source, self._source = self._source, None
        for part in (target, source):
            if part is not None:
                part.close()

    def _hello(self, _: Fields) -> Fields:
        return {
            "version": __version__,
            "pid": os.getpid(),
            "host": platform.node(),
            "boot_id": Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip(),
            "cpus": os.cpu_count() or 0,
            "arch": platform.machine(),
            "kernel": platform.release(),
            "memory": psutil.virtual_memory().total,
            "load": round(os.getloadavg()[0], 2),
        }

    def _open_source(self, order: Fields) -> Fields:
        self._close({})
        self._source = Source(from_fields(SourceSpec, order.get("source")), self._host, self._token)
        return {"facts": to_fields(self._source.facts())}

    def _open_target(self, order: Fields) -> Fields:
        self._close({})
        self._target = Target(from_fields(TargetSpec, order.get("target")), self._token)
        return {}

    def _reads(self, order: Fields) -> Fields:
        return {"seconds": self._the_target().reads(str(order.get("kind")), *_bounds(order))}

    def _fetches(self, order: Fields) -> Fields:
        return {"seconds": self._the_target().fetches(str(order.get("kind")), *_bounds(order))}

    def _round_trips(self, order: Fields) -> Fields:
        size = order.get("size")
        if type(size) is not int or not 0 < size <= 1 << 16:
            raise InvalidRequestError("round trips are for sizes up to 64 KiB", field="size")
        return {"seconds": self._the_target().round_trips(size, *_bounds(order))}

    def _close(self, _: Fields) -> Fields:
        self.close()
        return {}

    def _the_target(self) -> Target:
        if self._target is None:
            raise InvalidRequestError("no target is open", field="do")
        return self._target


def _bounds(order: Fields) -> tuple[int, float]:
    count, limit_s = order.get("count"), order.get("limit_s")
    if type(count) is not int or not 0 < count <= MAX_SAMPLES or type(limit_s) is not float or not 0 < limit_s < 60:
        raise InvalidRequestError(f"count is 1 to {MAX_SAMPLES}, limit_s below 60", field="count")
    return count, limit_s


def serve_agent(argv: Sequence[str] | None, make: Callable[[str, str | None, Line], Handlers]) -> int:
    """Be an agent process: serve one driver on the control line that the command line names; returns the exit status.

    Args:
        argv: The command line.
        make: Makes what the agent can do, from the host to bind to, the shared token and the control line.
    """
    parser = argparse.ArgumentParser(prog="baton.bench.kv.agent", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="the control line's socket")
    parser.add_argument("--parent", type=int, required=True, help="process id of the parent")
    parser.add_argument("--host", default="127.0.0.1", help="address that sources bind to")
    parser.add_argument("--token-file", default="", help="file with the shared token")
    args = parser.parse_args(argv)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != args.parent:  # it died before we could ask to be told
        return 1
    line = Line(Stream(socket.socket(fileno=args.fd), peer="the driver"))
    agent = make(args.host, read_token(args.token_file), line)
    try:
        serve_orders(line, agent.handlers())
    except BatonError as error:
        return 0 if error.code == "pipe_closed" else _fail(error)
    finally:
        agent.close()
        line.close()
    return 0


def _fail(error: BatonError) -> int:
    sys.stderr.write(f"baton bench: {error.message}\n")
    return 1


def main(argv: Sequence[str] | None = None) -> int:
    """Be an agent of sources and targets; returns the exit status."""
    return serve_agent(argv, lambda host, token, _: Agent(host, token))


log = logging.getLogger(__name__)
MAX_AGENTS = 64


class Listener:
    """Listens for drivers; each connection becomes the control line of an agent process of its own.

    Args:
        host: Address to bind, and that the agents' sources bind to.
        port: 0: any free one.
        token: Shared token.
        token_file: Where it stands, for the agents.
        module: What agents run.

    Raises:
        ConfigError: No token off loopback, or the address cannot be bound.
    """

    def __init__(
        self, host: str, port: int, token: str | None, token_file: str, *, module: str = "baton.bench.kv.agent"
    ) -> None:
        self._host, self._token, self._token_file, self._module = host, token, token_file, module
        self._socket = bind_tcp(host, port, token)
        self._socket.listen()
        self.address = join_address(host, self._socket.getsockname()[1])
        self._agents: dict[int, subprocess.Popen[bytes]] = {}
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
                send_error(stream, QueueFullError("too many agents run here"), Wait(time.monotonic() + 1.0))
                stream.close()

    def close(self) -> None:
        """Stop listening and end the agents."""
        close_listener(self._socket)
        with self._lock:
            agents = list(self._agents.values())
        for process in agents:
            with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
                process.terminate()
        for process in agents:
            end(process)

    def _start(self, stream: Stream) -> None:
        process = spawn(stream.sock, None, host=self._host, token_file=self._token_file, module=self._module)
        # Ours is closed without a shutdown, which would end the agent's copy too.
        os.close(stream.sock.detach())
        with self._lock:
            self._agents[process.pid] = process
        log.info("agent %d serves a driver", process.pid)
        threading.Thread(target=self._reap, args=(process,), name="bench-reap", daemon=True).start()

    def _reap(self, process: subprocess.Popen[bytes]) -> None:
        process.wait()
        with self._lock:
            self._agents.pop(process.pid, None)


if __name__ == "__main__":
    sys.exit(main())
