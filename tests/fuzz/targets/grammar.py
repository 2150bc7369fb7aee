"""What answers must be, and how models write calls: schemas, expressions, tools, tokenizers' templates, the answers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

from tests.fuzz.choices import Choices

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
from baton.dialects.builtin import Dialects, choose_dialects
from baton.dialects.call_grammar import AnswerGrammar
from baton.dialects.response_template import read_response_template
from baton.dialects.tool_use import read_tools
from baton.errors import ConfigError, InvalidRequestError
from baton.grammar import StructuredOutputs, regex_grammar
from baton.grammar.json_schema import FORMATS, REFUSED, SUPPORTED
from baton.types import Grammar

_TYPES = ["object", "array", "string", "number", "integer", "boolean", "null", ["string", "null"], "any"]
_KEYWORDS = sorted(SUPPORTED | REFUSED | {"$id", "$anchor", "$defs", "definitions", "title", "x-guidance"})
_PATTERNS = [*("a", "[a-z]", "(", ")", "[", "]", "{3}", "{2,}", "{9999}", "*", "+", "?", "|", "^", "$", "\\d", "\\")]
_KINDS = ["json", "json_object", "regex", "choice", "grammar", "structural_tag", "whitespace_pattern"]
_RULES = [*("start: ", "root ::= ", "A: ", "a b ", '"x" ', "/[a-z]+/ ", "| ", "( ", ") ", "* ", "\n", "%json ", "{} ")]
_NAMES = ["get_weather", "write_file", "a", "b.c", "d-e"]


def _pattern(choices: Choices) -> str:
    return "".join(choices.pick(_PATTERNS) for _ in range(choices.number(0, 12)))


def _schema(choices: Choices, depth: int = 4) -> Any:
    """Return a schema, or nearly one."""
    if not choices.number(0, 9):
        return choices.value()
    out: dict[str, Any] = {"type": choices.pick(_TYPES)} if choices.flag() else {}
    for _ in range(choices.number(0, 4)):
        keyword = choices.pick(_KEYWORDS)
        part: Any = choices.value(2)
        if keyword in ("items", "additionalProperties") and depth:
            part = _schema(choices, depth - 1)
        elif keyword in ("prefixItems", "anyOf", "oneOf", "allOf") and depth:
            part = [_schema(choices, depth - 1) for _ in range(choices.number(0, 3))]
        elif keyword in ("properties", "$defs", "definitions", "patternProperties") and depth:
            part = {choices.pick(["a", "b", "^a"]): _schema(choices, depth - 1) for _ in range(choices.number(0, 3))}
        elif keyword == "pattern":
            part = _pattern(choices)
        elif keyword == "format":
            part = choices.pick(sorted(FORMATS))
        elif keyword == "required":
            part = [choices.pick(["a", "b", "c"]) for _ in range(choices.number(0, 3))]
        elif keyword == "$ref":
            part = choices.pick(["#", "#/properties/a", "#/$defs/a", "#/$defs/b", "http://x", "#/"])
        elif keyword[:3] in ("min", "max", "exc", "mul") and choices.flag():
            part = choices.number(0, 30) / choices.pick([1, 1, 1, 7])
        out[keyword] = part
    return out


def _of_kind(choices: Choices, kind: str) -> Any:
    if kind == "json":
        return _schema(choices)
    if kind == "json_object":
        return True
    if kind == "choice":
        return [choices.text() for _ in range(choices.number(0, 4))]
    if kind == "grammar":
        rules = "".join(choices.pick(_RULES) for _ in range(choices.number(0, 30)))
        return rules if choices.flag() else choices.rest().decode("utf-8", "replace")
    if kind == "structural_tag":
        tags = [
            {"begin": choices.pick(["<f>", "<f=a>", "<g>", ""]), "schema": _schema(choices, 2), "end": choices.text()}
            for _ in range(choices.number(0, 3))
        ]
        return {"structures": tags, "triggers": [choices.pick(["<f", "<g>", "<"]) for _ in range(choices.number(0, 2))]}
    return _pattern(choices)


def grammars(data: bytes) -> None:
    """What an answer must be becomes a grammar that can be compiled, or an error that names a field; in little time."""
    choices = Choices(data)
    way = choices.number(0, 5)
    with contextlib.suppress(InvalidRequestError):
        if way == 0:
            regex_grammar(choices.rest().decode("utf-8", "replace"))
            return
        if way == 1:
            found = StructuredOutputs.from_response_format(
                {
                    "type": choices.pick(["text", "json_object", "json_schema", "structural_tag", ""]),
                    "json_schema": choices.pick([None, {"name": "n", "schema": _schema(choices)}, choices.value()]),
                }
            )
        elif way == 2:
            found = StructuredOutputs.from_mapping(choices.fields([*_KINDS, "disable_any_whitespace"], 3))
        else:
            kind = choices.pick(_KINDS)
            found = StructuredOutputs.from_mapping({kind: _of_kind(choices, kind), **choices.fields(_KINDS[-1:], 1)})
        if found is not None:
            assert found.to_grammar().text


def _tool(choices: Choices) -> Any:
    if not choices.number(0, 9):
        return choices.value()
    function = {"name": choices.pick(_NAMES), "parameters": _schema(choices), **choices.fields(["strict"], 1)}
    if isinstance(function["parameters"], dict) and choices.number(0, 3):
        function["parameters"]["type"] = "object"
        if choices.flag():
            function["parameters"]["properties"] = {
                choices.pick(["city", "days", '"q"', "é"]): _schema(choices, 3) for _ in range(choices.number(0, 3))
            }
    return {"type": "function", "function": function}


def _dialects(choices: Choices) -> Dialects:
    names = choices.pick([*TOOL_DIALECTS, "none"]), choices.pick([*REASONING_DIALECTS, "none", "auto"])
    return choose_dialects(*names)


def tools(data: bytes) -> None:
    """Tools of a request become a grammar of answers, or an error that names a field; any answer is read with them."""
    choices = Choices(data)
    choice: Any = choices.pick(["auto", "required", "none", None, "named", "some", "any"])
    if choice == "named":
        choice = {"type": "function", "function": {"name": choices.pick(_NAMES)}}
    elif choice == "some":
        allowed = [{"type": "function", "function": {"name": choices.pick(_NAMES)}}, *choices.pick([[], [5], [{}]])]
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": allowed}}
    elif choice == "any":
        choice = choices.value()
    try:
        use = read_tools(
            [_tool(choices) for _ in range(choices.number(0, 3))], choice, choices.pick([None, True, False])
        )
    except InvalidRequestError:
        return
    dialects, special = _dialects(choices), {"<tool_call>": 3, "<think>": 4} if choices.flag() else {}
    content = Grammar("regex", "start: /[ab]/") if choices.flag() else None
    with contextlib.suppress(InvalidRequestError):
        answer = AnswerGrammar(dialects, use, choices.flag(), content, special)
        answer.to_grammar()
        assert answer.key
    _same_however_cut(choices, dialects, _answer(choices, dialects), use.schemas)


def _answer(choices: Choices, dialects: Dialects) -> str:
    """Return what might be an answer: anchors of the dialect, names, JSON and text, in any order."""
    anchors = [*(dialects.tools.anchors if dialects.tools else ())]
    anchors += dialects.reasoning.anchors if dialects.reasoning else ()
    pieces = ["{", "}", '"', ":", ",", "[", "]", "(", ")", "=", "\\", "\n", " ", '{"name": "', '", "arguments": ']
    out = []
    for _ in range(choices.number(0, 24)):
        kind = choices.number(0, 4)
        if kind <= 1 and anchors:
            anchor = choices.pick(anchors)
            out.append(anchor[: choices.number(1, len(anchor))] if choices.number(0, 5) == 0 and anchor else anchor)
        elif kind == 2:
            out.append(choices.pick([*_NAMES, '{"city": "Bern"}', "city", "days", "functions."]))
        elif kind == 3:
            out.append(choices.pick(pieces))
        else:
            out.append(choices.text())
    return "".join(out)


def _same_however_cut(choices: Choices, dialects: Dialects, text: str, schemas: Any) -> None:
    prompt = choices.pick(["", "", "<think>\n", "x<think>y", "<|im_start|>assistant\n"])
    cuts = sorted(choices.number(0, len(text)) for _ in range(choices.number(0, 5)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = _read(dialects, [text], schemas, prompt)
    assert _read(dialects, pieces, schemas, prompt) == whole, (text, pieces)
    assert _read(dialects, text, schemas, prompt) == whole, text


def _read(dialects: Dialects, pieces: Iterable[str], schemas: Any, prompt: str) -> tuple[str, str, list[list[str]]]:
    """Return text, reasoning and calls, all of them in order."""
    parser = DialectParser(dialects.tools, dialects.reasoning, schemas=schemas, prompt=prompt)
    events: list[Event] = []
    for piece in pieces:
        events += parser.feed(piece)
    events += parser.finish()
    text, reasoning, calls, is_open = "", "", list[list[str]](), False
    for event in events:
        assert is_open == isinstance(event, CallArguments | CallEnd)
        match event:
            case Text():
                text += event.text
            case Reasoning():
                reasoning += event.text
            case CallStart():
                assert event.index == len(calls)
                assert event.id
                assert event.name
                calls.append([event.name, ""])
                is_open = True
            case CallArguments():
                assert event.index == len(calls) - 1
                calls[-1][1] += event.text
            case CallEnd():
                assert event.index == len(calls) - 1
                is_open = False
    assert not is_open
    return text, reasoning, calls


_FIELDS = ["content", "thinking", "tool_calls", "reasoning_content", "other"]
_FIELD_KEYS = [*("close", "close_pattern", "open_pattern", "content_args", "repeats", "join", "optional", "transform")]


def templates(data: bytes) -> None:
    """A tokenizer's own dialect is read or refused by name; what is written in it is read however it is cut."""
    choices = Choices(data)
    kinds = ["text", "json", "xml-inline", "kv-lines", "regex", "x"]
    fields: dict[str, Any] = {}
    for _ in range(choices.number(0, 3)):
        opened = choices.pick(["<a>", "<think>", "<tool_call>", "[", ""])
        field = {"open": opened, "content": choices.pick(kinds), **choices.fields(_FIELD_KEYS, 2)}
        if choices.flag():
            field["close"] = choices.pick(["</a>", "</think>", "</tool_call>", "]", ["x", "y"]])
        if not choices.number(0, 2):
            field["transform"] = choices.pick(["{content}", {"name": "{content.name}"}, {"function": "{content}"}])
        fields[choices.pick(_FIELDS)] = field
    spec: Any = {"fields": fields, **choices.fields(["version", "defaults", "start_anchor", "start_anchor_pattern"], 1)}
    if not choices.number(0, 9):
        spec = choices.value()
    try:
        dialects = Dialects(*read_response_template(spec))
    except ConfigError:
        return
    words = ["<a>", "</a>", "<think>", "</think>", "<tool_call>", "</tool_call>", "[", "]", '{"name": "f"}', "a: b\n"]
    if any(name.endswith("_pattern") for part in (spec, *spec["fields"].values()) for name in part):
        return  # where a pattern's match begins is certain at the end only
    text = "".join(choices.pick(words) if choices.flag() else choices.text() for _ in range(choices.number(0, 12)))
    _same_however_cut(choices, dialects, text, {"f": {"type": "object"}})
