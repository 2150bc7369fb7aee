"""Bodies of requests. Types are strict: ``"5"`` is no number. Ranges are checked where the values are used."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from baton.errors import InvalidRequestError

B = TypeVar("B", bound="Body")
_MAX_NAME = 100
MAX_ENTRIES = 1024
"""Fields of a body, and of each object in it."""
_PLACE = re.compile(r"^(.*) - at `(?:key` in `)?\$\.?([^`]*)`$", re.DOTALL)
"""Message and place of msgspec's errors: ``Expected `int`, got `str` - at `$.stop_token_ids[1]` ``."""


class Body(msgspec.Struct, kw_only=True):
    """A JSON object; ``None`` is the default of every field. See :func:`unknown_fields` for what it doesn't have."""


class StreamOptions(Body):
    """What a stream shall bring beside its text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(Body):
    """What chat and plain completions have in common.

    Fields that are called as those of :class:`~baton.types.SamplingParams` become those (see ``openai_request``).
    """

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stop: Any = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    # What OpenAI's interface doesn't have; spelled as other servers do.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    priority: int | None = None
    ttft_ms: float | None = None
    itl_ms: float | None = None
    user: str | None = None
    request_id: str | None = None
    best_of: int | None = None
    echo: bool | None = None


class CompletionBody(GenerationBody):
    """``POST /v1/completions``."""

    prompt: Any = None
    logprobs: int | None = None


class ChatBody(GenerationBody):
    """``POST /v1/chat/completions``."""

    messages: Any = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None


class TokenizeBody(Body):
    """``POST /tokenize``: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Any = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: list[int] | None = None
    skip_special_tokens: bool | None = None


def parse_body(cls: type[B], value: Any) -> B:
    """Check a decoded JSON value against a schema.

    Raises:
        InvalidRequestError: It is no object, has too many fields, or a field has the wrong type; names the field.
    """
    if not isinstance(value, dict):
        raise InvalidRequestError("the body must be a JSON object")
    _check_sizes(value)
    try:
        return msgspec.convert(value, cls)
    except msgspec.ValidationError as error:
        found = _PLACE.match(str(error))
        message, place = found.groups() if found is not None else (str(error), "")
        field = place.replace("[...]", "")[:_MAX_NAME]
        message = message.replace("`", "").replace(" | null", "")
        raise InvalidRequestError(f"{field}: {message[:1].lower()}{message[1:]}", field=field) from error


def unknown_fields(cls: type[Body], value: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a JSON object that are not in its schema."""
    known = cls.__struct_fields__
    return {name: item for name, item in value.items() if name not in known}


def json_schemas(classes: Sequence[type[Body]]) -> dict[str, Any]:
    """Return the schemas of bodies by their names, as OpenAPI's ``components`` have them."""
    _, components = msgspec.json.schema_components(classes, ref_template="#/components/schemas/{name}")
    return components


def _check_sizes(value: dict[str, Any]) -> None:
    """Refuse absurdly large objects before they are looked at piece by piece, while all other requests wait."""
    if len(value) > MAX_ENTRIES:
        raise InvalidRequestError(f"the body must have at most {MAX_ENTRIES} fields, got {len(value)}")
    for name, item in value.items():
        if isinstance(item, dict) and len(item) > MAX_ENTRIES:
            name = name[:_MAX_NAME]
            raise InvalidRequestError(f"{name} must be at most {MAX_ENTRIES} entries, got {len(item)}", field=name)
