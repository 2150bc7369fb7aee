"""Prompts and messages of request bodies, checked by hand so that errors say exactly where."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any

import orjson

from baton.errors import InvalidRequestError, shown
from baton.tokenizer.chat_template import flatten_content
from baton_router.processor.text_request import Prompt

MAX_MESSAGES = 10_000


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
        raise InvalidRequestError(f"{field} must not be empty", field=field)
    if set(map(type, value)) != {int}:  # a bool is an int elsewhere, but no token id
        at, item = next((at, item) for at, item in enumerate(value) if type(item) is not int)
        raise InvalidRequestError(f"{field}[{at}] must be a token id, got {shown(item)}", field=f"{field}[{at}]")
    return value


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
        raise InvalidRequestError(f"{field} must be an object", field=field)
    role = value.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequestError(f"{field}.role must be a non-empty string", field=f"{field}.role")
    content = value.get("content")
    calls = value.get("tool_calls")
    if content is None and not (role == "assistant" and calls):
        raise InvalidRequestError(f"{field}.content is required", field=f"{field}.content")
    if content is not None and not isinstance(content, str | list):
        raise InvalidRequestError(f"{field}.content must be a string or a list of parts", field=f"{field}.content")
    message = flatten_content(value, at)
    if content is None:
        message["content"] = ""
    if calls is not None:
        message["tool_calls"] = _tool_calls(calls, f"{field}.tool_calls")
    return message


def _tool_calls(value: Any, field: str) -> list[dict[str, Any]]:
    """Return earlier tool calls with their arguments as objects, which is what chat templates expect."""
    if not isinstance(value, list) or not all(isinstance(call, Mapping) for call in value):
        raise InvalidRequestError(f"{field} must be a list of objects", field=field)
    calls = []
    for at, call in enumerate(value):
        function = call.get("function")
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            where = f"{field}[{at}].function"
            raise InvalidRequestError(f"{where} must be an object with a name", field=where)
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = orjson.loads(arguments) if arguments else {}
            except orjson.JSONDecodeError as error:
                where = f"{field}[{at}].function.arguments"
                raise InvalidRequestError(f"{where} must be JSON: {error}", field=where) from error
        calls.append({**call, "function": {**function, "arguments": arguments}})
    return calls
