"""The body of ``POST /v1/responses``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from baton_router.frontend.openai.schemas import Body, Outside

TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
ROLES = ("user", "assistant", "system", "developer")


_TEXT = {"type": "string"}
_CONTENT = {
    "anyOf": [
        _TEXT,
        {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"type": {"enum": list(TEXT_PARTS)}, "text": _TEXT},
                "required": ["type", "text"],
            },
        },
    ]
}

_CONTENT_OR_NULL = {"anyOf": [_CONTENT, {"type": "null"}]}


def _item(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"type": {"const": kind}, **fields}, "required": ["type", *fields]}


_MESSAGE = _item("message", role={"enum": list(ROLES)}, content=_CONTENT)
_INPUT = {
    "description": "A text, or the items of a conversation.",
    "anyOf": [
        _TEXT,
        {
            "type": "array",
            "items": {
                "anyOf": [
                    {**_MESSAGE, "required": ["role", "content"]},
                    _item("function_call", call_id=_TEXT, name=_TEXT, arguments=_TEXT),
                    _item("function_call_output", call_id=_TEXT, output=_CONTENT),
                    {**_item("reasoning", content=_CONTENT_OR_NULL, summary=_CONTENT_OR_NULL), "required": ["type"]},
                ]
            },
            "minItems": 1,
        },
    ],
}


class ResponsesBody(Body, kw_only=True):
    """``POST /v1/responses``; what is in ``input``, ``tools``, ``text`` and ``reasoning`` is as OpenAI describes it."""

    outside: ClassVar[Outside] = Outside(
        frozenset({"safety_identifier", "prompt_cache_key", "prompt_cache_retention"}),
        {
            "background": (False,),
            "conversation": (),
            "prompt": (),
            "truncation": ("disabled",),
            "top_logprobs": (0,),
            "max_tool_calls": (),
            "context_management": ([],),
            "moderation": (),
        },
        {"service_tier": ("auto", "default"), "include": ([],), "stream_options": ({"include_obfuscation": False}, {})},
    )

    described: ClassVar[Mapping[str, Any]] = {"input": _INPUT}

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    temperature: float | None = None
    top_p: float | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    # What OpenAI's interface doesn't have.
    seed: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking_token_budget: int | None = None
