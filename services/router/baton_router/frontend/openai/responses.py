"""The parser of ``/v1/responses``: a request becomes that of a chat, and what it answered is kept for the next one."""

from __future__ import annotations

import re
import secrets
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import msgspec
import orjson

from baton.errors import InvalidRequestError, shown
from baton.grammar import StructuredOutputs
from baton_router.frontend.openai.openai_request import OpenAIRequest, parse_chat
from baton_router.frontend.openai.schemas import ResponsesBody, parse_body, unknown_fields
from baton_router.types import Account

MAX_RESPONSES = 4096
MAX_BYTES = 64 * 1024 * 1024
_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
_ROLES = ("user", "assistant", "system", "developer")
_PASSED = ("model", "temperature", "top_p", "stream", "user", "seed", "top_k", "min_p", "chat_template_kwargs")
"""Fields that chats have, too."""
_REFUSED: Mapping[str, tuple[Any, ...]] = {
    "background": (False,),
    "conversation": (),
    "prompt": (),
    "truncation": ("disabled",),
    "top_logprobs": (0,),
    "max_tool_calls": (),
}
"""Fields that cannot be done, and the values beside null that ask for nothing."""
_HARMLESS = {"include", "metadata", "safety_identifier", "prompt_cache_key", "service_tier", "prompt_cache_retention"}
_TOOL_FIELD = re.compile(r"^(tools\[\d+\])\.function")


class ResponseStore:
    """The conversations of earlier responses, a bounded number of them and of bytes; for one event loop."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, str], bytes] = OrderedDict()
        self._bytes = 0

    def put(self, account: Account | None, ident: str, messages: list[dict[str, Any]]) -> None:
        """Keep the messages of a conversation up to a response's; the oldest ones go where there is no room."""
        data = orjson.dumps(messages)
        if len(data) > MAX_BYTES // 8:
            return
        self._kept[_owner(account), ident] = data
        self._bytes += len(data)
        while len(self._kept) > MAX_RESPONSES or self._bytes > MAX_BYTES:
            _, old = self._kept.popitem(last=False)
            self._bytes -= len(old)

    def get(self, account: Account | None, ident: str) -> list[dict[str, Any]]:
        """Return what was kept.

        Raises:
            InvalidRequestError: There is no such response of this account, or not any more.
        """
        data = self._kept.get((_owner(account), ident))
        if data is None:
            name = "previous_response_id"
            raise InvalidRequestError(f"{name}: there is no response {shown(ident)} here (any more)", field=name)
        messages: list[dict[str, Any]] = orjson.loads(data)
        return messages


def _owner(account: Account | None) -> str:
    return "" if account is None else account.name


class ResponseSettings(msgspec.Struct):
    """What a response says of its request, and what becomes of it.

    Attributes:
        ident: The response's id.
        echo: Fields of the request that the response repeats.
        messages: The conversation before the answer, without instructions.
        account: Whose it is.
        store: Where it is kept; ``None``: nowhere.
    """

    ident: str
    echo: dict[str, Any]
    messages: list[dict[str, Any]]
    account: Account | None
    store: ResponseStore | None

    def keep(self, message: dict[str, Any]) -> None:
        """Keep the conversation with its answer."""
        if self.store is not None:
            self.store.put(self.account, self.ident, [*self.messages, message])


def parse_response(value: Any, account: Account | None, store: ResponseStore) -> OpenAIRequest:
    """Return what the body of a request for a response asks for.

    Args:
        value: The decoded body.
        account: Whose it is.
        store: Earlier responses.

    Raises:
        InvalidRequestError: A field is wrong or asks for what can't be done; names it.
    """
    body = parse_body(ResponsesBody, value)
    ignored = []
    for name, item in unknown_fields(ResponsesBody, value).items():
        if item is not None and item not in _REFUSED.get(name, (item,)):
            raise InvalidRequestError(f"{name} is not supported; leave it out", field=name)
        if name not in _HARMLESS and name not in _REFUSED:
            ignored.append(name)
    earlier = store.get(account, body.previous_response_id) if body.previous_response_id else []
    messages = earlier + _messages(body.input)
    instructions = [{"role": "system", "content": body.instructions}] if body.instructions else []
    chat: dict[str, Any] = {name: value[name] for name in _PASSED if value.get(name) is not None}
    chat["messages"] = instructions + messages
    chat["max_completion_tokens"] = body.max_output_tokens
    if body.tools:
        chat["tools"] = [_tool(tool, f"tools[{at}]") for at, tool in enumerate(body.tools)]
    chat["tool_choice"], chat["parallel_tool_calls"] = _tool_choice(body.tool_choice), body.parallel_tool_calls
    reasoning = body.reasoning or {}
    if reasoning.get("effort") is not None:
        chat["reasoning_effort"] = reasoning["effort"]
    try:
        request = parse_chat(chat)
    except InvalidRequestError as error:
        raise _renamed(error) from error
    (text_request,) = request.requests
    text_request.prompt_field, text_request.max_tokens_field = "input", "max_output_tokens"
    text_request.structured = _structured(body.text)
    request.ignored = ignored
    request.response = ResponseSettings(
        ident=f"resp_{secrets.token_hex(24)}",
        echo={
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": value.get("metadata") or {},
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
    """Return the messages of an input; calls and reasoning that stand by themselves become an assistant's message."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    messages: list[dict[str, Any]] = []
    for at, item in enumerate(value):
        place = f"input[{at}]"
        match item.get("type", "message"):
            case "message":
                role = item.get("role")
                if role not in _ROLES:
                    message = f"{place}.role must be one of {', '.join(_ROLES)}, got {shown(role)}"
                    raise InvalidRequestError(message, field=f"{place}.role")
                content = _text(item.get("content"), f"{place}.content")
                if role == "assistant" and messages and messages[-1].get("open"):
                    messages[-1]["content"] = content
                else:
                    messages.append({"role": role, "content": content})
            case "reasoning":
                content = _text(item.get("content") or item.get("summary") or [], f"{place}.content")
                messages.append({"role": "assistant", "content": "", "reasoning_content": content, "open": True})
            case "function_call":
                call = {"id": item.get("call_id"), "type": "function"}
                call["function"] = {"name": item.get("name"), "arguments": item.get("arguments")}
                for name in ("call_id", "name", "arguments"):
                    if not isinstance(item.get(name), str):
                        raise InvalidRequestError(f"{place}.{name} must be a string", field=f"{place}.{name}")
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


def _text(value: Any, place: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise InvalidRequestError(f"{place} must be a string or a list of parts", field=place)
    texts = []
    for at, part in enumerate(value):
        known = isinstance(part, Mapping) and part.get("type") in _TEXT_PARTS
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
    """Return a tool choice as chats have it."""
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


def _renamed(error: InvalidRequestError) -> InvalidRequestError:
    """Return an error of a chat with the names that the fields have here."""
    field = error.field or ""
    name = _TOOL_FIELD.sub(r"\1", field)
    if field.startswith("messages"):
        name = "input"
    elif field == "max_completion_tokens":
        name = "max_output_tokens"
    elif field == "reasoning_effort":
        name = "reasoning.effort"
    return InvalidRequestError(error.message.replace(field, name) if field else error.message, field=name)
