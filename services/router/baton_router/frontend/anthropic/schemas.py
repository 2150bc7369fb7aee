"""Schemas of ``/v1/messages`` and ``/v1/messages/count_tokens``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType

from baton_router.frontend.openai.schemas import (
    BOOL_OR_NULL,
    EXTENSIONS_SCHEMA,
    MESSAGES_TEXT,
    STRING,
    STRING_OR_NULL,
    TOOL_NAME,
    Body,
    Outside,
    array_schema,
    object_schema,
    or_null,
)


def _block(kind: str, needed: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return object_schema({"type": {"const": kind}, **needed}, **more)


_TEXTS = {"anyOf": [STRING, array_schema(_block("text", {"text": STRING}))]}
_REFERENCE = _block("tool_reference", {"tool_name": STRING})
_RESULT = {"anyOf": [STRING, array_schema({"anyOf": [_block("text", {"text": STRING}), _REFERENCE]})]}
_BLOCKS = [
    _block("text", {"text": STRING}),
    _block("tool_use", {"id": STRING, "name": STRING, "input": {"type": "object"}}),
    _block("tool_result", {"tool_use_id": STRING}, content=or_null(_RESULT), is_error=BOOL_OR_NULL),
    _block("thinking", {"thinking": STRING}),
    _block("redacted_thinking", {}),
]
_TOOL = object_schema(
    {"name": TOOL_NAME, "input_schema": {"description": "A JSON schema of an object.", "type": "object"}},
    type={"enum": ["custom", None]},
    description=STRING_OR_NULL,
    strict=BOOL_OR_NULL,
    defer_loading={"description": "Left out until a tool_reference names it.", **BOOL_OR_NULL},
)
_NAMED_TOOL = _block("tool_reference", {"name": STRING})
_CHANGES = [
    _block("text", {"text": STRING}),
    _block("tool_addition", {"tool": {"anyOf": [_NAMED_TOOL, _block("tool_definition", {"definition": _TOOL})]}}),
    _block("tool_removal", {"tool": _NAMED_TOOL}),
]
_MESSAGE = {
    "anyOf": [
        object_schema(
            {
                "role": {"enum": ["user", "assistant"]},
                "content": {"anyOf": [STRING, array_schema({"anyOf": _BLOCKS}, minItems=1)]},
            }
        ),
        object_schema(
            {
                "role": {"const": "system"},
                "content": {"anyOf": [STRING, array_schema({"anyOf": _CHANGES}, minItems=1)]},
            },
            clear_at={"enum": ["next_user_message", "never", None]},
            output_config={"type": ["object", "null"]},
        ),
    ]
}
_TOOL_CHOICE = object_schema(
    {"type": {"enum": ["auto", "any", "tool", "none"]}}, name=STRING, disable_parallel_tool_use=BOOL_OR_NULL
)
_THINKING = object_schema(
    {"type": {"enum": ["enabled", "adaptive", "disabled"]}},
    budget_tokens={"description": "With enabled: fewer than max_tokens.", "type": "integer", "minimum": 1},
    display={"enum": ["summarized", "updates", "omitted", None]},
)


_THREAD = {
    "description": "A conversation that the router stores.",
    "anyOf": [_block("create", {}), _block("continue", {"previous_message_id": STRING})],
}


class CountTokensBody(Body, kw_only=True):
    """Body of ``POST /v1/messages/count_tokens``, in the format of Anthropic's API."""

    outside: ClassVar[Outside] = Outside(
        frozenset(
            {
                "cache_control",
                "billing_policy",
                "fallback_credit_token",
                "fallbacks",  # for models that decline to answer
                "user_profile_id",
                "workspace_id",
            }
        ),
        {"mcp_servers": ([],), "container": ({}, {"skills": []}, {"skills": None}), "compaction": (), "thread": ()},
        {
            "speed": ("standard",),
            "service_tier": ("auto", "standard_only"),
            "betas": ([],),
            "inference_geo": ("global",),
            "diagnostics": ({}, {"previous_message_id": None}),
        },
    )

    described: ClassVar[Mapping[str, Any]] = {
        "messages": {"description": MESSAGES_TEXT, **array_schema(_MESSAGE, minItems=1)},
        "system": or_null(_TEXTS),
        "tools": or_null(array_schema(_TOOL)),
        "tool_choice": or_null(_TOOL_CHOICE),
        "thinking": or_null(_THINKING),
        "context_management": {"description": "Only edits that keep all.", "type": ["object", "null"]},
        "output_format": {"description": "As output_config.format.", "type": ["object", "null"]},
    }

    messages: list[dict[str, Any]]
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None
    # Fields that Anthropic's API does not have.
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesBody(CountTokensBody, kw_only=True):
    """Body of ``POST /v1/messages``."""

    described: ClassVar[Mapping[str, Any]] = {
        **CountTokensBody.described,
        "thread": or_null(_THREAD),
        "nvext": EXTENSIONS_SCHEMA,
    }

    max_tokens: Annotated[int, msgspec.Meta(ge=1)]
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: dict[str, Any] | None = None
    thread: dict[str, Any] | None = None
    # Fields that Anthropic's API does not have.
    nvext: dict[str, Any] | None = None
    seed: int | None = None
    min_p: float | None = None


class AnthropicErrorObject(msgspec.Struct):
    """An error; ``param`` and ``code`` are those of OpenAI's format, ``details`` are about threads."""

    type: str
    message: str
    param: str | None
    code: str
    details: dict[str, Any] | UnsetType = UNSET


class AnthropicError(msgspec.Struct):
    """Body of every error response, and event of a stream that ends with an error."""

    type: Literal["error"]
    error: AnthropicErrorObject


class MessageUsage(msgspec.Struct):
    """Tokens of a message; ``input_tokens`` are the prompt tokens that had to be computed."""

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
    """An event of a streamed message; its type determines the other fields."""

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
