"""The HTTP front's endpoints around generation: keys, methods, headers, health, metrics, pages of other origins."""

from __future__ import annotations

import httpx
import openai
import pytest
from prometheus_client import parser as plain_parser
from prometheus_client.openmetrics import parser
from tests.support.scripted import ANSWER, MODEL
from tests.support.servers.http_front import BODY, CHAT, KEYS, Served

from baton.errors import UnavailableError
from baton_router.accounts import Accounts


def test_strict_fields_and_api_keys() -> None:
    with Served(strict_fields=True, accounts=Accounts.of_keys(*KEYS)) as api:
        api.chat()  # the second key; the raw client below shows the first
        response = api.post("/v1/chat/completions", {"messages": CHAT, "zzz": 1})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "zzz")
        assert api.post("/tokenize", {"prompt": "x", "zzz": 1}).status_code == 400
        for wrong in ("", "Bearer", "Bearer nope", f"Basic {KEYS[0]}", f"Bearer {KEYS[0]}x"):
            refused = httpx.get(f"{api.url}/v1/models", headers={"authorization": wrong} if wrong else {}, timeout=240)
            assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
        assert httpx.post(f"{api.url}/tokenize", json={}, timeout=240).status_code == 401
        assert httpx.get(f"{api.url}/health", timeout=240).status_code == 200
        assert httpx.get(f"{api.url}/readyz", timeout=240).status_code == 200
        assert httpx.get(f"{api.url}/metrics", timeout=240).status_code == 401
        refused = api.http.get("/metrics")  # counters that another tenant moves
        assert (refused.status_code, refused.json()["error"]["type"]) == (403, "permission_error")
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{api.url}/v1", api_key="no", max_retries=0).models.list()


def test_http_itself(api: Served) -> None:
    path = "/v1/chat/completions"
    headers = {"content-type": "application/json"}
    cases = [
        (api.http.post(path, content=b"{not json", headers=headers), 400, "invalid_request"),
        (api.http.post(path, content=b"[1]", headers=headers), 400, "invalid_request"),
        (api.http.post(path, content=b'{"messages": "\\ud800"}', headers=headers), 400, "invalid_request"),
        (api.http.post(path, content=b"x=1", headers={"content-type": "application/x-www-form-urlencoded"}), 415,
         "unsupported_media_type"),
        (api.http.post(path, content=b"\x1f\x8b", headers={**headers, "content-encoding": "gzip"}), 415,
         "unsupported_media_type"),
        (api.http.get(path), 405, "method_not_allowed"),
        (api.http.get("/v2/nothing"), 404, "not_found"),
        (api.post(path, {"messages": "x" * 250_000}), 413, "payload_too_large"),
        (api.http.post(path, content=iter([b" " * 60_000] * 5), headers=headers), 413, "payload_too_large"),
    ]  # fmt: skip
    for response, status, code in cases:
        assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert cases[5][0].headers["allow"] == "POST"


def test_headers_tell_the_way(api: Served) -> None:
    for fields in ({}, {"stream": True}):
        response = api.post(
            "/v1/completions", {"prompt": "def", "temperature": 0, **fields}, headers={"x-request-id": "my-id.1"}
        )
        expected = {
            "x-request-id": "my-id.1",
            "x-baton-prefill-instance": "prefill-0",
            "x-baton-decode-instance": "decode-1",
            "x-baton-match-rate": "0.7500",
            "x-baton-path": "remote",
            "x-baton-pipe": "shm",
            "x-baton-kv-bytes": "4096",
            "x-baton-transfer-ms": "1.500",
            "x-baton-cached-tokens": str(min(3, len(MODEL.tokenizer.encode("def")))),
            "x-baton-index-state": "exact",
            "x-baton-local-reason": "none",
        }
        assert {name: response.headers[name] for name in expected} == expected
    assert api.dispatcher.requests[0].request_id.startswith("cmpl-my-id.1-")
    odd = api.post("/v1/completions", {"prompt": "def"}, headers={"x-request-id": "a b"})
    assert len(odd.headers["x-request-id"]) == 32


