"""What the holder of a certificate may call, where certificates say which role their holders have (``--tls-roles``).

The role stands in a URI of the certificate's subjectAltName, as SPIFFE has it: the pattern
``spiffe://example.org/baton/{role}`` makes a decode instance of the holder of ``spiffe://example.org/baton/decode``.
Beside it the shared token and API keys hold as before: a call needs all that is configured.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType

from baton.errors import ConfigError, PermissionDeniedError


def _methods(service: str, *names: str) -> frozenset[str]:
    return frozenset(f"/baton.api.v1.{service}/{name}" for name in names)


_REGISTERS = _methods("RouterService", "Register", "Heartbeat", "Deregister")
_KEEPS_BLOCKS = _methods("KvStoreService", "Put", "Get", "Release", "Contains", "GetStoreInfo")
_FETCHES_PROMPTS = _methods("WorkerService", "Prefill", "Abort")
_ANY = frozenset({"*"})

MAY_CALL: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "router": _methods("WorkerService", "GetInfo", "StreamKvEvents", "StreamLoad", "Generate", "GenerateMany")
        | _methods("WorkerService", "PrefillFirst", "Abort", "ResetPrefixCache")
        | _methods("KvStoreService", "GetStoreInfo", "StreamStoreEvents"),
        "prefill": _REGISTERS | _KEEPS_BLOCKS,
        "decode": _REGISTERS | _KEEPS_BLOCKS | _FETCHES_PROMPTS,
        "instance": _REGISTERS | _KEEPS_BLOCKS | _FETCHES_PROMPTS,  # one whose role may be changed
        "kvstore": frozenset(),
        "client": _methods("RouterService", "Generate", "Route", "NoteDirect", "ListModels", "Explain")
        | _methods("WorkerService", "Generate"),
        "admin": _ANY,
    }
)
"""The methods of each role; all others are denied it. What deletes, drains, pins, lists or changes roles is ``admin``'s
alone. Health checks and reflection are open to every certificate of the authority."""
READS_BLOCKS = frozenset({"prefill", "decode", "instance", "kvstore", "admin"})
"""Roles that may read KV blocks over the ``tls`` pipe."""
_ROLE = "{role}"


class CertificateRoles:
    """Finds the roles of certificates.

    Args:
        pattern: A URI with ``{role}`` in it, once.

    Raises:
        ConfigError: It is none.
    """

    def __init__(self, pattern: str) -> None:
        before, found, after = pattern.partition(_ROLE)
        if not found or _ROLE in after or "://" not in before:
            raise ConfigError(
                f"tls_roles must be a URI with {_ROLE} in it once, like spiffe://example.org/baton/{_ROLE}; "
                f"got {pattern!r}",
                field="tls_roles",
            )
        roles = "|".join(MAY_CALL)
        self._uri = re.compile(f"{re.escape(before)}({roles}){re.escape(after)}")

    def of(self, uris: Iterable[str]) -> frozenset[str]:
        """Return the roles that a certificate with these URIs gives."""
        return frozenset(match[1] for uri in uris if (match := self._uri.fullmatch(uri)))

    def require_call(self, uris: Collection[str], method: str) -> None:
        """Check that a certificate's holder may call a method (``/package.Service/Method``).

        Raises:
            PermissionDeniedError: No role of it may.
        """
        if not any(method in MAY_CALL[role] or MAY_CALL[role] is _ANY for role in self.of(uris)):
            raise PermissionDeniedError(f"{self._named(uris)} may not call {method.rpartition('/')[2]}")

    def require_reader(self, uris: Collection[str]) -> None:
        """Check that a certificate's holder may read KV blocks.

        Raises:
            PermissionDeniedError: No role of it may.
        """
        if not self.of(uris) & READS_BLOCKS:
            raise PermissionDeniedError(f"{self._named(uris)} may not read KV blocks")

    def _named(self, uris: Collection[str]) -> str:
        roles = sorted(self.of(uris))
        return f"a certificate of the role {' and '.join(roles)}" if roles else "a certificate without a role"
