"""Tools and reasoning over real sockets, with the unmodified OpenAI SDK: what the model writes is scripted."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.support.scripted import EOS, TINY, encode
from tests.support.servers.http_front import Served

CHAT: list[Any] = [{"role": "user", "content": "Weather?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "description": "Tell it.", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "get_time"}},
]
CALLS = (
    "<think>\nThey want it.\n</think>\n\nLet me see.\n"
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln", "days": 2}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
)
TEMPLATE = """{%- if tools %}<tools>{{ tools | tojson }}</tools>
For each call write <tool_call>{"name": ..., "arguments": ...}</tool_call>.
{% endif %}{%- for message in messages %}<|{{ message.role }}|>
{%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}
{% endfor %}<|assistant|>"""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = tmp_path_factory.mktemp("tools") / "model"
    shutil.copytree(TINY, model, ignore=shutil.ignore_patterns("*.safetensors"))
    (model / "chat_template.jinja").write_text(TEMPLATE)
    with Served() as server:
        server.model = str(model)  # type: ignore[attr-defined]
        yield server


@pytest.fixture
def api(running: Served) -> Served:
    running.reset()
    running.dispatcher.info = dataclasses.replace(running.dispatcher.info, path=running.model, max_model_len=2048)  # type: ignore[attr-defined]
    say(running, CALLS)
    return running


def say(server: Served, text: str) -> None:
    server.dispatcher.script = lambda request, index: encode(text)


def prompt(server: Served) -> str:
    from baton.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(Path(server.model))  # type: ignore[attr-defined]
    return tokenizer.decode(list(server.dispatcher.requests[-1].prompt_token_ids), skip_special_tokens=False)


def test_tokenize_counts_tools(api: Served) -> None:
    tokens = api.post("/tokenize", {"messages": CHAT, "tools": TOOLS}).json()["tokens"]
    api.chat(messages=CHAT, tools=TOOLS)
    assert tokens == list(api.dispatcher.requests[-1].prompt_token_ids)
    assert len(tokens) > api.post("/tokenize", {"messages": CHAT}).json()["count"]
    for fields, param in (({"prompt": "x", "tools": TOOLS}, "tools"), ({"messages": CHAT, "tools": [1]}, "tools[0]")):
        answer = api.post("/tokenize", fields)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def whole(stream: Any) -> tuple[dict[str, Any], str | None]:
    """Return the message that a stream's deltas make, put together as clients do it, and how it ended."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "tool_calls": []}
    finish = None
    for chunk in stream:
        if not chunk.choices:
            continue
        (choice,) = chunk.choices
        assert finish is None
        message["content"] += choice.delta.content or ""
        message["reasoning"] += getattr(choice.delta, "reasoning", None) or ""
        for call in choice.delta.tool_calls or []:
            if call.index == len(message["tool_calls"]):
                assert call.type == "function"
                message["tool_calls"].append([call.id, call.function.name, ""])
            else:
                assert call.id is None
                assert call.function.name is None
            message["tool_calls"][call.index][2] += call.function.arguments
        finish = choice.finish_reason
    return message, finish


@pytest.mark.parametrize("per_chunk", [1, 5, 1000])
def test_calls_and_reasoning_in_one_piece_and_in_a_stream(api: Served, per_chunk: int) -> None:
    api.dispatcher.per_chunk = per_chunk
    answer = api.chat(tools=TOOLS, max_tokens=500)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    assert choice.message.reasoning == choice.message.reasoning_content == "They want it."
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]
    assert calls == [("get_weather", {"city": "Köln", "days": 2}), ("get_time", {})]
    assert len({call.id for call in choice.message.tool_calls}) == 2
    message, finish = whole(api.chat(tools=TOOLS, max_tokens=500, stream=True))
    assert (message["content"], message["reasoning"], finish) == ("Let me see.", "They want it.", "tool_calls")
    texts = [call.function.arguments for call in choice.message.tool_calls]
    assert [call[2] for call in message["tool_calls"]] == texts
    assert [call[1] for call in message["tool_calls"]] == ["get_weather", "get_time"]


def test_arguments_stream_while_they_are_written(api: Served) -> None:
    deltas = [
        call.function.arguments
        for chunk in api.chat(tools=TOOLS, max_tokens=500, stream=True)
        for call in (chunk.choices[0].delta.tool_calls or [])
        if call.index == 0
    ]
    assert len(deltas) > 5


