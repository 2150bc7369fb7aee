"""Requests that HTTP has rules for, byte by byte: each gets the status that its RFC names, in OpenAI's shape."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator

import pytest
from tests.support.servers.http_front import BODY, Served, raw, read_answers

TYPE = b"content-type: application/json\r\n"
GET, POST = b"GET /health HTTP/1.1\r\n", b"POST /v1/completions HTTP/1.1\r\n" + TYPE
HOST, CLOSE = b"host: x\r\n", b"connection: close\r\n"
CHUNKED = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
LENGTH = b"content-length: %d\r\n" % len(BODY)


@pytest.fixture(scope="module")
def api() -> Iterator[Served]:
    with Served(max_body_bytes=200_000) as served:
        yield served


def check(api: Served, request: bytes, status: int, code: str) -> dict[str, str]:
    """Send a request; its answer has this status and error, and ends the connection."""
    ((got, body),) = read_answers(answer := raw(api, request))
    error = json.loads(body)["error"]
    assert (got, error["code"]) == (status, code), error
    assert set(error) == {"message", "type", "param", "code"}
    head = answer.partition(b"\r\n\r\n")[0].lower()
    assert b"\r\ncontent-type: application/json" in head
    assert b"\r\nconnection: close" in head
    assert re.search(rb"\r\nx-request-id: [0-9a-f]{32}", head)
    assert not api.dispatcher.requests
    return error


@pytest.mark.parametrize(
    ("request_bytes", "status", "code"),
    [
        (GET + CLOSE + b"\r\n", 400, "invalid_request"),
        (GET + HOST + b"host: y\r\n" + CLOSE + b"\r\n", 400, "invalid_request"),
        (GET + HOST + HOST + CLOSE + b"\r\n", 400, "invalid_request"),
        (b"GET /health HTTP/1.0\r\n" + HOST + HOST + b"\r\n", 400, "invalid_request"),
        (GET + b"host: a b\r\n" + CLOSE + b"\r\n", 400, "invalid_request"),
        (GET + b"host: evil/@x\r\n" + CLOSE + b"\r\n", 400, "invalid_request"),
        (GET + b"host: x:port\r\n" + CLOSE + b"\r\n", 400, "invalid_request"),
        (POST + CLOSE + LENGTH + b"\r\n" + BODY, 400, "invalid_request"),
        (POST + HOST + b"expect: foo\r\n" + CLOSE + LENGTH + b"\r\n" + BODY, 417, "expectation_failed"),
        (GET + HOST + b"Expect: 200-ok\r\n" + CLOSE + b"\r\n", 417, "expectation_failed"),
        (b"GET /health HTTP/2.0\r\n" + HOST + b"\r\n", 505, "version_not_supported"),
        (b"GET /health HTTP/1.2\r\n" + HOST + b"\r\n", 505, "version_not_supported"),
        (b"GET /health\r\n\r\n", 505, "version_not_supported"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505, "version_not_supported"),
        (POST + HOST + b"transfer-encoding: gzip, chunked\r\n\r\n" + CHUNKED, 501, "not_implemented"),
        (POST + HOST + b"transfer-encoding: identity\r\n\r\n" + CHUNKED, 501, "not_implemented"),
        (b"POST /health HTTP/1.1\r\n" + HOST + b"transfer-encoding: gzip, chunked\r\n\r\n" + CHUNKED, 501,
         "not_implemented"),
        (POST + HOST + b"transfer-encoding: chunked, gzip\r\n\r\n" + CHUNKED, 400, "invalid_request"),
        (POST + HOST + b"transfer-encoding: chunked\r\n" * 2 + b"\r\n" + CHUNKED, 400, "invalid_request"),
        (POST + HOST + b"transfer-encoding: xchunked\r\n\r\n" + CHUNKED, 501, "not_implemented"),
        (POST + HOST + LENGTH + b"transfer-encoding: chunked\r\n\r\n" + CHUNKED, 400, "invalid_request"),
        (POST + HOST + b"transfer-encoding: chunked\r\n" + LENGTH + b"\r\n" + CHUNKED, 400, "invalid_request"),
        (b"POST /v1/completions HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n" + CHUNKED, 400, "invalid_request"),
        (POST + HOST + LENGTH + b"content-length: 3\r\n\r\n" + BODY, 400, "invalid_request"),
        (POST + HOST + b"content-length: -3\r\n\r\n" + BODY, 400, "invalid_request"),
        (POST + HOST + b"content-length: 99999999999999999999\r\n\r\n" + BODY, 400, "invalid_request"),
        (POST + b"host : x\r\n" + LENGTH + b"\r\n" + BODY, 400, "invalid_request"),
        (POST + HOST + b"x: 1\r\n folded\r\n" + LENGTH + b"\r\n" + BODY, 400, "invalid_request"),
        (b"GET nowhere HTTP/1.1\r\n" + HOST + b"\r\n", 400, "invalid_request"),
        (b"SPILL /health HTTP/1.1\r\n" + HOST + b"\r\n", 400, "invalid_request"),
        (b"CONNECT x:443 HTTP/1.1\r\n" + HOST + b"\r\n", 400, "invalid_request"),
        (b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n" + HOST + b"\r\n", 414, "uri_too_long"),
        (GET + HOST + b"x: " + b"a" * 100_000, 431, "headers_too_large"),
    ],
)  # fmt: skip
def test_what_is_no_good_request_is_refused_in_openais_shape(
    api: Served, request_bytes: bytes, status: int, code: str
) -> None:
    api.reset()
    check(api, request_bytes, status, code)
    assert api.http.get("/health").status_code == 200


@pytest.mark.parametrize("host", [b"", b"x:", b"x:80", b"[::1]:80", b"10.0.0.1", b"a_b.c-d", b"a%20b"])
def test_hosts_as_clients_write_them(api: Served, host: bytes) -> None:
    assert raw(api, GET + b"Host: " + host + b"\r\n" + CLOSE + b"\r\n").startswith(b"HTTP/1.1 200 ")


def test_refused_requests_are_counted(api: Served) -> None:
    def seen() -> float:
        labels = {"endpoint": "other", "status": "505"}
        return api.registry.get_sample_value("baton_http_requests_total", labels) or 0.0

    before = seen()
    raw(api, b"GET /health HTTP/2.0\r\n" + HOST + b"\r\n")
    api.wait_until(lambda: seen() == before + 1)


def test_a_bad_request_is_answered_behind_the_one_before_it(api: Served) -> None:
    """Else its answer would be taken for the first one's."""
    api.reset()
    for bad, status in ((GET + CLOSE + b"\r\n", 400), (b"\x16\x03\x01", 400), (b"GET / HTTP/2.0\r\n\r\n", 505)):
        for path in (b"GET /v1/models HTTP/1.1\r\n" + HOST + b"\r\n", POST + HOST + LENGTH + b"\r\n" + BODY):
            first, second = read_answers(raw(api, path + bad + GET + HOST + b"\r\n"))
            assert first[0] == 200
            assert (second[0], set(json.loads(second[1]))) == (status, {"error"})


