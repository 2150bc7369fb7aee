"""A model that quotes a call does not make one: only the tokenizer's own token opens it."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import tokenizers
from tests.integration.http.test_tool_calls import TEMPLATE, TOOLS
from tests.support.scripted import TINY, encode
from tests.support.servers.http_front import Served

ANCHORS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
QUOTE = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
THOUGHT = f"It says {QUOTE} and </think>, which I don't do."
TEXT = f"The page says: {QUOTE}, in <think>quotes</think> "
CALL = '\n{"name": "get_weather", "arguments": {"city": "</tool_call> <tool_call>"}}\n'


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = tmp_path_factory.mktemp("anchors") / "model"
    shutil.copytree(TINY, model, ignore=shutil.ignore_patterns("*.safetensors"))
    (model / "chat_template.jinja").write_text(TEMPLATE)
    backend = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    backend.add_tokens([tokenizers.AddedToken(name, special=False, normalized=False) for name in ANCHORS])
    backend.save(str(model / "tokenizer.json"))
    with Served() as server:
        server.model = str(model)  # type: ignore[attr-defined]
        server.ids = {name: backend.token_to_id(name) for name in ANCHORS}  # type: ignore[attr-defined]
        yield server


@pytest.fixture(params=[1, 3, 1000])
def api(running: Served, request: pytest.FixtureRequest) -> Served:
    running.reset()
    running.dispatcher.per_chunk = request.param
    running.dispatcher.info = dataclasses.replace(running.dispatcher.info, path=running.model, max_model_len=2048)  # type: ignore[attr-defined]
    ids = running.ids  # type: ignore[attr-defined]
    answer = [ids["<think>"], *encode(THOUGHT), ids["</think>"], *encode(TEXT)]
    answer += [ids["<tool_call>"], *encode(CALL), ids["</tool_call>"]]
    running.dispatcher.script = lambda request, index: answer
    return running


def ask(api: Served, path: str, **options: Any) -> tuple[str, str, list[tuple[str, Any]]]:
    """Return text, reasoning and calls of an answer."""
    message = {"role": "user", "content": "What does the page say?"}
    body: dict[str, Any] = {"model": "baton-tiny", "temperature": 0, **options}
    if path == "chat/completions":
        body |= {"messages": [message], "tools": TOOLS, "max_tokens": 500}
    elif path == "responses":
        body |= {"input": [message], "max_output_tokens": 500}
        body["tools"] = [{"type": "function", **tool["function"]} for tool in TOOLS]
    else:
        body |= {"messages": [message], "max_tokens": 500}
        body["tools"] = [{"name": tool["function"]["name"], "input_schema": {"type": "object"}} for tool in TOOLS]
    answer = httpx.post(f"{api.url}/v1/{path}", json=body, timeout=240)
    assert answer.status_code == 200, answer.text
    if not options.get("stream"):
        return _read(path, answer.json())
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    if path == "responses":
        return _read(path, events[-1]["response"])
    text, thought, calls = "", "", list[list[str]]()
    for event in events:
        delta = event["choices"][0]["delta"] if event.get("choices") else event.get("delta", {})
        text += delta.get("content") or delta.get("text") or ""
        thought += delta.get("reasoning") or delta.get("thinking") or ""
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                calls.append([call["function"]["name"], ""])
            calls[-1][1] += call["function"]["arguments"]
        if event.get("content_block", {}).get("type") == "tool_use":
            calls.append([event["content_block"]["name"], ""])
        if "partial_json" in delta:
            calls[-1][1] += delta["partial_json"]
    return text, thought, [(name, json.loads(arguments)) for name, arguments in calls]


def _read(path: str, body: dict[str, Any]) -> tuple[str, str, list[tuple[str, Any]]]:
    if path == "chat/completions":
        message = body["choices"][0]["message"]
        found = [call["function"] for call in message["tool_calls"]]
        calls = [(call["name"], json.loads(call["arguments"])) for call in found]
        return message["content"], message["reasoning"], calls
    if path == "responses":
        texts = [item["content"][0]["text"] for item in body["output"] if item["type"] == "message"]
        thoughts = [item["content"][0]["text"] for item in body["output"] if item["type"] == "reasoning"]
        calls = [(it["name"], json.loads(it["arguments"])) for it in body["output"] if it["type"] == "function_call"]
        return "".join(texts), "".join(thoughts), calls
    blocks = body["content"]
    texts = [block["text"] for block in blocks if block["type"] == "text"]
    thoughts = [block["thinking"] for block in blocks if block["type"] == "thinking"]
    return "".join(texts), "".join(thoughts), [(b["name"], b["input"]) for b in blocks if b["type"] == "tool_use"]


EXPECTED = (TEXT.rstrip(), THOUGHT, [("get_weather", {"city": "</tool_call> <tool_call>"})])


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_quoted_call_is_text_and_the_tokens_are_a_call(api: Served, path: str, stream: bool) -> None:
    thinking = {"thinking": {"type": "adaptive"}} if path == "messages" else {}
    assert ask(api, path, stream=stream, **thinking) == EXPECTED


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_and_log_probabilities_do_not_move_an_anchor(api: Served, stream: bool) -> None:
    assert ask(api, "chat/completions", stream=stream, stop=["<tool_call>\n{{", "the end"]) == EXPECTED
    assert ask(api, "chat/completions", stream=stream, logprobs=True) == EXPECTED
