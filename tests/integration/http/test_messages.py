"""``/v1/messages`` over real sockets, with the unmodified Anthropic SDK: what the model writes is scripted."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pydantic
import pytest
from tests.integration.http.test_tool_calls import CALLS, PARAMETERS, api, prompt, running, say  # noqa: F401
from tests.support.scripted import encode
from tests.support.servers.http_front import KEYS, Served

from baton_router.accounts import Accounts
from baton_router.frontend.anthropic.answer import object_of
from baton_router.frontend.anthropic.conversation import Conversation

TOOLS: list[Any] = [
    {"name": "get_weather", "description": "Tell it.", "input_schema": PARAMETERS},
    {"name": "get_time", "input_schema": {"type": "object"}},
]
CHAT: list[Any] = [{"role": "user", "content": "Weather?"}]
GREEDY: Any = {"extra_body": {"temperature": 0}}  # which the SDK does not name any more
THINKING: Any = {"type": "enabled", "budget_tokens": 100}


@pytest.fixture
def served(api: Served) -> Served:  # noqa: F811
    api.dispatcher.info = dataclasses.replace(api.dispatcher.info, grammars=True)
    return api


@pytest.fixture
def client(served: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=str(served.http.base_url), api_key="none", max_retries=0) as made:
        yield made


def create(client: anthropic.Anthropic, **fields: Any) -> Any:
    return client.messages.create(**{"model": "baton-tiny", "messages": CHAT, "max_tokens": 500, **GREEDY, **fields})


def kinds(content: list[Any]) -> list[str]:
    return [block.type for block in content]


@pytest.mark.parametrize("per_chunk", [1, 7, 1000])
def test_text_reasoning_and_calls_are_blocks(served: Served, client: anthropic.Anthropic, per_chunk: int) -> None:
    served.dispatcher.per_chunk = per_chunk
    message = create(client, tools=TOOLS, thinking=THINKING)
    assert (message.type, message.role, message.stop_reason) == ("message", "assistant", "tool_use")
    assert kinds(message.content) == ["thinking", "text", "tool_use", "tool_use"]
    thought, text, call, other = message.content
    assert (thought.thinking, text.text) == ("They want it.", "Let me see.")
    assert (call.name, call.input) == ("get_weather", {"city": "Köln", "days": 2})
    assert (other.name, other.input) == ("get_time", {})
    usage = message.usage
    assert usage.output_tokens == len(encode(CALLS)) + 1
    assert 0 < usage.output_tokens_details.thinking_tokens < usage.output_tokens
    prompt_tokens = len(served.dispatcher.requests[-1].prompt_token_ids)
    assert usage.input_tokens + usage.cache_read_input_tokens == prompt_tokens


@pytest.mark.parametrize("per_chunk", [1, 7, 1000])
def test_a_stream_makes_the_same_message(served: Served, client: anthropic.Anthropic, per_chunk: int) -> None:
    served.dispatcher.per_chunk = per_chunk
    whole = create(client, tools=TOOLS, thinking=THINKING)
    with client.messages.stream(
        model="baton-tiny", messages=CHAT, max_tokens=500, tools=TOOLS, thinking=THINKING, **GREEDY
    ) as stream:
        events = list(stream)
        final = stream.get_final_message()
    told = [{k: v for k, v in block.model_dump().items() if k != "id"} for block in final.content]
    assert told == [{k: v for k, v in block.model_dump().items() if k != "id"} for block in whole.content]
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    names = {event.type for event in events}
    assert {"message_start", "content_block_start", "text", "input_json", "thinking", "message_stop"} <= names


def test_events_come_as_anthropic_describes_them(served: Served) -> None:
    body = {"messages": CHAT, "max_tokens": 500, "tools": TOOLS, "thinking": THINKING, "stream": True, "temperature": 0}
    text = served.post("/v1/messages", body).text
    parts = [part.split("\n") for part in text.strip().split("\n\n")]
    events = [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in parts]
    assert all(name == event["type"] for name, event in events)
    names = [name for name, _ in events]
    assert names[:2] == ["message_start", "ping"]
    assert names[-2:] == ["message_delta", "message_stop"]
    start = events[0][1]["message"]
    assert (start["content"], start["stop_reason"], start["usage"]["output_tokens"]) == ([], None, 0)
    opened: int | None = None
    count = 0
    for name, event in events[2:-2]:
        if name == "content_block_start":
            assert opened is None
            assert event["index"] == count
            opened, count = event["index"], count + 1
        else:
            assert event["index"] == opened
            opened = None if name == "content_block_stop" else opened
    assert opened is None
    assert count == 4
    deltas = [event["delta"] for name, event in events if name == "content_block_delta"]
    assert {delta["type"] for delta in deltas} == {"thinking_delta", "text_delta", "input_json_delta"}
    assert sum(delta["type"] == "input_json_delta" for delta in deltas) > 5


def test_reasoning_is_shown_to_who_asks_for_it(served: Served, client: anthropic.Anthropic) -> None:
    for thinking in (None, {"type": "disabled"}, {"type": "adaptive", "display": "omitted"}):
        message = create(client, tools=TOOLS, **({} if thinking is None else {"thinking": thinking}))
        assert kinds(message.content) == ["text", "tool_use", "tool_use"]
        more: dict[str, Any] = {**GREEDY} if thinking is None else {"thinking": thinking, **GREEDY}
        with client.messages.stream(model="baton-tiny", messages=CHAT, max_tokens=500, **more) as stream:
            assert "thinking" not in kinds(stream.get_final_message().content)
    for thinking in ({"type": "adaptive"}, {"type": "adaptive", "display": "updates"}):
        assert kinds(create(client, thinking=thinking).content)[0] == "thinking"
    create(client, thinking=THINKING)
    assert "max_tokens=99" in served.dispatcher.requests[-1].sampling.grammar.text  # type: ignore[union-attr]


def test_a_conversation_with_results_reaches_the_model_by_its_template(
    served: Served, client: anthropic.Anthropic
) -> None:
    first = create(client, tools=TOOLS, thinking=THINKING, system=[{"type": "text", "text": "Be brief."}])
    call, other = (block for block in first.content if block.type == "tool_use")
    results: list[Any] = [
        {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "Sunny."}]},
        {"type": "tool_result", "tool_use_id": other.id, "content": "no clock", "is_error": True},
        {"type": "text", "text": "So?", "cache_control": {"type": "ephemeral"}},
    ]
    say(served, "It is sunny.")
    history = [*CHAT, {"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    second = create(client, tools=TOOLS, system="Be brief.", messages=history)
    assert (second.stop_reason, second.content[0].text) == ("end_turn", "It is sunny.")
    text = prompt(served)
    assert "<|system|>Be brief." in text
    assert '<|user|>Weather?<|assistant|><think>They want it.</think>Let me see.<tool_call>{"name": "get_w' in text
    assert "<|tool|>Sunny.<|tool|>Error: no clock<|user|>So?" in text
    assert '"name": "get_weather"' in text.partition("</tools>")[0]


def test_turns_of_one_role_become_one_and_a_begun_answer_goes_on(served: Served, client: anthropic.Anthropic) -> None:
    say(served, " sunny.")
    turns: list[Any] = [*CHAT, {"role": "user", "content": "Quick."}, {"role": "assistant", "content": "It is"}]
    message = create(client, messages=turns)
    assert "".join(block.text for block in message.content) == " sunny."
    assert "<|user|>Weather?\nQuick.<|assistant|>It is" in prompt(served)
    assert prompt(served).endswith("It is")


def test_why_it_ended(served: Served, client: anthropic.Anthropic) -> None:
    cut = create(client, max_tokens=30, tools=TOOLS)
    assert cut.stop_reason == "max_tokens"
    say(served, "One, two, three.")
    stopped = create(client, stop_sequences=["two", "never"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "two")
    more: dict[str, Any] = {"stop_sequences": ["three"], **GREEDY}
    with client.messages.stream(model="baton-tiny", messages=CHAT, max_tokens=50, **more) as stream:
        final = stream.get_final_message()
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", "three")


def test_a_call_that_was_cut_has_what_is_whole_of_it(client: anthropic.Anthropic) -> None:
    seen = set()
    for most in range(60, 90, 3):
        message = create(client, max_tokens=most, tools=TOOLS)
        if message.stop_reason == "max_tokens" and message.content[-1].type == "tool_use":
            seen.add(json.dumps(message.content[-1].input))
    assert "{}" in seen
    assert '{"city": "K\\u00f6ln"}' in seen or len(seen) == 1
    for text, value in (
        ("", {}),
        ('{"a": [1, {"b": "x\\"}', {"a": [1, {}]}),
        ('{"a": {"b": 1}, "c', {"a": {"b": 1}}),
        ('{"a": "}', {}),
        ("[1, 2", {"INVALID_JSON": "[1, 2"}),
        ("nonsense", {"INVALID_JSON": "nonsense"}),
    ):
        assert object_of(text) == value


def test_tool_choices(served: Served, client: anthropic.Anthropic) -> None:
    def grammar(**choice: Any) -> str:
        create(client, tools=TOOLS, tool_choice=choice)
        made = served.dispatcher.requests[-1].sampling.grammar
        return "" if made is None else made.text

    assert grammar(type="none") == ""
    assert "<tools>" not in prompt(served)
    assert re.search(r"^body: .*TEXT$", grammar(type="auto"), re.MULTILINE)
    assert "get_weather" in grammar(type="any")
    only = grammar(type="tool", name="get_time")
    assert "get_time" in only
    assert "get_weather" not in only
    assert len(grammar(type="any", disable_parallel_tool_use=True)) < len(grammar(type="any"))


def test_the_format_of_the_text(served: Served, client: anthropic.Anthropic) -> None:
    class City(pydantic.BaseModel):
        name: str

    say(served, '{"name": "Rome"}')
    parsed = client.messages.parse(model="baton-tiny", max_tokens=50, messages=CHAT, output_format=City, **GREEDY)
    assert parsed.parsed_output == City(name="Rome")
    assert "%json" in served.dispatcher.requests[-1].sampling.grammar.text  # type: ignore[union-attr]


def test_tokens_are_counted_as_prompts_have_them(served: Served, client: anthropic.Anthropic) -> None:
    say(served, "Hm.")
    for more in ({}, {"system": "Be brief.", "tools": TOOLS}):
        create(client, **more)
        counted = client.messages.count_tokens(model="baton-tiny", messages=CHAT, **more)  # type: ignore[arg-type]
        assert counted.input_tokens == len(served.dispatcher.requests[-1].prompt_token_ids)
    answer = served.post("/v1/messages/count_tokens", {"messages": CHAT, "tools": [{"name": "f"}]})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tools[0].input_schema"


def test_fields_without_effect_are_named(served: Served) -> None:
    say(served, "Hm.")
    body = {"messages": CHAT, "max_tokens": 9, "zzz": 1, "output_config": {"effort": "low", "task_budget": {}}}
    answer = served.post("/v1/messages", body)
    named = sorted(answer.headers["x-baton-ignored-fields"].split(", "))
    assert named == ["output_config.effort", "output_config.task_budget", "zzz"]
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    harmless = {"cache_control": {"type": "ephemeral"}, "service_tier": "auto", "metadata": {"user_id": "u"}}
    answer = served.post(
        "/v1/messages", {"messages": CHAT, "max_tokens": 9, "thinking": {"type": "adaptive"}, **harmless}
    )
    assert "x-baton-ignored-fields" not in answer.headers


TOOL = TOOLS[1]
KEEP_ALL: list[Any] = [
    {},
    {"edits": []},
    {"edits": None},
    {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    {"edits": [{"type": "clear_thinking_20251015", "keep": {"type": "all"}}]},
]


def test_models_have_the_fields_of_anthropics_clients(served: Served, client: anthropic.Anthropic) -> None:
    page = client.models.list()
    (model,) = page.data
    assert (model.type, model.id, model.display_name) == ("model", served.dispatcher.info.name, model.id)
    assert model.created_at.year >= 2026
    assert (page.has_more, page.first_id, page.last_id) == (False, model.id, model.id)
    assert client.models.retrieve(model.id) == model
    assert "type" not in served.http.get("/v1/models").json()["data"][0]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_beta_fields_that_ask_for_nothing_are_accepted(served: Served, path: str) -> None:
    say(served, "Hm.")
    nothing: list[dict[str, Any]] = [{"context_management": value} for value in KEEP_ALL]
    names = ("compaction", "container", "diagnostics", "fallbacks", "inference_geo", "output_format", "speed", "thread")
    nothing.append(dict.fromkeys(names, None))
    nothing.append({"billing_policy": {"type": "billing_policy", "bill_to": "self"}, "fallbacks": "default"})
    nothing.append({"mcp_servers": [], "container": {"skills": []}, "betas": [], "speed": "standard"})
    nothing.append(
        {"inference_geo": "global", "diagnostics": {"previous_message_id": None}, "fallback_credit_token": "x"}
    )
    for fields in nothing:
        body = {"messages": CHAT, **fields, **({"max_tokens": 9} if path == "/v1/messages" else {})}
        answer = served.post(path, body)
        assert answer.status_code == 200, (fields, answer.text)
        assert "x-baton-ignored-fields" not in answer.headers, fields


def test_deferred_and_changed_tools(served: Served, client: anthropic.Anthropic) -> None:
    """As Claude Code sends them: a search tells which tools to load, system turns add and remove others."""
    say(served, '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>')
    late = {**TOOLS[0], "defer_loading": True}
    first = create(client, tools=[TOOLS[1], late])
    assert "get_weather" not in prompt(served)
    (call,) = first.content
    loaded = [{"type": "tool_reference", "tool_name": "get_weather"}]
    history: list[Any] = [
        *CHAT,
        {"role": "assistant", "content": [call.model_dump()]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": loaded}]},
    ]
    create(client, tools=[TOOLS[1], late], messages=history)
    assert '"name": "get_weather"' in prompt(served)
    assert "<|tool|>get_weather" in prompt(served)
    added = {"type": "tool_definition", "definition": {"name": "sing", "input_schema": {"type": "object"}}}
    changes: list[Any] = [
        {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "get_time"}},
        {"type": "tool_addition", "tool": added},
        {"type": "text", "text": "Tools changed."},
    ]
    served.post(
        "/v1/messages",
        {"max_tokens": 9, "tools": [TOOLS[1], late], "messages": [*history, {"role": "system", "content": changes}]},
    )
    offered = prompt(served).partition("</tools>")[0]
    assert '"sing"' in offered
    assert '"get_weather"' in offered
    assert "get_time" not in offered
    assert "Tools changed." in prompt(served)
    wrong = {"name": "sing", "strict": True, "input_schema": {"type": "object", "not": {}}}
    changes[1]["tool"] = {"type": "tool_definition", "definition": wrong}
    answer = served.post("/v1/messages", {"max_tokens": 9, "messages": [*CHAT, {"role": "system", "content": changes}]})
    assert answer.json()["error"]["param"] == "messages[1].content[1].tool.definition.input_schema.not"


def test_settings_of_system_turns(served: Served) -> None:
    say(served, "Hm.")
    turns: list[Any] = [
        *CHAT,
        {"role": "system", "content": "Only now.", "clear_at": "next_user_message"},
        {"role": "assistant", "content": "Well."},
        {"role": "user", "content": "And?"},
        {"role": "system", "content": "Still here.", "clear_at": "next_user_message"},
        {"role": "system", "output_config": {"effort": "low"}},
    ]
    answer = served.post("/v1/messages", {"messages": turns, "max_tokens": 9})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-baton-ignored-fields"] == "output_config.effort"  # the template does not read it
    assert "Only now." not in prompt(served)
    assert "Still here." in prompt(served)


def test_tools_of_the_service_are_left_out_by_name(served: Served) -> None:
    say(served, "Hm.")
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
    answer = served.post("/v1/messages", {"messages": CHAT, "max_tokens": 9, "tools": [search, TOOL]})
    assert answer.headers["x-baton-ignored-fields"] == "tools[0].web_search_20250305"
    answer = served.post("/v1/messages", {"messages": CHAT, "max_tokens": 9, "tools": [search]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools[0].type")


def test_the_old_name_of_the_format_of_the_text(served: Served) -> None:
    say(served, '{"name": "Rome"}')
    form = {"type": "json_schema", "schema": {"type": "object", "properties": {"name": {"type": "string"}}}}
    answer = served.post("/v1/messages", {"messages": CHAT, "max_tokens": 99, "output_format": form})
    assert answer.status_code == 200, answer.text
    assert "%json" in served.dispatcher.requests[-1].sampling.grammar.text  # type: ignore[union-attr]


@pytest.mark.parametrize("stream", [False, True])
def test_a_thread_goes_on_by_the_id_of_its_last_message(served: Served, stream: bool) -> None:
    def post(**fields: Any) -> tuple[str, str]:
        body = {"max_tokens": 500, "temperature": 0, "stream": stream, **fields}
        answer = served.post("/v1/messages", body)
        assert answer.status_code == 200, answer.text
        assert "x-baton-ignored-fields" not in answer.headers
        if not stream:
            return answer.json()["id"], answer.json()["content"][-1].get("id", "")
        parts = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
        blocks = [part["content_block"] for part in parts if part["type"] == "content_block_start"]
        return parts[0]["message"]["id"], blocks[-1].get("id", "")

    first, call = post(messages=CHAT, tools=TOOLS, system="Be brief.", thinking=THINKING, thread={"type": "create"})
    say(served, "It is sunny.")
    results = [{"type": "tool_result", "tool_use_id": call, "content": "Noon."}]
    turn = {"role": "user", "content": results}
    goes_on = {"type": "continue", "previous_message_id": first}
    second, _ = post(messages=[turn], thread=goes_on)
    text = prompt(served)
    assert "<|system|>Be brief." in text
    assert '"get_weather"' in text.partition("</tools>")[0]
    assert "<|user|>Weather?<|assistant|><think>They want it.</think>Let me see.<tool_call>" in text
    assert "<|tool|>Noon." in text
    post(messages=[{"role": "user", "content": "Sure?"}], thread={**goes_on, "previous_message_id": second})
    assert prompt(served).endswith("<|tool|>Noon.<|assistant|>It is sunny.<|user|>Sure?<|assistant|>")
    # It is no response of OpenAI's interface, and the other way round.
    assert served.http.get(f"/v1/responses/{first}").status_code == 404
    assert served.post("/v1/responses", {"input": "x", "previous_response_id": first}).status_code == 404
    response = served.post("/v1/responses", {"input": "x"}).json()["id"]
    for ident in ("msg_none", response):
        answer = served.post(
            "/v1/messages", {"max_tokens": 9, "messages": CHAT, "thread": {**goes_on, "previous_message_id": ident}}
        )
        assert answer.status_code == 404
        assert answer.json()["error"]["details"] == {"error_code": "thread_not_found"}
    answer = served.post("/v1/messages", {"max_tokens": 9, "messages": CHAT, "thread": {"type": "fork"}})
    assert answer.json()["error"]["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10**6}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": "x"}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t"}]}]},
            "messages[0].content[0].tool_use_id",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f"}]}]},
            "messages[0].content[0].input",
        ),
        (
            {
                "messages": [
                    *CHAT,
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]},
                ]
            },
            "messages[1].content",
        ),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"thread": {"type": "create", "previous_message_id": "msg_1"}}, "thread.previous_message_id"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "f", "input_schema": {"type": "array"}}]}, "tools[0].input_schema"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        (
            {"tools": [{"name": "f", "strict": True, "input_schema": {"type": "object", "not": {}}}]},
            "tools[0].input_schema.not",
        ),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "sometimes"}}, "tool_choice.type"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}},
            "tool_choice.disable_parallel_tool_use",
        ),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "hard"}}, "thinking.type"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}},
            "output_config.format.schema.not",
        ),
        ({"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}]}, "messages"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"temperature": -1}, "temperature"),
        ({"container": "c"}, "container"),
        ({"compaction": {"type": "x"}}, "compaction"),
        ({"context_management": {"edits": 1}}, "context_management.edits"),
        ({"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}}, "context_management.edits[0]"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management.edits[0]"),
        ({"thread": {"type": "continue"}}, "thread.previous_message_id"),
        ({"thread": {"type": "continue", "previous_message_id": "x"}, "system": "x"}, "system"),
        ({"thread": {"type": "continue", "previous_message_id": "x"}, "tools": []}, "tools"),
        ({"messages": [*CHAT, {"role": "system", "content": "x", "clear_at": "now"}]}, "messages[1].clear_at"),
        (
            {"messages": [*CHAT, {"role": "system", "content": [{"type": "tool_removal"}]}]},
            "messages[1].content[0].tool.type",
        ),
        ({"messages": [*CHAT, {"role": "system", "output_config": 1}]}, "messages[1].output_config"),
        ({"metadata": {"user_id": 1}}, "metadata.user_id"),
    ],
)
def test_bad_input_names_the_field(served: Served, fields: dict[str, Any], param: str) -> None:
    body = {"messages": CHAT, "max_tokens": 9, **fields}
    answer = served.post("/v1/messages", {name: value for name, value in body.items() if value is not None})
    told = answer.json()
    assert (answer.status_code, told["type"], told["error"]["type"]) == (400, "error", "invalid_request_error")
    assert told["error"]["param"] == param
    assert param.partition("[")[0].partition(".")[0] in told["error"]["message"]
    assert served.dispatcher.requests == []


@pytest.mark.timeout(240)  # many minutes, where each turn copies what those before it said
def test_turns_of_one_role_take_their_length_in_time() -> None:
    turns: list[Any] = [{"role": "user", "content": "a" * 40}] * 300_000
    blocks: list[Any] = [{"type": "thinking", "thinking": "a" * 40}] * 300_000
    conversation = Conversation(None, [])
    conversation.read([*turns, {"role": "assistant", "content": blocks}])
    made = conversation.messages()
    assert [len(message["content"]) for message in made] == [300_000 * 41 - 1, 0]
    assert len(made[1]["reasoning_content"]) == 300_000 * 40


def test_errors_have_anthropics_shape(served: Served, client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as caught:
        create(client, model="other")
    assert caught.value.body["error"]["type"] == "not_found_error"  # type: ignore[index,call-overload]
    assert served.http.post("/v1/messages", content=b"{").json()["type"] == "error"
    served.dispatcher.fail_after, served.dispatcher.error = 3, RuntimeError("inside")
    with pytest.raises(anthropic.APIStatusError, match="something went wrong"):
        list(create(client, stream=True))


def test_keys_come_in_either_header_and_responses_are_an_accounts_own() -> None:
    with Served(accounts=Accounts.of_keys(*KEYS)) as router:
        with anthropic.Anthropic(base_url=router.url, api_key=KEYS[0], max_retries=0) as keyed:
            create(keyed, max_tokens=20)
        with anthropic.Anthropic(base_url=router.url, auth_token=KEYS[1], max_retries=0) as keyed:
            create(keyed, max_tokens=20)
        with (
            anthropic.Anthropic(base_url=router.url, api_key="wrong", max_retries=0) as keyed,
            pytest.raises(anthropic.AuthenticationError) as caught,
        ):
            create(keyed, max_tokens=20)
        assert caught.value.body["error"]["type"] == "authentication_error"  # type: ignore[index,call-overload]
        tenants = [request.account.name for request in router.dispatcher.requests if request.account is not None]
        assert len(set(tenants)) == 2
        mine = router.client.responses.create(model="baton-tiny", input="x", max_output_tokens=9)
        assert router.client.responses.retrieve(mine.id).id == mine.id
        with openai.OpenAI(base_url=f"{router.url}/v1", api_key=KEYS[0], max_retries=0) as other:
            with pytest.raises(openai.NotFoundError):
                other.responses.retrieve(mine.id)
            with pytest.raises(openai.NotFoundError):
                other.responses.delete(mine.id)
            with pytest.raises(openai.NotFoundError):
                other.responses.create(model="baton-tiny", input="x", previous_response_id=mine.id)
