"""From schemas, expressions, choices and tags to the one form that instances know; what is refused, and where."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
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
    return matcher.try_consume_tokens([*text.encode()]) == len(text.encode()) and matcher.is_accepting()


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
        ({"type": "object", "properties": {"a": {"not": {"type": "null"}}}}, "s.properties.a.not"),
        ({"if": {}, "then": {}}, "s.if"),
        ({"type": "array", "uniqueItems": True}, "s.uniqueItems"),
        ({"type": "array", "prefixItems": [{}, {"contains": {}}]}, "s.prefixItems[1].contains"),
        ({"anyOf": [{"unevaluatedProperties": False, "allOf": [{}]}]}, "s.anyOf[0].unevaluatedProperties"),
        ({"unevaluatedItems": False, "contains": {}}, "s.unevaluatedItems"),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"dependentRequired": {"a": 5}}}}, "s.$defs.x.dependentRequired.a"),
        ({"patternProperties": {"^a": {}}, "propertyNames": {"enum": ["a"]}}, "s.propertyNames"),
        ({"propertyNames": {"pattern": "^a", "maxLength": 3}}, "s.propertyNames"),
        ({"properties": {"a": {}}, "propertyNames": {"pattern": "^a"}}, "s.propertyNames"),
        ({"type": "object", "minProperties": 2}, "s.minProperties"),
        ({"minProperties": 3, "required": ["a"], "patternProperties": {"^b": {}}}, "s.minProperties"),
        ({"properties": {"a": {}}, "additionalProperties": {"enum": ["\x01"]}}, "s.additionalProperties.enum"),
        ({"$ref": "https://example.org/schema"}, "s.$ref"),
        ({"$ref": "#/$defs/nowhere"}, "s.$ref"),
        ({"$ref": "#nowhere", "$defs": {"a": {"$anchor": "somewhere"}}}, "s.$ref"),
        ({"$dynamicRef": "#a"}, "s.$dynamicRef"),
        ({"properties": {"a": {"type": "str"}}}, "s.properties.a.type"),
        ({"type": ["string", 5]}, "s.type"),
        ({"required": True}, "s.required"),
        ({"maxItems": 2.5}, "s.maxItems"),
        ({"minLength": -1}, "s.minLength"),
        ({"minimum": "1"}, "s.minimum"),
        ({"enum": "a"}, "s.enum"),
        ({"pattern": 5}, "s.pattern"),
        ({"items": 5}, "s.items"),
        ({"properties": []}, "s.properties"),
        ({"anyOf": {}}, "s.anyOf"),
        ({"type": "string", "pattern": "((ab){100}){200}"}, "s.pattern"),
        ({"type": "string", "pattern": "(?=a)b"}, "s"),
        ({"not": {}}, "s.not"),
        ({"type": "nothing"}, "s.type"),
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


def test_annotations_and_unknown_keywords_are_no_reason_to_refuse() -> None:
    known = ["title", "description", "default", "examples", "deprecated", "readOnly", "$comment", "contentEncoding"]
    unknown = ["example", "nullable", "x-kubernetes-list-type", "enumNames", "markdownDescription", "xml", "strict"]
    ignored = {keyword: {"not": {}} for keyword in (*known, *unknown)}
    idle: dict[str, Any] = {
        "propertyNames": {"type": "string"}, "uniqueItems": False, "not": False, "if": {}, "minContains": 3,
        "dependentRequired": {}, "unevaluatedProperties": True, "format": "color", "additionalItems": False,
    }  # fmt: skip
    options = {"x-guidance": {"lenient": True, "json_allow_general_unicode_escapes": True}, "": 5}
    grammar = json_schema_grammar({"enum": ["q"], **ignored, **idle, **options})
    assert accepts(grammar, '"q"')
    assert not accepts(grammar, '"text"')
    assert not accepts(grammar, '"\\u0071"')
    assert "lenient" not in grammar.text


_REFERRED = {
    "type": "array",
    "items": {"$ref": "#/components/schemas/a~1b"},
    "components": {"schemas": {"a/b": {"anyOf": [{"type": "null"}, {"$ref": "#there"}, {"$ref": "list.json"}]}}},
    "$defs": {"x": {"$anchor": "there", "const": 7}, "y": {"$id": "list.json", "$ref": "#/$defs/z",
                                                           "$defs": {"z": {"enum": ["z"]}}}},
}  # fmt: skip
_UNION = {
    "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
    "discriminator": {"propertyName": "kind", "mapping": {"cat": "#/$defs/Cat", "dog": "#/$defs/Dog"}},
    "$defs": {
        name: {
            "type": "object",
            "properties": {"kind": {"const": name.lower()}, "friend": {"$ref": "#/$defs/Friend"}},
            "required": ["kind"],
            "additionalProperties": False,
        }
        for name in ("Cat", "Dog")
    } | {"Friend": {"oneOf": [{"type": "null"}, {"$ref": "#/$defs/Cat"}]}},
}  # fmt: skip


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (
            {"type": "array", "items": [{"const": 1}], "additionalItems": {"const": 2}},
            ["[1]", "[1,2,2]"],
            ["[2]", "[1,1]"],
        ),
        ({"type": "array", "maxItems": 2.0}, ["[]", "[1,1]"], ["[1,1,1]"]),
        ({"type": "integer", "minimum": 3, "exclusiveMinimum": True}, ["4"], ["3"]),
        ({"type": "integer", "maximum": 3, "exclusiveMaximum": False}, ["3"], ["4"]),
        ({"dependentRequired": {"a": ["b"]}}, ['{"b":1}', '{"a":1,"b":1}', "{}", "5"], ['{"a":1}', '{"a":1,"c":1}']),
        ({"dependencies": {"a": {"properties": {"b": False}}}}, ['{"b":1}', '{"a":1}'], ['{"a":1,"b":1}']),
        ({"type": "object", "propertyNames": {"pattern": "^x"}}, ["{}", '{"x1":[]}'], ['{"y":1}', '{"x":1,"y":1}']),
        ({"type": "object", "propertyNames": {"maxLength": 2}}, ['{"ab":1}'], ['{"abc":1}']),
        (
            {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "integer"}},
            ["{}", '{"a":1,"b":2}'],
            ['{"c":1}', '{"a":"x"}'],
        ),
        ({"properties": {"a": {}}, "unevaluatedProperties": False}, ['{"a":1}'], ['{"a":1,"b":1}', '{"b":1}']),
        ({"type": "array", "prefixItems": [{}], "unevaluatedItems": False}, ["[1]"], ["[1,1]"]),
        ({"properties": {"a": {"not": {}}}, "additionalProperties": {"const": 1}}, ['{"b":1}'], ['{"a":1}', '{"b":2}']),
        (_REFERRED, ["[]", '[7,null,"z"]'], ["[8]", '["y"]']),
        (_UNION, ['{"kind":"cat"}', '{"kind":"dog","friend":{"kind":"cat","friend":null}}'], ['{"kind":"cow"}']),
        ({"oneOf": [{"$ref": "#/$defs/a"}, {"type": "null"}], "$defs": {"a": {"const": 1}}}, ["1", "null"], ["2"]),
        ({"oneOf": [{"not": {}}, {"const": 1}, False]}, ["1"], ["2"]),
        ({"type": "integer", "format": "int32"}, ["2147483647", "-2147483648"], ["2147483648", "-2147483649"]),
        (
            {"type": "integer", "format": "int64"},
            ["9223372036854774784"],
            ["9223372036854775808", "-9223372036854775809"],
        ),
        ({"type": "number", "format": "double"}, ["1.5e3", "-0.25"], ['"1"']),
        (
            {"type": "string", "format": "hostname"},
            [f'"{name}"' for name in ("a", "a-b.c3", "ab-c", "a--b", "x" * 63, ".".join(["y" * 62] * 4))],
            [
                f'"{name}"'
                for name in (
                    "",
                    "-a",
                    "a-",
                    "abc-",
                    "a--",
                    "a.",
                    "a..b",
                    "xn--4dbc5h",
                    "ab--c",
                    "x" * 64,
                    ".".join(["y" * 63] * 4),
                )
            ],
        ),
        (
            {"type": "string", "format": "uri-reference"},
            ['"/a?b#c"', '""', '"a/b:c"', '"//h:8/"', '"http://u@h/x"', '"mailto:a@b"', '"%20"'],
            ['"a b"', '"a:b:c d"', '"\\\\x"', '"//h:p"', '"//a@b@c/"', '"#a#b"', '":a"'],
        ),
        ({"type": "string", "format": "json-pointer"}, ['""', '"/a/~0~1"'], ['"a"', '"/~"', '"/~2"']),
    ],
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else "",
)
def test_what_other_drafts_and_keywords_say_is_kept_to(schema: Any, right: list[str], wrong: list[str]) -> None:
    grammar = json_schema_grammar(schema)
    assert [text for text in right if not accepts(grammar, text)] == []
    assert [text for text in wrong if accepts(grammar, text)] == []


def test_an_error_names_no_option_of_the_compiler() -> None:
    with pytest.raises(InvalidRequestError, match="exclude each other") as caught:
        json_schema_grammar({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "s")
    assert "coerce_one_of" not in caught.value.message


def spellings(char: str) -> st.SearchStrategy[str]:
    """Ways to write a character in a JSON string."""
    code = f"\\u{ord(char):04x}"
    return st.sampled_from([json.dumps(char, ensure_ascii=False)[1:-1], code, code.upper().replace("U", "u")])


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.data(), st.text(st.sampled_from('aé"\\\n\x01/<'), min_size=1, max_size=3))
@example(None, "a")
def test_a_key_has_one_spelling_and_comes_once(data: st.DataObject | None, name: str) -> None:
    spelled = "\\u0061" if data is None else "".join(data.draw(spellings(char)) for char in name)
    key = f'"{spelled}"'
    assert json.loads(key) == name
    plain = json.dumps(name, ensure_ascii=False)
    named = {"properties": {name: {"type": "integer"}}}
    for schema in (
        {"type": "object", **named},
        {"type": "object", **named, "additionalProperties": {"type": "string"}},
        {"type": "object", **named, "required": [name]},
        {"allOf": [{"type": "object"}, named]},
        {"items": {"type": "object", "patternProperties": {"^[^b]": {"type": "integer"}}}},
    ):
        grammar = json_schema_grammar(schema)
        begin, end = ("[", "]") if "items" in schema else ("", "")
        if "items" not in schema or "\x01" not in name:  # which a free key cannot have
            assert accepts(grammar, f"{begin}{{{plain}:1}}{end}")
        assert not accepts(grammar, f'{begin}{{{key}:"x"}}{end}')
        if "items" not in schema:
            assert not accepts(grammar, f'{{{plain}:1,{key}:"x"}}')
            assert not accepts(grammar, f"{{{plain}:1,{key}:1}}")


def test_as_many_properties_as_must_be_there_are_different_ones() -> None:
    one_free = json_schema_grammar({"type": "object", "minProperties": 2, "required": ["a"]})
    assert accepts(one_free, '{"a":1,"b":2}')
    assert not accepts(one_free, '{"a":1}')
    assert not accepts(one_free, '{"a":1,"a":2}')


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
        (structural_tag_grammar, {"structures": [{"begin": "<a>", "schema": {"not": 5}}], "triggers": ["<a>"]}),
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
    wrong = read({"type": "json_schema", "json_schema": {"schema": {"properties": {"a": {"not": {"type": "null"}}}}}})
    assert wrong is not None
    with pytest.raises(InvalidRequestError) as raised:
        wrong.to_grammar()
    assert raised.value.field == "response_format.json_schema.schema.properties.a.not"