@pytest.mark.parametrize("waits", [False, True])
def test_a_body_in_broken_chunks_is_the_error_of_its_own_request(api: Served, waits: bool) -> None:
    api.reset()
    before = POST + HOST + LENGTH + b"\r\n" + BODY if waits else b""
    data = before + POST + HOST + b"transfer-encoding: chunked\r\n\r\n5\r\n{    \r\nno number\r\n"
    answers = read_answers(raw(api, data))
    assert [status for status, _ in answers] == ([200, 400] if waits else [400])
    assert json.loads(answers[-1][1])["error"]["code"] == "invalid_request"
    assert len(api.dispatcher.requests) == waits


@pytest.mark.parametrize("lines", [b"", b"connection: keep-alive\r\n", b"connection: upgrade\r\nupgrade: h2c\r\n"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_of_http_1_0_gets_nothing_in_chunks(api: Served, lines: bytes, stream: bool) -> None:
    api.reset()
    body = json.dumps({"prompt": "def", "temperature": 0, "stream": stream}).encode()
    head = b"POST /v1/completions HTTP/1.0\r\n" + TYPE + lines + b"content-length: %d\r\n\r\n" % len(body)
    got, _, answer = raw(api, head + body).partition(b"\r\n\r\n")
    assert got.startswith(b"HTTP/1.1 200 ")
    assert b"chunked" not in got
    assert b"connection: close" in got
    assert answer.endswith(b"data: [DONE]\n\n") if stream else json.loads(answer)["choices"]
    for path in (b"/metrics", b"/openapi.json", b"/v1/models"):
        got, _, answer = raw(api, b"GET " + path + b" HTTP/1.0\r\n" + lines + b"\r\n").partition(b"\r\n\r\n")
        assert got.startswith(b"HTTP/1.1 200 ")
        assert b"chunked" not in got
        assert answer


def test_a_client_of_http_1_0_is_not_told_to_continue(api: Served) -> None:
    """RFC 9110, 10.1.1: it would take that for the answer."""
    with socket.create_connection(api.socket.getsockname()[:2], timeout=240) as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.0\r\nexpect: 100-continue\r\n" + TYPE + LENGTH + b"\r\n" + BODY[:5]
        )
        assert api.http.get("/health").status_code == 200  # time enough for what must not come
        client.sendall(BODY[5:])
        assert client.recv(100).startswith(b"HTTP/1.1 200 ")
