"""TCP addresses: written, read, and bound with care for who may reach them."""

from __future__ import annotations

import ipaddress
import socket

from baton.errors import ConfigError, PipeClosedError


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


def bind_tcp(host: str, port: int, token: str | None, *, safe: bool = False) -> socket.socket:
    """Bind a TCP socket; ``safe``: whoever connects shows a certificate.

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


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
