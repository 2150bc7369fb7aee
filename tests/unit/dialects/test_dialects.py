"""Tool calls and reasoning: however an answer is cut, what is found in it is the same, and no text is lost."""

# ruff: noqa: RUF001  DeepSeek's anchors have fullwidth bars in them

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.dialects.samples import IRREGULAR_SAMPLES, QWEN_TEMPLATE, SAMPLES, SCHEMAS, TEMPLATE_SAMPLES, Sample

from baton.dialects import (
    REASONING_DIALECTS,
    TOOL_DIALECTS,
    CallArguments,
    CallEnd,
    CallStart,
    DialectParser,
    Event,
    Reasoning,
    Text,
)
from baton.dialects.builtin import choose_dialects

_TEMPLATES = tuple((sample, choose_dialects(response_template=template)) for template, sample in TEMPLATE_SAMPLES)
_NAMED = tuple(
    (sample, choose_dialects(sample.dialect, sample.reasoning_dialect)) for sample in (*SAMPLES, *IRREGULAR_SAMPLES)
)
_ALL = (*_NAMED, *_TEMPLATES)
_IDS = [f"{sample.dialect}-{at}" for at, (sample, _) in enumerate(_ALL)]


def _parse(sample: Sample, dialects: Any, pieces: Iterable[str]) -> list[Event]:
    parser = DialectParser(dialects.tools, dialects.reasoning, schemas=SCHEMAS, prompt=sample.prompt)
    events = []
    for piece in pieces:
        events += parser.feed(piece)
    return events + parser.finish()


def _merged(events: Iterable[Event]) -> tuple[str, str, list[tuple[str, str]]]:
    """Return text, reasoning, and names and arguments of calls; check that events come in order."""
    text, reasoning, calls, is_open = "", "", list[list[str]](), False
    for event in events:
        match event:
            case Text():
                assert event.text
                assert not is_open
                text += event.text
            case Reasoning():
                assert event.text
                assert not is_open
                reasoning += event.text
            case CallStart():
                assert event.index == len(calls)
                assert event.id
                assert event.name
                assert not is_open
                calls.append([event.name, ""])
                is_open = True
            case CallArguments():
                assert event.index == len(calls) - 1
                assert event.text
                assert is_open
                calls[-1][1] += event.text
            case CallEnd():
                assert event.index == len(calls) - 1
                assert is_open
                is_open = False
    assert not is_open
    return text, reasoning, [(name, arguments) for name, arguments in calls]


@pytest.mark.parametrize(("sample", "dialects"), _ALL, ids=_IDS)
def test_every_sample_says_what_its_model_meant(sample: Sample, dialects: Any) -> None:
    text, reasoning, calls = _merged(_parse(sample, dialects, [sample.text]))
    assert (text, reasoning) == (sample.content, sample.reasoning)
    assert [(name, json.loads(arguments)) for name, arguments in calls] == list(sample.calls)


@pytest.mark.parametrize(("sample", "dialects"), _ALL, ids=_IDS)
def test_a_sample_cut_at_every_place_is_the_same(sample: Sample, dialects: Any) -> None:
    whole = _merged(_parse(sample, dialects, [sample.text]))
    for at in range(1, len(sample.text)):
        assert _merged(_parse(sample, dialects, [sample.text[:at], sample.text[at:]])) == whole, at
    assert _merged(_parse(sample, dialects, sample.text)) == whole


@st.composite
def _mutated(draw: st.DrawFn) -> tuple[Sample, Any, str, list[int]]:
    sample, dialects = draw(st.sampled_from(_ALL))
    text = sample.text
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(text)))
        end = min(len(text), at + draw(st.integers(0, 20)))
        other = draw(st.sampled_from(_ALL))[0].text
        begin = draw(st.integers(0, max(0, len(other) - 1)))
        piece = draw(st.sampled_from(("", "{", '"', "}", "\\", "\n", "é", text[at:end], other[begin : begin + 30])))
        text = text[:at] + piece + text[draw(st.sampled_from((at, end))) :]
    cuts = sorted(draw(st.sets(st.integers(0, len(text)), max_size=8)))
    return sample, dialects, text, cuts


