"""What a web page of somebody else's can have a browser do to an open router: nothing."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from contextlib import closing

import pytest
from tests.support.servers.http_front import Served

from baton.config.router import RouterConfig
from baton.errors import ConfigError
from baton.rpc.auth import HostRule
from baton_router.accounts import Accounts

BODY = b'{"model": "baton-tiny", "prompt": "def"}'
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served(hosts=HostRule.of_server("127.0.0.1", ("ui.example", "*.svc.cluster.local"), keyed=False)) as running:
        yield running


def test_a_simple_cross_site_post_runs_no_generation(served: Served) -> None:
    # What a page may send anywhere without asking: text/plain, a form, and a Blob without a type.
    for kind in ("text/plain", "text/plain;charset=UTF-8", "application/x-www-form-urlencoded", None):
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            headers = {} if kind is None else {"content-type": kind}
            answer = served.http.post(path, content=BODY, headers={**headers, "origin": "https://evil.example"})
            assert answer.status_code == 415, (path, kind)
            assert answer.json()["error"]["type"] == "invalid_request_error"
    assert not served.dispatcher.requests
    assert served.http.post("/v1/completions", content=BODY, headers=JSON).status_code == 200


def test_a_page_of_another_origin_posts_nothing_without_a_body_either(served: Served) -> None:
    for origin, status in (("https://evil.example", 403), ("null", 403), (served.url, 405), (None, 405)):
        answer = served.http.post("/health", headers={} if origin is None else {"origin": origin})
        assert answer.status_code == status, origin


def test_pages_of_allowed_origins_post_without_a_body_and_no_others_do() -> None:
    with Served(cors_origins=("https://ui.example",)) as served:
        for origin, status in (("https://ui.example", 405), ("https://evil.example", 403), ("null", 403)):
            assert served.http.post("/health", headers={"origin": origin}).status_code == status, origin
    with Served(cors_origins=("*",)) as anybody:
        assert anybody.http.post("/health", headers={"origin": "https://evil.example"}).status_code == 405


def ask(served: Served, method: str, path: str, host: str | None) -> tuple[int, bytes]:
    address: tuple[str, int] = served.socket.getsockname()
    with closing(http.client.HTTPConnection(*address, timeout=240)) as connection:
        connection.putrequest(method, path, skip_host=True)
        if host is not None:
            connection.putheader("host", host)
        body = BODY if method == "POST" else b""
        for name, value in {**JSON, "content-length": str(len(body))}.items():
            connection.putheader(name, value)
        connection.endheaders(body)
        answer = connection.getresponse()
        return answer.status, answer.read()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models", "/metrics", "/debug/decisions", "/health", "/none"])
@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "ui.example.evil"]
)
def test_foreign_hosts_are_refused(served: Served, path: str, host: str) -> None:
    method = "POST" if path == "/v1/completions" else "GET"
    status, body = ask(served, method, path, host)
    assert status == 403
    assert b"--allowed-hosts" in body
    assert b'"type":"permission_error"' in body


@pytest.mark.parametrize(
    "host",
    [
        *(
            "localhost",
            "LOCALHOST:8000",
            "localhost.",
            "127.0.0.1:8000",
            "127.3.2.1",
            "[::1]:8000",
            "[::1]",
            "10.1.2.3:8000",
        ),
        *("ui.example", "UI.example:443", "baton.models.svc.cluster.local:8000", "host.docker.internal:8000"),
    ],
)
def test_own_names_and_addresses_are_served(served: Served, host: str) -> None:
    assert ask(served, "GET", "/v1/models", host)[0] == 200
    assert ask(served, "POST", "/v1/completions", host)[0] == 200


@pytest.mark.parametrize("path", ["/metrics/", "/health/", "/v1/models/", "/debug/decisions/", "/docs/", "/console/"])
def test_nobody_is_sent_to_the_host_that_a_request_named(path: str) -> None:
    with Served(accounts=Accounts.of_keys("k")) as keyed:
        status, _ = ask(keyed, "GET", path, "evil.example")
        assert not 300 <= status < 400


def test_where_hosts_are_looked_at() -> None:
    """Without names that were given: on loopback, where no key is wanted."""
    assert HostRule.of_server("127.0.0.1", (), keyed=True) is None
    assert HostRule.of_server("0.0.0.0", (), keyed=False) is None
    for host, names in (("::1", ()), ("0.0.0.0", ("a.example",)), ("localhost", ())):
        assert HostRule.of_server(host, names, keyed=False) is not None
    HostRule.of_server("127.0.0.1", ("*",), keyed=False).check([(b"host", b"anything.example")])  # type: ignore[union-attr]


def test_names_that_are_no_hosts_are_refused() -> None:
    for name in ("http://ui.example", "ui.example:8000", "a b"):
        with pytest.raises(ConfigError, match="allowed_hosts"):
            RouterConfig(allowed_hosts=(name,))
