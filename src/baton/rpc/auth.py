"""The shared token that services show each other, and the rule that nobody listens off loopback without one."""

from __future__ import annotations

import hmac
import ipaddress
from pathlib import Path

from baton.errors import ConfigError

HEADER = "authorization"


def read_token(path: str) -> str | None:
    """Read a token file; an empty path means no token.

    Raises:
        ConfigError: The file is missing or empty.
    """
    if not path:
        return None
    try:
        token = Path(path).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(f"cannot read the token file {path}: {error.strerror}", field="token_file") from error
    if not token:
        raise ConfigError(f"the token file {path} is empty", field="token_file")
    return token


def is_loopback(host: str) -> bool:
    """Whether a host name or address can be reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def require_safe_bind(host: str, token: str | None) -> None:
    """Refuse to listen on an address others can reach without a token.

    Raises:
        ConfigError: Off loopback and no token.
    """
    if token is None and not is_loopback(host):
        raise ConfigError(f"listening on {host}, which others can reach, needs --token-file", field="host")


def matches(token: str, header: str | bytes | None) -> bool:
    """Compare an ``authorization`` header with the token in constant time."""
    given = header.encode() if isinstance(header, str) else header or b""
    return hmac.compare_digest(given, f"Bearer {token}".encode())
