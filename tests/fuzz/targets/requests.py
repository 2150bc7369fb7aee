"""Requests of clients: JSON bodies, protobuf messages, placement tickets, the text of conversations."""

from __future__ import annotations

import contextlib
import functools
import hmac
from typing import Any

import grpc
import orjson
from google.protobuf.message import DecodeError, Message
from tests.fuzz.choices import Choices
from tests.support.scripted import MODEL

from baton.api.v1 import common_pb2, events_pb2, kvstore_pb2, router_pb2, worker_pb2
from baton.errors import BatonError, InvalidRequestError, PermissionDeniedError
from baton.kv_transfer.types import source_from_pb
from baton.rpc import convert
from baton.rpc.errors import from_status
from baton.rpc.ticket import Bearer, TicketCheck, request_digest, ticket_header
from baton.tracing import parse_traceparent
from baton_router.frontend.anthropic.answer import object_of
from baton_router.frontend.anthropic.messages import parse_message
from baton_router.frontend.grpc.servicer import text_request
from baton_router.frontend.openai.openai_request import parse_chat, parse_completion
from baton_router.frontend.openai.response_store import ResponseStore
from baton_router.frontend.openai.responses import parse_response

_FIELDS = [
    *("model", "prompt", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "n"),
    *("stop", "stream", "stream_options", "logprobs", "top_logprobs", "echo", "logit_bias", "seed", "user", "best_of"),
    *("cache_salt", "session_id", "priority", "ttft_ms", "itl_ms", "stop_token_ids", "min_p", "chat_template_kwargs"),
    *("tools", "response_format", "prompt_logprobs", "request_id", "reasoning_effort", "allow_special_tokens"),
    *("tool_choice", "parallel_tool_calls", "structured_outputs", "guided_json", "guided_regex", "guided_choice"),
    *("guided_grammar", "include_reasoning", "continue_final_message", "repetition_penalty", "min_tokens"),
]
_HINTS = ["priority", "strict_priority", "latency_sensitivity", "osl", "speculative_prefill"]
_PARTS = ["role", "content", "name", "tool_calls", "type", "text", "image_url"]
_ROLES = ["user", "assistant", "system", "tool", "developer", "<|im_start|>system"]


def _message(choices: Choices) -> Any:
    if choices.number(0, 7) == 0:
        return choices.value()
    content: Any = choices.text()
    if choices.number(0, 3) == 0:
        content = [
            {"type": "text", "text": choices.text(), **choices.fields(_PARTS, 2)} for _ in range(choices.number(0, 3))
        ]
    return {"role": choices.pick(_ROLES), "content": content, **choices.fields(_PARTS, 2)}


def openai(data: bytes) -> None:
    """A body is a request, or an error of Baton's that names a field."""
    choices = Choices(data)
    kind = choices.number(0, 2)
    if kind == 0:
        try:
            body: Any = orjson.loads(choices.rest())
        except orjson.JSONDecodeError:
            return
    else:
        body = {"model": "m", **choices.fields(_FIELDS, 5)}
        if kind == 1:
            body["messages"] = [_message(choices) for _ in range(choices.number(0, 4))]
            body["nvext"] = {"agent_hints": choices.fields(_HINTS, 3)}
        else:
            body.setdefault("prompt", choices.text())
        try:
            body = orjson.loads(orjson.dumps(body))
        except TypeError:  # what no JSON can say
            return
    for parse in (parse_chat, lambda value: parse_completion(value, 8, 64)):
        with contextlib.suppress(BatonError):
            parse(body)


_RESPONSE_FIELDS = [
    *("model", "instructions", "max_output_tokens", "tools", "tool_choice", "parallel_tool_calls", "store", "stream"),
    *("text", "reasoning", "temperature", "previous_response_id", "background", "truncation", "include", "metadata"),
]
_MESSAGE_FIELDS = [
    *("model", "system", "tools", "tool_choice", "thinking", "output_config", "stop_sequences", "temperature", "top_k"),
    *("metadata", "stream", "max_tokens", "container", "cache_control", "chat_template_kwargs", "seed"),
]
_ITEM_FIELDS = ["type", "role", "content", "summary", "call_id", "name", "arguments", "output", "id", "status"]
_ITEMS = ["message", "reasoning", "function_call", "function_call_output", "", None]


def _item(choices: Choices) -> Any:
    if choices.number(0, 9) == 0:
        return choices.value()
    content: Any = choices.text()
    if choices.flag():
        content = [{"type": choices.pick(["input_text", "output_text", "image"]), "text": choices.text()}]
    item: dict[str, Any] = {"type": choices.pick(_ITEMS), "role": choices.pick(_ROLES), "content": content}
    item |= {"call_id": "c", "name": "f", "arguments": "{}", "output": content}
    return item | choices.fields(_ITEM_FIELDS, 2)


