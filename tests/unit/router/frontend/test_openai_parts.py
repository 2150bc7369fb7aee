"""Parts of the HTTP front that are easier to corner without a server."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from tests.support.scripted import MODEL, encode

from baton.api.v1 import common_pb2
from baton.errors import InvalidRequestError
from baton.types import InstanceId, Role, SamplingParams, TokenLogprob
from baton_router.frontend.http.errors import baton_error_object
from baton_router.frontend.http.middleware import HttpMetrics
from baton_router.frontend.openai.answer import LogprobWriter
from baton_router.frontend.openai.generation import Route, route_lines
from baton_router.frontend.openai.openai_request import parse_messages
from baton_router.frontend.openai.schemas import (
    HARMLESS,
    ONLY_DEFAULT,
    ChatBody,
    CompletionBody,
    header_value,
    ignored_fields,
    parse_body,
)
from baton_router.processor.text_request import TextChunk
from baton_router.scheduler.decision import Decision
from baton_router.scheduler.policies import Ratings, Scores, Side
from baton_router.scheduler.policy import Choice


def test_no_field_is_both_supported_and_refused() -> None:
    supported = set(ChatBody.__struct_fields__) | set(CompletionBody.__struct_fields__)
    assert not supported & set(ONLY_DEFAULT)
    assert not supported & HARMLESS
    assert not HARMLESS & set(ONLY_DEFAULT)


@pytest.mark.parametrize("name", sorted(ONLY_DEFAULT))
def test_refused_fields_pass_with_their_defaults_alone(name: str) -> None:
    for value in (None, *ONLY_DEFAULT[name]):
        assert ignored_fields({name: value}) == []
    with pytest.raises(InvalidRequestError) as caught:
        ignored_fields({name: {"something": "else"}})
    assert caught.value.field == name


@given(st.lists(st.text(max_size=200), max_size=60))
def test_header_value_fits_into_a_header(names: list[str]) -> None:
    value = header_value(names)
    assert len(value) <= 1010
    assert value.isascii()
    assert "\n" not in value
    assert "\r" not in value


def test_clients_cannot_blow_up_the_metrics() -> None:
    registry = CollectorRegistry()
    HttpMetrics(registry).count_ignored([f"field{at}" for at in range(1000)])
    text = generate_latest(registry).decode()
    assert text.count("baton_http_ignored_fields_total{") == 101
    assert 'baton_http_ignored_fields_total{field="other"} 900.0' in text


def test_minus_infinity_becomes_json() -> None:
    item = TokenLogprob(7, -math.inf, 9, ((8, -0.1), (9, -math.inf)))
    writer = LogprobWriter(MODEL.tokenizer)
    (chat,) = writer.chat([item])
    assert (chat["logprob"], chat["top_logprobs"][1]["logprob"]) == (-9999.0, -9999.0)
    assert writer.completion([7], [item], [0])["token_logprobs"] == [-9999.0]
    assert writer.prompt([None, item])[1]["7"]["logprob"] == -9999.0  # type: ignore[index]


def test_tokens_of_half_characters_stay_apart_in_completions() -> None:
    halves = next(ids for text in ("鼠", "龘", "𓀀") if len(ids := encode(text)) > 1)
    item = TokenLogprob(halves[0], -1.0, 1, tuple((token_id, -1.0) for token_id in dict.fromkeys(halves)))
    top = LogprobWriter(MODEL.tokenizer).completion([halves[0]], [item], [0])["top_logprobs"][0]
    assert len(top) == len(set(halves))
    (chat,) = LogprobWriter(MODEL.tokenizer).chat([item])
    assert bytes(chat["bytes"]) == MODEL.tokenizer.token_bytes(halves[0])


def route_headers(routes: list[Route]) -> dict[str, str]:
    return dict(line.split(": ", 1) for line in route_lines(routes).decode().splitlines())


def test_headers_of_local_remote_and_batches() -> None:
    assert route_headers([Route()])["x-baton-path"] == "none"
    local, remote = Route(), Route()
    decision = Decision(
        prompt_tokens=1,
        policy="x",
        prefill=Side(Role.PREFILL, [InstanceId("p")], [0], [0.5], [0.0], [0.0], 1.0),
        decode=Side(Role.DECODE, [InstanceId("d")], [0], [1.0], [0.0], [0.0], 1.0),
        ratings=Ratings(Scores({}, [0.0]), Scores({}, [0.0])),
        choice=Choice(0, 0, None, 0.0),
        path=None,
        prefill_order=[0],
        prefill_addresses=[],
        index_state="stale",
    )
    trace = common_pb2.RequestTrace
    local.add(
        TextChunk([], trace(path=common_pb2.PREFILL_PATH_LOCAL, decode_instance="d", local_reason="short"), decision)
    )
    headers = route_headers([local])
    assert (headers["x-baton-path"], headers["x-baton-prefill-instance"]) == ("local", "none")
    assert (headers["x-baton-match-rate"], headers["x-baton-local-reason"]) == ("1.0000", "short")
    remote.add(
        TextChunk(
            [],
            trace(path=common_pb2.PREFILL_PATH_REMOTE, prefill_instance="p", kv_bytes=5, pipe="tcp", transfer_us=1500),
            decision,
            cached_tokens=3,
        )
    )
    both = route_headers([local, remote])
    assert (both["x-baton-path"], both["x-baton-match-rate"], both["x-baton-kv-bytes"]) == (
        "local,remote",
        "0.7500",
        "5",
    )
    assert (both["x-baton-cached-tokens"], both["x-baton-transfer-ms"]) == ("3", "1.500")
    assert both["x-baton-index-state"] == "stale"


def test_error_codes() -> None:
    from baton.errors import ContextLengthError, NotFoundError

    assert baton_error_object(ContextLengthError("x"))["error"]["code"] == "context_length_exceeded"
    assert baton_error_object(NotFoundError("x", field="model"))["error"]["code"] == "model_not_found"
    assert baton_error_object(NotFoundError("x"))["error"]["code"] == "not_found"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"stop_token_ids": [1, "x"]}, "stop_token_ids[1]"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"logit_bias": {"5": "x"}}, "logit_bias"),
        ({"n": True}, "n"),
        ({"n": 1.0}, "n"),
        ({"temperature": "1"}, "temperature"),
    ],
)
def test_errors_of_types_name_their_place(body: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_body(CompletionBody, body)
    assert caught.value.field == field
    assert caught.value.message.startswith(f"{field}: expected ")
    assert "null" not in caught.value.message


def test_every_sampling_field_has_its_place_in_bodies_and_on_the_wire() -> None:
    """A new one is a line in each of: SamplingParams, the body's schema, the proto."""
    names = {field.name for field in fields(SamplingParams)}
    for body in (ChatBody, CompletionBody):
        # A grammar comes as response_format, structured_outputs or guided_*.
        assert names - {"grammar"} <= set(body.__struct_fields__)
    assert names - {"stop"} == {field.name for field in common_pb2.SamplingParams.DESCRIPTOR.fields}


def test_whole_numbers_are_numbers() -> None:
    body = parse_body(CompletionBody, {"prompt": "x", "temperature": 1})
    assert isinstance(body.temperature, float)


def test_earlier_tool_calls_reach_the_template_as_objects() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    (message,) = parse_messages([{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert message["content"] == ""
    assert message["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    for wrong, field in (
        ([{"function": {"name": "f", "arguments": "{"}}], "messages[0].tool_calls[0].function.arguments"),
        ([{}], "messages[0].tool_calls[0].function"),
        ("x", "messages[0].tool_calls"),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            parse_messages([{"role": "assistant", "content": "x", "tool_calls": wrong}])
        assert caught.value.field == field
