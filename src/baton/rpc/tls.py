"""TLS between services: both ends show a certificate of one authority, and each checks the other's.

Files are read again when they change, so that certificates can be renewed without a restart: a server gives new
connections the new certificate, a client opens new channels with it.

With ``--tls-roles`` the certificate also decides what its holder may call. The role is part of a URI in the
certificate's subjectAltName, as in SPIFFE: the pattern ``spiffe://example.org/baton/{role}`` makes the holder of
``spiffe://example.org/baton/decode`` a decode instance. The shared token and API keys are checked as well: a call needs
all that is configured.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import ssl
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import grpc

from baton.config.files import read_small_file
from baton.config.flags import AccessConfig
from baton.config.secrets import file_stamp, read_secret_file
from baton.errors import ConfigError, PermissionDeniedError
from baton.rpc.audit import audit

log = logging.getLogger(__name__)

ALPN = "h2"
"""How both ends of a TLS handshake name HTTP/2."""
_ROUNDS = 8


@dataclass(frozen=True, slots=True)
class _Material:
    """Content of the files. What is used is what was read and checked, whatever the files are by then."""

    cert: bytes
    key: bytes
    ca: bytes

    def load_into(self, *contexts: ssl.SSLContext, authority: bool = True) -> None:
        """Have contexts show the certificate and, with ``authority``, believe the authority's.

        Raises:
            OSError: They cannot be used; :class:`ssl.SSLError` is one.
        """
        with contextlib.ExitStack() as files:  # the ssl module reads keys from files only
            cert, key, ca = (files.enter_context(_file_of(data)) for data in (self.cert, self.key, self.ca))
            for context in contexts:
                context.load_cert_chain(cert, key, password=b"")  # OpenSSL would ask the terminal for one
                if authority:
                    context.load_verify_locations(ca)


class Tls:
    """The certificates of one process.

    Args:
        cert: File with this process's certificate, PEM, and the intermediates up to the authority's.
        key: File with the certificate's private key, PEM, without a password.
        ca: File with the authority's certificates, PEM.
        name: Name that peers' certificates must have; empty: the host under which they are reached.
        roles: Pattern of the URIs in certificates that carry their holders' roles; empty: certificates have no roles.

    Attributes:
        name: Name that peers' certificates must have; empty: the host under which they are reached.
        roles: Rules of what each role may call; ``None``: holders of certificates may call everything.

    Raises:
        ConfigError: A file cannot be read, or peers would refuse the certificate; says why.
    """

    def __init__(self, cert: str, key: str, ca: str, *, name: str = "", roles: str = "") -> None:
        self.roles = CertificateRoles(roles) if roles else None
        self._paths = (Path(cert), Path(key), Path(ca))
        self.name = name
        self._lock = threading.Lock()
        self.generation = 0
        """How often the files were read again."""
        self._contexts: dict[bool | str, ssl.SSLContext] = {}
        """Contexts of pipes, by whether they are a server's, and of calls, by their protocol."""
        self._seen = self._stamp()
        self._material = self._read()

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return the credentials of a gRPC server that requires a certificate of every client."""
        return grpc.dynamic_ssl_server_credentials(
            self._server_configuration(self._material),
            self._next_configuration,  # type: ignore[arg-type]  # None: as before, says gRPC's documentation
            require_client_authentication=True,
        )

    def channel_credentials(self) -> tuple[bytes, grpc.ChannelCredentials]:
        """Return the certificate that a channel shows, PEM, and the channel's credentials."""
        self.refresh()
        now = self._material
        return now.cert, grpc.ssl_channel_credentials(now.ca, now.key, now.cert)

    def channel_options(self) -> list[tuple[str, Any]]:
        """Return the channel options that check :attr:`name`."""
        return [("grpc.ssl_target_name_override", self.name)] if self.name else []

    def pipe_context(self, *, server_side: bool) -> ssl.SSLContext:
        """Return the context of a connection that carries KV: both ends show certificates."""
        self.refresh()
        with self._lock:
            if server_side not in self._contexts:
                self._contexts[server_side] = _pipe_context(self._material, server_side)
            return self._contexts[server_side]

    def http2_context(self) -> tuple[bytes, ssl.SSLContext]:
        """Return the certificate that a connection to a gRPC server shows, PEM, and the connection's context."""
        self.refresh()
        with self._lock:
            if ALPN not in self._contexts:
                context = self._contexts[ALPN] = _pipe_context(self._material, False)
                context.set_alpn_protocols([ALPN])
            return self._material.cert, self._contexts[ALPN]

    def http_context(self) -> ssl.SSLContext:
        """Return the context of an HTTP server: its clients need no certificate, they show API keys."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self.renew(context)
        return context

    def renew(self, context: ssl.SSLContext) -> None:
        """Have a context show the current certificate to new connections."""
        self._material.load_into(context, authority=False)

    def refresh(self) -> bool:
        """Read the files again if they changed; broken ones are reported and change nothing."""
        with self._lock:
            stamp = self._stamp()
            if stamp == self._seen:
                return False
            self._seen = stamp
            try:
                fresh = self._read()
            except ConfigError as error:
                log.error("certificates stay as they were: %s", error.message)
                return False
            self._material = fresh
            self._contexts.clear()
            self.generation += 1
            log.info("certificates were read again")
            audit("certificates_changed", file=str(self._paths[0]))
            return True

    def _next_configuration(self) -> grpc.ServerCertificateConfiguration | None:
        """Called by gRPC before every handshake, in a thread of its own."""
        return self._server_configuration(self._material) if self.refresh() else None

    @staticmethod
    def _server_configuration(material: _Material) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(material.key, material.cert)], material.ca)

    def _stamp(self) -> list[tuple[int, ...] | None]:
        return [file_stamp(path) for path in self._paths]

    def _read(self) -> _Material:
        cert, key, ca = self._paths
        material = _Material(
            read_small_file(cert, "the certificate", "tls_cert"),
            read_secret_file(key, "the key", "tls_key", pipes=False),
            read_small_file(ca, "the authority", "tls_ca"),
        )
        _check(material, f"certificate {cert}, key {key} and authority {ca}")
        return material


def read_tls(config: AccessConfig) -> Tls | None:
    """Return a configuration's certificates; ``None``: it names none.

    Raises:
        ConfigError: It names only some of the files, or they cannot be used.
    """
    paths = {"tls_cert": config.tls_cert, "tls_key": config.tls_key, "tls_ca": config.tls_ca}
    if not any(paths.values()):
        for field in ("tls_name", "tls_roles"):
            if getattr(config, field):
                flag = f"--{field.replace('_', '-')}"
                raise ConfigError(f"{flag} needs --tls-cert, --tls-key and --tls-ca", field=field)
        return None
    for field, path in paths.items():
        if not path:
            raise ConfigError(f"TLS needs --{field.replace('_', '-')} too", field=field)
    return Tls(config.tls_cert, config.tls_key, config.tls_ca, name=config.tls_name, roles=config.tls_roles)


@contextlib.contextmanager
def _file_of(data: bytes) -> Iterator[str]:
    """Return the path of a file in memory, which only this process has."""
    with open(os.memfd_create("baton tls"), "wb", buffering=0) as file:
        file.write(data)
        yield f"/proc/self/fd/{file.fileno()}"


def _pipe_context(material: _Material, server_side: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server_side else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    material.load_into(context)
    return context


def _check(material: _Material, shown: str) -> None:
    """Do a handshake of the certificate with itself, so that what peers would refuse is known now.

    Raises:
        ConfigError: Peers would refuse the certificate; says why.
    """
    try:
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client.check_hostname = False
        server.verify_mode = ssl.CERT_REQUIRED
        material.load_into(server, client)
        _shake_hands(server, client)
    except ssl.SSLCertVerificationError as error:
        raise ConfigError(f"{shown}: it does not hold: {error.verify_message}", field="tls_cert") from error
    except (ssl.SSLError, OSError) as error:
        reason = getattr(error, "reason", None) or str(error)
        raise ConfigError(f"{shown}: {reason}", field="tls_cert") from error


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> None:
    up = ssl.MemoryBIO()
    down = ssl.MemoryBIO()
    ends = [client.wrap_bio(down, up, server_side=False), server.wrap_bio(up, down, server_side=True)]
    for _ in range(_ROUNDS):
        for end in list(ends):
            try:
                end.do_handshake()
                ends.remove(end)
            except ssl.SSLWantReadError:
                continue
        if not ends:
            return
    raise ConfigError("a certificate could not greet itself", field="tls_cert")


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
"""Methods that each role may call; all others are denied. Only ``admin`` may delete, drain, pin, list or change roles.
Health checks and reflection are open to every certificate of the authority."""
READS_BLOCKS = frozenset({"prefill", "decode", "instance", "kvstore", "admin"})
"""Roles that may read KV blocks over the ``tls`` pipe."""
_ROLE = "{role}"


class CertificateRoles:
    """Finds the roles of certificates.

    Args:
        pattern: URI that contains ``{role}`` exactly once.

    Raises:
        ConfigError: The pattern is not such a URI.
    """

    def __init__(self, pattern: str) -> None:
        before, role, after = pattern.partition(_ROLE)
        if not role or _ROLE in after or "://" not in before:
            raise ConfigError(
                f"tls_roles must be a URI with {_ROLE} in it once, like spiffe://example.org/baton/{_ROLE}; "
                f"got {pattern!r}",
                field="tls_roles",
            )
        roles = "|".join(MAY_CALL)
        self._uri = re.compile(f"{re.escape(before)}({roles}){re.escape(after)}")

    def of(self, uris: Iterable[str]) -> frozenset[str]:
        """Return the roles of a certificate with these URIs."""
        return frozenset(match[1] for uri in uris if (match := self._uri.fullmatch(uri)))

    def require_call(self, uris: Collection[str], method: str) -> None:
        """Check that a certificate's holder may call a method (``/package.Service/Method``).

        Raises:
            PermissionDeniedError: None of its roles may.
        """
        if not any(method in MAY_CALL[role] or MAY_CALL[role] is _ANY for role in self.of(uris)):
            raise PermissionDeniedError(f"{self._named(uris)} may not call {method.rpartition('/')[2]}")

    def require_reader(self, uris: Collection[str]) -> None:
        """Check that a certificate's holder may read KV blocks.

        Raises:
            PermissionDeniedError: None of its roles may.
        """
        if not self.of(uris) & READS_BLOCKS:
            raise PermissionDeniedError(f"{self._named(uris)} may not read KV blocks")

    def _named(self, uris: Collection[str]) -> str:
        roles = sorted(self.of(uris))
        return f"a certificate of the role {' and '.join(roles)}" if roles else "a certificate without a role"
