"""From schemas, expressions, choices and tags to the one form that instances know; what is refused, and where."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher

from baton.errors import InvalidRequestError
from baton.grammar import (
    StructuredOutputs,
    choice_grammar,
    ebnf_or_lark_grammar,
    json_object_grammar,
    json_schema_grammar,
    lark_grammar,
    regex_grammar,
    structural_tag_grammar,
)
from baton.grammar.json_schema import ANNOTATIONS
from baton.grammar.validation import LIMITS, MAX_PARTS, _bytes_tokenizer, count_parts
from baton.types import MAX_GRAMMAR_BYTES, Grammar

END = 256
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "pattern": "^[A-Z][a-z]+$"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def accepts(grammar: Grammar, text: str) -> bool:
    """Whether a text is a whole answer, byte by byte."""
    matcher = LLMatcher(_bytes_tokenizer(), grammar.text, log_level=0, limits=LIMITS)
    return all(matcher.validate_tokens([byte]) == 1 and matcher.consume_token(byte) for byte in text.encode()) and (
        matcher.is_accepting()
    )


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        (
            json_schema_grammar(PERSON),
            ['{"name":"Bo","age":7}', '{"name": "Bo", "age": 7}'],
            ['{"name":"bo","age":7}', '{"name":"Bo"}', '{"name":"Bo","age":7,"b":1}', '{"name":  "Bo","age":7}', "7"],
        ),
        (json_schema_grammar(json.dumps(PERSON)), ['{"name":"Bo","age":7}'], ["{}"]),
        (
            json_schema_grammar(PERSON, disable_any_whitespace=True),
            ['{"name":"Bo","age":7}'],
            ['{"name": "Bo","age":7}'],
        ),
        (
            json_schema_grammar(PERSON, whitespace_pattern=r"\n*"),
            ['{\n\n"name":"Bo","age":7}'],
            ['{"name": "Bo","age":7}'],
        ),
        (json_object_grammar(), ["{}", '{"a": [1, null]}'], ["[]", "1", '{"a"}']),
        (regex_grammar(r"(/a\d)+"), ["/a1", "/a1/a2"], ["", "/a", "/a1x"]),
        (
            choice_grammar(["yes", "no", "not yet", 'quo"te\n\\', "ä"]),
            ["no", "not yet", 'quo"te\n\\', "ä"],
            ["", "not", "y"],
        ),
        (lark_grammar('start: "a" B+\nB: /b|c/'), ["ab", "acb"], ["a", "b"]),
        (ebnf_or_lark_grammar('root ::= "x" num\nnum ::= [0-9]+'), ["x1", "x23"], ["x", "1"]),
        (
            structural_tag_grammar(
                {
                    "structures": [
                        {"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"},
                        {"begin": "<f=b>", "schema": {"enum": ["q"]}, "end": "</f>"},
                    ],
                    "triggers": ["<f="],
                }
            ),
            ["", "free text", 'so: <f=a>7</f> and <f=b>"q"</f>.'],
            ["<f=c>", "<f=a>x</f>", "<f=a>7"],
        ),
    ],
    ids=lambda value: value.kind if isinstance(value, Grammar) else "",
)
def test_what_a_grammar_accepts(grammar: Grammar, right: list[str], wrong: list[str]) -> None:
    assert [text for text in right if not accepts(grammar, text)] == []
    assert [text for text in wrong if accepts(grammar, text)] == []


@pytest.mark.parametrize(
    ("kind", "right", "wrong"),
    [
        (
            "date",
            ["2024-02-29", "2000-02-29", "2023-02-28", "1999-12-31"],
            ["2023-02-29", "2100-02-29", "2024-04-31", "0000-01-01"],
        ),
        (
            "date-time",
            ["2024-02-29T23:59:59Z", "1985-04-12T23:20:50.52+01:00"],
            ["2023-02-29T00:00:00Z", "2024-01-01T00:00:60Z", "2024-01-01t00:00:00Z", "0001-01-01T00:00:00Z"],
        ),
        ("time", ["23:59:59Z", "00:00:00.5-02:00"], ["24:00:00Z", "23:59:60Z"]),
    ],
)
def test_dates_are_those_that_every_validator_takes(kind: str, right: list[str], wrong: list[str]) -> None:
    schema = {"properties": {"format": {"type": "string", "format": kind}}, "additionalProperties": False}
    grammar = json_schema_grammar({"type": "object", "required": ["format"], **schema})
    assert [one for one in right if not accepts(grammar, json.dumps({"format": one}))] == []
    assert [one for one in wrong if accepts(grammar, json.dumps({"format": one}))] == []
    other = json_schema_grammar({"const": {"format": kind}})
    assert accepts(other, json.dumps({"format": kind}))


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": "object", "properties": {"a": {"not": {}}}}, "s.properties.a.not"),
        ({"if": {}, "then": {}}, "s.if"),
        ({"type": "array", "uniqueItems": True}, "s.uniqueItems"),
        ({"type": "array", "prefixItems": [{}, {"contains": {}}]}, "s.prefixItems[1].contains"),
        ({"anyOf": [{"unevaluatedProperties": False}]}, "s.anyOf[0].unevaluatedProperties"),
        ({"$defs": {"x": {"dependentRequired": {}}}}, "s.$defs.x.dependentRequired"),
        ({"patternProperties": {"^a": {"propertyNames": {}}}}, "s.patternProperties.^a.propertyNames"),
        ({"type": "string", "format": "iri"}, "s.format"),
        ({"$ref": "https://example.org/schema"}, "s.$ref"),
        ({"$dynamicRef": "#a"}, "s.$dynamicRef"),
        ({"type": "string", "nullable": True}, "s.nullable"),
        ({"type": "string", "x-guidance": {"lenient": True}}, "s.x-guidance"),
        ({"items": [{}]}, "s.items"),
        ({"items": 5}, "s.items"),
        ({"properties": []}, "s.properties"),
        ({"anyOf": {}}, "s.anyOf"),
        ({"type": "string", "pattern": "((ab){100}){200}"}, "s.pattern"),
        ({"type": "string", "pattern": "(?=a)b"}, "s"),
        ({"type": "nothing"}, "s"),
        ({"enum": []}, "s"),
        ({"$ref": "#"}, "s"),
        ({"minLength": 5, "maxLength": 2, "type": "string"}, "s"),
        ("{", "s"),
        ([], "s"),
        (True, "s"),
        ({"const": float("nan")}, "s"),
        ({"const": object()}, "s"),
    ],
)
def test_a_schema_is_refused_with_its_place(schema: Any, place: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        json_schema_grammar(schema, "s")
    assert raised.value.field == place
    assert "s" in raised.value.message


def test_annotations_are_no_reason_to_refuse() -> None:
    values: dict[str, Any] = {"examples": ["q"], "deprecated": True, "readOnly": True, "writeOnly": True}
    schema = {"enum": ["q"], **{name: values.get(name, "text") for name in ANNOTATIONS}}
    grammar = json_schema_grammar(schema)
    assert accepts(grammar, '"q"')
    assert not accepts(grammar, '"text"')


@pytest.mark.parametrize(
    ("make", "value"),
    [
        (regex_grammar, "a("),
        (regex_grammar, r"\bword"),
        (regex_grammar, "(a{1000}){1000}"),
        (regex_grammar, "(a?){5000}a{5000}"),
        (regex_grammar, ""),
        (regex_grammar, 5),
        (choice_grammar, []),
        (choice_grammar, ["a", "a"]),
        (choice_grammar, ["a", ""]),
        (choice_grammar, "ab"),
        (choice_grammar, ["\ud800"]),
        (lark_grammar, "start: unknown"),
        (lark_grammar, 'start: "a'),
        (lark_grammar, "start: start"),
        (lark_grammar, "begin: /a/"),
        (lark_grammar, 'start: %json {"not": {}}'),
        (ebnf_or_lark_grammar, "root ::= ("),
        (ebnf_or_lark_grammar, "root ::= " + "(" * 50_000),
        (json_schema_grammar, {"required": "é" * 80}),  # the compiler panics, which is no Exception
        (structural_tag_grammar, {}),
        (structural_tag_grammar, "["),
        (structural_tag_grammar, {"structures": [{"begin": "<b>"}], "triggers": ["<a>"]}),
        (structural_tag_grammar, {"structures": [{"begin": "<a>", "schema": {"not": {}}}], "triggers": ["<a>"]}),
        (structural_tag_grammar, {"structures": [], "triggers": ["<a>"]}),
        (structural_tag_grammar, {"format": {}}),
        (lark_grammar, "x" * (MAX_GRAMMAR_BYTES + 1)),
    ],
)
def test_what_is_wrong_is_refused_by_the_field(make: Any, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        make(value, "here")
    assert (raised.value.field or "").startswith("here")
    assert len(raised.value.message) < 1000


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": [f"string number {i}" for i in range(100_000)]},
        '{"properties":{"a":' * 500 + "{}" + "}}" * 500,
        {"type": "string", "pattern": "^(a{1000}){1000}$"},
    ],
    ids=["large enum", "deep", "pattern"],
)
def test_costly_schemas_are_refused(schema: Any) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        json_schema_grammar(schema)
    assert (raised.value.field or "").startswith("json_schema")


@pytest.mark.timeout(60)  # hours, where the work grows with the square of the text
@pytest.mark.parametrize(
    ("make", "text"),
    [
        (regex_grammar, "[" * MAX_GRAMMAR_BYTES),
        (regex_grammar, "a{" + "1" * (MAX_GRAMMAR_BYTES - 2)),
        (lark_grammar, "start: " + "/\\" * (MAX_GRAMMAR_BYTES // 2 - 4)),
        (ebnf_or_lark_grammar, "root ::= " + "\n" * (MAX_GRAMMAR_BYTES - 9)),
    ],
    ids=["open classes", "open repeat", "escaped slashes", "lines"],
)
def test_what_is_looked_at_before_compilation_takes_its_length_in_time(make: Any, text: str) -> None:
    with pytest.raises(InvalidRequestError):
        make(text)


def test_expressions_are_told_from_strings_and_comments() -> None:
    for text in (
        'start: "/" /(a{1000}){1000}/',
        "start: A // a/b\nA: /(a{1000}){1000}/",
        'start: "\\"/" /(a{999}){999}/',
    ):
        with pytest.raises(InvalidRequestError, match="more than 20000 parts"):
            lark_grammar(text)
    assert lark_grammar('start: "(a{1000}){1000}/" // /(a{1000}){1000}/').text


def test_repeats_are_counted() -> None:
    assert count_parts("a{3}b") == 2  # a repeat of one character is not written out
    assert count_parts("(ab){1000}") == 2000
    assert count_parts("((ab){10}){10}c") == 201
    assert count_parts(r"[{3}]\{3}") == 4
    assert count_parts("(a{2}){3}") == 6
    assert count_parts("((ab){3}c){2}|d") == 15
    assert count_parts("((a{9}){99}){99}") > MAX_PARTS
    assert count_parts(")))(((") == 0


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ({}, "structured_outputs"),
        ({"json": {}, "regex": "a"}, "structured_outputs"),
        ({"json_object": False}, "structured_outputs"),
        ({"jsn": {}}, "structured_outputs.jsn"),
        ({"regex": "a", "disable_fallback": True}, "structured_outputs.disable_fallback"),
        ({"regex": "a", "whitespace_pattern": " "}, "structured_outputs.whitespace_pattern"),
        (
            {"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True},
            "structured_outputs.whitespace_pattern",
        ),
        ({"json": {}, "disable_any_whitespace": 1}, "structured_outputs.disable_any_whitespace"),
        ("json", "structured_outputs"),
    ],
)
def test_contradictory_fields_are_refused(value: Any, field: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        StructuredOutputs.from_mapping(value)
    assert raised.value.field == field


def test_each_kind_is_read() -> None:
    tag = {"structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["<a>"]}
    values = {"json": PERSON, "regex": "a+", "choice": ["a"], "grammar": 'start: "a"', "json_object": True}
    kinds = {
        name: StructuredOutputs.from_mapping({name: value}).to_grammar().kind
        for name, value in {**values, "structural_tag": tag}.items()
    }
    assert kinds == {
        "json": "json_schema",
        "regex": "regex",
        "choice": "choice",
        "grammar": "grammar",
        "json_object": "json_object",
        "structural_tag": "structural_tag",
    }


def test_response_format_is_read() -> None:
    read = StructuredOutputs.from_response_format
    assert read({"type": "text"}) is None
    assert read({}) is None
    schema = read({"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON, "strict": True}})
    assert schema is not None
    assert schema.to_grammar() == json_schema_grammar(PERSON)
    anything = read({"type": "json_object"})
    assert anything is not None
    assert anything.to_grammar() == json_object_grammar()
    for value, field in (
        ({"type": "xml"}, "response_format.type"),
        ({"type": "json_schema"}, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": {"name": "p"}}, "response_format.json_schema.schema"),
        ({"type": "json_schema", "json_schema": {"schema": {}, "strict": 1}}, "response_format.json_schema.strict"),
        ({"type": "json_schema", "json_schema": {"schema": {}, "more": 1}}, "response_format.json_schema.more"),
    ):
        with pytest.raises(InvalidRequestError) as raised:
            read(value)
        assert raised.value.field == field
    wrong = read({"type": "json_schema", "json_schema": {"schema": {"properties": {"a": {"not": {}}}}}})
    assert wrong is not None
    with pytest.raises(InvalidRequestError) as raised:
        wrong.to_grammar()
    assert raised.value.field == "response_format.json_schema.schema.properties.a.not"
