"""Who may call a service: where it may listen, which calls need a proof, and which ``Host`` headers are answered.

Off loopback a service listens only with a shared token or TLS.

The check of ``Host`` defends against DNS rebinding: a browser lets a page read what the page's own host answers, and a
domain's owner can point the name for a moment at a router that the browser reaches and the owner does not, as a rule
one on loopback. Such a request names the foreign host. IP addresses are never a foreign domain, so they always pass.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Sequence
from typing import TypeAlias

from baton.config.kvstore import KVStoreConfig
from baton.config.pipes import clear_pipes
from baton.config.worker import WorkerConfig
from baton.errors import ConfigError, PermissionDeniedError
from baton.rpc.addresses import is_loopback
from baton.rpc.service_token import Token
from baton.rpc.tls import Tls

HEADER = "authorization"


def require_safe_bind(host: str, token: Token | None, tls: Tls | None = None) -> None:
    """Refuse to listen on an address that other machines can reach if any caller would be served.

    Raises:
        ConfigError: Off loopback with neither a token nor certificates.
    """
    if token is None and tls is None and not is_loopback(host):
        message = f"listening on {host}, which others can reach, needs --token-file or --tls-cert"
        raise ConfigError(message, field="host")


def require_clear_pipes(config: KVStoreConfig | WorkerConfig, tls: Tls | None) -> None:
    """Refuse to send KV in the clear off loopback while calls are encrypted, unless ``--clear-kv`` allows it.

    Raises:
        ConfigError: It does not.
    """
    if tls is None or is_loopback(config.host) or config.clear_kv or not clear_pipes(config.pipes):
        return
    message = f"KV would leave {config.host} in the clear: say --clear-kv, or --pipes auto, or shm,tls"
    raise ConfigError(message, field="clear_kv")


Admits: TypeAlias = Callable[[str, str | bytes | None], bool]
"""Decides whether a call without a proof of the token is served, by its method (``/package.Service/Method``) and its
header ``authorization``."""


_LOCAL = ("localhost", "*.localhost", "*.internal")
"""Names that cannot be registered as a domain: ``host.docker.internal`` is how a container calls its host."""
_MAX_KNOWN = 1024


class HostRule:
    """Decides which ``Host`` headers a server answers. IP addresses and local names are always among them.

    Args:
        allowed: Further names: ``*.example.com`` allows all names below one, ``*`` any.
    """

    def __init__(self, allowed: Sequence[str] = ()) -> None:
        names = {name.lower().rstrip(".") for name in (*_LOCAL, *allowed)}
        self._names = {name for name in names if not name.startswith("*")}
        self._below = tuple(name[1:] for name in names if name.startswith("*"))  # of "*" it is "", the end of any name
        self._known: set[bytes] = set()

    @classmethod
    def of_server(cls, host: str, allowed: Sequence[str], *, keyed: bool) -> HostRule | None:
        """Return the rule of a server; ``None``: it answers to any name.

        Unless names are configured, any name is answered where clients need API keys, which a foreign page does not
        have, and off loopback, where services and proxies have names that only the operator knows.

        Args:
            host: Address that the server listens on.
            allowed: Configured names.
            keyed: Whether clients must show API keys.
        """
        return cls((host, *allowed)) if allowed or (is_loopback(host) and not keyed) else None

    def check(self, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Check the ``Host`` of a request. One without (HTTP/1.0) does not come from a browser.

        Raises:
            PermissionDeniedError: The host is foreign.
        """
        for name, value in headers:
            if name != b"host" or value in self._known:
                continue
            host = value.decode("latin-1")
            if not self.admits(host):
                raise PermissionDeniedError(
                    f"this router does not answer to the host {host!r:.120}: start it with --allowed-hosts",
                    field="host",
                )
            if len(self._known) < _MAX_KNOWN:
                self._known.add(value)

    def admits(self, host: str) -> bool:
        """Whether a request for this host, with or without a port, is answered."""
        name = host.lower()
        if name.startswith("["):
            name = name[1:].partition("]")[0]
        elif name.count(":") == 1:
            name = name.partition(":")[0]
        name = name.rstrip(".")
        if name in self._names or name.endswith(self._below):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True
