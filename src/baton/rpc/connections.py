"""Bounds the connections of a gRPC server whose peers have not authenticated.

gRPC closes connections that are idle for minutes and can bound the number of all connections, but then one client that
opens that many locks all others out. So this process's own sockets are scanned every second for connections to the
server's port without an authenticated call. Beyond a limit the oldest connection of the address with the most of them
is closed, as with the pipes. To gRPC it looks as if the peer had closed it.
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

from baton.background import keep_running

log = logging.getLogger(__name__)

MAX_UNKNOWN = 64
"""Maximum connections of one server without an authenticated call."""
_SCAN_S = 1.0
_WARNING_S = 60.0
_SCAN_SHARE = 0.01
"""Share of a processor that scans may use, however many files are open."""


@dataclass(frozen=True, slots=True)
class _Connection:
    """A socket found in a scan.

    Attributes:
        inode: Inode of the socket, which identifies it.
        peer: Address and port of the peer as gRPC writes them; empty: it is not a connection of this server.
        host: Address of the peer.
    """

    inode: int
    peer: str = ""
    host: str = ""


class ConnectionGuard:
    """Closes unauthenticated connections of a server beyond ``MAX_UNKNOWN``."""

    def __init__(self) -> None:
        self._port = 0
        self._known: set[str] = set()
        self._gone: set[str] = set()
        self._seen: dict[int, _Connection] = {}
        self._closed = 0
        self._warned_at = -_WARNING_S
        self._task: asyncio.Task[None] | None = None

    def start(self, port: int) -> None:
        """Begin to scan for connections to a port, in the running loop."""
        self._port = port
        self._task = keep_running(self._run, "connections")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def mark_known(self, context: Any) -> None:
        """Record that a call of this connection was authenticated."""
        self._known.add(context.peer())

    def scan(self) -> float:
        """Close connections beyond the limit; returns the processor time of the scan in seconds. Blocks meanwhile."""
        began = time.thread_time()
        before = self._seen
        current = dict[int, _Connection]()
        for fd in _descriptors():
            with contextlib.suppress(OSError):  # it was closed meanwhile
                status = os.fstat(fd)
                if stat.S_ISSOCK(status.st_mode):
                    seen = before.get(fd)
                    same = seen is not None and seen.inode == status.st_ino
                    current[fd] = seen if seen is not None and same else self._examine(fd, status.st_ino)
        self._seen = {fd: each for fd, each in before.items() if current.get(fd) is each} | current  # the oldest first
        known = set(self._known)
        self._forget(known - {each.peer for each in current.values()})
        unknown = {fd: each for fd, each in self._seen.items() if each.peer and each.peer not in known}
        hosts = Counter(each.host for each in unknown.values())
        for _ in range(len(unknown) - MAX_UNKNOWN):
            ((busiest, _),) = hosts.most_common(1)
            oldest = next(fd for fd, each in unknown.items() if each.host == busiest)
            hosts[busiest] -= 1
            self._hang_up(oldest, unknown.pop(oldest))
        return time.thread_time() - began

    def _forget(self, gone: set[str]) -> None:
        """Forget peers that two scans did not find: a connection may be opened, and authenticate, during one scan."""
        self._known -= gone & self._gone
        self._gone = gone

    async def _run(self) -> None:
        pause_s = _SCAN_S
        while True:
            await asyncio.sleep(pause_s)
            pause_s = max(_SCAN_S, await asyncio.to_thread(self.scan) / _SCAN_SHARE)

    def _examine(self, fd: int, inode: int) -> _Connection:
        sock = socket.socket(fileno=fd)
        try:
            if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.getsockname()[1] == self._port:
                host, port = sock.getpeername()[:2]  # a listening socket has no peer: OSError
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
        if time.monotonic() >= self._warned_at + _WARNING_S:
            self._warned_at = time.monotonic()
            log.warning(
                "%d gRPC connections that had proved nothing were closed, to make room for others: the latest from %s",
                self._closed,
                connection.host,
            )
            self._closed = 0


def max_connections() -> int:
    """Return the maximum connections of a gRPC server: a quarter of the process's file descriptors."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if most == resource.RLIM_INFINITY else max(MAX_UNKNOWN, most // 4)


def _descriptors() -> Iterable[int]:
    """Return this process's descriptors; listing them needs one, so where none is left all numbers are tried."""
    try:
        return [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        return range(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def _peer(host: str, port: int) -> str:
    """Return an address and port as gRPC writes them."""
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else address
    return f"ipv4:{mapped}:{port}" if mapped is not None else f"ipv6:{quote(f'[{host}]', safe=':')}:{port}"