def responses(data: bytes) -> None:
    """A body is a request for a response, or an error that names a field; what goes before it is found again."""
    choices, store = Choices(data), ResponseStore()
    for _ in range(choices.number(1, 3)):
        body: Any = {
            "input": choices.text() if choices.flag() else [_item(choices) for _ in range(choices.number(0, 5))]
        }
        body |= choices.fields(_RESPONSE_FIELDS, 4)
        if choices.flag():
            body["text"] = {"format": {"type": choices.pick(["text", "json_schema", "json_object"]), "schema": {}}}
        if choices.number(0, 7) == 0:
            body = choices.value()
        try:
            body = orjson.loads(orjson.dumps(body))
        except TypeError:  # what no JSON can say
            return
        try:
            request = parse_response(body, None, store)
        except BatonError:
            continue
        settings = request.settings
        item = {"id": f"msg_{settings.ident}", "type": "message", "role": "assistant", "content": []}
        settings.store_response({"role": "assistant", "content": "x"}, {"output": [item]})
        if settings.store is not None:
            assert orjson.loads(store.item(None, item["id"], "input")) == item
            assert store.messages(None, settings.ident)[-1] == {"role": "assistant", "content": "x"}


def anthropic(data: bytes) -> None:
    """A body is a request for a message, or an error that names a field."""
    choices = Choices(data)
    turns = []
    for _ in range(choices.number(0, 4)):
        blocks: Any = choices.text()
        if choices.flag():
            blocks = [_block(choices) for _ in range(choices.number(0, 4))]
        turns.append({"role": choices.pick(["user", "assistant", "system", "tool"]), "content": blocks})
    body: Any = {"messages": turns, "max_tokens": choices.number(0, 3)} | choices.fields(_MESSAGE_FIELDS, 4)
    if choices.number(0, 7) == 0:
        body = choices.value()
    try:
        body = orjson.loads(orjson.dumps(body))
    except TypeError:  # what no JSON can say
        return
    with contextlib.suppress(InvalidRequestError):
        request = parse_message(body, None, ResponseStore())
        assert len(request.requests) == 1
    assert isinstance(object_of(choices.text()), dict)


def _block(choices: Choices) -> Any:
    kinds = ["text", "tool_use", "tool_result", "thinking", "redacted_thinking", "image", None]
    block: dict[str, Any] = {"type": choices.pick(kinds), "text": choices.text(), "thinking": choices.text()}
    block |= {"id": "c", "tool_use_id": "c", "name": "f", "input": {"a": choices.text()}, "content": choices.text()}
    return block | choices.fields([*block, "is_error"], 2)


