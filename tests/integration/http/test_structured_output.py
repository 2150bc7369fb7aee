"""``response_format``, ``structured_outputs``, ``guided_*`` over HTTP: what reaches the instances, what is refused."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import pydantic
import pytest
from tests.support.scripted import INFO, encode
from tests.support.servers.http_front import CHAT, Served

from baton.grammar import choice_grammar, json_object_grammar, json_schema_grammar, regex_grammar
from baton.types import MAX_GRAMMAR_BYTES

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TAG = {"structures": [{"begin": "<f=a>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f="]}


class Person(pydantic.BaseModel):
    name: str
    age: int


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served() as api:
        yield api


@pytest.fixture
def api(served: Served) -> Served:
    served.reset()
    served.dispatcher.info = dataclasses.replace(INFO, grammars=True)
    return served


def post(api: Served, **fields: Any) -> Any:
    return api.post("/v1/chat/completions", {"messages": CHAT, "temperature": 0, "max_tokens": 50, **fields})


def schema_format(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **more}}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": schema_format(SCHEMA, strict=True)}, json_schema_grammar(SCHEMA)),
        ({"response_format": {"type": "json_object"}}, json_object_grammar()),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, json_schema_grammar(SCHEMA)),
        ({"guided_json": SCHEMA}, json_schema_grammar(SCHEMA)),
        (
            {"guided_json": SCHEMA, "guided_whitespace_pattern": "\\n?"},
            json_schema_grammar(SCHEMA, whitespace_pattern="\\n?"),
        ),
        ({"guided_regex": "[0-9]+"}, regex_grammar("[0-9]+")),
        ({"guided_choice": ["yes", "no"]}, choice_grammar(["yes", "no"])),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, choice_grammar(["yes", "no"])),
    ],
)
def test_each_way_to_say_it_becomes_one_grammar(api: Served, fields: dict[str, Any], expected: Any) -> None:
    for _ in range(2):  # the second time it is known
        assert post(api, **fields).status_code == 200
    assert [request.sampling.grammar for request in api.dispatcher.requests] == [expected] * 2


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_grammar": 'start: "a" /[0-9]+/'},
        {"structured_outputs": {"grammar": 'root ::= "a" [0-9]+'}},
        {"structured_outputs": {"structural_tag": TAG}},
        {"response_format": {"type": "structural_tag", **TAG}},
    ],
)
def test_grammars_and_tags_are_taken(api: Served, fields: dict[str, Any]) -> None:
    assert post(api, **fields).status_code == 200
    (request,) = api.dispatcher.requests
    assert request.sampling.grammar is not None
    assert request.sampling.grammar.kind in ("grammar", "structural_tag")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (
            {"response_format": schema_format({"properties": {"a": {"not": {"type": "null"}}}})},
            "response_format.json_schema.schema.properties.a.not",
        ),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": schema_format(SCHEMA), "guided_regex": "a"}, "guided_regex"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a("}}, "structured_outputs.regex"),
        ({"guided_regex": "a{500}b(c{500}){500}"}, "guided_regex"),
        ({"guided_grammar": "start: other"}, "guided_grammar"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", ""]}, "guided_choice[1]"),
        ({"guided_json": {"const": "x" * MAX_GRAMMAR_BYTES}}, "guided_json"),
        ({"structured_outputs": "json"}, "structured_outputs"),
    ],
)
def test_what_is_wrong_is_refused_before_anything_is_placed(api: Served, fields: dict[str, Any], param: str) -> None:
    response = post(api, **fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert api.dispatcher.requests == []


def test_a_model_whose_instances_know_no_grammars_gets_none(api: Served) -> None:
    api.dispatcher.info = INFO
    response = post(api, response_format={"type": "json_object"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "response_format")
    assert post(api, response_format={"type": "text"}).status_code == 200


def test_parse_of_the_sdk(api: Served) -> None:
    api.dispatcher.script = lambda request, index: encode('{"name": "Bo", "age": 7}')
    answer = api.client.chat.completions.parse(
        model="baton-tiny", messages=CHAT, temperature=0, max_tokens=50, response_format=Person
    )
    assert answer.choices[0].message.parsed == Person(name="Bo", age=7)
    (request,) = api.dispatcher.requests
    assert request.sampling.grammar is not None
    assert request.sampling.grammar.kind == "json_schema"


def test_prompts_of_one_request_share_a_grammar(api: Served) -> None:
    body = {"prompt": ["one", "two " * 2000], "max_tokens": 5, "temperature": 0, "guided_regex": "shared[0-9]"}
    api.dispatcher.info = dataclasses.replace(INFO, grammars=True, max_model_len=8192)
    assert api.post("/v1/completions", body).status_code == 200
    assert [one.sampling.grammar for one in api.dispatcher.requests] == [regex_grammar("shared[0-9]")] * 2
