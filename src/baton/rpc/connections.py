"""Bounds the connections of a gRPC server whose other ends have not shown who they are.

gRPC closes what is idle for minutes and can bound the number of all connections, but then whoever opens that many keeps
everybody else out. So a look at this process's own sockets, every second, finds those of the server's port over which
no call was let through yet. Of more than some the oldest gives way, of the address that has most of them, as with the
pipes. gRPC hears of it as if the other end had hung up.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import resource
import socket
import stat
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

log = logging.getLogger(__name__)

MAX_UNKNOWN = 64
"""Connections of one server over which no call was let through yet."""
_LOOK_S = 1.0
_COMPLAINTS_S = 60.0
_LOOK_SHARE = 0.01
"""Of a processor, for looks, however many files are open."""


@dataclass(frozen=True, slots=True)
class _Connection:
    """One that was seen.

    Attributes:
        inode: Which socket the descriptor was.
        peer: As gRPC writes it; empty: none of this server's.
        host: Its address.
    """

    inode: int
    peer: str = ""
    host: str = ""


class ConnectionGuard:
    """Closes connections of a server that prove nothing, where there are too many of them.

    Args:
        port: Of the server.
        most: How many there may be.
    """

    def __init__(self, port: int, most: int = MAX_UNKNOWN) -> None:
        self._port = port
        self._most = most
        self._known: set[str] = set()
        self._gone: set[str] = set()
        self._seen: dict[int, _Connection] = {}
        self._closed = 0
        self._complained_at = -_COMPLAINTS_S
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to look, in the running loop."""
        self._task = asyncio.create_task(self._run(), name="connections")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def know(self, context: Any) -> None:
        """Take note that a call was let through."""
        self._known.add(context.peer())

    def look(self) -> float:
        """Close what is too much; returns the seconds of processor time that this took. Blocks for a moment."""
        began = time.thread_time()
        before = self._seen
        found = dict[int, _Connection]()
        for fd in _descriptors():
            with contextlib.suppress(OSError):  # it was closed meanwhile
                status = os.fstat(fd)
                if stat.S_ISSOCK(status.st_mode):
                    seen = before.get(fd)
                    same = seen is not None and seen.inode == status.st_ino
                    found[fd] = seen if seen is not None and same else self._examine(fd, status.st_ino)
        self._seen = {fd: each for fd, each in before.items() if found.get(fd) is each} | found  # the oldest first
        known = set(self._known)
        self._forget(known - {each.peer for each in found.values()})
        unknown = {fd: each for fd, each in self._seen.items() if each.peer and each.peer not in known}
        hosts = Counter(each.host for each in unknown.values())
        for _ in range(len(unknown) - self._most):
            ((busiest, _),) = hosts.most_common(1)
            oldest = next(fd for fd, each in unknown.items() if each.host == busiest)
            hosts[busiest] -= 1
            self._hang_up(oldest, unknown.pop(oldest))
        return time.thread_time() - began

    def _forget(self, gone: set[str]) -> None:
        """Forget who was gone twice: a connection may have come, and called, during one look."""
        self._known -= gone & self._gone
        self._gone = gone

    async def _run(self) -> None:
        pause_s = _LOOK_S
        while True:
            await asyncio.sleep(pause_s)
            pause_s = max(_LOOK_S, await asyncio.to_thread(self.look) / _LOOK_SHARE)

    def _examine(self, fd: int, inode: int) -> _Connection:
        sock = socket.socket(fileno=fd)
        try:
            if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.getsockname()[1] == self._port:
                host, port = sock.getpeername()[:2]  # of what listens there is none: an OSError
                return _Connection(inode, _peer(host, port), host)
        finally:
            sock.detach()
        return _Connection(inode)

    def _hang_up(self, fd: int, connection: _Connection) -> None:
        with contextlib.suppress(OSError):
            if os.fstat(fd).st_ino != connection.inode:
                return
            sock = socket.socket(fileno=fd)
            try:
                sock.shutdown(socket.SHUT_RDWR)
            finally:
                sock.detach()
            self._closed += 1
        if time.monotonic() >= self._complained_at + _COMPLAINTS_S:
            self._complained_at = time.monotonic()
            log.warning(
                "%d gRPC connections that had proved nothing were closed, to make room for others: the latest from %s",
                self._closed,
                connection.host,
            )
            self._closed = 0


def max_connections() -> int:
    """Return how many connections a gRPC server takes at once: a quarter of what may be open."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if most == resource.RLIM_INFINITY else max(MAX_UNKNOWN, most // 4)


def _descriptors() -> Iterable[int]:
    """Return this process's descriptors; to list them takes one, so where none is left they are tried in turn."""
    try:
        return [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        return range(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def _peer(host: str, port: int) -> str:
    """Return an address as gRPC writes it."""
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else address
    return f"ipv4:{mapped}:{port}" if mapped is not None else f"ipv6:{quote(f'[{host}]', safe=':')}:{port}"
