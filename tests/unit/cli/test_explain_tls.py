"""``baton explain`` against a router whose certificate has one name for all services, as docs/security.md makes it."""

from __future__ import annotations

import http.server
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.servers.certificates import Authority

from baton.cli.main import main


class _Nothing(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = b'{"decisions": []}'
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def url_and_ca(tmp_path: Path) -> Iterator[tuple[str, str]]:
    certificate = Authority(tmp_path / "ca").issue("services", names="DNS:baton")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Nothing)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate.cert, certificate.key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"https://127.0.0.1:{server.server_port}", certificate.ca
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_the_name_of_the_certificate_can_be_given(url_and_ca, capsys):
    url, ca = url_and_ca
    assert main(["explain", "--url", url, "--tls-ca", ca]) == 1
    assert "certificate" in capsys.readouterr().err
    assert main(["explain", "--url", url, "--tls-ca", ca, "--tls-name", "another"]) == 1
    assert main(["explain", "--url", url, "--tls-ca", ca, "--tls-name", "baton"]) == 0
    assert "no requests yet" in capsys.readouterr().out