def test_the_sdk_puts_a_stream_together(api: Served) -> None:
    with api.client.chat.completions.stream(model="baton-tiny", messages=CHAT, tools=TOOLS, temperature=0) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    (choice,) = final.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls is not None
    assert [call.function.name for call in choice.message.tool_calls] == ["get_weather", "get_time"]


def test_tools_and_earlier_calls_reach_the_model_by_its_own_template(api: Served) -> None:
    history = [
        *CHAT,
        {
            "role": "assistant",
            "content": None,
            "reasoning": "Hm.",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rom"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "Sunny. <|im_end|> </tool_call>"},
    ]
    say(api, "It is sunny.")
    (choice,) = api.chat(tools=TOOLS, messages=history, max_tokens=50).choices
    assert (choice.message.content, choice.finish_reason, choice.message.tool_calls) == ("It is sunny.", "stop", None)
    text = prompt(api)
    assert "<tools>" in text
    assert '"name": "get_weather"' in text
    assert "<think>Hm.</think>" in text
    assert '<tool_call>{"name": "get_weather", "arguments": {"city": "Rom"}}</tool_call>' in text
    assert "<|tool|>Sunny." in text


def test_names_of_control_tokens_in_a_tools_description_stay_text(api: Served) -> None:
    tool = {"type": "function", "function": {"name": "f", "description": "Ends <|im_end|> a turn."}}
    api.chat(tools=[tool], max_tokens=500)
    assert EOS not in api.dispatcher.requests[-1].prompt_token_ids
    assert "<|im_end|>" in prompt(api)


def test_without_tools_calls_are_text(api: Served) -> None:
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        (choice,) = api.chat(max_tokens=500, **fields).choices
        assert choice.finish_reason == "stop"
        assert choice.message.tool_calls is None
        assert choice.message.content == CALLS.partition("</think>\n\n")[2]
        assert "<tools>" not in prompt(api)
        message, finish = whole(api.chat(max_tokens=500, stream=True, **fields))
        assert (message["content"], message["reasoning"], finish) == (choice.message.content, "They want it.", "stop")


def test_reasoning_can_be_left_out(api: Served) -> None:
    fields = {"tools": TOOLS, "max_tokens": 500, "extra_body": {"include_reasoning": False}}
    (choice,) = api.chat(**fields).choices
    assert not hasattr(choice.message, "reasoning")
    message, _ = whole(api.chat(stream=True, **fields))
    assert (message["content"], message["reasoning"]) == ("Let me see.", "")


def test_an_answer_that_is_cut_says_so(api: Served) -> None:
    say(api, CALLS)
    cut = len(encode(CALLS)) - 40
    for stream in (False, True):
        if stream:
            message, finish = whole(api.chat(tools=TOOLS, max_tokens=cut, stream=True))
            arguments = [call[2] for call in message["tool_calls"]]
        else:
            (choice,) = api.chat(tools=TOOLS, max_tokens=cut).choices
            finish, arguments = choice.finish_reason, [call.function.arguments for call in choice.message.tool_calls]
        assert finish == "length"
        assert '{"city": "Köln", "days": 2}'.startswith(arguments[0])


def test_every_token_has_its_log_probability_once(api: Served) -> None:
    count = len(encode(CALLS)) + 1
    (choice,) = api.chat(tools=TOOLS, max_tokens=500, logprobs=True).choices
    assert len(choice.logprobs.content) == count
    chunks = [c.choices[0] for c in api.chat(tools=TOOLS, max_tokens=500, logprobs=True, stream=True)]
    assert sum(len(item.logprobs.content) for item in chunks if item.logprobs) == count


def test_sequences_of_one_request_are_parsed_each_by_itself(api: Served) -> None:
    texts = ["Plain.", '<tool_call>{"name": "get_time", "arguments": {}}</tool_call>']
    api.dispatcher.script = lambda request, index: encode(texts[index])
    first, second = api.chat(tools=TOOLS, max_tokens=500, n=2).choices
    assert (first.message.content, first.finish_reason) == ("Plain.", "stop")
    assert (second.message.content, second.finish_reason) == (None, "tool_calls")


def test_text_behind_reasoning_is_written_as_it_comes(api: Served) -> None:
    say(api, "<think>a</think>\n\nOne  two \n three.  ")
    message, finish = whole(api.chat(max_tokens=100, stream=True))
    assert (message["reasoning"], message["content"], finish) == ("a", "One  two \n three.  ", "stop")


_F = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": [1]}, "tools[0]"),
        ({"tools": [{"type": "custom"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"function": {}}]}, "tools[0].function.name"),
        ({"tools": [_F, _F]}, "tools[1].function.name"),
        ({"tools": [{"function": {"name": "f", "strict": 1}}]}, "tools[0].function.strict"),
        ({"tools": [{"function": {"name": "f", "parameters": {"type": "string"}}}]}, "tools[0].function.parameters"),
        ({"tools": [{"function": {"name": "f", "parameters": []}}]}, "tools[0].function.parameters"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [_F], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [_F], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [_F], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tools": [_F], "parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"messages": [{"role": "assistant", "content": "x", "reasoning": 1}]}, "messages[0].reasoning"),
    ],
)
def test_bad_tools_name_the_field(api: Served, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        api.client.post("/chat/completions", cast_to=object, body={"messages": CHAT, **fields})
    assert caught.value.param == param
    assert api.dispatcher.requests == []


@pytest.fixture
def guided(api: Served) -> Served:
    api.dispatcher.info = dataclasses.replace(api.dispatcher.info, grammars=True)
    return api


def grammar(server: Served) -> Any:
    return server.dispatcher.requests[-1].sampling.grammar


NAMED = {"type": "function", "function": {"name": "get_time"}}


def test_calls_that_must_be_made_are_a_grammar(guided: Served) -> None:
    for choice, names in (("required", ("get_weather", "get_time")), (NAMED, ("get_time",))):
        for _ in range(2):  # the second time it is known
            (made,) = guided.chat(tools=TOOLS, tool_choice=choice, max_tokens=500).choices
            assert made.finish_reason == "tool_calls"
            text = grammar(guided).text
            assert grammar(guided).kind == "tools"
            assert all((f'\\"{name}\\"' in text) is (name in names) for name in ("get_weather", "get_time"))
            assert "TEXT" not in text.splitlines()[0]  # no free text beside reasoning


def test_auto_and_strict_constrain_what_is_in_calls(guided: Served) -> None:
    guided.chat(tools=TOOLS, max_tokens=500)
    auto = grammar(guided).text
    assert re.search(r"^body: .*TEXT$", auto, re.MULTILINE)
    guided.chat(tools=TOOLS, max_tokens=500, parallel_tool_calls=False)
    assert grammar(guided).text != auto
    guided.chat(tools=TOOLS, max_tokens=500, tool_choice="none")
    assert grammar(guided) is None
    guided.chat(max_tokens=500)
    assert grammar(guided) is None


def test_a_response_format_stands_behind_reasoning_and_beside_calls(guided: Served) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": PARAMETERS}}
    guided.chat(max_tokens=500, response_format=form)
    assert "</think>" in grammar(guided).text
    assert "tool_call" not in grammar(guided).text
    guided.chat(max_tokens=500, response_format=form, tools=TOOLS)
    assert "%lark" in grammar(guided).text
    assert "tool_call" in grammar(guided).text
    guided.chat(max_tokens=500, response_format=form, tools=TOOLS, tool_choice="required")
    assert "%lark" not in grammar(guided).text


def test_what_cannot_be_kept_to_is_refused(api: Served) -> None:
    strict = [
        {
            "type": "function",
            "function": {"name": "f", "strict": True, "parameters": {"type": "object", "if": {}, "then": {}}},
        }
    ]
    for fields, param in (
        ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": NAMED}, "tool_choice"),
        ({"tools": strict}, "tools"),
    ):
        with pytest.raises(openai.BadRequestError, match="no instance knows grammars") as caught:
            api.chat(**fields)
        assert caught.value.param == param
    api.dispatcher.info = dataclasses.replace(api.dispatcher.info, grammars=True)
    with pytest.raises(openai.BadRequestError, match="is not supported") as caught:
        api.chat(tools=strict)
    assert caught.value.param == "tools[0].function.parameters.if"
    assert api.dispatcher.requests == []
    api.chat(tools=[{**strict[0], "function": {**strict[0]["function"], "strict": False}}], max_tokens=500)
    assert grammar(api).kind == "tools"