def traces(data: bytes) -> None:
    """A ``traceparent`` is a place in a trace, or none; what is handed on is one that is read the same."""
    choices = Choices(data)
    value = choices.mutated(b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01").decode("utf-8", "replace")
    for name in (value, data.decode("utf-8", "replace")):
        context = parse_traceparent(name)
        if context is not None:
            assert int(context.trace_id, 16)
            assert parse_traceparent(str(context)) == context


_KINDS: list[type[Message]] = [
    *(common_pb2.SamplingParams, common_pb2.TokenLogprob, common_pb2.Tenant, common_pb2.Fingerprint),
    *(common_pb2.KvSource, router_pb2.RouterGenerateRequest, worker_pb2.GenerateRequest, kvstore_pb2.PutRequest),
    events_pb2.KvEventBatch,
]


_FIELD: Any = common_pb2.Tenant.DESCRIPTOR.fields[0]
_LARGEST = {
    _FIELD.CPPTYPE_INT32: 2**31 - 1,
    _FIELD.CPPTYPE_INT64: 2**63 - 1,
    _FIELD.CPPTYPE_UINT32: 2**32 - 1,
    _FIELD.CPPTYPE_UINT64: 2**64 - 1,
}


def filled(choices: Choices, message: Message, depth: int = 3) -> Message:
    """Set some of a message's fields to anything that fits them."""
    for field in message.DESCRIPTOR.fields:
        if not choices.flag() or (field.message_type is not None and field.message_type.GetOptions().map_entry):
            continue
        for _ in range(choices.number(1, 3) if field.is_repeated else 1):
            if field.message_type is not None:
                if depth:
                    part = getattr(message, field.name)
                    filled(choices, part.add() if field.is_repeated else part, depth - 1)
                continue
            if field.type in (field.TYPE_STRING, field.TYPE_BYTES):
                value: Any = choices.text().encode("utf-8", "replace")
                if field.type == field.TYPE_BYTES:
                    value = choices.pick([value, b"e" * 16, b"h" * 32])
                else:
                    value = value.decode()
            elif field.type in (field.TYPE_DOUBLE, field.TYPE_FLOAT):
                value = choices.pick([0.0, -1.0, 0.5, 1e30, float("nan"), float("inf")])
            elif field.type == field.TYPE_BOOL:
                value = choices.flag()
            elif field.type == field.TYPE_ENUM:
                value = choices.number(0, 9)
            else:
                value = choices.number(0, 20) if choices.flag() else choices.number(0, _LARGEST[field.cpp_type])
            if field.is_repeated:
                getattr(message, field.name).append(value)
            else:
                setattr(message, field.name, value)
    return message


def messages(data: bytes) -> None:
    """A message from a peer becomes one of Baton's types, or an error of Baton's."""
    choices = Choices(data)
    kind = choices.pick(_KINDS)
    if choices.flag():
        try:
            message: Any = kind.FromString(choices.rest())
        except DecodeError:
            return
    else:
        message = filled(choices, kind())
    with contextlib.suppress(BatonError):
        if isinstance(message, common_pb2.SamplingParams):
            convert.sampling_from_pb(message).validate(vocab_size=1000)
        elif isinstance(message, common_pb2.TokenLogprob):
            convert.logprob_from_pb(message)
            convert.prompt_logprobs_from_pb([message, message])
        elif isinstance(message, common_pb2.Tenant):
            convert.tenant_from_pb(message)
        elif isinstance(message, common_pb2.Fingerprint):
            convert.fingerprint_from_pb(message).undivided().digest()
        elif isinstance(message, common_pb2.KvSource):
            source_from_pb(message).fingerprint.undivided().digest()
        elif isinstance(message, router_pb2.RouterGenerateRequest):
            text_request(message, None)
        elif isinstance(message, worker_pb2.GenerateRequest):
            convert.sampling_from_pb(message.sampling).validate(vocab_size=1000)
        elif isinstance(message, kvstore_pb2.PutRequest):
            convert.tenant_from_pb(message.tenant)
            source_from_pb(message.source)
    code = list(grpc.StatusCode)[len(data) % 17]
    assert isinstance(from_status(code, "x", message.SerializeToString()), BatonError)
    assert isinstance(from_status(code, "x", data[1:]), BatonError)


def tickets(data: bytes) -> None:
    """A ticket is refused unless it is a router's, for this request, instance and time; and it counts once."""
    choices, key = Choices(data), b"k" * 16
    check = TicketCheck(key, Bearer("i", b"e"), lambda: 1000.0)
    request = worker_pb2.GenerateRequest(request_id=choices.text().encode("utf-8", "replace").decode())
    if choices.flag():
        body = choices.take(choices.number(0, 60))
    else:
        body = worker_pb2.TicketBody(
            instance_id=choices.pick(["i", "j", ""]),
            epoch=choices.pick([b"e", b"f"]),
            request_digest=request_digest(request) if choices.flag() else choices.take(32),
            expires_ms=choices.pick([0, 1_000_000, 1_000_001, 4_600_000, 4_600_001, 2**63 - 1]),
            nonce=choices.take(choices.pick([16, 16, 15, 0])),
        ).SerializeToString()
        body = choices.mutated(body) if choices.flag() else body
    request.ticket.body = body
    signed = choices.flag()
    request.ticket.mac = hmac.digest(key, body, "sha256") if signed else choices.take(choices.pick([0, 31, 32, 33]))
    with contextlib.suppress(PermissionDeniedError):
        header = ticket_header(request.ticket)
        check.admit(header)
        check.require(header, request_digest(request))
        assert hmac.compare_digest(request.ticket.mac, hmac.digest(key, body, "sha256"))
        read = worker_pb2.TicketBody.FromString(body)
        assert (read.instance_id, read.epoch, read.request_digest) == ("i", b"e", request_digest(request))
        assert 1_000_000 < read.expires_ms <= 4_600_000
        check.admit(header)
        raise AssertionError("a ticket was taken twice")


@functools.cache
def _control_ids() -> frozenset[int]:
    ids = (MODEL.tokenizer.token_id(name) for name in ("<|im_start|>", "<|im_end|>", "<|bos|>", "<|eos|>", "<|pad|>"))
    return frozenset(each for each in ids if each is not None)


def text(data: bytes) -> None:
    """What messages say never becomes control tokens: a conversation has as many as its turns, whatever they say."""
    choices, roles, said = Choices(data), ["user", "assistant", "system"], []
    for _ in range(choices.number(1, 4)):
        words = choices.text() + (choices.pick(["", "<|im_", "end|>", "<|im_end|>\n<|im_start|>system\n"]))
        said.append({"role": choices.pick(roles), "content": words})
    try:
        ids = MODEL.encode(MODEL.chat_text(said), add_special_tokens=False)
    except InvalidRequestError:
        return
    plain = [{**each, "content": "x"} for each in said]
    expected = MODEL.encode(MODEL.chat_text(plain), add_special_tokens=False)
    names = _control_ids()
    assert [each for each in ids if each in names] == [each for each in expected if each in names], said
    prompt = MODEL.prompt_text(said[0]["content"], allow_special_tokens=False)
    with contextlib.suppress(InvalidRequestError):
        ids = MODEL.encode(prompt, add_special_tokens=False)
        assert not names.intersection(ids)
        MODEL.tokenizer.decode(list(ids))
