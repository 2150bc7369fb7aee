"""Bodies of requests. Types are strict: ``"5"`` is no number. Ranges are checked where the values are used."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from baton.errors import InvalidRequestError

B = TypeVar("B", bound="Body")
_MAX_NAME = 100
MAX_ENTRIES = 1024
"""Fields of a body, and of each object in it."""


class Body(BaseModel):
    """A JSON object; fields that it doesn't know are kept apart."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    @property
    def extra(self) -> dict[str, Any]:
        """Fields that are not in the schema."""
        return self.model_extra or {}


class StreamOptions(Body):
    """What a stream shall bring beside its text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(Body):
    """What chat and plain completions have in common; ``None`` is the default everywhere."""

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


class CompletionBody(GenerationBody):
    """``POST /v1/completions``."""

    prompt: Any = None
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None


class ChatBody(GenerationBody):
    """``POST /v1/chat/completions``."""

    messages: Any = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    best_of: int | None = None
    echo: bool | None = None
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
        return cls.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        field = field_path(first["loc"])
        raise InvalidRequestError(f"{field}: {first['msg'][:1].lower()}{first['msg'][1:]}", field=field) from error


def _check_sizes(value: dict[str, Any]) -> None:
    """Refuse what nobody means before it is looked at piece by piece, which all others would wait for."""
    if len(value) > MAX_ENTRIES:
        raise InvalidRequestError(f"the body must have at most {MAX_ENTRIES} fields, got {len(value)}")
    for name, item in value.items():
        if isinstance(item, dict) and len(item) > MAX_ENTRIES:
            name = name[:_MAX_NAME]
            raise InvalidRequestError(f"{name} must be at most {MAX_ENTRIES} entries, got {len(item)}", field=name)


def field_path(location: tuple[int | str, ...]) -> str:
    """Return a place in a JSON value as people write it: ``messages[0].content``."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part[:_MAX_NAME]}" if path else part[:_MAX_NAME]
    return path