@given(_mutated())
@settings(max_examples=600, deadline=None)
def test_any_text_is_parsed_the_same_however_it_is_cut(case: tuple[Sample, Any, str, list[int]]) -> None:
    sample, dialects, text, cuts = case
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = _merged(_parse(sample, dialects, [text]))
    assert _merged(_parse(sample, dialects, pieces)) == whole
    assert _merged(_parse(sample, dialects, text)) == whole


@given(st.sampled_from(_NAMED), st.data())
@settings(max_examples=600, deadline=None)
def test_what_does_not_belong_into_a_call_is_still_there(case: tuple[Sample, Any], data: st.DataObject) -> None:
    """A character that is in no anchor, put anywhere, comes out: as text, reasoning or in a call."""
    sample, dialects = case
    at = data.draw(st.integers(0, len(sample.text)))
    text = f"{sample.text[:at]}§{sample.text[at:]}"
    content, reasoning, calls = _merged(_parse(sample, dialects, [text]))
    assert "§" in content + reasoning + "".join(name + arguments for name, arguments in calls), text


@pytest.mark.parametrize("name", TOOL_DIALECTS)
@pytest.mark.parametrize("reasoning", sorted({*REASONING_DIALECTS, "none"} - {"deepseek_r1"}))  # begins as reasoning
def test_plain_text_passes_through_every_dialect(name: str, reasoning: str) -> None:
    text = "  Answer: 1 < 2, {not: json}, [1, 2], a[0](b)\n\n```json\n{}\n```\n"
    sample = Sample(name, text)
    assert _merged(_parse(sample, choose_dialects(name, reasoning), text)) == (text, "", [])


_BROKEN = '{"city": {"name": "Rome"'
_FINE = '{"city": "Bonn"}'
_KIMI = "<|tool_call_begin|>functions.get_weather:{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
_V31 = "<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
_BROKEN_CALLS = (
    ("kimi_k2", f"<|tool_calls_section_begin|>{_KIMI}{_KIMI}<|tool_calls_section_end|>".format(0, _BROKEN, 1, _FINE)),
    ("deepseek_v3.1", f"<｜tool▁calls▁begin｜>{_V31}{_V31}<｜tool▁calls▁end｜>".format(_BROKEN, _FINE)),
    (
        "hermes",
        f'<tool_call>{{"name": "get_weather", "arguments": {_BROKEN}</tool_call>'
        f'<tool_call>{{"name": "get_weather", "arguments": {_FINE}}}</tool_call>',
    ),
    ("mistral", f"[TOOL_CALLS]get_weather[ARGS]{_BROKEN}[TOOL_CALLS]get_weather[ARGS]{_FINE}"),
)


@pytest.mark.parametrize(("name", "text"), _BROKEN_CALLS, ids=[name for name, _ in _BROKEN_CALLS])
def test_brackets_that_are_not_closed_swallow_nothing_behind_their_call(name: str, text: str) -> None:
    dialects = choose_dialects(name, "none")
    expected = [("get_weather", _BROKEN), ("get_weather", _FINE)]
    for at in range(len(text)):
        assert _merged(_parse(Sample(name, text), dialects, [text[:at], text[at:]])) == ("", "", expected), at
    assert _merged(_parse(Sample(name, text), dialects, text)) == ("", "", expected)
    quoted = text.replace(_FINE, json.dumps({"city": text}))  # what is in a string ends nothing
    assert _merged(_parse(Sample(name, quoted), dialects, quoted))[2][1] == ("get_weather", json.dumps({"city": text}))


def test_pythons_names_of_types_are_understood() -> None:
    values = {"float": 3.5, "int": 3, "bool": True, "dict": {"a": 1}, "list": [1], "str": "3"}
    schema = {"properties": {name: {"type": name} for name in values}}
    written = "".join(
        f"<parameter={name}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
        for name, value in values.items()
    )
    parser = DialectParser(TOOL_DIALECTS["qwen3_coder"], schemas={"f": schema})
    events = parser.feed(f"<tool_call>\n<function=f>\n{written}</function>\n</tool_call>")
    ((_, arguments),) = _merged([*events, *parser.finish()])[2]
    assert json.loads(arguments) == values


def test_a_call_that_is_cut_gives_what_it_has() -> None:
    sample = Sample("hermes", '<tool_call>{"name": "get_weather", "arguments": {"city": "San')
    dialects = choose_dialects("hermes", "none")
    assert _merged(_parse(sample, dialects, [sample.text])) == ("", "", [("get_weather", '{"city": "San')])


