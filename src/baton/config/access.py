"""Token and certificates: what services say of theirs, and how a command line tool shows its own."""

from __future__ import annotations

from dataclasses import dataclass

from baton.config.flags import option

TLS_CERT_HELP = "file with this service's certificate (PEM), shown to all others; default: no TLS"
TLS_KEY_HELP = "file with the key of --tls-cert"
TLS_CA_HELP = "file with the authority whose certificates are believed"
TLS_NAME_HELP = "name that others' certificates must have; default: the host under which they are reached"
CLEAR_KV_HELP = "with --tls-cert, KV may travel in the clear: auto means tcp or nixl, not tls; they may leave loopback"


@dataclass(frozen=True)
class AccessConfig:
    """What a client of services shows."""

    token_file: str = option("", "file with the token that services show each other")
    tls_cert: str = option("", TLS_CERT_HELP)
    tls_key: str = option("", TLS_KEY_HELP)
    tls_ca: str = option("", TLS_CA_HELP)
    tls_name: str = option("", TLS_NAME_HELP)
