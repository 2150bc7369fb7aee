"""TCP and Unix connections: addresses, listening (off loopback only with a token), connecting within a deadline."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import math
import os
import select
import socket
import time
from typing import Any

from baton.errors import ConfigError, PipeClosedError
from baton.kv_transfer.protocol.deadline import Wait
from baton.kv_transfer.protocol.sockets import Stream
from baton.rpc.service_token import Token

_FULL_S = 0.01


def split_address(address: str) -> tuple[str, int]:
    """Split ``host:port``.

    Raises:
        PipeClosedError: It is not such an address.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise PipeClosedError(f"{address!r} is not host:port")
    return host.strip("[]"), int(port)


def join_address(host: str, port: int) -> str:
    """Write ``host:port``, IPv6 hosts in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def bind_tcp(host: str, port: int, token: Token | None, *, safe: bool = False) -> socket.socket:
    """Bind a TCP socket; ``safe``: peers show a certificate.

    Raises:
        ConfigError: No token off loopback, or the address cannot be bound.
    """
    if token is None and not safe and not _is_loopback(host):
        raise ConfigError(f"listening on {host} needs a shared token: only loopback goes without", field="token")
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, proto)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}: {error}", field="host") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}", field="port") from error
    return listener


def accept_stream(listener: socket.socket, wait: Wait, peer: str) -> Stream:
    """Accept a connection.

    Raises:
        DeadlineError, CancelledError: As their names say.
        PipeClosedError: The listener was closed.
    """
    while True:
        try:
            listener.settimeout(wait.nap())
            return Stream(listener.accept()[0], peer=peer)
        except (TimeoutError, BlockingIOError):  # the latter: a time-out of 0
            wait.check("waiting for a pipe")
        except OSError as error:
            raise PipeClosedError(f"the listener was closed ({error.strerror or error})") from error


def close_listener(listener: socket.socket) -> None:
    """Stop listening and wake a blocked ``accept``."""
    with contextlib.suppress(OSError):  # Linux wakes accept(), and then says that the socket was not connected
        listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def connect_tcp(address: str, wait: Wait) -> Stream:
    """Connect to ``host:port`` (IPv6 hosts in brackets).

    Raises:
        PipeClosedError: Nothing listens there.
        DeadlineError: It took too long.
    """
    host, port = split_address(address)
    wait.check(f"connecting to {address}")
    reason = "it has no address"
    try:
        for family, kind, proto, _, target in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            sock = socket.socket(family, kind, proto)
            try:
                code = _connect(sock, target, wait)
            except BaseException:
                sock.close()
                raise
            if code == 0:
                return Stream(sock, peer=address)
            sock.close()
            reason = os.strerror(code)
    except OSError as error:
        reason = str(error.strerror or error)
    raise PipeClosedError(f"cannot connect to {address}: {reason}")


def _connect(sock: socket.socket, target: Any, wait: Wait) -> int:
    """Connect without blocking past the wait; returns the error number, 0 for success."""
    sock.setblocking(False)
    code = sock.connect_ex(target)
    if code != errno.EINPROGRESS:
        return code
    poller = select.poll()
    poller.register(sock, select.POLLOUT)
    while True:
        nap = wait.nap()
        if poller.poll(None if nap is None else math.ceil(nap * 1000)):
            return sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        wait.check("connecting")


def connect_unix(name: str, wait: Wait) -> Stream:
    """Connect to an abstract Unix socket (without its leading NUL).

    Raises:
        PipeClosedError: Nothing listens there.
        DeadlineError: It took too long.
    """
    wait.check(f"connecting to @{name}")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        while True:
            sock.settimeout(wait.remaining())
            try:
                sock.connect("\0" + name)
                break
            except BlockingIOError:  # more wait to be accepted than may: it soon takes more
                time.sleep(_FULL_S)
                wait.check(f"connecting to @{name}")
    except BaseException as error:
        sock.close()
        if not isinstance(error, OSError):
            raise
        if isinstance(error, TimeoutError):
            wait.check(f"connecting to @{name}")
            raise PipeClosedError(f"@{name} did not answer") from error
        raise PipeClosedError(f"cannot connect to @{name}: {error.strerror or error}") from error
    return Stream(sock, peer=f"@{name}")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
