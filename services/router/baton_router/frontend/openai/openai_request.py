"""The parsers of the endpoints that generate: from a request's body and headers to the generations it asks for.

Prompts and messages are checked by hand so that errors say exactly where.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import msgspec
import orjson

from baton.dialects.tool_use import read_tools
from baton.errors import InvalidRequestError, shown
from baton.grammar import StructuredOutputs
from baton.rpc.convert import MODEL_DEFAULTED
from baton.tokenizer.chat_template import flatten_content
from baton.types import MAX_LOGPROBS, MAX_N, ORDER_HEADER, Order, SamplingParams
from baton_router.frontend.http.middleware import Headers
from baton_router.frontend.openai.hints import apply_hints, ignored_hints
from baton_router.frontend.openai.schemas import (
    MAX_BUDGET,
    ChatBody,
    CompletionBody,
    GenerationBody,
    StreamOptions,
    TokenizeBody,
    ignored_fields,
    invalid_field,
    parse_body,
    unknown_fields,
)
from baton_router.processor.text_request import MAX_MESSAGES, ChatPrompt, Prompt, TextRequest, check_role
from baton_router.types import MAX_SALT_CHARS, Account

DEFAULT_COMPLETION_TOKENS = 16
_READ = frozenset({"max_tokens", "logprobs", "stop", "stop_token_ids", "logit_bias"})
"""Sampling fields whose values in a body are not yet those of :class:`SamplingParams`."""
_COPIED = {field.name for field in fields(SamplingParams)} & {*GenerationBody.__struct_fields__} - _READ
"""Sampling fields that are taken from a body as they are: all others that both sides have."""


class OpenAIRequest(msgspec.Struct):
    """What one HTTP request asks for.

    Attributes:
        requests: One generation per prompt.
        chat: Whether the answer is a chat message.
        n: Sequences per prompt.
        include_usage: End a stream with a chunk that has the usage.
        continuous_usage: Put the usage so far into every chunk of a stream.
        echo: Begin the text with the prompt.
        score_only: The prompt is only to be scored: the one token generated is left out of the answer.
        prompt_logprobs: Give the prompt's log probabilities in the extended format.
        tokens_as_ids: Spell tokens in log probabilities as ``token_id:17``.
        ident: The answer's id, if it is to be no guessable one; empty: that of the HTTP request will do.
        settings: What an interface other than that of chats has to say of the answer.
        ignored: Fields that have no effect.
        reasoning: Whether the model's reasoning is part of the answer.
        template_fields: Names of fields that only have an effect if the chat template reads the variable.
        reasoning_fields: Names of fields that only have an effect if the model is known to reason.
    """

    requests: list[TextRequest]
    chat: bool
    n: int
    stream: bool
    include_usage: bool = False
    continuous_usage: bool = False
    echo: bool = False
    score_only: bool = False
    logprobs: bool = False
    prompt_logprobs: bool = False
    return_token_ids: bool = False
    tokens_as_ids: bool = False
    reasoning: bool = True
    ident: str = ""
    settings: Any = None
    ignored: list[str] = msgspec.field(default_factory=list)
    template_fields: dict[str, str] = msgspec.field(default_factory=dict)
    reasoning_fields: list[str] = msgspec.field(default_factory=list)


def parse_completion(value: Any, max_prompts: int, max_sequences: int) -> OpenAIRequest:
    """Parse the body of a completion request.

    Args:
        value: The decoded JSON body.
        max_prompts: Most prompts of a request.
        max_sequences: Most sequences of a request, over all prompts.

    Raises:
        InvalidRequestError: A field is wrong or asks for what is not supported; names it.
    """
    body = parse_body(CompletionBody, value)
    for name in ("tools", "tool_choice"):
        if value.get(name) not in (None, [], "none", "auto"):
            raise invalid_field(name, "is for chat completions")
    prompts = parse_prompts(body.prompt, max_prompts)
    echo = bool(body.echo)
    sampling = _sampling(body, value, body.max_tokens, body.logprobs)
    num_sequences = sampling.n * len(prompts)
    if num_sequences > max_sequences and sampling.n <= MAX_N:  # else sampling reports a wrong n
        raise InvalidRequestError(
            f"n times the number of prompts must be at most {max_sequences}, got {num_sequences}", field="n"
        )
    score_only = echo and body.max_tokens == 0
    if score_only:
        sampling = sampling.replace(max_tokens=1, min_tokens=0)
    if echo and body.logprobs is not None:
        sampling = sampling.replace(prompt_logprobs=max(body.logprobs, body.prompt_logprobs or 0))
    requests = [
        _text_request(
            body,
            sampling,
            prompt=prompt,
            prompt_index=index,
            default_max_tokens=DEFAULT_COMPLETION_TOKENS,
            add_special_tokens=body.add_special_tokens is not False,
        )
        for index, prompt in enumerate(prompts)
    ]
    request = _request(body, value, requests, sampling)
    request.echo = echo
    request.score_only = score_only
    request.logprobs = body.logprobs is not None
    return request


def parse_chat(value: Any, tool_places: Sequence[str] = ()) -> OpenAIRequest:
    """Parse the body of a chat request.

    Args:
        value: The decoded JSON body.
        tool_places: Where each function of ``tools`` is in the request, if it is one of another interface.

    Raises:
        InvalidRequestError: A field is wrong or asks for what is not supported; names it.
    """
    body = parse_body(ChatBody, value)
    variables = dict(body.chat_template_kwargs or {})
    template_fields = {variable: f"chat_template_kwargs.{variable}" for variable in variables}
    if body.reasoning_effort is not None and "reasoning_effort" not in variables:
        variables["reasoning_effort"] = body.reasoning_effort
        template_fields["reasoning_effort"] = "reasoning_effort"
    prompt = chat_prompt(body, variables)
    use = read_tools(body.tools, body.tool_choice, body.parallel_tool_calls, tool_places)
    if use.mode != "none":
        prompt = msgspec.structs.replace(prompt, tools=use.tools)
        if use.mode == "auto":  # else the grammar has it call one all the same
            template_fields["tools"] = "tools"
    if body.echo:
        raise InvalidRequestError("echo is for plain completions", field="echo")
    max_tokens = body.max_tokens
    name = "max_tokens"
    if body.max_completion_tokens is not None:
        max_tokens = body.max_completion_tokens
        name = "max_completion_tokens"
        if body.max_tokens not in (None, max_tokens):
            raise InvalidRequestError("max_tokens and max_completion_tokens differ", field=name)
    sampling = _sampling(body, value, max_tokens, _chat_logprobs(body))
    text_request = _text_request(
        body,
        sampling,
        prompt=prompt,
        prompt_field="messages",
        max_tokens_field=name,
        add_special_tokens=bool(body.add_special_tokens),
        tool_use=use,
        parsed=True,
        thinking_budget=_thinking_budget(body.thinking_token_budget),
    )
    request = _request(body, value, [text_request], sampling)
    if body.thinking_token_budget is not None:
        request.reasoning_fields.append("thinking_token_budget")
    request.reasoning = body.include_reasoning is not False
    request.logprobs = bool(body.logprobs)
    request.template_fields = template_fields
    return request


def _thinking_budget(value: int | None) -> int | None:
    name = "thinking_token_budget"
    if value is not None and not 0 <= value <= MAX_BUDGET:
        raise invalid_field(name, f"must be between 0 and {MAX_BUDGET}, got {value}")
    return value


def _chat_logprobs(body: ChatBody) -> int | None:
    top = body.top_logprobs
    if top is not None and not 0 <= top <= MAX_LOGPROBS:
        raise InvalidRequestError(f"top_logprobs must be between 0 and {MAX_LOGPROBS}, got {top}", field="top_logprobs")
    if top and not body.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs: true", field="top_logprobs")
    return (top or 0) if body.logprobs else None


def _text_request(body: GenerationBody, sampling: SamplingParams, **more: Any) -> TextRequest:
    unset = [name for name in MODEL_DEFAULTED if getattr(body, name) is None]
    request = TextRequest(
        sampling=sampling,
        unset=("max_tokens", *unset),
        model=body.model or "",
        allow_special_tokens=body.allow_special_tokens,
        skip_special_tokens=body.skip_special_tokens is not False,
        include_stop=bool(body.include_stop_str_in_output),
        cache_salt=body.cache_salt or "",
        session=body.session_id or "",
        session_hint=body.prompt_cache_key or "",
        priority=body.priority or 0,
        ttft_ms=body.ttft_ms,
        itl_ms=body.itl_ms,
        user=body.user or "",
        request_id=body.request_id or "",
        per_token=bool(body.stream),
        structured=_structured(body),
        **more,
    )
    apply_hints(body, request)
    return request


def _request(
    body: CompletionBody | ChatBody, value: dict[str, Any], requests: list[TextRequest], sampling: SamplingParams
) -> OpenAIRequest:
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError("stream_options needs stream: true", field="stream_options")
    if body.stream and body.prompt_logprobs is not None:
        raise InvalidRequestError("prompt_logprobs can't be had in a stream; use echo", field="prompt_logprobs")
    if body.best_of not in (None, sampling.n):
        raise InvalidRequestError("best_of other than n is not supported; leave it out", field="best_of")
    ignored = ignored_fields(unknown_fields(type(body), value)) + ignored_hints(value.get("nvext"))
    options = body.stream_options or StreamOptions()
    if body.stream_options is not None:
        for name, item in unknown_fields(StreamOptions, value["stream_options"]).items():
            # A padding of chunks against eavesdroppers: OpenAI's SDK documents it; Baton pads nothing.
            if (name, item) != ("include_obfuscation", False):
                ignored.append(f"stream_options.{name}")
    return OpenAIRequest(
        requests=requests,
        chat=isinstance(body, ChatBody),
        n=sampling.n,
        stream=bool(body.stream),
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.include_usage and options.continuous_usage_stats),
        prompt_logprobs=body.prompt_logprobs is not None,
        return_token_ids=bool(body.return_token_ids),
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
        ignored=ignored,
    )


def _sampling(
    body: GenerationBody, value: dict[str, Any], max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    sampling = SamplingParams(
        max_tokens=max_tokens,
        logprobs=logprobs,
        stop=_stop(body.stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        logit_bias=_logit_bias(body.logit_bias),
    )
    for name in _COPIED.intersection(value):
        item = getattr(body, name)
        if item is not None:
            setattr(sampling, name, item)
    return sampling


def _structured(body: GenerationBody) -> StructuredOutputs | None:
    """Return the constraint on the answer; ``None`` if there is none.

    Raises:
        InvalidRequestError: Several fields have one, or one is wrong.
    """
    constraints: list[tuple[str, StructuredOutputs | None]] = []
    if body.response_format is not None:
        constraints.append(("response_format", StructuredOutputs.from_response_format(body.response_format)))
    if body.structured_outputs is not None:
        constraints.append(("structured_outputs", StructuredOutputs.from_mapping(body.structured_outputs)))
    pattern = body.guided_whitespace_pattern
    for kind in ("json", "regex", "choice", "grammar"):
        value = getattr(body, name := f"guided_{kind}")
        if value is not None:
            spaces = {"whitespace_pattern": pattern if kind == "json" else None}
            constraints.append((name, StructuredOutputs.from_mapping({kind: value, **spaces}, name)))
    given = [(name, asked) for name, asked in constraints if asked is not None]
    if len(given) > 1:
        names = " and ".join(name for name, _ in given)
        raise InvalidRequestError(f"{names} contradict each other: give one of them", field=given[1][0])
    if pattern is not None and "guided_json" not in dict(given):
        raise invalid_field("guided_whitespace_pattern", "is for guided_json")
    return given[0][1] if given else None


def _stop(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(item, str) for item in strings):
        raise InvalidRequestError("stop must be a string or a list of strings", field="stop")
    return tuple(strings)


def _logit_bias(value: dict[str, float] | None) -> dict[int, float]:
    bias = {}
    for key, number in (value or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) < 12):
            raise InvalidRequestError(f"logit_bias: {key[:40]!r} is not a token id", field="logit_bias")
        bias[int(key)] = number
    return bias


# --- prompts and messages ---


def parse_prompts(value: Any, max_prompts: int) -> list[Prompt]:
    """Return the prompts of a completion request.

    Args:
        value: A string, a list of strings, a list of token ids, or a list of such lists; or ids as an array.
        max_prompts: How many there may be.

    Raises:
        InvalidRequestError: It is none of these; names the place.
    """
    if isinstance(value, str | array):
        return [value]
    if value is None:
        raise InvalidRequestError("prompt is required", field="prompt")
    if not isinstance(value, list):
        raise InvalidRequestError("prompt must be a string, token ids, or a list of either", field="prompt")
    if not value:
        raise InvalidRequestError("prompt must not be empty", field="prompt")
    if type(value[0]) is int:
        return [_token_ids(value, "prompt")]
    if len(value) > max_prompts:
        raise InvalidRequestError(f"prompt must have at most {max_prompts} prompts, got {len(value)}", field="prompt")
    prompts: list[Prompt] = []
    for at, item in enumerate(value):
        field = f"prompt[{at}]"
        if isinstance(item, list) and isinstance(value[0], list):
            prompts.append(_token_ids(item, field))
        elif isinstance(item, str) and isinstance(value[0], str):
            prompts.append(item)
        else:
            raise InvalidRequestError(
                f"{field}: a list of prompts has strings alone or lists of token ids alone", field=field
            )
    return prompts


def _token_ids(value: list[Any], field: str) -> list[int]:
    if not value:
        raise invalid_field(field, "must not be empty")
    if set(map(type, value)) != {int}:  # a bool is an int elsewhere, but no token id
        at, item = next((at, item) for at, item in enumerate(value) if type(item) is not int)
        raise invalid_field(f"{field}[{at}]", f"must be a token id, got {shown(item)}")
    return value


def chat_prompt(body: ChatBody | TokenizeBody, variables: Mapping[str, Any]) -> ChatPrompt:
    """Return the conversation that a body has.

    Raises:
        InvalidRequestError: A message is wrong; names the place.
    """
    go_on = bool(body.continue_final_message)
    return ChatPrompt(
        messages=parse_messages(body.messages),
        add_generation_prompt=not go_on if body.add_generation_prompt is None else body.add_generation_prompt,
        continue_final_message=go_on,
        variables=variables,
    )


def parse_messages(value: Any) -> list[dict[str, Any]]:
    """Return the messages of a chat request as chat templates want them: content is one string.

    Raises:
        InvalidRequestError: Something is wrong; names the place.
    """
    if value is None:
        raise InvalidRequestError("messages is required", field="messages")
    if not isinstance(value, list):
        raise InvalidRequestError("messages must be a list", field="messages")
    if not value:
        raise InvalidRequestError("messages must not be empty", field="messages")
    if len(value) > MAX_MESSAGES:
        raise InvalidRequestError(f"messages must be at most {MAX_MESSAGES}, got {len(value)}", field="messages")
    return [_message(item, at) for at, item in enumerate(value)]


def _message(value: Any, at: int) -> dict[str, Any]:
    field = f"messages[{at}]"
    if not isinstance(value, dict):
        raise invalid_field(field, "must be an object")
    role = value.get("role")
    check_role(role, f"{field}.role")
    content = value.get("content")
    calls = value.get("tool_calls")
    if content is None and not (role == "assistant" and calls):
        raise invalid_field(f"{field}.content", "is required")
    if content is not None and not isinstance(content, str | list):
        raise invalid_field(f"{field}.content", "must be a string or a list of parts")
    for name in ("name", "tool_call_id", "reasoning", "reasoning_content"):
        _check_text(value, name, field)
    message = flatten_content(value, at)
    reasoning = message.pop("reasoning", None) or message.get("reasoning_content")
    if reasoning:  # as answers have it, by the names that templates have for it
        message["reasoning_content"] = reasoning
        if not content:  # gpt-oss' template takes it for another kind of content
            message["thinking"] = reasoning
    if content is None:
        message["content"] = ""
    if calls is not None:
        message["tool_calls"] = _tool_calls(calls, f"{field}.tool_calls")
    return message


def _check_text(value: Mapping[str, Any], name: str, field: str) -> None:
    if not isinstance(value.get(name), str | None):
        raise invalid_field(f"{field}.{name}", "must be a string")


def _tool_calls(value: Any, field: str) -> list[dict[str, Any]]:
    """Return earlier tool calls with their arguments as objects, which is what chat templates expect."""
    if not isinstance(value, list) or not all(isinstance(call, Mapping) for call in value):
        raise invalid_field(field, "must be a list of objects")
    calls = []
    for at, call in enumerate(value):
        function = call.get("function")
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            where = f"{field}[{at}].function"
            raise invalid_field(where, "must be an object with a name")
        for name in ("id", "type"):
            _check_text(call, name, f"{field}[{at}]")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = orjson.loads(arguments) if arguments else {}
            except orjson.JSONDecodeError as error:
                where = f"{field}[{at}].function.arguments"
                raise invalid_field(where, f"must be JSON: {error}") from error
        calls.append({**call, "function": {**function, "arguments": arguments}})
    return calls


# --- headers ---


def apply_headers(requests: list[TextRequest], headers: Headers, account: Account | None) -> None:
    """Put what the headers of an HTTP request say into its generations: they go before the fields of its body.

    A conversation that is not named for Baton is named by what coding agents send on their own.

    Raises:
        InvalidRequestError: A header is wrong; names it.
    """
    session, rank = "", len(_AGENT_SESSIONS)
    final = (b"x-dynamo-session-final", b"true") in ((name, value.strip().lower()) for name, value in headers)
    for name, value in headers:
        if _AGENT_SESSIONS.get(name, rank) < rank:
            session, rank = value.decode("latin-1").strip(), _AGENT_SESSIONS[name]
        reader = _READERS.get(name)
        text = value.decode("latin-1").strip() if reader is not None else ""
        if reader is not None and text:
            field, read = reader
            for request in requests:
                setattr(request, field, read(name.decode(), text))
    for request in requests:
        hint = session or request.session_hint
        if not request.session and len(hint) <= MAX_SALT_CHARS:
            request.session = hint
        if final:
            request.retention_s = -1.0
    if account is not None:
        for request in requests:
            request.account = account
            request.cache_salt = account.salt(request.cache_salt)


def _text(name: str, value: str) -> str:
    return value


def _milliseconds(name: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise invalid_field(name, f"must be a number above 0, got {shown(value)}")
    return number


def _integer(name: str, value: str) -> int:
    digits = value.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) < 11):
        raise invalid_field(name, f"must be an integer, got {shown(value)}")
    return int(value)


_READERS: Mapping[bytes, tuple[str, Callable[[str, str], Any]]] = {
    b"x-baton-session": ("session", _text),
    b"x-baton-ttft-ms": ("ttft_ms", _milliseconds),
    b"x-baton-itl-ms": ("itl_ms", _milliseconds),
    b"x-baton-priority": ("priority", _integer),
    ORDER_HEADER.encode(): ("order", Order.parse),
    b"traceparent": ("traceparent", _text),  # one that cannot be read is ignored, as W3C Trace Context says
}
"""Headers, the fields of :class:`TextRequest` that they are for, and how they are read."""
_AGENT_SESSIONS: Mapping[bytes, int] = {
    name: rank
    for rank, name in enumerate(
        (
            b"x-claude-code-session-id",  # Claude Code from 2.1.86 on
            b"session-id",  # Codex
            b"session_id",  # Codex before
            b"x-session-affinity",  # opencode
            b"x-opencode-session",
            b"x-session-id",
            b"x-dynamo-session-id",
        )
    )
}
"""Headers in which agents name a conversation; the first of them counts."""
