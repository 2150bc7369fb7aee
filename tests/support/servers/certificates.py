"""Certificates for tests, made by the ``openssl`` command."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

_CONFIG = """
[ca]
default_ca = own
[own]
database = {root}/index.txt
serial = {root}/serial
new_certs_dir = {root}
default_md = sha256
policy = any
copy_extensions = none
unique_subject = no
[any]
commonName = supplied
"""
_CURVE = ("ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


@dataclass(frozen=True, slots=True)
class Certificate:
    """Files of a certificate, its key, and the authority that made it."""

    cert: str
    key: str
    ca: str

    @property
    def flags(self) -> tuple[str, ...]:
        """Flags of a service that shows it."""
        return ("--tls-cert", self.cert, "--tls-key", self.key, "--tls-ca", self.ca)

    @property
    def environment(self) -> dict[str, str]:
        """The same as variables."""
        return {"BATON_TLS_CERT": self.cert, "BATON_TLS_KEY": self.key, "BATON_TLS_CA": self.ca}


class Authority:
    """An authority in a directory of its own.

    Args:
        root: The directory; made if it is not there.
    """

    def __init__(self, root: Path) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self._root = root
        self._run("req", "-x509", "-newkey", *_CURVE, "-days", "3", "-subj", "/CN=authority", *_out("ca", "pem"))
        (root / "config").write_text(_CONFIG.format(root=root))
        (root / "index.txt").write_text("")
        (root / "serial").write_text("01\n")

    def issue(
        self, name: str, *, names: str = "DNS:localhost,IP:127.0.0.1", begins: str = "", ends: str = ""
    ) -> Certificate:
        """Make a certificate.

        Args:
            name: Of its files and its subject.
            names: Hosts that it stands for.
            begins: From when it counts, ``YYYYMMDDHHMMSSZ``; default: now.
            ends: Until when; default: three days on.
        """
        self._run("req", "-newkey", *_CURVE, "-subj", f"/CN={name}", *_out(name, "csr"))
        (self._root / f"{name}.ext").write_text(f"subjectAltName={names}\n")
        times = [*(("-startdate", begins) if begins else ()), *(("-enddate", ends) if ends else ("-days", "3"))]
        files = ("-in", f"{name}.csr", "-out", f"{name}.pem", "-extfile", f"{name}.ext")
        ca = ("-cert", "ca.pem", "-keyfile", "ca.key")
        self._run("ca", "-batch", "-notext", "-config", "config", *ca, *files, *times)
        return Certificate(*(str(self._root / file) for file in (f"{name}.pem", f"{name}.key", "ca.pem")))

    def _run(self, *args: str) -> None:
        environment = {**os.environ, "OPENSSL_CONF": os.devnull}
        if args[0] == "req":
            environment.pop("OPENSSL_CONF")
        subprocess.run(["openssl", *args], cwd=self._root, check=True, capture_output=True, env=environment)


def _out(name: str, ending: str) -> tuple[str, ...]:
    return ("-keyout", f"{name}.key", "-out", f"{name}.{ending}")
