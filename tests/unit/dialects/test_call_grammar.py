"""Grammars of calls: whatever they let a model write is read as calls that follow the schemas, in every dialect."""

from __future__ import annotations

import contextlib
import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from tests.support.scripted import TINY
from tests.unit.dialects.samples import SAMPLES, SCHEMAS, Sample
from tokenizers import AddedToken, Tokenizer

from baton.dialects import TOOL_DIALECTS, CallArguments, CallStart, DialectParser, Text
from baton.dialects.builtin import REASONING_DIALECTS, Dialects, choose_dialects
from baton.dialects.call_grammar import AnswerGrammar
from baton.dialects.tool_use import ToolUse, read_tools, schema_types
from baton.errors import InvalidRequestError
from baton.grammar import StructuredOutputs
from baton.types import Grammar

EOS = 4
PARAMETERS = {
    "type": "object",
    "properties": {
        "unit": {"type": "string", "enum": ["C", "F"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 20},
        "wet": {"type": "boolean"},
        "at": {"$ref": "#/$defs/place"},
    },
    "required": ["days", "at"],
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"x": {"enum": [1, 2, None]}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "get_time"}},
]
ANCHORS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|tool_call|>", "</think>")
DEEPSEEK = "begin end sep"


def _tokenizer(special: bool) -> tuple[LLTokenizer, Tokenizer, dict[str, int]]:
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    found: dict[str, int] = {}
    if special:
        names = {name for dialect in TOOL_DIALECTS.values() for name in dialect.anchors if name.strip()}
        marks = sorted(
            name for name in names if name[0] in "<[" and name[-1] in ">]" and '"' not in name and "\n" not in name
        )
        tokenizer.add_special_tokens(
            [AddedToken(name, special=True) for name in (*marks, "<|constrain|>", "<think>", "</think>")]
        )
        found = {token.content: at for at, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    return LLTokenizer(tokenizer.to_str(), eos_token=[2, EOS]), tokenizer, found


_TOKENIZERS = {special: _tokenizer(special) for special in (False, True)}


def _walk(grammar: Grammar, special: bool, seed: int, most: int = 400) -> str | None:
    """Return a random text that a grammar lets a model write; ``None``: it did not end."""
    guidance, tokenizer, _ = _TOKENIZERS[special]
    matcher = LLMatcher(guidance, grammar.text, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    mask = allocate_token_bitmask(1, guidance.vocab_size)
    chance, ids = random.Random(seed), list[int]()
    while len(ids) < most:
        if matcher.is_stopped():
            break
        fill_next_token_bitmask(matcher, mask)
        allowed = np.flatnonzero(np.unpackbits(mask[0].view(np.uint8), bitorder="little"))
        assert len(allowed), tokenizer.decode(ids)
        token = int(chance.choice(allowed))
        if token in (2, EOS):
            break
        assert matcher.consume_token(token)
        ids.append(token)
    else:
        return None
    return tokenizer.decode(ids, skip_special_tokens=False)


def _parse(text: str, dialects: Dialects, use: ToolUse, prompt: str = "") -> tuple[str, list[tuple[str, Any]]]:
    parser = DialectParser(dialects.tools, dialects.reasoning, schemas=use.schemas, prompt=prompt)
    content, calls = "", list[list[str]]()
    for event in [*parser.feed(text), *parser.finish()]:
        match event:
            case Text():
                content += event.text
            case CallStart():
                calls.append([event.name, ""])
            case CallArguments():
                calls[-1][1] += event.text
    return content, [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize("special", [False, True], ids=["literal", "special"])
@pytest.mark.parametrize("name", TOOL_DIALECTS)
def test_what_is_required_is_called_as_its_schema_says(name: str, special: bool) -> None:
    dialects = choose_dialects(name, "auto" if name == "gpt_oss" else "none")
    ended = 0
    for choice, parallel, names in (
        ("required", True, {"get_weather", "get_time"}),
        ("required", False, {"get_weather", "get_time"}),
        ({"type": "function", "function": {"name": "get_weather"}}, False, {"get_weather"}),
    ):
        use = read_tools(TOOLS, choice, parallel)
        grammar = AnswerGrammar(dialects, use, special_tokens=_TOKENIZERS[special][2]).to_grammar()
        for seed in range(8):
            text = _walk(grammar, special, seed)
            if text is None:
                continue
            ended += 1
            content, calls = _parse(text, dialects, use)
            assert calls, text
            assert not content or name == "gpt_oss", text
            assert len(calls) == 1 or parallel, text
            for called, arguments in calls:
                assert called in names
                jsonschema.validate(
                    arguments, {**PARAMETERS, "additionalProperties": False} if called == "get_weather" else {}
                )
    assert ended >= 12


def _accepts(grammar: Grammar, special: bool, text: str) -> bool:
    guidance, tokenizer, _ = _TOKENIZERS[special]
    matcher = LLMatcher(guidance, grammar.text, log_level=0)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return bool(matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting())


_USE = ToolUse(
    tuple({"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()),
    "auto",
    tuple(SCHEMAS),
)
_UNUSUAL = (
    "function_calls",
    "[THINK]",
    '{"arguments"',
    '"name": ...',
    '": "{',
    "}</tool_call> and",
    "CALL_ID",
    " to=",
    "<function=get_weather>\n<parameter=city>\nRome",
    "</arg_key><arg",
    "<|python_",
    "</think> alone",
)


@pytest.mark.parametrize("special", [False, True], ids=["literal", "special"])
@pytest.mark.parametrize(
    "sample",
    [sample for sample in SAMPLES if not any(mark in sample.text for mark in _UNUSUAL)],
    ids=lambda sample: sample.dialect,
)
def test_auto_leaves_models_what_they_write_of_their_own(sample: Sample, special: bool) -> None:
    dialects = choose_dialects(sample.dialect, sample.reasoning_dialect)
    reasons = bool(dialects.reasoning and dialects.reasoning.is_open(sample.prompt))
    answer = AnswerGrammar(dialects, _USE, reasons=reasons, special_tokens=_TOKENIZERS[special][2])
    text = sample.text
    for end in ("<|call|>", "<|return|>"):  # these end the sequence
        text = text.removesuffix(end)
    if special and sample.dialect == "mistral" and "[ARGS]" not in text:
        pytest.skip("a tokenizer with [ARGS] is of a model that writes no lists")
    assert _accepts(answer.to_grammar(), special, text)


def test_auto_lets_no_wrong_call_be_written() -> None:
    grammar = AnswerGrammar(choose_dialects("hermes", "none"), _USE).to_grammar()
    assert _accepts(grammar, False, "Free text, 1 < 2.")
    for wrong in ('{"name": "other", "arg', '{"name": "get_time", "arguments": {"a"', '{"nome'):
        guidance, tokenizer, _ = _TOKENIZERS[False]
        ids = tokenizer.encode(f"So: <tool_call>\n{wrong}", add_special_tokens=False).ids
        assert LLMatcher(guidance, grammar.text, log_level=0).validate_tokens(ids) < len(ids), wrong


@pytest.mark.parametrize("kind", ["json", "regex", "grammar"])
@pytest.mark.parametrize("reasons", [False, True])
def test_what_the_text_must_be_begins_behind_reasoning_and_beside_calls(kind: str, reasons: bool) -> None:
    value = {"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}
    value |= {"regex": "[ab]+c", "grammar": 'start: "x" rest\nrest: /[0-9]/ | "{" rest "}"'}  # type: ignore[dict-item]
    text = {"json": '{"a": 1}', "regex": "abc", "grammar": "x{1}"}[kind]
    content = StructuredOutputs.from_mapping({kind: value[kind]}).to_grammar()
    dialects = choose_dialects("hermes", "think")
    begin = "" if reasons else "<think>"
    alone = AnswerGrammar(dialects, ToolUse(), reasons, content).to_grammar()
    assert _accepts(alone, False, f"{begin}Hm.</think>\n\n{text}")
    assert not _accepts(alone, False, f"{begin}Hm.</think>\n\n{text}!")
    assert _accepts(alone, False, text) is not reasons
    beside = AnswerGrammar(dialects, _USE, reasons, content).to_grammar()
    call = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
    assert _accepts(beside, False, f"{begin}Hm.</think>{text}")
    assert _accepts(beside, False, f"{begin}Hm.</think>{call}")
    assert not _accepts(beside, False, f"{begin}Hm.</think>Free.")


def test_a_schema_that_cannot_be_kept_to_is_refused_where_it_must_be() -> None:
    tools = [
        {"function": {"name": "f"}},
        {"function": {"name": "g", "parameters": {"type": "object", "not": {"required": ["x"]}}}},
    ]
    dialects = choose_dialects("hermes", "none")
    with pytest.raises(InvalidRequestError, match="not") as caught:
        AnswerGrammar(dialects, read_tools(tools, "required", None)).to_grammar()
    assert str(caught.value.field).startswith("tools[1].function.parameters")
    free = AnswerGrammar(dialects, read_tools(tools, "auto", None)).to_grammar()
    assert _accepts(free, False, '<tool_call>\n{"name": "g", "arguments": {"any": 1}}\n</tool_call>')
    tools[1]["function"]["strict"] = True
    with pytest.raises(InvalidRequestError):
        AnswerGrammar(dialects, read_tools(tools, "auto", None)).to_grammar()


@pytest.mark.parametrize(
    "broken",
    [
        {"type": "string", "pattern": "^(?=a)b"},
        {"type": "string", "pattern": r"\bword"},
        {"type": "string", "pattern": r"(a)\1"},
        {"type": "string", "pattern": r"\cA"},
        {"type": "string", "pattern": "a{,3}"},
        {"type": "str"},
        {"type": ["any"]},
        {"$ref": "#/$defs/nowhere"},
        {"type": "object", "properties": {"b": {"minLength": 5, "maxLength": 2, "type": "string"}}, "required": ["b"]},
    ],
)
@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "pythonic"])
def test_a_schema_that_cannot_be_compiled_is_any_object_unless_it_must_be_kept_to(name: str, broken: Any) -> None:
    good = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    tools: list[dict[str, Any]] = [
        {"function": {"name": "f", "parameters": good}},
        {"function": {"name": "g", "parameters": {**good, "properties": {"a": broken}}}},
    ]
    dialects = choose_dialects(name, "none")
    free = AnswerGrammar(dialects, read_tools(tools, "auto", None)).to_grammar()
    begin, between, end = {
        "hermes": ('<tool_call>\n{"name": "', '", "arguments": {"a": ', "}}\n</tool_call>"),
        "qwen3_coder": ("<tool_call>\n<function=", ">\n<parameter=a>\n", "\n</parameter>\n</function>\n</tool_call>"),
        "pythonic": ("[", "(a=", ")]"),
    }[name]
    if name != "pythonic":  # which has no anchor: its calls are free in any case
        assert _accepts(free, False, f"{begin}g{between}null{end}") or broken.get("type") == "string"
        assert _accepts(free, False, f"{begin}f{between}1{end}")
        assert not _accepts(free, False, f"{begin}f{between}null{end}"), "the other tool's schema is kept to"
    tools[1]["function"]["strict"] = name != "pythonic"
    use = read_tools(tools, "required" if name == "pythonic" else "auto", None)
    if name == "qwen3_coder" and broken.get("type") in ("string", "str"):
        return  # text between tags, of which patterns are not enforced; Python's name of it is understood there
    with pytest.raises(InvalidRequestError) as caught:
        AnswerGrammar(dialects, use).to_grammar()
    assert str(caught.value.field).startswith("tools[1].function.parameters")


@pytest.mark.parametrize("mode", ["auto", "required"])
@pytest.mark.parametrize("name", TOOL_DIALECTS)
@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "object", "properties": {"a": {"anyOf": 5}}},
        {"type": "object", "properties": {"a": {"anyOf": [5, {"type": 5}], "enum": 7}}},
        {"type": "object", "properties": {"a": {"type": "string", "enum": 5}}},
        {"type": "object", "properties": {"a": {"type": "string", "enum": [5, ["b"], "c"]}}},
        {"type": "object", "properties": {"a": {"type": "string", "const": ["b"]}}},
        {"type": "object", "properties": {"a": 5}},
        {"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}},
    ],
)
def test_strange_schemas_are_refused_by_place_or_their_arguments_are_free(
    parameters: Any, name: str, mode: str
) -> None:
    use = read_tools([{"type": "function", "function": {"name": "f", "parameters": parameters}}], mode, None)
    dialects = choose_dialects(name, "none")
    with contextlib.suppress(InvalidRequestError):  # no other error
        assert AnswerGrammar(dialects, use).to_grammar().text
    sample = next(each for each in SAMPLES if each.dialect == name and each.calls)
    parser = DialectParser(dialects.tools, schemas={"get_weather": {**parameters, "properties": {"city": 5}}})
    assert parser.feed(sample.text)
    parser = DialectParser(dialects.tools, schemas={"get_weather": parameters | {"properties": {"city": parameters}}})
    assert parser.feed(sample.text)


@pytest.mark.parametrize(
    ("parameters", "field"),
    [({"properties": 5}, "properties"), ({"required": 5}, "required"), ({"required": [5]}, "required")],
)
def test_parameters_that_name_none_are_refused(parameters: Any, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read_tools([{"function": {"name": "f", "parameters": parameters}}], "auto", None)
    assert caught.value.field == f"tools[0].function.parameters.{field}"


@pytest.mark.timeout(60)  # for ever, where each reference is followed again and again
def test_references_that_lead_in_circles_are_followed_once() -> None:
    circle = {"anyOf": [{"$ref": "#/properties/a"}] * 60}
    wide = {"anyOf": [{"type": "integer"}] * 100_000}
    root = {"properties": {"a": circle, "b": wide, "c": {"anyOf": [{"$ref": "#/properties/d"}, {"type": "null"}]},
                           "d": {"type": "integer"}}}  # fmt: skip
    assert schema_types(circle, root) == frozenset()
    assert schema_types(wide, root) == frozenset()  # too much to look at: it does not say
    assert schema_types(root["properties"]["c"], root) == {"integer", "null"}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", TOOL_DIALECTS)
def test_tools_whose_grammar_would_be_huge_are_refused(name: str) -> None:
    """Definitions go into the rule of each parameter: 100 KB of them beside 5,000 parameters would be 500 MB."""
    definitions: dict[str, Any] = {f"d{at}": {"type": "integer", "minimum": at} for at in range(1500)}
    definitions["all"] = {"allOf": [{"$ref": f"#/$defs/{name}"} for name in definitions]}
    properties = {f"p{at}": {"$ref": "#/$defs/all"} for at in range(5000)}
    parameters = {"type": "object", "properties": properties, "$defs": definitions}
    use = read_tools([{"function": {"name": "f", "parameters": parameters}}], "required", None)
    with pytest.raises(InvalidRequestError, match="bytes") as caught:
        AnswerGrammar(choose_dialects(name, "none"), use).to_grammar()
    assert str(caught.value.field).startswith("tools")


def _reasoning_tokens(ids: list[int], special: bool, begin: str, end: str) -> int:
    """Return how many tokens of an answer lie wholly before the end of its reasoning, behind the beginning."""
    tokenizer = _TOKENIZERS[special][1]
    texts = [tokenizer.decode(ids[:at], skip_special_tokens=False) for at in range(len(ids) + 1)]
    if not texts[-1].startswith(begin):
        return 0
    ends = (end, "<tool_call>") if special else (end,)  # a call's token ends it as well
    stop = min((found for item in ends if (found := texts[-1].find(item, len(begin))) >= 0), default=-1)
    assert stop >= 0
    return sum(len(begin) < len(text) <= stop for text in texts[1:])


@pytest.mark.parametrize("special", [False, True], ids=["literal", "special"])
@pytest.mark.parametrize("budget", [0, 1, 3, 40])
@pytest.mark.parametrize("name", ["think", "mistral", "gpt_oss"])
def test_a_budget_ends_reasoning(name: str, budget: int, special: bool) -> None:
    guidance, tokenizer, found = _TOKENIZERS[special]
    dialects = choose_dialects("gpt_oss" if name == "gpt_oss" else "hermes", name)
    reasoning = dialects.reasoning
    assert reasoning is not None
    begin, end = reasoning.begin, reasoning.end
    if name == "gpt_oss":
        begin, end = "<|channel|>analysis<|message|>", "<|end|>"
    content = StructuredOutputs.from_mapping({"json": {"enum": ["yes", "no"]}}).to_grammar()
    mask = allocate_token_bitmask(1, guidance.vocab_size)
    for use, reasons in ((ToolUse(), False), (ToolUse(), True), (_USE, False)):
        if name == "gpt_oss" and reasons:
            continue
        grammar = AnswerGrammar(
            dialects, use, reasons, content, special_tokens=found, thinking_budget=budget
        ).to_grammar()
        for seed in range(3):
            matcher, chance = LLMatcher(guidance, grammar.text, log_level=0), random.Random(seed)
            assert not matcher.is_error(), matcher.get_error()
            ids = [] if reasons else tokenizer.encode(begin, add_special_tokens=False).ids
            assert matcher.consume_tokens(ids)
            while not matcher.is_stopped() and len(ids) < 200:
                fill_next_token_bitmask(matcher, mask)
                allowed = np.flatnonzero(np.unpackbits(mask[0].view(np.uint8), bitorder="little"))
                ids.append(int(chance.choice(allowed)))
                if ids[-1] in (2, EOS):
                    break
                assert matcher.consume_token(ids[-1])
            head = "" if reasons else begin
            assert _reasoning_tokens(ids, special, head, end) <= budget
            rest = tokenizer.decode(ids, skip_special_tokens=False).partition(end)[2]
            if name != "gpt_oss" and use.mode == "none":
                assert rest.strip("\n</s>") in ('"yes"', '"no"')


_KIMI = "<|tool_calls_section_begin|><|tool_call_begin|>functions.{}<|tool_calls_section_end|>"
_NO_ARGUMENTS = {
    "hermes": '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=get_time>\n</function>\n</tool_call>",
    "kimi_k2": _KIMI.format("get_time:0<|tool_call_argument_begin|>{}<|tool_call_end|>"),
    "minimax_m2": '<minimax:tool_call>\n<invoke name="get_time">\n</invoke>\n</minimax:tool_call>',
}


@pytest.mark.parametrize("budget", [None, 40])
@pytest.mark.parametrize("reasons", [False, True])
@pytest.mark.parametrize("name", _NO_ARGUMENTS)
def test_the_token_of_a_call_ends_reasoning_that_was_not_closed(name: str, reasons: bool, budget: int | None) -> None:
    dialects = choose_dialects(name, "think")
    assert dialects.tools is not None
    call = _NO_ARGUMENTS[name]
    begin = dialects.tools.sections[0].begin[0]
    thought = ("" if reasons else "<think>") + "I look, then:\n"
    content = StructuredOutputs.from_mapping({"json": {"enum": ["yes", "no"]}}).to_grammar()
    for mode, must_be in (("auto", None), ("auto", content), ("required", None)):
        use = ToolUse(_USE.tools, mode, _USE.names)  # type: ignore[arg-type]
        found = _TOKENIZERS[True][2]
        grammar = AnswerGrammar(dialects, use, reasons, must_be, found, thinking_budget=budget).to_grammar()
        assert _accepts(grammar, True, f"{thought}{call}"), mode
        assert _accepts(grammar, True, f"{thought}</think>\n\n{call}"), mode
        assert not _accepts(grammar, True, f"{thought}{begin}nothing of a call"), mode
        assert not _accepts(grammar, True, f"{thought}{call} " + "so " * 60) or (mode, must_be) == ("auto", None)
        assert not _accepts(grammar, True, thought)
        if budget is not None:
            assert not _accepts(grammar, True, f"{thought}{'so ' * 60}{call}")


@pytest.mark.parametrize("special", [False, True], ids=["literal", "special"])
def test_reasoning_within_its_budget_is_left_as_it_is(special: bool) -> None:
    dialects = choose_dialects("hermes", "think")
    call = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
    for use in (ToolUse(), _USE):
        grammar = AnswerGrammar(dialects, use, special_tokens=_TOKENIZERS[special][2], thinking_budget=60).to_grammar()
        for text in (
            "<think>\nA <b>bold</b> idea: 1 < 2, </thin ice, <</ and </think>\n\nSo.",
            "<think></think>So.",
            "Free <text>.",
        ):
            assert _accepts(grammar, special, text), text
        assert not _accepts(grammar, special, "<think>" + "so " * 100 + "</think>Yes.")
        assert not _accepts(grammar, special, " <think>" + "so " * 100 + "</think>Yes.")
        assert _accepts(grammar, special, f"<think>Hm.</think>{call}") or use.mode == "none"


def test_ends_of_reasoning_can_be_told_from_their_beginnings() -> None:
    for reasoning in REASONING_DIALECTS.values():
        assert reasoning.end[:1] not in reasoning.end[1:] or not reasoning.end
