"""``/v1/responses``: schemas, and the parser that makes a chat request of a request and the stored conversation."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec
import orjson

from baton.errors import InvalidRequestError, shown
from baton.grammar import StructuredOutputs
from baton_router.frontend.openai.endpoint import FieldNames
from baton_router.frontend.openai.openai_request import OpenAIRequest, parse_chat
from baton_router.frontend.openai.response_store import ResponseStore
from baton_router.frontend.openai.schemas import Body, Outside, ignored_fields, parse_body, unknown_fields
from baton_router.types import Account

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


_PASSED = (
    "model",
    "temperature",
    "top_p",
    "stream",
    "user",
    "seed",
    "top_k",
    "min_p",
    "chat_template_kwargs",
    "thinking_token_budget",
)
"""Fields that chat requests have, too."""
_NESTED: Mapping[str, tuple[tuple[str, ...], Mapping[str, tuple[Any, ...]]]] = {
    "text": (("format",), {"verbosity": ("medium",)}),
    "reasoning": (("effort",), {"summary": (), "generate_summary": ()}),
}
"""Fields of nested objects: those with an effect, and those without one, with the values that need no warning."""
NAMES = FieldNames.make(
    (r"(tools\[\d+\])\.function", r"\1"),
    (r"messages.*", "input"),
    (r"max_completion_tokens", "max_output_tokens"),
    (r"reasoning_effort", "reasoning.effort"),
)
"""Names of chat fields in this interface."""


class ResponseSettings(msgspec.Struct):
    """The part of a response that comes from its request, and where it is stored.

    Attributes:
        ident: Identifier of the response.
        echo: Fields of the request that the response repeats.
        messages: The conversation before the answer, without instructions.
        account: Account of the request; ``None`` without API keys.
        store: Store for the response; ``None``: it is not stored.
    """

    ident: str
    echo: dict[str, Any]
    messages: list[dict[str, Any]]
    account: Account | None
    store: ResponseStore | None

    def store_response(self, message: dict[str, Any], body: bytes) -> None:
        """Store the conversation with its answer, and the response as JSON."""
        if self.store is not None:
            self.store.add(self.account, self.ident, [*self.messages, message], body)


def parse_response(value: Any, account: Account | None, store: ResponseStore) -> OpenAIRequest:
    """Parse the body of a request for a response.

    Args:
        value: The decoded JSON body.
        account: Account of the request; ``None`` without API keys.
        store: Store of earlier responses.

    Raises:
        InvalidRequestError: A field is wrong or asks for what is not supported; names it.
        NotFoundError: There is no response of the id ``previous_response_id``.
    """
    body = parse_body(ResponsesBody, value)
    ignored = ignored_fields(unknown_fields(ResponsesBody, value), ResponsesBody.outside)
    for name, (acting, silent) in _NESTED.items():
        nested = getattr(body, name) or {}
        for key, item in nested.items():
            if key not in acting and item is not None and item not in silent.get(key, ()):
                ignored.append(f"{name}.{key}")
    earlier = store.messages(account, body.previous_response_id) if body.previous_response_id else []
    messages = earlier + _messages(body.input)
    instructions = [{"role": "system", "content": body.instructions}] if body.instructions else []
    chat: dict[str, Any] = {name: value[name] for name in _PASSED if value.get(name) is not None}
    chat["messages"] = instructions + messages
    chat["max_completion_tokens"] = body.max_output_tokens
    if body.tools:
        chat["tools"] = [_tool(tool, f"tools[{at}]") for at, tool in enumerate(body.tools)]
    chat["tool_choice"] = _tool_choice(body.tool_choice)
    chat["parallel_tool_calls"] = body.parallel_tool_calls
    reasoning = body.reasoning or {}
    if reasoning.get("effort") is not None:
        chat["reasoning_effort"] = reasoning["effort"]
    request = parse_chat(chat)
    (text_request,) = request.requests
    text_request.prompt_field = "input"
    text_request.max_tokens_field = "max_output_tokens"
    text_request.structured = _structured(body.text)
    request.ignored = ignored
    if "reasoning_effort" in request.template_fields:
        request.template_fields["reasoning_effort"] = "reasoning.effort"
    request.ident = f"resp_{secrets.token_hex(24)}"
    request.settings = ResponseSettings(
        ident=request.ident,
        echo={
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": reasoning.get("effort"), "summary": None},
            "store": body.store is not False,
            "temperature": body.temperature,
            "text": body.text or {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": body.top_p,
            "truncation": "disabled",
            "user": body.user,
        },
        messages=messages,
        account=account,
        store=store if body.store is not False else None,
    )
    return request


def _messages(value: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages of an input; separate calls and reasoning become an assistant's message."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    messages: list[dict[str, Any]] = []
    for at, item in enumerate(value):
        place = f"input[{at}]"
        match item.get("type", "message"):
            case "message":
                role = item.get("role")
                if role not in ROLES:
                    message = f"{place}.role must be one of {', '.join(ROLES)}, got {shown(role)}"
                    raise InvalidRequestError(message, field=f"{place}.role")
                content = _text(item.get("content"), f"{place}.content")
                if role == "assistant" and messages and messages[-1].get("open"):
                    messages[-1]["content"] = content
                else:
                    messages.append({"role": role, "content": content})
            case "reasoning":
                given = {name: item[name] for name in ("content", "summary") if item.get(name) is not None}
                texts = [_text(value, f"{place}.{name}") for name, value in given.items()]
                content = next(filter(None, texts), "")
                messages.append({"role": "assistant", "content": "", "reasoning_content": content, "open": True})
            case "function_call":
                call = {"id": item.get("call_id"), "type": "function"}
                call["function"] = {"name": item.get("name"), "arguments": item.get("arguments")}
                for name in ("call_id", "name", "arguments"):
                    if not isinstance(item.get(name), str):
                        raise InvalidRequestError(f"{place}.{name} must be a string", field=f"{place}.{name}")
                _check_json(item["arguments"], f"{place}.arguments")
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": ""})
                messages[-1].setdefault("tool_calls", []).append(call)
            case "function_call_output":
                if not isinstance(item.get("call_id"), str):
                    raise InvalidRequestError(f"{place}.call_id must be a string", field=f"{place}.call_id")
                output = _text(item.get("output"), f"{place}.output")
                messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": output})
            case kind:
                message = f"{place}.type must be message, reasoning, function_call or function_call_output"
                raise InvalidRequestError(f"{message}, got {shown(kind)}", field=f"{place}.type")
    for made in messages:
        made.pop("open", None)
    return messages


def _check_json(text: str, place: str) -> None:
    try:
        orjson.loads(text or "{}")
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(f"{place} must be JSON: {error}", field=place) from error


def _text(value: Any, place: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise InvalidRequestError(f"{place} must be a string or a list of parts", field=place)
    texts = []
    for at, part in enumerate(value):
        known = isinstance(part, Mapping) and part.get("type") in TEXT_PARTS
        if not known or not isinstance(part.get("text"), str):
            message = f"{place}[{at}]: only text parts are supported: {{'type': 'input_text', 'text': '...'}}"
            raise InvalidRequestError(message, field=f"{place}[{at}]")
        texts.append(part["text"])
    return "\n".join(texts)


def _tool(tool: dict[str, Any], place: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        message = f"{place}.type must be function, got {shown(tool.get('type'))}"
        raise InvalidRequestError(message, field=f"{place}.type")
    return {"type": "function", "function": {name: item for name, item in tool.items() if name != "type"}}


def _tool_choice(value: Any) -> Any:
    """Return a tool choice in the form of chat requests."""
    match value:
        case {"type": "function", "name": name}:
            return {"type": "function", "function": {"name": name}}
        case {"type": "allowed_tools", "mode": mode, "tools": list() as tools}:
            named = [{"function": item} for item in tools]
            return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}
    return value


def _structured(text: dict[str, Any] | None) -> StructuredOutputs | None:
    place = "text.format"
    form = (text or {}).get("format")
    if form is None:
        return None
    kind = form.get("type") if isinstance(form, Mapping) else None
    match kind:
        case "text":
            return None
        case "json_object":
            return StructuredOutputs(json_object=True, field=place)
        case "json_schema":
            if not isinstance(form.get("schema"), Mapping):
                raise InvalidRequestError(f"{place}.schema must be a JSON schema", field=f"{place}.schema")
            return StructuredOutputs(json=form["schema"], field=f"{place}.schema")
    message = f"{place}.type must be text, json_object or json_schema, got {shown(kind)}"
    raise InvalidRequestError(message, field=f"{place}.type")
