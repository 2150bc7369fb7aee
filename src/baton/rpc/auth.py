"""The shared token that services show each other, and the rule that nobody listens off loopback without one or TLS."""

from __future__ import annotations

import hmac
import ipaddress
import logging
from collections.abc import Callable
from typing import Protocol, TypeAlias

from baton.config.pipes import clear_pipes
from baton.config.secrets import read_secret_file
from baton.errors import ConfigError
from baton.rpc.tls import Tls

log = logging.getLogger(__name__)

_LEAST_CHARACTERS, _LEAST_DIFFERENT = 16, 6
HEADER = "authorization"


def read_token(path: str) -> str | None:
    """Read a token file; an empty path means no token. A token that could be guessed is warned of.

    Raises:
        ConfigError: The file is missing or empty, or open to others.
    """
    if not path:
        return None
    try:
        token = read_secret_file(path, "the token file", "token_file").decode().strip()
    except UnicodeDecodeError as error:
        raise ConfigError(f"the token file {path} is no text", field="token_file") from error
    if not token:
        raise ConfigError(f"the token file {path} is empty", field="token_file")
    if len(token) < _LEAST_CHARACTERS or len(set(token)) < _LEAST_DIFFERENT:
        log.warning(
            "the token in %s can be guessed: it has %d characters, %d different ones; head -c 32 /dev/urandom | base64 "
            "makes one that cannot",
            *(path, len(token), len(set(token))),
        )
    return token


def is_loopback(host: str) -> bool:
    """Whether a host name or address can be reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def require_safe_bind(host: str, token: str | None, tls: Tls | None = None) -> None:
    """Refuse to listen on an address others can reach where anybody could call.

    Raises:
        ConfigError: Off loopback with neither a token nor certificates.
    """
    if token is None and tls is None and not is_loopback(host):
        message = f"listening on {host}, which others can reach, needs --token-file or --tls-cert"
        raise ConfigError(message, field="host")


def require_clear_pipes(config: PipeFields, tls: Tls | None) -> None:
    """Refuse to let KV travel in the clear off loopback beside calls that are encrypted, unless that is wanted.

    Raises:
        ConfigError: It is not.
    """
    if tls is None or is_loopback(config.host) or config.clear_kv or not clear_pipes(config.pipes):
        return
    message = f"KV would leave {config.host} in the clear: say --clear-kv, or --pipes auto, or shm,tls"
    raise ConfigError(message, field="clear_kv")


class PipeFields(Protocol):
    """The part of a configuration that says how KV travels."""

    @property
    def host(self) -> str:
        """Address to listen on."""

    @property
    def pipes(self) -> tuple[str, ...]:
        """Kinds of pipe."""

    @property
    def clear_kv(self) -> bool:
        """Whether KV may travel in the clear."""


Admits: TypeAlias = Callable[[str, str | bytes | None], bool]
"""Says whether a call goes on, by its method (``/package.Service/Method``) and its header ``authorization``."""


def admits_services(token: str | None, *, open_to_all: frozenset[str] = frozenset()) -> Admits:
    """Return a rule: whoever shows the token, if there is one.

    Args:
        token: Shared by the services.
        open_to_all: Methods that look after themselves: what they are given proves that it may be asked for.
    """

    def admits(method: str, header: str | bytes | None) -> bool:
        return token is None or matches(token, header) or method in open_to_all

    return admits


def matches(token: str, header: str | bytes | None) -> bool:
    """Compare an ``authorization`` header with the token in constant time."""
    given = header.encode() if isinstance(header, str) else header or b""
    return hmac.compare_digest(given, f"Bearer {token}".encode())
