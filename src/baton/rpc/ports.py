"""Ports for processes that are told where to listen."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST = 10000
_TRIES = 1000


def free_port() -> int:
    """Return a port of 127.0.0.1 that is free now; see :func:`free_ports`."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Return distinct ports of 127.0.0.1 that are free now.

    They lie below those that the system gives to outgoing connections: between this call and the process that listens,
    a connection would take one of them sooner or later. Where too few of them are free the system's own are taken.
    """
    first = _first_ephemeral()
    with ExitStack() as held:
        ports: list[int] = []
        for _ in range(_TRIES):
            if len(ports) == count:
                break
            port = _bound(held, random.randrange(_LOWEST, first)) if first > _LOWEST else None
            if port is not None:
                ports.append(port)
        while len(ports) < count:
            port = _bound(held, 0)
            assert port is not None  # the system finds one, or raises another error
            ports.append(port)
        return ports


def _first_ephemeral() -> int:
    try:
        return int(_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0  # not Linux


def _bound(held: ExitStack, port: int) -> int | None:
    """Bind a port until ``held`` ends and return it; ``None``: it is taken."""
    sock = held.enter_context(socket.socket())
    try:
        sock.bind(("127.0.0.1", port))
    except OSError:
        if port == 0:
            raise
        return None
    return int(sock.getsockname()[1])
