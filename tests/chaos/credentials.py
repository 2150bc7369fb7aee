"""Token, API keys and certificates of deployments that have them."""

from __future__ import annotations

import json
import secrets
import ssl
from pathlib import Path

from tests.support.servers.certificates import Authority

from baton.rpc.service_token import Token
from baton.rpc.tls import Tls

TENANTS = ("ann", "bob", "eve")
_ADMIN = "admin"
_FAR = ("20200101000000Z", "20900101000000Z")
"""From when until when certificates count: the clocks that are set stay between."""


class Credentials:
    """Made once for a run.

    Args:
        folder: For the files.
        hosts: Addresses that the certificate stands for.

    Attributes:
        token: That services prove to each other.
        keys: Tenant to API key.
        tls: Of services and clients.
        https: Of HTTP clients.
    """

    def __init__(self, folder: Path, *hosts: str) -> None:
        folder.mkdir(mode=0o700)
        text = secrets.token_hex(32)
        self.token = Token(text)
        self.keys = {name: f"sk-{secrets.token_hex(16)}" for name in (*TENANTS, _ADMIN)}
        tenants = {name: {"keys": [key], "admin": name == _ADMIN} for name, key in self.keys.items()}
        token = _write(folder / "token", text)
        names = ",".join(f"IP:{host}" for host in hosts)
        certificate = Authority(folder / "tls").issue("baton", names=names, begins=_FAR[0], ends=_FAR[1])
        Path(certificate.key).chmod(0o600)
        self.tls = Tls(certificate.cert, certificate.key, certificate.ca)
        self.https = ssl.create_default_context(cafile=certificate.ca)
        self.service_flags = ("--token-file", token, *certificate.flags)
        keys = _write(folder / "keys.json", json.dumps({"tenants": tenants}))
        secret = _write(folder / "secret", secrets.token_hex(32))
        self.router_flags = (*self.service_flags, "--api-keys", keys, "--tenant-secret-file", secret)

    @property
    def admin_headers(self) -> dict[str, str]:
        """What an administrator's HTTP requests carry."""
        return {"authorization": f"Bearer {self.keys[_ADMIN]}"}


def _write(path: Path, text: str) -> str:
    path.touch(mode=0o600)
    path.write_text(text, encoding="ascii")
    return str(path)
