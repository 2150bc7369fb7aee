"""The other host's side: a listener that starts an agent for every driver that shows the shared token."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import threading
import time

from baton.bench.kv.agents import end, spawn
from baton.errors import QueueFullError
from baton.kv_transfer.protocol.connect import accept_stream, bind_tcp, close_listener, join_address
from baton.kv_transfer.protocol.deadline import Wait
from baton.kv_transfer.protocol.frames import send_error
from baton.kv_transfer.protocol.handshake import HANDSHAKE_S, greet_or_refuse
from baton.kv_transfer.protocol.sockets import Stream

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
