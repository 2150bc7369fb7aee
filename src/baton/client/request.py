"""Converts the arguments of calls to messages. Wrong arguments are refused here, before anything is sent."""

from __future__ import annotations

import dataclasses
import json
import math
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypedDict

from baton.api.v1 import router_pb2
from baton.errors import InvalidRequestError, shown
from baton.grammar import StructuredOutputs
from baton.rpc.convert import MODEL_DEFAULTED, sampling_to_pb
from baton.tracing import parse_traceparent
from baton.types import ORDER_HEADER, Grammar, Order, SamplingParams

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
"""Text, token ids, or chat messages ``{"role": ..., "content": ...}``."""

AnswerParser: TypeAlias = Callable[[str], Any]
"""Makes an object of the text of a sequence."""

_MESSAGE_KEYS = frozenset({"role", "content"})
_INT32 = 2**31


class Options(TypedDict, total=False):
    """Keyword arguments of ``generate``: the fields of :class:`baton.SamplingParams`, and those of the request."""

    max_tokens: int | None
    """Most tokens to generate; default: as many as the model's context has room for."""
    min_tokens: int
    """Tokens before which neither a stop token nor a stop string ends the answer; default 0."""
    temperature: float
    """0 selects the most probable token; default 1."""
    top_p: float
    """Sample from the most probable tokens that together have this probability; default 1."""
    top_k: int
    """Sample from so many most probable tokens; 0, the default, is no limit."""
    min_p: float
    """Sample from tokens with at least this share of the highest probability; default 0."""
    repetition_penalty: float
    """Penalty on tokens of prompt and answer; 1, the default, is none."""
    presence_penalty: float
    """Penalty on tokens that the answer has already; default 0."""
    frequency_penalty: float
    """Penalty on tokens of the answer per occurrence; default 0."""
    logit_bias: Mapping[int, float]
    """Values that are added to the logits of tokens, by token id."""
    seed: int | None
    """Seed of the random numbers; the same request with the same seed has the same answer. Default: a random one."""
    stop: str | Sequence[str]
    """Strings that end the answer."""
    stop_token_ids: Sequence[int]
    """Tokens that end the answer, beside the model's own."""
    ignore_eos: bool
    """Go on after the model's end-of-sequence tokens; default ``False``."""
    logprobs: int | None
    """Return log probabilities, with those of so many most probable tokens; default ``None``: none."""
    prompt_logprobs: int | None
    """The same for the tokens of the prompt."""
    n: int
    """Number of sequences to generate; default 1."""
    grammar: Grammar | None
    """Compiled grammar that the answer must match."""
    speculative_tokens: int | None
    """Most draft tokens per step; 0 disables speculative decoding. The tokens of the answer do not depend on it."""
    structured_outputs: StructuredOutputs | Mapping[str, Any]
    """Constraint on the answer: one of json, regex, choice, grammar, json_object and structural_tag."""
    response_format: Any
    """The same constraint in OpenAI's form, or a pydantic class; ``answer.parsed`` is then an instance of it."""
    sampling: SamplingParams
    """Sampling parameters to start from; other keyword arguments override its fields."""
    include_stop_in_output: bool
    """Whether the stop string or token that ended the answer is part of its text; default ``False``."""
    allow_special_tokens: bool
    """Whether names of special tokens in the prompt become such tokens; default: in texts, but not in messages."""
    cache_salt: str
    """Separates the prefix caches of tenants: requests share cached blocks only with requests of the same salt."""
    priority: int
    """Requests with lower numbers run first; default 0."""
    ttft_ms: float
    """Deadline of the first token, in milliseconds; the request is refused at once if it cannot be met."""
    itl_ms: float
    """Longest time between two tokens, in milliseconds; the request is refused if no instance is fast enough."""
    user: str
    """Name of the tenant in the router's queue, for requests without ``cache_salt``."""
    session_id: str
    """Name of the conversation, for routers that keep the requests of a conversation on one instance."""
    order: str
    """Instance that gets the request first: ``decode_first`` or ``prefill_first``; direct mode has the former only."""
    request_id: str
    """Identifier of the request; default: a generated one."""
    traceparent: str
    """W3C trace context of the caller's span, which becomes the parent of the request's spans."""


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
        if "sampling" not in options:  # what is not given is the model's default
            for name in MODEL_DEFAULTED:
                if name not in options:
                    request.sampling.ClearField(name)  # type: ignore[arg-type]
    except (ValueError, TypeError) as error:  # validated above, except for integers that are too large for the wire
        raise InvalidRequestError(f"sampling parameters out of range: {error}", field="sampling") from error
    return request


