"""Who may call a service, and the rule that nobody listens off loopback without a shared token or TLS."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from typing import Protocol, TypeAlias

from baton.config.pipes import clear_pipes
from baton.errors import ConfigError
from baton.rpc.service_token import Token
from baton.rpc.tls import Tls

HEADER = "authorization"


def is_loopback(host: str) -> bool:
    """Whether a host name or address can be reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def require_safe_bind(host: str, token: Token | None, tls: Tls | None = None) -> None:
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
    def host(self) -> str: ...

    @property
    def pipes(self) -> tuple[str, ...]: ...

    @property
    def clear_kv(self) -> bool:
        """Whether KV may travel in the clear."""


Admits: TypeAlias = Callable[[str, str | bytes | None], bool]
"""Says whether a call goes on that does not prove the token, by its method (``/package.Service/Method``) and its header
``authorization``."""
