"""From what a caller passes to what goes over the wire; everything wrong is refused here, before any connection."""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from baton.api.v1 import router_pb2
from baton.client.structured import read_structured, structured_to_pb
from baton.errors import InvalidRequestError, shown
from baton.grammar import StructuredOutputs
from baton.rpc.convert import sampling_to_pb
from baton.tracing import parse_traceparent
from baton.types import ORDER_HEADER, Grammar, Order, SamplingParams

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
"""Text, token ids, or chat messages ``{"role": ..., "content": ...}``."""

_MESSAGE_KEYS = frozenset({"role", "content"})
_INT32 = 2**31


class Options(TypedDict, total=False):
    """Keywords of ``generate``: the fields of :class:`baton.SamplingParams` and those of the request."""

    max_tokens: int | None
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int | None
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    logprobs: int | None
    prompt_logprobs: int | None
    n: int
    grammar: Grammar | None
    speculative_tokens: int | None
    """Draft tokens per step at most; 0: none. No token of the answer changes by it."""
    structured_outputs: StructuredOutputs | Mapping[str, Any]
    """What the answer must be: one of json, regex, choice, grammar, json_object and structural_tag."""
    response_format: Any
    """The same, as in OpenAI's interface, or a class of pydantic: ``answer.parsed`` is one of it."""
    sampling: SamplingParams
    """Starting point; keywords beside it win."""
    include_stop_in_output: bool
    allow_special_tokens: bool
    """Names of special tokens in the prompt are such tokens; default: in a text, and not in messages."""
    cache_salt: str
    """Keeps this tenant's prefix cache apart from others'."""
    priority: int
    """Lower runs first."""
    ttft_ms: float
    """The first token is wanted within so many milliseconds; refused at once where that cannot be."""
    itl_ms: float
    """Most milliseconds wanted between two tokens; refused at once where no instance is so fast."""
    user: str
    """Whose request it is: the tenant in the router's queue, where there is no ``cache_salt``."""
    session_id: str
    """Whose conversation this is, for routers that keep one in one place."""
    order: str
    """``decode_first`` or ``prefill_first``: which instance it is sent to first; direct mode knows the former alone."""
    request_id: str
    traceparent: str
    """W3C trace context of the caller's span: the request's spans become part of it."""


_SAMPLING_FIELDS = {item.name: item for item in dataclasses.fields(SamplingParams)}
_REQUEST_KINDS: dict[str, type] = {
    "include_stop_in_output": bool,
    "allow_special_tokens": bool,
    "cache_salt": str,
    "priority": int,
    "ttft_ms": float,
    "itl_ms": float,
    "user": str,
    "session_id": str,
    "request_id": str,
}


def build_generate(prompt: Prompt, model: str, options: Mapping[str, Any]) -> router_pb2.RouterGenerateRequest:
    """Build the message of a ``generate`` call.

    Raises:
        InvalidRequestError: Something is out of range or of the wrong type; names the field.
        TypeError: An option does not exist.
    """
    sampling = build_sampling(options)
    request = router_pb2.RouterGenerateRequest(model=_typed("model", model, str))
    for name, kind in _REQUEST_KINDS.items():
        if name in options:
            setattr(request, name, _typed(name, options[name], kind))
    set_prompt(request, prompt)
    request.stop.extend(sampling.stop)
    asked, _ = read_structured({"grammar": sampling.grammar, **options})
    if asked is not None:
        request.structured_outputs.CopyFrom(structured_to_pb(asked))
    try:
        request.sampling.CopyFrom(sampling_to_pb(sampling))
    except (ValueError, TypeError) as error:  # validated above: what is left is an int too large for the wire
        raise InvalidRequestError(f"sampling parameters out of range: {error}", field="sampling") from error
    return request