def build_metadata(options: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return the options of a ``generate`` call that are sent as metadata.

    Raises:
        InvalidRequestError: An option is wrong; names the field.
    """
    metadata: list[tuple[str, str]] = []
    if "order" in options:
        metadata.append((ORDER_HEADER, Order.parse("order", _typed("order", options["order"], str))))
    if "traceparent" in options:
        traceparent = _typed("traceparent", options["traceparent"], str)
        if parse_traceparent(traceparent) is None:
            raise InvalidRequestError(f"{traceparent!r} is no W3C trace context", field="traceparent")
        metadata.append(("traceparent", traceparent))
    return tuple(metadata)


def build_route(prompt: Prompt, model: str, cache_salt: str) -> router_pb2.RouteRequest:
    """Build the message of a ``route`` call.

    Raises:
        InvalidRequestError: An argument is wrong; names the field.
    """
    request = router_pb2.RouteRequest(
        model=_typed("model", model, str), cache_salt=_typed("cache_salt", cache_salt, str)
    )
    set_prompt(request, prompt)
    return request


def build_sampling(options: Mapping[str, Any]) -> SamplingParams:
    """Build and validate sampling parameters from keyword arguments.

    Raises:
        InvalidRequestError: An argument is wrong; names the field.
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
    """Set the prompt of a message.

    Raises:
        InvalidRequestError: The prompt is empty, or neither a text, nor token ids, nor messages.
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
    """Check that a prompt is a conversation, and return it.

    Raises:
        InvalidRequestError: It is not; names the field.
    """
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence):
        raise InvalidRequestError(f"messages must be a list of messages, got {shown(messages)}", field="messages")
    for i, message in enumerate(messages):
        _chat_message(i, message)
    return messages


def _chat_message(index: int, message: Any) -> router_pb2.ChatMessage:
    name = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise InvalidRequestError(f"{name} must be a mapping with role and content", field=name)
    for key in message:
        if key not in _MESSAGE_KEYS:
            raise InvalidRequestError(
                f"{name} has {shown(key)}; role and content are all it may have", field=f"{name}.{key}"
            )
    for key in sorted(_MESSAGE_KEYS):
        if not isinstance(message.get(key), str):
            raise InvalidRequestError(f"{name}.{key} must be a string", field=f"{name}.{key}")
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
        valid = _is_int(value) and -_INT32 <= value < _INT32
        expected = "a 32-bit integer"
    elif kind is float:
        valid = _is_number(value) and 0 < value < math.inf
        expected = "a number above 0"
    else:
        valid = isinstance(value, kind)
        expected = f"a {kind.__name__}"
    if not valid:
        raise InvalidRequestError(f"{name} must be {expected}, got {shown(value)}", field=name)
    return value


def read_structured(options: Mapping[str, Any]) -> tuple[StructuredOutputs | None, AnswerParser | None]:
    """Return the constraint on the answer and the parser of its text, each ``None`` if there is none.

    Raises:
        InvalidRequestError: The options contradict each other or are wrong; names the field.
    """
    names = [name for name in ("structured_outputs", "response_format", "grammar") if options.get(name) is not None]
    if len(names) > 1:
        message = f"{names[0]} and {names[1]} contradict each other: give one of them"
        raise InvalidRequestError(message, field=names[1])
    asked = options.get("structured_outputs")
    if asked is None:
        return _read_response_format(options.get("response_format"))
    if not isinstance(asked, StructuredOutputs):
        asked = StructuredOutputs.from_mapping(asked)
    return asked, _json_parser(asked)


def _read_response_format(value: Any) -> tuple[StructuredOutputs | None, AnswerParser | None]:
    if value is None:
        return None, None
    schema = getattr(value, "model_json_schema", None)
    parse = getattr(value, "model_validate_json", None)
    if callable(schema) and callable(parse):
        return StructuredOutputs(json=schema(), field="response_format"), parse
    asked = StructuredOutputs.from_response_format(value)
    return asked, _json_parser(asked)


def _json_parser(asked: StructuredOutputs | None) -> AnswerParser | None:
    return json.loads if asked is not None and asked.kind in ("json", "json_object") else None


def structured_to_pb(asked: StructuredOutputs) -> router_pb2.StructuredOutputs:
    """Convert a constraint on the answer to its message.

    Raises:
        InvalidRequestError: A value is of the wrong type; names the field.
    """
    kind = asked.kind
    value = getattr(asked, kind)
    if kind in ("json", "structural_tag") and not isinstance(value, str):
        try:
            value = json.dumps(value, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequestError(f"{asked.field}.{kind} is no JSON: {error}", field=asked.field) from error
    message = router_pb2.StructuredOutputs(
        whitespace_pattern=asked.whitespace_pattern or "", disable_any_whitespace=asked.disable_any_whitespace
    )
    try:
        if kind == "choice":
            message.choice.texts.extend(value)
        else:
            setattr(message, kind, value)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"{asked.field}.{kind} cannot be {shown(value)}", field=asked.field) from error
    return message
