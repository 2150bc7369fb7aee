"""Which ``Host`` headers are answered: a page whose own name was made to lead here (DNS rebinding) has a foreign one.

A browser lets a page read what the page's own host answers. Whoever has a domain can, for a moment, have its name lead
to the address of a router that the browser reaches and its owner does not, one on loopback as a rule. The request then
names the foreign host, which is what can be seen of it. Addresses in numbers are nobody's domain, so they always pass.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from baton.errors import PermissionDeniedError
from baton.rpc.auth import is_loopback

_LOCAL = ("localhost", "*.localhost", "*.internal")
"""Names that nobody can register: ``host.docker.internal`` is how a container calls its host."""
_MAX_KNOWN = 1024


class HostRule:
    """Says whether requests for a host are answered.

    Args:
        allowed: Names that are, ``*.example.com`` for all below one, ``*`` for any; empty: addresses and local names.
    """

    def __init__(self, allowed: Sequence[str] = ()) -> None:
        names = {name.lower().rstrip(".") for name in (*_LOCAL, *allowed)}
        self._names = {name for name in names if not name.startswith("*")}
        self._below = tuple(name[1:] for name in names if name.startswith("*"))  # of "*" it is "", the end of any name
        self._known: set[bytes] = set()

    @classmethod
    def of_server(cls, host: str, allowed: Sequence[str], *, keyed: bool) -> HostRule | None:
        """Return the rule of a server; ``None``: it answers to any name.

        Without names that were given this is so where clients show API keys, which a foreign page does not have, and
        off loopback, where services and proxies have names that only its operator knows.

        Args:
            host: Where it listens.
            allowed: Names that were given.
            keyed: Whether clients must show API keys.
        """
        return cls((host, *allowed)) if allowed or (is_loopback(host) and not keyed) else None

    def check(self, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Check what a request names. One that names nothing (HTTP/1.0) is no browser's.

        Raises:
            PermissionDeniedError: A foreign host.
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
        """Whether a request is answered that names this host, with or without a port."""
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
