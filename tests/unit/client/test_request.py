"""What the SDK refuses by itself, and how its keywords become messages."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pydantic
import pytest

import baton
import baton.client
from baton.api.v1 import common_pb2, router_pb2
from baton.client import Instance, Load, Model, Quantiles, RouteCandidate, RouteDecision, Stats, Trace
from baton.client.request import Options, build_generate, build_metadata, build_route
from baton.client.settings import Settings
from baton.errors import InvalidRequestError
from baton.grammar import StructuredOutputs
from baton.rpc.convert import sampling_from_pb
from baton.types import Grammar, SamplingParams


def test_importing_baton_loads_neither_torch_nor_grpc_and_the_sdk_no_torch() -> None:
    script = (
        "import sys, baton\n"
        "assert not {'torch', 'grpc', 'transformers', 'numpy'} & set(sys.modules), 'import baton is not cheap'\n"
        "baton.Client, baton.AsyncClient\n"
        "assert 'grpc' in sys.modules and not {'torch', 'transformers', 'fastapi'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


def test_all_names_everything_public() -> None:
    for name in baton.client.__all__:
        assert getattr(baton.client, name).__doc__
    public = {name for name, value in vars(baton.client).items() if isinstance(value, type) and name[0] != "_"}
    assert public <= set(baton.client.__all__)
    assert baton.Client is baton.client.Client
    assert baton.AsyncClient is baton.client.AsyncClient


def test_options_cover_every_sampling_field() -> None:
    assert set(SamplingParams.__dataclass_fields__) <= set(Options.__annotations__)


def test_answer_types_have_every_field_of_their_messages() -> None:
    pairs: list[tuple[Any, Any]] = [
        (Trace, common_pb2.RequestTrace),
        (RouteDecision, router_pb2.RouteDecision),
        (RouteCandidate, router_pb2.RouteCandidate),
        (Instance, router_pb2.InstanceStatus),
        (Load, common_pb2.LoadReport),
        (Model, router_pb2.ModelDescription),
        (Stats, router_pb2.GetStatsResponse),
        (Quantiles, router_pb2.Quantiles),
    ]
    for cls, message in pairs:
        assert set(cls.__dataclass_fields__) == {field.name for field in message.DESCRIPTOR.fields}


def test_every_field_arrives() -> None:
    options: dict[str, Any] = {
        "max_tokens": 7,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.25,
        "logit_bias": {3: -1.5},
        "seed": 2**40,
        "stop": ["a", "b"],
        "stop_token_ids": [5, 6],
        "ignore_eos": True,
        "logprobs": 3,
        "speculative_tokens": 4,
        "prompt_logprobs": 0,
        "n": 2,
    }
    extra = {
        "include_stop_in_output": True,
        "allow_special_tokens": True,
        "cache_salt": "t",
        "priority": -3,
        "request_id": "r",
        "session_id": "s",
    }
    extra |= {"ttft_ms": 250, "itl_ms": 12.5, "user": "u"}
    request = build_generate("hi", "m", {**options, **extra})
    expected = SamplingParams(**{**options, "stop": ("a", "b"), "stop_token_ids": (5, 6)})
    assert sampling_from_pb(request.sampling, stop=tuple(request.stop)) == expected
    assert (request.model, request.text) == ("m", "hi")
    for name, value in extra.items():
        assert getattr(request, name) == value
    assert build_metadata({"order": "prefill_first"}) == (("x-baton-order", "prefill_first"),)
    assert build_metadata(options) == ()
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    assert build_metadata({"traceparent": parent}) == (("traceparent", parent),)
    with pytest.raises(InvalidRequestError, match="no W3C trace context") as caught:
        build_metadata({"traceparent": "nonsense"})
    assert caught.value.field == "traceparent"
    others = {"sampling", "order", "traceparent", "grammar", "structured_outputs", "response_format"}
    assert set(options) | others | set(extra) == set(Options.__annotations__)


class Person(pydantic.BaseModel):
    name: str


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"response_format": Person}, {"json": json.dumps(Person.model_json_schema())}),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        ({"response_format": {"type": "text"}}, {}),
        ({"structured_outputs": {"json": {"type": "integer"}, "disable_any_whitespace": True}},
         {"json": '{"type": "integer"}', "disable_any_whitespace": True}),
        ({"structured_outputs": StructuredOutputs(regex="a+")}, {"regex": "a+"}),
        ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": router_pb2.Choices(texts=["a", "b"])}),
        ({"structured_outputs": {"grammar": "start: /a/"}}, {"grammar": "start: /a/"}),
    ],
)  # fmt: skip
def test_what_the_answer_must_be_arrives(options: dict[str, Any], expected: dict[str, Any]) -> None:
    request = build_generate("hi", "", options)
    assert request.structured_outputs == router_pb2.StructuredOutputs(**expected)
    assert request.HasField("structured_outputs") == bool(expected)


def test_a_grammar_in_normal_form_arrives() -> None:
    grammar = Grammar("regex", "start: /a/", (5,))
    for options in ({"grammar": grammar}, {"sampling": SamplingParams(grammar=grammar)}):
        assert sampling_from_pb(build_generate("hi", "", options).sampling).grammar == grammar


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"structured_outputs": {"regex": "a"}, "response_format": Person}, "response_format"),
        ({"structured_outputs": {"regex": "a"}, "grammar": Grammar("regex", "start: /a/")}, "grammar"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs"),
        ({"structured_outputs": {"choice": [5]}}, "structured_outputs"),
        ({"structured_outputs": {"json": {"a": object()}}}, "structured_outputs"),
        ({"response_format": "json"}, "response_format"),
        ({"grammar": "start: /a/"}, "grammar"),
    ],
)
def test_what_the_answer_must_be_is_checked(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        build_generate("hi", "", options)
    assert caught.value.field == field


def test_keywords_win_over_sampling() -> None:
    request = build_generate([1, 2], "", {"sampling": SamplingParams(temperature=0.0, n=3), "n": 2, "stop": "x"})
    assert (request.sampling.temperature, request.sampling.n, list(request.stop)) == (0.0, 2, ["x"])
    assert list(request.token_ids.ids) == [1, 2]


def test_chat_messages() -> None:
    request = build_route([{"role": "user", "content": "hello"}], "", "salt")
    assert [(m.role, m.content) for m in request.chat.messages] == [("user", "hello")]
    assert request.cache_salt == "salt"


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ("", "prompt"),
        ([], "prompt"),
        (None, "prompt"),
        (b"bytes", "prompt"),
        ({"role": "user"}, "prompt"),
        ([1, -1], "prompt"),
        ([1, 2**32], "prompt"),
        ([1, "x"], "prompt"),
        ([1.5], "prompt"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": "a"}, {"role": 3, "content": "b"}], "messages[1].role"),
        ([{"role": "user", "content": "a", "name": "b"}], "messages[0].name"),
        ([{"role": "user", "content": "a"}, "b"], "messages[1]"),
    ],
)
def test_bad_prompts_name_their_field(prompt: Any, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        build_generate(prompt, "", {})
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", "7"),
        ("max_tokens", True),
        ("min_tokens", None),
        ("temperature", "hot"),
        ("temperature", -1),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_k", 1.5),
        ("ignore_eos", 1),
        ("n", 0),
        ("n", 10_000),
        ("stop", ""),
        ("stop", ["a", 3]),
        ("stop", 3),
        ("stop_token_ids", ["a"]),
        ("stop_token_ids", [-1]),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {1: 1000}),
        ("logit_bias", [1]),
        ("seed", -1),
        ("logprobs", 21),
        ("sampling", {"n": 1}),
        ("priority", 2**31),
        ("priority", "high"),
        ("ttft_ms", 0),
        ("ttft_ms", "soon"),
        ("itl_ms", float("inf")),
        ("user", 7),
        ("cache_salt", 3),
        ("request_id", None),
    ],
)
def test_bad_options_name_their_field(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        build_generate("hi", "", {name: value})
    assert caught.value.field == name


def test_an_int_too_large_for_the_wire_is_refused() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        build_generate("hi", "", {"max_tokens": 2**40})
    assert caught.value.field == "sampling"


def test_an_unknown_option_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="max_token'"):
        build_generate("hi", "", {"max_token": 3})


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ((("h:1", "nowhere"), None, 1.0, 0), "address"),
        (((), None, 1.0, 0), "address"),
        ((("h:1",), None, 0.0, 0), "timeout"),
        ((("h:1",), None, float("inf"), 0), "timeout"),
        ((("h:1",), None, 1.0, -1), "retries"),
    ],
)
def test_bad_settings_name_their_field(values: tuple[Any, ...], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        Settings(*values)
    assert caught.value.field == field