def test_health_and_metrics(api: Served) -> None:
    assert api.http.get("/health").json() == {"status": "ok"}
    assert api.http.get("/readyz").status_code == 200
    assert "version" in api.http.get("/version").json()
    api.dispatcher.info_error = UnavailableError("no instance is ready")
    assert api.http.get("/readyz").status_code == 503
    assert api.http.get("/health").status_code == 200
    assert api.http.get("/v1/models").status_code == 503
    api.dispatcher.info_error = None
    api.chat()
    text = api.http.get("/metrics").text
    assert 'baton_http_requests_total{endpoint="/v1/chat/completions",status="200"}' in text
    assert 'baton_http_requests_total{endpoint="/readyz",status="503"}' in text
    assert 'baton_http_in_flight{endpoint="/v1/chat/completions"} 0.0' in text
    assert "baton_request_ttft_seconds_count" in text
    assert api.http.get("/openapi.json").status_code == 200
    cors = api.http.get("/health", headers={"origin": "https://ui.example"}).headers
    assert cors["access-control-allow-origin"] == "https://ui.example"


def test_metrics_in_the_format_that_the_scraper_asks_for(api: Served) -> None:
    api.chat()
    for accept, kind in (
        ("application/openmetrics-text; version=1.0.0", "application/openmetrics-text"),
        ("application/openmetrics-text;version=1.0.0;q=0.6,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
         "application/openmetrics-text"),
        ("text/plain;version=0.0.4", "text/plain"),
        ("*/*", "text/plain"),
        ("", "text/plain"),
    ):  # fmt: skip
        answer = api.http.get("/metrics", headers={"accept": accept})
        assert answer.headers["content-type"].startswith(kind)
        assert "Accept" in answer.headers["vary"]
        openmetrics = kind.startswith("application")
        parse = (parser if openmetrics else plain_parser).text_string_to_metric_families
        samples = {sample.name for family in parse(answer.text) for sample in family.samples}
        assert {"baton_http_requests_total", "baton_request_ttft_seconds_count"} <= samples
        assert answer.text.endswith("# EOF\n") is openmetrics


def test_head(api: Served) -> None:
    for path in ("/health", "/v1/models", "/metrics"):
        answer = api.http.head(path)
        assert (answer.status_code, answer.content) == (200, b"")


def test_paths_with_queries_and_escapes_are_the_same_endpoints(api: Served) -> None:
    for path in ("/v1/completions?api-version=1", "/v1/%63ompletions"):
        answer = api.http.post(path, content=BODY, headers={"content-type": "application/json"})
        assert answer.json()["choices"][0]["text"] == ANSWER
    assert api.http.options("/v1/completions").status_code == 405


@pytest.mark.parametrize("stream", [False, True])
def test_pages_of_allowed_origins_may_read_answers(api: Served, stream: bool) -> None:
    body = {"prompt": "def", "stream": stream}
    for origin, allowed in (("https://ui.example", "https://ui.example"), ("https://other.example", None)):
        for answer in (
            api.post("/v1/completions", body, headers={"origin": origin}),
            api.post("/v1/completions", {"prompt": 5}, headers={"origin": origin}),
            api.http.get("/v1/models", headers={"origin": origin}),
            api.http.get("/nothing", headers={"origin": origin}),
        ):
            assert answer.headers.get("access-control-allow-origin") == allowed
            assert answer.headers["vary"].lower() == "origin"  # what a cache keeps for one page is not another's
            assert "access-control-allow-credentials" not in answer.headers  # keys are no cookies
    assert api.post("/v1/completions", body).headers["vary"].lower() == "origin"


def test_preflight_requests_need_no_key_and_allow_what_the_endpoints_take() -> None:
    asked = {
        "origin": "https://ui.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-baton-session",
    }
    with Served(accounts=Accounts.of_keys(*KEYS), cors_origins=("https://ui.example",)) as api:
        preflight = httpx.options(f"{api.url}/v1/completions", headers=asked, timeout=240)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "https://ui.example"
        assert preflight.headers["access-control-allow-headers"] == asked["access-control-request-headers"]
        assert "POST" in preflight.headers["access-control-allow-methods"]
        refused = httpx.options(f"{api.url}/v1/completions", headers={**asked, "origin": "https://x"}, timeout=240)
        assert refused.status_code == 400
        assert "access-control-allow-origin" not in refused.headers
        wrong = httpx.post(f"{api.url}/v1/completions", headers={"origin": "https://ui.example"}, json={}, timeout=240)
        assert (wrong.status_code, wrong.headers["access-control-allow-origin"]) == (401, "https://ui.example")
    with Served(cors_origins=("*",)) as anybody:
        headers = anybody.post("/v1/completions", {"prompt": "def"}, headers={"origin": "https://x"}).headers
        assert (headers["access-control-allow-origin"], headers.get("vary")) == ("*", None)
    with Served() as closed:
        headers = closed.post("/v1/completions", {"prompt": "def"}, headers=asked).headers
        assert "access-control-allow-origin" not in headers
        assert "vary" not in headers