def test_arguments_come_while_they_are_written() -> None:
    for name, text in (
        ("hermes", '<tool_call>{"name": "write_file", "arguments": {"path": "a long'),
        ("qwen3_coder", "<tool_call>\n<function=write_file>\n<parameter=path>\na long"),
        ("deepseek_v3.1", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>write_file<｜tool▁sep｜>{"path": "a long'),
        ("gpt_oss", '<|channel|>commentary to=functions.write_file<|message|>{"path": "a long'),
    ):
        parser = DialectParser(TOOL_DIALECTS[name], schemas=SCHEMAS)
        events = parser.feed(text)
        assert events[-1] == CallArguments(0, '{"path": "a long'), name


def test_ids_are_as_the_model_wants_them() -> None:
    def ids(name: str, text: str) -> list[str]:
        sample = Sample(name, text)
        return [
            event.id for event in _parse(sample, choose_dialects(name, "none"), [text]) if isinstance(event, CallStart)
        ]

    (hermes,) = ids("hermes", '<tool_call>{"name": "f", "arguments": {}}</tool_call>')
    assert hermes.startswith("call_")
    (mistral,) = ids("mistral", "[TOOL_CALLS]f[ARGS]{}")
    assert len(mistral) == 9
    assert mistral.isalnum()
    assert ids("mistral", "[TOOL_CALLS]f[CALL_ID]a1B2c3D4e[ARGS]{}") == ["a1B2c3D4e"]
    kimi = "<|tool_call_begin|>functions.f:7<|tool_call_argument_begin|>{}<|tool_call_end|>"
    assert ids("kimi_k2", f"<|tool_calls_section_begin|>{kimi}") == ["functions.f:7"]


def test_long_answers_take_time_in_proportion() -> None:
    """What only looks like calls is not looked at again and again; checked by the characters that are held."""
    for name, piece in (
        ("hermes", '<tool_call>{"name": "x'),
        ("hermes", '<tool_call>{"arguments": {'),
        ("hermes", "<tool_call>"),
        ("pythonic", "<function_calls>f("),
        ("gpt_oss", "<|channel|>"),
        ("glm4", "<tool_call>f\n<arg_key>"),
    ):
        text = piece * 2000
        parser = DialectParser(TOOL_DIALECTS[name], schemas=SCHEMAS)
        content, _, calls = _merged([*parser.feed(text), *parser.finish()])
        assert (content, calls) == (text, []), name


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("{{ '<tool_call>' }}", "hermes", None),
        ("<tool_call>\n<function=example> ... </think>", "qwen3_coder", "think"),
        ("<|start|>assistant<|channel|>final", "gpt_oss", "gpt_oss"),
        ("[TOOL_CALLS]", "mistral", None),
        ("{{ messages }}", None, None),
    ],
)
def test_the_chat_template_shows_the_dialect(template: str, tools: str | None, reasoning: str | None) -> None:
    found = choose_dialects(chat_template=template)
    assert (found.tools and found.tools.name, found.reasoning and found.reasoning.name) == (tools, reasoning)


def test_a_tokenizers_own_template_goes_before_the_chat_templates_marks() -> None:
    found = choose_dialects(chat_template="[TOOL_CALLS]", response_template=QWEN_TEMPLATE)
    assert found.tools is not None
    assert found.tools.name == "template"
    broken = choose_dialects(chat_template="[TOOL_CALLS]", response_template={"version": 2})
    assert broken.tools is not None
    assert broken.tools.name == "mistral"
    named = choose_dialects("hermes", "none", response_template=QWEN_TEMPLATE)
    assert named.tools is TOOL_DIALECTS["hermes"]
    assert named.reasoning is None


@pytest.mark.parametrize("written", ["5", "[5]", '["name"]', "null", '{"name": 5}', '{"name": [], "arguments": 5}'])
@pytest.mark.parametrize("transform", [None, {"function": "{content}"}, {"name": "{content.name}"}])
def test_what_a_template_did_not_expect_is_text(written: str, transform: Any) -> None:
    field = {"open": "<tool_call>", "close": "</tool_call>", "content": "json", "transform": transform}
    text = f"<tool_call>{written}</tool_call>"
    dialects = choose_dialects(response_template={"fields": {"tool_calls": field}})
    assert _merged(_parse(Sample("template", text), dialects, [text]))[0] == text
