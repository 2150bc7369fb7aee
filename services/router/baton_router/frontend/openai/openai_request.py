"""The parsers of the endpoints that generate: from a request's body to the generations it asks for."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import msgspec

from baton.errors import InvalidRequestError
from baton.types import MAX_LOGPROBS, SamplingParams
from baton_router.frontend.openai.messages import parse_messages, parse_prompts
from baton_router.frontend.openai.schemas import (
    ChatBody,
    CompletionBody,
    GenerationBody,
    StreamOptions,
    parse_body,
    unknown_fields,
)
from baton_router.frontend.openai.unsupported_params import ignored_fields
from baton_router.processor.text_request import ChatPrompt, TextRequest

DEFAULT_COMPLETION_TOKENS = 16
_READ = frozenset({"max_tokens", "logprobs", "stop", "stop_token_ids", "logit_bias"})
"""Sampling fields whose values in a body are not yet those of :class:`SamplingParams`."""
_COPIED = tuple(
    field.name
    for field in fields(SamplingParams)
    if field.name in GenerationBody.__struct_fields__ and field.name not in _READ
)
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
        ignored: Fields that have no effect.
        template_fields: Names of fields that only have an effect if the chat template reads the variable.
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
    ignored: list[str] = msgspec.field(default_factory=list)
    template_fields: dict[str, str] = msgspec.field(default_factory=dict)


def parse_completion(value: Any, max_prompts: int) -> OpenAIRequest:
    """Return what the body of a completion request asks for.

    Args:
        value: The decoded body.
        max_prompts: How many prompts it may have.

    Raises:
        InvalidRequestError: A field is wrong or asks for what can't be done; names it.
    """
    body = parse_body(CompletionBody, value)
    prompts = parse_prompts(body.prompt, max_prompts)
    echo = bool(body.echo)
    sampling = _sampling(body, body.max_tokens, body.logprobs)
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
            default_max_tokens=DEFAULT_COMPLETION_TOKENS,
            add_special_tokens=body.add_special_tokens is not False,
        )
        for prompt in prompts
    ]
    request = _request(body, value, requests, sampling)
    request.echo, request.score_only, request.logprobs = echo, score_only, body.logprobs is not None
    return request


def parse_chat(value: Any) -> OpenAIRequest:
    """Return what the body of a chat request asks for.

    Args:
        value: The decoded body.

    Raises:
        InvalidRequestError: A field is wrong or asks for what can't be done; names it.
    """
    body = parse_body(ChatBody, value)
    messages = parse_messages(body.messages)
    if body.echo:
        raise InvalidRequestError("echo is for plain completions", field="echo")
    max_tokens, name = body.max_tokens, "max_tokens"
    if body.max_completion_tokens is not None:
        max_tokens, name = body.max_completion_tokens, "max_completion_tokens"
        if body.max_tokens not in (None, max_tokens):
            raise InvalidRequestError("max_tokens and max_completion_tokens differ", field=name)
    sampling = _sampling(body, max_tokens, _chat_logprobs(body))
    variables = dict(body.chat_template_kwargs or {})
    template_fields = {variable: f"chat_template_kwargs.{variable}" for variable in variables}
    if body.reasoning_effort is not None and "reasoning_effort" not in variables:
        variables["reasoning_effort"] = body.reasoning_effort
        template_fields["reasoning_effort"] = "reasoning_effort"
    go_on = bool(body.continue_final_message)
    prompt = ChatPrompt(
        messages=messages,
        add_generation_prompt=not go_on if body.add_generation_prompt is None else body.add_generation_prompt,
        continue_final_message=go_on,
        variables=variables,
    )
    text_request = _text_request(
        body,
        sampling,
        prompt=prompt,
        prompt_field="messages",
        max_tokens_field=name,
        add_special_tokens=bool(body.add_special_tokens),
    )
    request = _request(body, value, [text_request], sampling)
    request.logprobs, request.template_fields = bool(body.logprobs), template_fields
    return request


def _chat_logprobs(body: ChatBody) -> int | None:
    top = body.top_logprobs
    if top is not None and not 0 <= top <= MAX_LOGPROBS:
        raise InvalidRequestError(f"top_logprobs must be between 0 and {MAX_LOGPROBS}, got {top}", field="top_logprobs")
    if top and not body.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs: true", field="top_logprobs")
    return (top or 0) if body.logprobs else None


def _text_request(body: GenerationBody, sampling: SamplingParams, **more: Any) -> TextRequest:
    return TextRequest(
        sampling=sampling,
        model=body.model or "",
        skip_special_tokens=body.skip_special_tokens is not False,
        include_stop=bool(body.include_stop_str_in_output),
        cache_salt=body.cache_salt or "",
        session=body.session_id or "",
        priority=body.priority or 0,
        ttft_ms=body.ttft_ms,
        itl_ms=body.itl_ms,
        user=body.user or "",
        request_id=body.request_id or "",
        **more,
    )


def _request(
    body: CompletionBody | ChatBody, value: dict[str, Any], requests: list[TextRequest], sampling: SamplingParams
) -> OpenAIRequest:
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError("stream_options needs stream: true", field="stream_options")
    if body.stream and body.prompt_logprobs is not None:
        raise InvalidRequestError("prompt_logprobs can't be had in a stream; use echo", field="prompt_logprobs")
    if body.best_of not in (None, sampling.n):
        raise InvalidRequestError("best_of other than n is not supported; leave it out", field="best_of")
    ignored = ignored_fields(unknown_fields(type(body), value))
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


def _sampling(body: GenerationBody, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
    sampling = SamplingParams(
        max_tokens=max_tokens,
        logprobs=logprobs,
        stop=_stop(body.stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        logit_bias=_logit_bias(body.logit_bias),
    )
    for name in _COPIED:
        value = getattr(body, name)
        if value is not None:
            setattr(sampling, name, value)
    return sampling


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
