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
from baton_router.frontend.anthropic import chat_messages, object_of

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
    assert kinds(create(client, thinking={"type": "adaptive"}).content)[0] == "thinking"
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
    made = chat_messages(None, [*turns, {"role": "assistant", "content": blocks}], [])
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