def build_metadata(options: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return what of the options of a ``generate`` call goes beside its message.

    Raises:
        InvalidRequestError: Names the field.
    """
    found: list[tuple[str, str]] = []
    if "order" in options:
        found.append((ORDER_HEADER, Order.parse("order", _typed("order", options["order"], str))))
    if "traceparent" in options:
        traceparent = _typed("traceparent", options["traceparent"], str)
        if parse_traceparent(traceparent) is None:
            raise InvalidRequestError(f"{traceparent!r} is no W3C trace context", field="traceparent")
        found.append(("traceparent", traceparent))
    return tuple(found)


def build_route(prompt: Prompt, model: str, cache_salt: str) -> router_pb2.RouteRequest:
    """Build the message of a ``route`` call.

    Raises:
        InvalidRequestError: Names the field.
    """
    request = router_pb2.RouteRequest(
        model=_typed("model", model, str), cache_salt=_typed("cache_salt", cache_salt, str)
    )
    set_prompt(request, prompt)
    return request


def build_sampling(options: Mapping[str, Any]) -> SamplingParams:
    """Build and validate sampling parameters from keywords.

    Raises:
        InvalidRequestError: Names the field.
        TypeError: An option does not exist.
    """
    unknown = [name for name in options if name not in Options.__annotations__]
    if unknown:
        raise TypeError(f"generate() got an unexpected keyword argument {unknown[0]!r}")
    base = _typed("sampling", options.get("sampling", SamplingParams()), SamplingParams)
    changes = {name: _sampling_value(name, options[name]) for name in _SAMPLING_FIELDS if name in options}
    sampling: SamplingParams = dataclasses.replace(base, **changes)
    sampling.validate()
    return sampling


def set_prompt(request: router_pb2.RouterGenerateRequest | router_pb2.RouteRequest, prompt: Prompt) -> None:
    """Put a prompt of any form into a message.

    Raises:
        InvalidRequestError: It is empty or of another form.
    """
    if isinstance(prompt, str):
        if not prompt:
            raise InvalidRequestError("prompt must not be empty", field="prompt")
        request.text = prompt
        return
    if isinstance(prompt, (bytes, Mapping)) or not isinstance(prompt, Sequence):
        raise InvalidRequestError(
            f"prompt must be a string, token ids or chat messages, got {type(prompt).__name__}", field="prompt"
        )
    if not prompt:
        raise InvalidRequestError("prompt must not be empty", field="prompt")
    if isinstance(prompt[0], Mapping):
        for i, message in enumerate(prompt):
            request.chat.messages.append(_chat_message(i, message))
        return
    try:
        request.token_ids.ids.extend(typing.cast(Sequence[int], prompt))
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"token ids must be integers from 0 to 2^32 - 1: {error}", field="prompt") from error


def check_messages(messages: Any) -> Sequence[Mapping[str, str]]:
    """Check that a prompt is a conversation.

    Raises:
        InvalidRequestError: It is a text or token ids.
    """
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence):
        raise InvalidRequestError(f"messages must be a list of messages, got {shown(messages)}", field="messages")
    for i, message in enumerate(messages):
        _chat_message(i, message)
    return messages


def _chat_message(index: int, message: Any) -> router_pb2.ChatMessage:
    at = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise InvalidRequestError(f"{at} must be a mapping with role and content", field=at)
    for key in message:
        if key not in _MESSAGE_KEYS:
            raise InvalidRequestError(
                f"{at} has {shown(key)}; role and content are all it may have", field=f"{at}.{key}"
            )
    for key in sorted(_MESSAGE_KEYS):
        if not isinstance(message.get(key), str):
            raise InvalidRequestError(f"{at}.{key} must be a string", field=f"{at}.{key}")
    return router_pb2.ChatMessage(role=message["role"], content=message["content"])


def _sampling_value(name: str, value: Any) -> Any:
    """Check the type of a sampling keyword, so that ``validate`` can compare numbers."""
    if name == "stop":
        texts = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Sequence) else None
        if texts is None or not all(isinstance(text, str) and text for text in texts):
            raise InvalidRequestError("stop must be a string or strings, none of them empty", field="stop")
        return texts
    if name == "stop_token_ids":
        if not isinstance(value, Sequence) or not all(_is_int(token) for token in value):
            raise InvalidRequestError("stop_token_ids must be integers", field=name)
        return tuple(value)
    if name == "logit_bias":
        if not isinstance(value, Mapping) or not all(_is_int(k) and _is_number(v) for k, v in value.items()):
            raise InvalidRequestError("logit_bias must map token ids to numbers", field=name)
        return dict(value)
    if name == "grammar":
        return value if value is None else _typed(name, value, Grammar)
    default = _SAMPLING_FIELDS[name].default
    if default is None:
        ok = value is None or _is_int(value)
    elif isinstance(default, bool):
        ok = isinstance(value, bool)
    elif isinstance(default, int):
        ok = _is_int(value)
    else:
        ok = _is_number(value)
    if not ok:
        kind = "an integer or None" if default is None else {bool: "a bool", int: "an integer"}.get(type(default))
        raise InvalidRequestError(f"{name} must be {kind or 'a number'}, got {shown(value)}", field=name)
    return value


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_int(value) or (isinstance(value, float) and not math.isnan(value))


def _typed(name: str, value: Any, kind: type) -> Any:
    if kind is int:
        ok, what = _is_int(value) and -_INT32 <= value < _INT32, "a 32-bit integer"
    elif kind is float:
        ok, what = _is_number(value) and 0 < value < math.inf, "a number above 0"
    else:
        ok, what = isinstance(value, kind), f"a {kind.__name__}"
    if not ok:
        raise InvalidRequestError(f"{name} must be {what}, got {shown(value)}", field=name)
    return value
