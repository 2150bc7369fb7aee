"""``/v1/responses`` over real sockets, with the unmodified OpenAI SDK: what the model writes is scripted."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
from types import SimpleNamespace
from typing import Any, cast

import openai
import pydantic
import pytest
from tests.integration.http.test_tool_calls import CALLS, PARAMETERS, api, prompt, running, say  # noqa: F401
from tests.support.scripted import encode
from tests.support.servers.http_front import Served

from baton.errors import NotFoundError
from baton_router.frontend.openai import response_store, responses
from baton_router.frontend.openai.response_store import ResponseStore
from baton_router.types import Account

TOOLS: list[Any] = [
    {"type": "function", "name": "get_weather", "parameters": PARAMETERS, "strict": False},
    {"type": "function", "name": "get_time", "parameters": None, "strict": None},
]

NAMESPACE: dict[str, Any] = {
    "type": "namespace",
    "name": "weather",
    "description": "About it.",
    "tools": [
        {"type": "function", "name": "ask", "parameters": PARAMETERS, "strict": True},
        {"type": "custom", "name": "run"},
    ],
}
NAMESPACE_CALLS = """<tool_call>
{"name": "weather__ask", "arguments": {"city": "Rome"}}
</tool_call>
<tool_call>
{"name": "weather__run", "arguments": {"input": "a \\"b\\"\\nc"}}
</tool_call>
<tool_call>
{"name": "get_time", "arguments": {}}
</tool_call>"""


@pytest.fixture
def served(api: Served) -> Served:  # noqa: F811
    api.dispatcher.info = dataclasses.replace(api.dispatcher.info, grammars=True)
    return api


def create(served: Served, **fields: Any) -> Any:
    return served.client.responses.create(
        **{"model": "baton-tiny", "input": "Weather?", "temperature": 0, "max_output_tokens": 500, **fields}
    )


def kinds(output: list[Any]) -> list[str]:
    return [item.type for item in output]


@pytest.mark.parametrize("per_chunk", [1, 7, 1000])
def test_text_reasoning_and_calls_are_items(served: Served, per_chunk: int) -> None:
    served.dispatcher.per_chunk = per_chunk
    answer = create(served, tools=TOOLS)
    assert answer.status == "completed"
    assert kinds(answer.output) == ["reasoning", "message", "function_call", "function_call"]
    thought, message, call, other = answer.output
    assert thought.content[0].text == "They want it."
    assert message.content[0].text == answer.output_text == "Let me see."
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Köln", "days": 2})
    assert (other.name, other.arguments) == ("get_time", "{}")
    assert answer.usage.output_tokens == len(encode(CALLS)) + 1
    assert 0 < answer.usage.output_tokens_details.reasoning_tokens < answer.usage.output_tokens


@pytest.mark.parametrize("per_chunk", [1, 7, 1000])
def test_a_stream_tells_of_each_change_and_ends_with_all_of_it(served: Served, per_chunk: int) -> None:
    served.dispatcher.per_chunk = per_chunk
    whole = create(served, tools=TOOLS)
    events = list(create(served, tools=TOOLS, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    final = events[-1]
    assert final.type == "response.completed"
    assert kinds(final.response.output) == kinds(whole.output)
    texts: dict[str, str] = {}
    for event in events:
        if event.type.endswith(".delta"):
            texts[event.item_id] = texts.get(event.item_id, "") + event.delta
    for item, expected in zip(final.response.output, whole.output, strict=True):
        if item.type == "function_call":
            assert texts[item.id] == item.arguments == expected.arguments
        else:
            assert texts[item.id] == item.content[0].text == expected.content[0].text
    added = [event.item.id for event in events if event.type == "response.output_item.added"]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert added == [item.id for item in done] == [item.id for item in final.response.output]
    assert {item.status for item in done} == {"completed"}


def test_the_sdk_puts_a_stream_together(served: Served) -> None:
    with served.client.responses.stream(model="baton-tiny", input="Weather?", tools=TOOLS, temperature=0) as stream:
        for _ in stream:
            pass
        final = stream.get_final_response()
    assert kinds(final.output) == ["reasoning", "message", "function_call", "function_call"]


def test_a_conversation_goes_on_by_the_id_of_its_last_response(served: Served) -> None:
    first = create(served, tools=TOOLS, instructions="Be brief.")
    call = next(item for item in first.output if item.type == "function_call")
    say(served, "It is sunny.")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."}
    second = create(served, previous_response_id=first.id, input=[result], tools=TOOLS)
    assert second.output_text == "It is sunny."
    text = prompt(served)
    assert "Be brief." not in text  # instructions are a request's own
    assert "Weather?" in text
    assert "<think>They want it.</think>Let me see." in text
    assert '{"name": "get_weather", "arguments": {"city": "Köln", "days": 2}}' in text
    assert "<|tool|>Sunny." in text
    create(served, previous_response_id=second.id, input="And tomorrow?")
    assert "It is sunny.<|user|>And tomorrow?" in prompt(served)
    # The same, told by items.
    told = [{"role": "user", "content": "Weather?"}, *(item.model_dump() for item in first.output), result]
    create(served, input=told, tools=TOOLS)
    assert prompt(served) == text


def test_what_is_not_stored_cannot_be_gone_on_from(served: Served) -> None:
    say(served, "Hm.")
    answer = create(served, store=False)
    for ident in (answer.id, "resp_none"):
        with pytest.raises(openai.NotFoundError) as caught:
            create(served, previous_response_id=ident)
        assert caught.value.param == "previous_response_id"
        with pytest.raises(openai.NotFoundError) as caught:
            served.client.responses.retrieve(ident)
        assert caught.value.param == "response_id"


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_stored_can_be_had_again_and_deleted(served: Served, stream: bool) -> None:
    if stream:
        answer = list(create(served, tools=TOOLS, metadata={"a": "b"}, stream=True))[-1].response
    else:
        answer = create(served, tools=TOOLS, metadata={"a": "b"})
    assert answer.metadata == {"a": "b"}
    again = served.client.responses.retrieve(answer.id)
    assert again.model_dump() == answer.model_dump()
    assert served.http.get(f"/v1/responses/{answer.id}?stream=true").status_code == 400
    metrics = served.http.get("/metrics").text
    assert "baton_http_kept_responses 0" not in metrics
    assert 'baton_http_requests_total{endpoint="/v1/responses/{id}",status="200"}' in metrics
    assert served.http.delete(f"/v1/responses/{answer.id}").json() == {
        "id": answer.id, "object": "response", "deleted": True,
    }  # fmt: skip
    with pytest.raises(openai.NotFoundError):
        served.client.responses.delete(answer.id)
    with pytest.raises(openai.NotFoundError):
        create(served, previous_response_id=answer.id)


def test_the_beginning_of_a_stream_has_no_output_yet(served: Served) -> None:
    served.dispatcher.per_chunk = 1000
    first = next(iter(create(served, tools=TOOLS, stream=True)))
    assert (first.type, first.response.output) == ("response.created", [])


def test_fields_without_effect_are_named(served: Served) -> None:
    say(served, "Hm.")
    fields: dict[str, Any] = {
        "input": "x", "max_output_tokens": 9, "include": ["reasoning.encrypted_content"], "zzz": 1,
        "service_tier": "flex", "reasoning": {"effort": "low", "summary": "auto"}, "text": {"verbosity": "high"},
    }  # fmt: skip
    answer = served.post("/v1/responses", fields)
    named = answer.headers["x-baton-ignored-fields"].split(", ")
    expected = ["include", "zzz", "service_tier", "text.verbosity", "reasoning.summary", "reasoning.effort"]
    assert sorted(named) == sorted(expected)
    harmless = {
        "include": [],
        "service_tier": "auto",
        "stream_options": {"include_obfuscation": False},
        "prompt_cache_key": "k",
        "text": {"verbosity": "medium", "format": {"type": "text"}},
        "background": False,
        "truncation": "disabled",
    }
    answer = served.post("/v1/responses", {"input": "x", "max_output_tokens": 9, **harmless})
    assert "x-baton-ignored-fields" not in answer.headers


def test_an_answer_that_is_cut_is_incomplete(served: Served) -> None:
    cut = create(served, max_output_tokens=20)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    events = list(create(served, max_output_tokens=20, stream=True))
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output[-1].status == "incomplete"


def test_text_has_the_format_that_was_asked_for(served: Served) -> None:
    class City(pydantic.BaseModel):
        name: str

    say(served, '{"name": "Rome"}')
    parsed = served.client.responses.parse(model="baton-tiny", input="Where?", text_format=City, temperature=0)
    assert parsed.output_parsed == City(name="Rome")
    assert "%json" in served.dispatcher.requests[-1].sampling.grammar.text  # type: ignore[union-attr]
    create(served, tools=TOOLS, tool_choice={"type": "function", "name": "get_time"})
    assert "get_weather" not in served.dispatcher.requests[-1].sampling.grammar.text  # type: ignore[union-attr]


def test_a_stream_that_fails_ends_with_an_error(served: Served) -> None:
    served.dispatcher.fail_after, served.dispatcher.error = 3, openai.OpenAIError("inside")
    last = list(create(served, stream=True))[-1]
    assert last.type == "error"
    assert "something went wrong" in last.message


@pytest.mark.parametrize("per_chunk", [1, 1000])
@pytest.mark.parametrize("additional", [False, True])
def test_tools_in_a_namespace_are_called_by_both_names(served: Served, additional: bool, per_chunk: int) -> None:
    served.dispatcher.per_chunk = per_chunk
    say(served, NAMESPACE_CALLS)
    tools = [NAMESPACE, TOOLS[1], {"type": "web_search", "external_web_access": False}]
    question: list[Any] = [{"role": "user", "content": "Weather?"}]
    given: dict[str, Any] = {"input": question, "tools": tools}
    if additional:
        given = {"input": [{"type": "additional_tools", "role": "developer", "tools": tools}, *question]}
    answer = create(served, **given)
    call, custom, other = answer.output
    assert (call.type, call.namespace, call.name, call.arguments) == (
        "function_call", "weather", "ask", '{"city": "Rome"}',
    )  # fmt: skip
    assert (custom.type, custom.namespace, custom.name) == ("custom_tool_call", "weather", "run")
    assert custom.input == 'a "b"\nc'
    assert (other.type, other.namespace, other.name) == ("function_call", None, "get_time")
    assert '"name":"weather__ask"' in prompt(served).replace(" ", "")
    assert "web_search" not in prompt(served)
    events = list(create(served, stream=True, **given))
    assert [item.model_dump(exclude={"id", "call_id"}) for item in events[-1].response.output] == [
        item.model_dump(exclude={"id", "call_id"}) for item in answer.output
    ]
    pieces = [event for event in events if event.type == "response.custom_tool_call_input.delta"]
    assert "".join(event.delta for event in pieces) == custom.input
    assert [event.input for event in events if event.type == "response.custom_tool_call_input.done"] == [custom.input]
    # The calls and their results go back to the model as it knows them.
    say(served, "Sunny.")
    results = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "Sun."},
        {"type": "custom_tool_call_output", "call_id": custom.call_id, "output": [{"type": "input_text", "text": "d"}]},
        {"type": "function_call_output", "call_id": other.call_id, "output": "Noon."},
    ]
    output = [item.model_dump(exclude_none=True) for item in answer.output]
    told = create(served, **{**given, "input": [*given["input"], *output, *results]})
    assert told.output_text == "Sunny."
    text = prompt(served)
    assert '<tool_call>{"name": "weather__ask", "arguments": {"city": "Rome"}}</tool_call>' in text
    assert '<tool_call>{"name": "weather__run", "arguments": {"input": "a \\"b\\"\\nc"}}</tool_call>' in text
    assert "<|tool|>Sun." in text
    assert "<|tool|>d" in text
    create(served, previous_response_id=answer.id, input=results, tools=tools)
    assert prompt(served).endswith(text[text.index("Weather?") :])


def test_tools_of_the_service_are_left_out_by_name(served: Served) -> None:
    say(served, "Hm.")
    kinds = ("web_search", "web_search_preview", "file_search", "mcp", "image_generation", "code_interpreter")
    tools = [TOOLS[1], *({"type": kind} for kind in kinds)]
    tools.append({"type": "custom", "name": "c", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}})
    answer = served.post("/v1/responses", {"input": "x", "tools": tools, "max_output_tokens": 9})
    named = answer.headers["x-baton-ignored-fields"].split(", ")
    assert named == [*(f"tools[{at}].{kind}" for at, kind in enumerate(kinds, 1)), f"tools[{len(kinds) + 1}].format"]
    choice = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "web_search"}, {"type": "function", "name": "ask", "namespace": "weather"}],
    }
    say(served, '<tool_call>\n{"name": "weather__ask", "arguments": {"city": "Rome"}}\n</tool_call>')
    allowed = create(served, tools=[NAMESPACE, *tools], tool_choice=choice)
    assert (allowed.output[0].namespace, allowed.output[0].name) == ("weather", "ask")
    grammar = served.dispatcher.requests[-1].sampling.grammar
    assert grammar is not None
    assert "get_time" not in grammar.text
    bad = {**NAMESPACE["tools"][0], "parameters": {"type": "object", "not": {}}}
    answer = served.post("/v1/responses", {"input": "x", "tools": [{**NAMESPACE, "tools": [TOOLS[1], bad]}]})
    assert answer.json()["error"]["param"] == "tools[0].tools[1].parameters.not"


def test_an_item_changes_the_settings(served: Served) -> None:
    say(served, '{"name": "Rome"}')
    schema = {"type": "object", "properties": {"name": {"type": "string"}}}
    update = {
        "type": "configuration_update",
        "text": {"format": {"type": "json_schema", "name": "x", "schema": schema}},
    }
    effort = {"type": "configuration_update", "reasoning": {"effort": "low"}}
    fields = {"input": [{"role": "user", "content": "x"}, update, effort], "client_metadata": {"a": "b"}}
    answer = served.post("/v1/responses", {**fields, "max_output_tokens": 99})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-baton-ignored-fields"] == "reasoning.effort"  # the template does not read it
    assert "%json" in served.dispatcher.requests[-1].sampling.grammar.text  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": [{"role": "user", "content": "x", "id": 5}]}, "input[0].id"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "reasoning", "content": "", "summary": {}}]}, "input[0].summary"),
        ({"input": [{"type": "item_reference"}]}, "input[0].id"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"tools": [{"type": "local_shell"}]}, "tools[0].type"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [TOOLS[0], {"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": [{"type": "namespace", "name": "n"}]}, "tools[0].tools"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}]}, "tools[0].tools[0].name"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [NAMESPACE]}]}, "tools[0].tools[0].type"),
        ({"tools": [NAMESPACE, {"type": "function", "name": "weather__ask"}]}, "tools[1].name"),
        ({"tools": [{"type": "custom"}]}, "tools[0].name"),
        ({"input": [{"type": "additional_tools", "tools": [{"type": "x"}]}]}, "input[0].tools[0].type"),
        ({"input": [{"type": "configuration_update", "reasoning": 3}]}, "input[0].reasoning"),
        ({"input": [{"type": "custom_tool_call", "call_id": "c", "name": "f"}]}, "input[0].input"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "text.format.schema.not"),
        ({"background": True}, "background"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1].name"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        (
            {"tools": [{"type": "function", "name": "f", "strict": True, "parameters": {"type": "object", "not": {}}}]},
            "tools[0].parameters.not",
        ),
        ({"thinking_token_budget": -1}, "thinking_token_budget"),
        ({"reasoning": {"effort": 3}}, "reasoning.effort"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 10**6}, "max_output_tokens"),
        ({"temperature": "x"}, "temperature"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": -1}, "top_logprobs"),
        ({"include": "message.output_text.logprobs"}, "include"),
    ],
)
def test_bad_input_names_the_field(served: Served, fields: dict[str, Any], param: str) -> None:
    answer = served.post("/v1/responses", {"input": "x", **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert served.dispatcher.requests == []


def test_the_store_is_bounded_and_apart_by_accounts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_store, "MAX_RESPONSES", 3)
    monkeypatch.setattr(response_store, "MAX_BYTES", 8000)
    monkeypatch.setattr(response_store, "MAX_ENTRY_BYTES", 1000)
    monkeypatch.setattr(response_store, "MAX_TOTAL_BYTES", 12000)
    counts: list[tuple[int, int]] = []
    store = ResponseStore(lambda *count: counts.append(count))
    mine, other = (cast(Account, SimpleNamespace(name=name)) for name in ("mine", "other"))

    def body(size: int) -> dict[str, Any]:
        return {"output": [], "x": "x" * (size - len('{"x":""}'))}

    for at in range(5):
        store.add(mine, f"r{at}", [{"role": "user", "content": str(at)}], {"output": [], "x": at})
    assert store.messages(mine, "r4") == [{"role": "user", "content": "4"}]
    assert json.loads(store.body(mine, "r4")) == {"output": [], "x": 4}
    for account, ident in ((mine, "r1"), (other, "r4"), (None, "r4")):
        for call in (store.messages, store.body, store.delete):
            with pytest.raises(NotFoundError, match="no response"):
                call(account, ident)
    store.add(mine, "large", [], body(1001))
    with pytest.raises(NotFoundError):
        store.body(mine, "large")
    # One account cannot take the room of another, but has all that is there.
    monkeypatch.setattr(response_store, "MAX_RESPONSES", 100)
    for at in range(20):
        store.add(other, f"o{at}", [], body(998))
    assert store.body(mine, "r4")
    kept = [at for at in range(20) if f"o{at}" in store._kept["other"]]
    assert kept == list(range(12, 20))
    for at in range(20):
        store.add(mine, f"m{at}", [], body(998))
    assert len(store._kept["mine"]) == len(store._kept["other"]) == 6
    for at in range(14, 20):
        store.delete(mine, f"m{at}")
        store.delete(other, f"o{at}")
    assert counts[-1] == (0, 0)


@pytest.mark.parametrize(
    "metadata", [{str(at): "" for at in range(17)}, {"k" * 65: ""}, {"k": "v" * 513}], ids=["many", "key", "value"]
)
def test_metadata_has_the_bounds_of_openai(served: Served, metadata: dict[str, str]) -> None:
    with pytest.raises(openai.BadRequestError, match="metadata must have") as refused:
        create(served, metadata=metadata)
    assert refused.value.param == "metadata"
    most = {f"{at:064}": "é" * 512 for at in range(16)}
    assert create(served, metadata=most).metadata == most


def test_only_so_many_large_responses_are_read_at_once(served: Served) -> None:
    first = create(served, tools=[*TOOLS, {"type": "web_search", "search_context_size": "x" * 3_900_000}])
    assert served.client.responses.retrieve(first.id).tools == first.tools
    request = f"GET /v1/responses/{first.id} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    with contextlib.ExitStack() as stack:
        states = []
        for _ in range(response_store.MAX_READERS + 1):  # they read the first line and no more
            reader = stack.enter_context(socket.socket())
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.connect(served.socket.getsockname())
            reader.sendall(request)
            states.append(reader.recv(12)[9:])
        assert states == [b"200"] * response_store.MAX_READERS + [b"429"]


def test_items_are_referred_to_and_listed(served: Served) -> None:
    """As the AI SDK does: it refers to earlier items by their ids."""
    first = create(served, tools=TOOLS)
    told = [{"role": "user", "content": "Weather?"}, *(item.model_dump() for item in first.output)]
    ids = [{"type": "item_reference", "id": item.id} for item in first.output]
    call = first.output[-1]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Noon."}
    say(served, "It is noon.")
    create(served, input=[*told, result], tools=TOOLS)
    expected = prompt(served)
    second = create(served, input=[told[0], *ids, result], tools=TOOLS)
    assert prompt(served) == expected
    listed = served.client.responses.input_items.list(second.id, limit=2, order="asc")
    everything = list(listed)
    assert [item.type for item in listed.data] == ["message", "item_reference"]
    assert [item.type for item in everything] == ["message", *["item_reference"] * len(ids), "function_call_output"]
    assert everything[0].content[0].text == "Weather?"  # type: ignore[union-attr]
    assert [item.id for item in served.client.responses.input_items.list(second.id)] == [
        item.id for item in reversed(everything)
    ]
    for query in ("limit=0", "limit=x", "order=up"):
        assert served.http.get(f"/v1/responses/{second.id}/input_items?{query}").status_code == 400
    assert served.http.get("/v1/responses/none/input_items").status_code == 404
    with pytest.raises(openai.BadRequestError, match="background"):
        served.client.responses.cancel(second.id)
    with pytest.raises(openai.NotFoundError):
        served.client.responses.cancel("none")
    served.client.responses.delete(first.id)
    answer = served.post("/v1/responses", {"input": [told[0], *ids, result]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (404, "input[1].id")


def test_what_references_stand_for_is_bounded(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    first = create(served)
    stored = served.http.get(f"/v1/responses/{first.id}").json()
    assert stored == first.model_dump(exclude_unset=True, mode="json")
    reference = {"type": "item_reference", "id": first.output[0].id}
    size = len(json.dumps(stored["output"][0], separators=(",", ":"), ensure_ascii=False).encode())
    monkeypatch.setattr(responses, "MAX_REFERRED_BYTES", 2 * size)
    question = {"role": "user", "content": "and?"}
    assert served.post("/v1/responses", {"input": [reference] * 2 + [question]}).status_code == 200
    answer = served.post("/v1/responses", {"input": [reference] * 3 + [question]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input[2]")


def test_the_body_has_what_openai_publishes(served: Served) -> None:
    body = served.post("/v1/responses", {"input": "x", "user": None}).json()
    assert "user" not in body  # a string, where there is one
    assert set(body["usage"]["input_tokens_details"]) == {"cached_tokens", "cache_write_tokens"}
    assert served.post("/v1/responses", {"input": "x", "user": "u"}).json()["user"] == "u"


@pytest.mark.parametrize("per_chunk", [1, 7, 1000])
def test_text_has_the_log_probabilities_of_its_tokens(served: Served, per_chunk: int) -> None:
    served.dispatcher.per_chunk = per_chunk
    include: Any = ["message.output_text.logprobs"]
    answer = create(served, tools=TOOLS, top_logprobs=2, include=include)
    assert answer.top_logprobs == 2
    message = next(item for item in answer.output if item.type == "message")
    (part,) = message.content
    assert part.text == "Let me see."
    assert "".join(item.token for item in part.logprobs).strip() == part.text  # of no reasoning, call or mark
    assert bytes(byte for item in part.logprobs for byte in item.bytes).decode().strip() == part.text
    for item in part.logprobs:
        assert item.logprob == -1.0
        assert [top.logprob for top in item.top_logprobs] == [-0.5, -1.0]
        assert (item.top_logprobs[1].token, item.top_logprobs[1].bytes) == (item.token, item.bytes)

    events = list(create(served, tools=TOOLS, top_logprobs=2, stream=True))  # without include, too
    shorter = [
        {"token": item.token, "logprob": -1.0, "top_logprobs": [{"token": t.token, "logprob": t.logprob} for t in tops]}
        for item in part.logprobs
        for tops in [item.top_logprobs]
    ]
    told = [item.to_dict() for e in events if e.type == "response.output_text.delta" for item in e.logprobs]
    done = next(event for event in events if event.type == "response.output_text.done")
    assert told == [item.to_dict() for item in done.logprobs] == shorter
    first = next(e.part for e in events if e.type == "response.content_part.added" and e.part.type == "output_text")
    assert first.logprobs == []
    last = next(e.part for e in events if e.type == "response.content_part.done" and e.part.type == "output_text")
    final = next(item for item in events[-1].response.output if item.type == "message")
    assert last.to_dict() == final.content[0].to_dict() == part.to_dict()


def test_log_probabilities_are_those_that_were_asked_for(served: Served) -> None:
    text = "naïve 👩‍👩‍👧‍👦 日本 <tool_call> no, <think"
    say(served, text)
    fields = {"input": "x", "max_output_tokens": 500, "temperature": 0}
    include = {"include": ["message.output_text.logprobs"]}
    answer = served.post("/v1/responses", {**fields, **include})
    assert "x-baton-ignored-fields" not in answer.headers
    (part,) = answer.json()["output"][0]["content"]
    assert part["text"] == text
    assert b"".join(bytes(item["bytes"]) for item in part["logprobs"]).decode() == text
    assert {len(item["top_logprobs"]) for item in part["logprobs"]} == {0}
    for asked in ({}, {"top_logprobs": 0}, {"top_logprobs": None, "include": []}):
        body = served.post("/v1/responses", {**fields, **asked}).json()
        assert (body["top_logprobs"], body["output"][0]["content"][0]["logprobs"]) == (0, [])
        assert served.dispatcher.requests[-1].sampling.logprobs is None
    both = {"include": ["message.output_text.logprobs", "reasoning.encrypted_content"], "top_logprobs": 20}
    answer = served.post("/v1/responses", {**fields, **both})
    assert answer.headers["x-baton-ignored-fields"] == "include"
    assert len(answer.json()["output"][0]["content"][0]["logprobs"][0]["top_logprobs"]) == 20


def test_the_tokens_of_an_input_are_counted(served: Served) -> None:
    first = create(served, tools=TOOLS)
    fields: dict[str, Any] = {
        "input": "And now?",
        "tools": TOOLS,
        "previous_response_id": first.id,
        "instructions": "Hm.",
    }
    counted = served.client.responses.input_tokens.count(model="baton-tiny", **fields)
    assert counted.object == "response.input_tokens"
    create(served, **fields)
    assert counted.input_tokens == len(served.dispatcher.requests[-1].prompt_token_ids)
    answer = served.post("/v1/responses/input_tokens", {"input": [{"role": "wizard"}]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input[0].role")


def test_a_socket_is_refused_so_that_clients_go_on_by_post(served: Served) -> None:
    headers = {"connection": "upgrade", "upgrade": "websocket", "sec-websocket-version": "13", "sec-websocket-key": "x"}
    answer = served.http.get("/v1/responses", headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (426, "upgrade_required")
    answer = served.http.get("/v1/responses")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
