"""The bodies of ``/v1/messages`` and ``/v1/messages/count_tokens``, and what answers to them look like."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType

from baton_router.frontend.openai.schemas import Body, Outside


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


def _block(kind: str, needed: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"type": {"const": kind}, **needed, **more},
        "required": ["type", *needed],
    }


_STRING = {"type": "string"}
_TEXTS = {"anyOf": [_STRING, {"type": "array", "items": _block("text", {"text": _STRING})}]}
_BLOCKS = [
    _block("text", {"text": _STRING}),
    _block("tool_use", {"id": _STRING, "name": _STRING, "input": {"type": "object"}}),
    _block("tool_result", {"tool_use_id": _STRING}, content=_or_null(_TEXTS), is_error={"type": ["boolean", "null"]}),
    _block("thinking", {"thinking": _STRING}),
    _block("redacted_thinking", {}),
]
_MESSAGES = {
    "description": "The conversation; the model's chat template makes the prompt of it.",
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "role": {"enum": ["user", "assistant", "system"]},
            "content": {"anyOf": [_STRING, {"type": "array", "items": {"anyOf": _BLOCKS}, "minItems": 1}]},
        },
        "required": ["role", "content"],
    },
    "minItems": 1,
}
_TOOL = {
    "type": "object",
    "properties": {
        "type": {"enum": ["custom", None]},
        "name": {"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,64}$"},
        "description": {"type": ["string", "null"]},
        "input_schema": {"description": "A JSON schema of an object.", "type": "object"},
        "strict": {"type": ["boolean", "null"]},
    },
    "required": ["name", "input_schema"],
}


_TOOL_CHOICE = {
    "type": "object",
    "properties": {
        "type": {"enum": ["auto", "any", "tool", "none"]},
        "name": _STRING,
        "disable_parallel_tool_use": {"type": ["boolean", "null"]},
    },
    "required": ["type"],
}
_THINKING = {
    "type": "object",
    "properties": {
        "type": {"enum": ["enabled", "adaptive", "disabled"]},
        "budget_tokens": {"description": "With enabled: fewer than max_tokens.", "type": "integer", "minimum": 1},
        "display": {"enum": ["summarized", "omitted", None]},
    },
    "required": ["type"],
}


class CountTokensBody(Body, kw_only=True):
    """``POST /v1/messages/count_tokens``; what is in messages, tools and the like is as Anthropic describes it."""

    outside: ClassVar[Outside] = Outside(
        frozenset({"cache_control"}),
        {"output_format": (), "mcp_servers": ([],), "container": (), "context_management": ({}, {"edits": []})},
        {"speed": ("standard",), "service_tier": ("auto", "standard_only"), "betas": ([],)},
    )

    described: ClassVar[Mapping[str, Any]] = {
        "messages": _MESSAGES,
        "system": _or_null(_TEXTS),
        "tools": _or_null({"type": "array", "items": _TOOL}),
        "tool_choice": _or_null(_TOOL_CHOICE),
        "thinking": _or_null(_THINKING),
    }

    messages: list[dict[str, Any]]
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    # What Anthropic's interface doesn't have.
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesBody(CountTokensBody, kw_only=True):
    """``POST /v1/messages``."""

    max_tokens: Annotated[int, msgspec.Meta(ge=1)]
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: dict[str, Any] | None = None
    # What Anthropic's interface doesn't have.
    seed: int | None = None
    min_p: float | None = None


class AnthropicErrorObject(msgspec.Struct):
    """What went wrong; ``param`` and ``code`` are as in the errors of OpenAI's endpoints."""

    type: str
    message: str
    param: str | None
    code: str


class AnthropicError(msgspec.Struct):
    """The body of every answer that is an error, and the event of a stream that ends with one."""

    type: Literal["error"]
    error: AnthropicErrorObject


class MessageUsage(msgspec.Struct):
    """Tokens of a message; ``input_tokens`` are those of the prompt that had to be computed."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: dict[str, int] | UnsetType = UNSET


class Message(msgspec.Struct):
    """Answers ``POST /v1/messages``."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageEvent(msgspec.Struct):
    """An event of a message: its kind says which other fields there are."""

    type: Literal[
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


class TokenCount(msgspec.Struct):
    """Answers ``POST /v1/messages/count_tokens``."""

    input_tokens: int
