"""Addresses of services, and why a connection to one is not there, in words that say nothing about this machine."""

from __future__ import annotations

import ipaddress
import socket
import ssl

_REASONS: tuple[tuple[type[BaseException], str], ...] = (
    (ConnectionRefusedError, "nothing listens there"),
    (ConnectionResetError, "it was reset"),
    (BrokenPipeError, "it was closed"),
    (ConnectionAbortedError, "it was closed"),
    (TimeoutError, "it took too long"),
    (socket.gaierror, "its name is not known"),
    (ValueError, "it is no address"),
)


def join_address(host: str, port: int) -> str:
    """Write ``host:port``, IPv6 hosts in brackets."""
    return f"[{host.strip('[]')}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether a host name or address, IPv6 with or without brackets, can be reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def connection_reason(error: BaseException | None) -> str:
    """Return why a connection broke or was not made; ``None``: its other end closed it.

    The operating system's own words are for logs: clients of a router see this text.
    """
    if error is None:
        return "it was closed"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed: {getattr(error, 'verify_message', '') or error.reason or 'the other end gave up'}"
    return next((text for kind, text in _REASONS if isinstance(error, kind)), "it failed")
