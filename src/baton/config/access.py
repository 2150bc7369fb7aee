"""How a command line tool gets in: token and certificates."""

from __future__ import annotations

from dataclasses import dataclass

from baton.config.flags import option
from baton.config.tls import TLS_CA_HELP, TLS_CERT_HELP, TLS_KEY_HELP, TLS_NAME_HELP


@dataclass(frozen=True)
class AccessConfig:
    """What a client of services shows."""

    token_file: str = option("", "file with the token that services show each other")
    tls_cert: str = option("", TLS_CERT_HELP)
    tls_key: str = option("", TLS_KEY_HELP)
    tls_ca: str = option("", TLS_CA_HELP)
    tls_name: str = option("", TLS_NAME_HELP)
