"""The HTTP front over TLS: connections are bounded before their handshake is complete, too."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.support.servers.certificates import Authority
from tests.support.servers.http_front import Served

from baton.rpc.tls import Tls
from baton_router.frontend.http import listener


@pytest.fixture
def secured(tmp_path: Path) -> Iterator[tuple[Served, ssl.SSLContext]]:
    issued = Authority(tmp_path).issue("router")
    with Served(context=Tls(issued.cert, issued.key, issued.ca).http_context()) as served:
        yield served, ssl.create_default_context(cafile=issued.ca)


def get(served: Served, trusted: ssl.SSLContext, path: str = "/health") -> httpx.Response:
    port = served.socket.getsockname()[1]
    return httpx.get(f"https://127.0.0.1:{port}{path}", verify=trusted, timeout=240)


def dial(served: Served, data: bytes = b"") -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", served.socket.getsockname()[1]), timeout=240)
    sock.sendall(data)
    return sock


def hung_up(sock: socket.socket) -> bool:
    sock.setblocking(False)
    try:
        return sock.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def test_handshakes_that_do_not_end_give_way_to_others(secured: tuple[Served, ssl.SSLContext]) -> None:
    served, trusted = secured
    silent = [dial(served, data) for data in (b"", b"\x16", b"\x16\x03\x01\x3f\xff\x01\x00\x3f\xfb" + bytes(4000)) * 8]
    try:
        served.wait_until(lambda: sum(map(hung_up, silent)) >= len(silent) - 8)
        assert not any(map(hung_up, silent[-4:])), "the oldest give way"
        assert get(served, trusted).status_code == 200
    finally:
        for sock in silent:
            sock.close()
    served.wait_until(lambda: not served.server.listeners[0].num_handshakes)


def test_who_does_not_close_gives_way_to_others(secured: tuple[Served, ssl.SSLContext]) -> None:
    served, trusted = secured
    staying = []
    try:
        for _ in range(100):
            sock = trusted.wrap_socket(dial(served), server_hostname="127.0.0.1")
            staying.append(sock)
            sock.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            assert sock.recv(100).startswith(b"HTTP/1.1 200")
        assert len(served.server.listeners[0]._open) <= 64
        assert get(served, trusted).status_code == 200
    finally:
        for sock in staying:
            sock.close()


def test_a_handshake_has_a_time(secured: tuple[Served, ssl.SSLContext], monkeypatch: pytest.MonkeyPatch) -> None:
    served, trusted = secured
    monkeypatch.setattr(listener, "HANDSHAKE_S", 0.2)
    with dial(served) as sock:
        assert sock.recv(1) == b""
    assert get(served, trusted).status_code == 200
    with dial(served, b"GET / HTTP/1.1\r\n\r\n") as sock:  # no TLS at all
        assert b"HTTP" not in sock.recv(1000)
    assert not served.server.listeners[0].num_handshakes


def test_what_comes_with_the_handshakes_end_is_served(secured: tuple[Served, ssl.SSLContext]) -> None:
    served, trusted = secured
    for _ in range(20):
        with trusted.wrap_socket(dial(served), server_hostname="127.0.0.1") as sock:
            sock.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            assert sock.recv(100).startswith(b"HTTP/1.1 200")
