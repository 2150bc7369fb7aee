"""What the HTTP front refuses and how it fails: the field that is wrong, statuses, sizes, nothing that is secret."""

from __future__ import annotations

import contextlib
import http.client
import json
from typing import Any

import httpx
import openai
import pytest
from tests.support.servers.http_front import CHAT, Served

from baton.errors import InternalError, InvalidRequestError, QueueFullError, UnavailableError
from baton.tokenizer import Tokenizer
from baton_router.frontend.http.bodies import MAX_DEPTH


@pytest.mark.parametrize(
    ("path", "fields", "status", "param"),
    [
        ("chat", {"messages": None}, 400, "messages"),
        ("chat", {"messages": []}, 400, "messages"),
        ("chat", {"messages": "hi"}, 400, "messages"),
        ("chat", {"messages": [{"content": "x"}]}, 400, "messages[0].role"),
        ("chat", {"messages": [*CHAT, {"role": "wizard", "content": "x"}]}, 400, "messages[1].role"),
        ("chat", {"messages": [{"role": ["user"], "content": "x"}]}, 400, "messages[0].role"),
        ("chat", {"messages": [*CHAT, {"role": "user"}]}, 400, "messages[1].content"),
        ("chat", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages[0].content[0]"),
        ("chat", {"model": "gpt-4"}, 404, "model"),
        ("chat", {"model": 3}, 400, "model"),
        ("chat", {"temperature": "hot"}, 400, "temperature"),
        ("chat", {"temperature": -1}, 400, "temperature"),
        ("chat", {"top_p": 0}, 400, "top_p"),
        ("chat", {"n": 0}, 400, "n"),
        ("chat", {"n": True}, 400, "n"),
        ("chat", {"max_tokens": 10_000}, 400, "max_tokens"),
        ("chat", {"max_completion_tokens": 0}, 400, "max_completion_tokens"),
        ("chat", {"max_completion_tokens": 3, "max_tokens": 4}, 400, "max_completion_tokens"),
        ("chat", {"top_logprobs": 21, "logprobs": True}, 400, "top_logprobs"),
        ("chat", {"top_logprobs": 2}, 400, "top_logprobs"),
        ("chat", {"logit_bias": {"x": 1}}, 400, "logit_bias"),
        ("chat", {"logit_bias": {"5": 101}}, 400, "logit_bias"),
        ("chat", {"stop": [1]}, 400, "stop"),
        ("chat", {"stop": ""}, 400, "stop"),
        ("chat", {"seed": 2**70}, 400, "seed"),
        ("chat", {"stream_options": {"include_usage": True}}, 400, "stream_options"),
        ("chat", {"stream": True, "stream_options": {"include_usage": 1}}, 400, "stream_options.include_usage"),
        ("chat", {"tools": [{"type": "function"}]}, 400, "tools[0].function"),
        ("chat", {"response_format": {"type": "json_object"}}, 400, "response_format"),
        ("chat", {"chat_template_kwargs": {"messages": 1}}, 400, "chat_template_kwargs.messages"),
        ("chat", {"messages": [{"role": "user", "content": "word " * 400}]}, 400, "messages"),
        ("", {"prompt": None}, 400, "prompt"),
        ("", {"prompt": [1, "x"]}, 400, "prompt[1]"),
        ("", {"prompt": ["x", 1]}, 400, "prompt[1]"),
        ("", {"prompt": [[1], []]}, 400, "prompt[1]"),
        ("", {"prompt": ["x"] * 5}, 400, "prompt"),
        ("", {"prompt": [5000]}, 400, "prompt"),
        ("", {"prompt": ["x"] * 4, "n": 100}, 400, "n"),
        ("", {"prompt": ["x"] * 4, "n": 10**6}, 400, "n"),
        ("", {"best_of": 2}, 400, "best_of"),
        ("", {"suffix": "x"}, 400, "suffix"),
        ("", {"logprobs": 21}, 400, "logprobs"),
        ("", {"max_tokens": 0}, 400, "max_tokens"),
        ("", {"stop_token_ids": [-1]}, 400, "stop_token_ids"),
        ("", {"stream": True, "prompt_logprobs": 1}, 400, "prompt_logprobs"),
    ],
)  # fmt: skip
def test_bad_input_names_the_field(api: Served, path: str, fields: dict[str, Any], status: int, param: str) -> None:
    base = {"messages": CHAT} if path else {"prompt": "x"}
    response = api.post(f"/v1/{path + '/' if path else ''}completions", {"model": "baton-tiny", **base, **fields})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (status, param)
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert api.dispatcher.requests == []


def test_sdk_error_classes(api: Served) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        api.chat(messages=[{"role": "user", "content": "word " * 400}])
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")
    with pytest.raises(openai.NotFoundError) as missing:
        api.chat(model="nope")
    assert missing.value.code == "model_not_found"
    api.dispatcher.fail_after, api.dispatcher.error = 0, QueueFullError("everybody is full", retry_after_s=2.3)
    for stream in (False, True):  # nothing has been sent yet: a stream's error has its own status as well
        with pytest.raises(openai.RateLimitError) as full:
            api.chat(stream=stream)
        assert full.value.response.headers["retry-after"] == "3"
    api.dispatcher.error = UnavailableError("nobody is there")
    with pytest.raises(openai.InternalServerError) as away:
        api.chat()
    assert (away.value.status_code, away.value.response.headers["retry-after"]) == (503, "1")
    api.dispatcher.error = InvalidRequestError("refused below", field="prompt")
    with pytest.raises(openai.BadRequestError, match="refused below"):
        api.completion(prompt=["a", "b"])
    assert api.dispatcher.open_streams == 0


def test_harmless_and_default_values_are_accepted_in_silence(api: Served) -> None:
    fields: dict[str, Any] = {
        "best_of": 1, "logprobs": None, "tools": None, "tool_choice": "auto", "response_format": {"type": "text"},
        "user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "parallel_tool_calls": True,
        "modalities": ["text"], "stop": None, "n": None, "seed": None, "stream_options": None, "logit_bias": {},
    }  # fmt: skip
    response = api.post("/v1/chat/completions", {"model": None, "messages": CHAT, "temperature": 0, **fields})
    assert response.status_code == 200
    assert "x-baton-ignored-fields" not in response.headers


def test_unknown_fields_are_named_and_counted(api: Served) -> None:
    fields = {
        "store": True, "mystery\r\nx": 1, "zzz_vendor": {"a": 1}, "reasoning_effort": "low",
        "chat_template_kwargs": {"enable_thinking": False}, "stream": True,
        "stream_options": {"include_usage": True, "odd": 1},
    }  # fmt: skip
    response = api.post("/v1/chat/completions", {"messages": CHAT, "temperature": 0, **fields})
    assert response.headers["x-baton-ignored-fields"].split(", ") == [
        "store", "mystery??x", "zzz_vendor", "stream_options.odd",
        "chat_template_kwargs.enable_thinking", "reasoning_effort",
    ]  # fmt: skip
    text = api.http.get("/metrics").text
    assert 'baton_http_ignored_fields_total{field="zzz_vendor"} 1.0' in text
    assert 'baton_http_ignored_fields_total{field="mystery??x"} 1.0' in text


def test_unexpected_errors_tell_nothing(api: Served, capfd: pytest.CaptureFixture[str]) -> None:
    api.dispatcher.fail_after, api.dispatcher.error = 0, RuntimeError("secret detail")
    response = api.post("/v1/completions", {"prompt": "x"})
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"
    assert "secret" not in response.text


@pytest.mark.parametrize("error", [InternalError("the instance died"), RuntimeError("secret detail")])
def test_error_in_mid_stream_is_an_event(api: Served, error: Exception) -> None:
    api.dispatcher.fail_after, api.dispatcher.error = 3, error
    with pytest.raises(openai.APIError) as caught:
        list(api.chat(stream=True))
    assert "secret" not in str(caught.value)
    lines = api.post("/v1/completions", {"prompt": "x", "stream": True, "temperature": 0}).text.split("\n\n")
    assert lines[-1] == ""
    assert json.loads(lines[-2].removeprefix("data: "))["error"]["type"] == "server_error"
    assert "[DONE]" not in "".join(lines)


@pytest.mark.parametrize(("stream", "fail_after"), [(False, 0), (True, 0), (True, 3)])
def test_an_error_of_ours_leaves_the_connection_usable(
    api: Served, caplog: pytest.LogCaptureFixture, stream: bool, fail_after: int
) -> None:
    """A whole answer promises that the connection takes the next request, whatever went wrong behind it."""
    api.dispatcher.fail_after, api.dispatcher.error = fail_after, RuntimeError("secret detail")
    body = json.dumps({"prompt": "x", "stream": stream, "temperature": 0})
    with contextlib.closing(http.client.HTTPConnection(*api.socket.getsockname()[:2], timeout=240)) as connection:
        connection.request(
            "POST", "/v1/completions", body, {"x-request-id": "which", "content-type": "application/json"}
        )
        answer = connection.getresponse()
        assert answer.status == (200 if fail_after else 500)
        assert answer.headers["x-request-id"] == "which"
        assert b"server_error" in answer.read()
        used = connection.sock
        connection.request("GET", "/health")
        assert connection.getresponse().status == 200
        assert connection.sock is used
    (record,) = [record for record in caplog.records if record.exc_info]
    assert "which" in record.getMessage()
    assert "secret detail" in caplog.text  # whoever runs this learns what clients don't


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
@pytest.mark.parametrize("field", ["prompt", "stop", "tools", "logit_bias", "zzz"])
def test_deeply_nested_values_are_no_servers_error(api: Served, field: str, opening: str, closing: str) -> None:
    def ask(depth: int) -> httpx.Response:
        value = opening * depth + ("1" if opening != "[" else "") + closing * depth
        body = f'{{"{field}":{value}}}' if field == "prompt" else f'{{"prompt":"x","max_tokens":1,"{field}":{value}}}'
        return api.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})

    deeper = ask(1000)
    assert (deeper.status_code, deeper.json()["error"]["message"]) == (
        400,
        f"the body is nested deeper than {MAX_DEPTH}",
    )
    answer = ask(MAX_DEPTH - 1)
    if field == "zzz":
        assert answer.headers["x-baton-ignored-fields"] == "zzz"
    else:
        assert (answer.status_code, answer.json()["error"]["param"][: len(field)]) == (400, field)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": "m" * 50_000}, "model"),
        ({"logit_bias": {str(item): 1 for item in range(2000)}}, "logit_bias"),
        ({"chat_template_kwargs": {f"k{item}": 1 for item in range(2000)}}, "chat_template_kwargs"),
        ({"logit_bias": {"x" * 50_000: "y"}}, "logit_bias"),
        ({"stop_token_ids": list(range(2000))}, "stop_token_ids"),
        ({"prompt": [[1], [{"k" * 50_000: 1}]]}, "prompt"),
    ],
)
def test_errors_do_not_repeat_all_that_was_sent(api: Served, fields: dict[str, Any], param: str) -> None:
    answer = api.post("/v1/completions", {"prompt": "x", **fields})
    assert answer.status_code in {400, 404}
    assert answer.json()["error"]["param"].startswith(param)
    assert len(answer.content) < 1000


