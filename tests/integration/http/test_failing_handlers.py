"""An error whose handling fails: the client gets an answer all the same, and nothing of its request stays behind."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tests.support.servers.http_front import CHAT, Served

from baton.errors import InvalidRequestError
from baton_router.frontend.http.protocol import HttpExchange
from baton_router.processor.input_processor import InputProcessor


class UnanswerableError(InvalidRequestError):
    """An error that no answer can be made of."""

    @property
    def http_status(self) -> int:  # type: ignore[override]
        raise ZeroDivisionError("in the handler")


BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": ["def", "class"]},
    "/v1/chat/completions": {"messages": CHAT},
    "/v1/messages": {"messages": CHAT, "max_tokens": 50},
    "/v1/responses": {"input": "write add"},
}


@pytest.fixture
def fresh() -> Iterator[Served]:
    """A server that has not loaded its tokenizer: requests are prepared in tasks."""
    with Served() as served:
        yield served


def post(api: Served, path: str, *, stream: bool) -> httpx.Response:
    return api.post(path, {"temperature": 0, "stream": stream, **BODIES[path]}, timeout=60)


def assert_failed(api: Served, response: httpx.Response, caplog: pytest.LogCaptureFixture) -> None:
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "something went wrong inside Baton"
    assert_nothing_left(api, caplog)


def assert_nothing_left(api: Served, caplog: pytest.LogCaptureFixture) -> None:
    posts = api.front.posts
    api.wait_until(lambda: not (api.dispatcher.open_streams or posts._tasks))
    assert len(posts.deadlines) == 0
    in_flight = [
        sample.value
        for metric in api.registry.collect()
        for sample in metric.samples
        if sample.name == "baton_http_requests_in_flight" and sample.labels["endpoint"] in BODIES
    ]
    assert sum(in_flight) == 0
    assert any("in the handler" in (record.exc_text or "") for record in caplog.records)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
def test_in_the_preparing_task(
    fresh: Served, path: str, stream: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def prepare(*args: Any, **fields: Any) -> None:
        raise UnanswerableError("x")

    monkeypatch.setattr(InputProcessor, "prepare", prepare)
    assert_failed(fresh, post(fresh, path, stream=stream), caplog)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
def test_before_the_first_token(api: Served, path: str, stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    api.dispatcher.fail_after = 0
    api.dispatcher.error = UnanswerableError("x")
    assert_failed(api, post(api, path, stream=stream), caplog)


@pytest.mark.parametrize("path", BODIES)
def test_in_a_stream(api: Served, path: str, caplog: pytest.LogCaptureFixture) -> None:
    api.dispatcher.fail_after = 2
    api.dispatcher.error = UnanswerableError("x")
    with pytest.raises(httpx.RemoteProtocolError):  # the head with 200 is sent: the connection ends
        post(api, path, stream=True)
    assert_nothing_left(api, caplog)


@pytest.mark.parametrize("length", [1, 100_000])
def test_of_an_endpoint_that_generates_nothing(
    api: Served, length: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def model_info(*args: Any) -> None:
        raise UnanswerableError("x")

    monkeypatch.setattr(InputProcessor, "model_info", model_info)
    body = json.dumps({"prompt": "x" * length})
    headers = {"content-type": "application/json"}
    assert_failed(api, api.http.post("/tokenize", content=body, headers=headers, timeout=60), caplog)


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_in_the_writing_of_the_answer(
    api: Served, path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    respond = HttpExchange.respond
    failures = iter([ZeroDivisionError("in the handler")])

    def fail_once(exchange: HttpExchange, *answer: Any) -> None:
        for failure in failures:
            raise failure
        respond(exchange, *answer)

    monkeypatch.setattr(HttpExchange, "respond", fail_once)
    assert_failed(api, api.post(path, {"prompt": "def"}, timeout=60), caplog)