def test_a_body_has_no_thousands_of_fields(api: Served) -> None:
    for path, body in (("/v1/completions", {"prompt": "x"}), ("/tokenize", {"prompt": "x"})):
        answer = api.post(path, {**body, **{f"f{item}": 1 for item in range(2000)}})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")
        assert "1024 fields" in answer.json()["error"]["message"]


def test_what_is_tokenized_and_turned_back_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton_router.frontend.app._LEAST_BOUND", 3000)
    with Served() as api:
        for path, body, param in (
            ("/tokenize", {"prompt": "x" * 3001}, "prompt"),
            ("/tokenize", {"messages": [{"role": "user", "content": "x" * 2000}] * 2}, "messages"),
            ("/detokenize", {"tokens": [5] * 3001}, "tokens"),
        ):
            answer = api.post(path, body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        assert api.post("/tokenize", {"prompt": "x" * 3000}).status_code == 200
        assert api.post("/detokenize", {"tokens": [5] * 3000}).status_code == 200


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(api: Served, monkeypatch: Any) -> None:
    def refuse(*args: Any) -> Any:
        raise AssertionError("tokenized")

    monkeypatch.setattr(Tokenizer, "encode", refuse)
    for path, body in (
        ("/v1/completions", {"prompt": "a " * 50_000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a " * 50_000}]}),
    ):
        answer = api.post(path, body)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", next(iter(body)))
