"""Tools of ``/v1/responses``: what the model is offered, and how its calls and their results become items and messages.

Tools in a namespace are called ``NAMESPACE__NAME`` in the prompt, and by both names in items. Custom tools, whose input
is text, are functions with the one parameter ``input`` for the model. Tools of OpenAI's servers are left out where
there are others.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import orjson

from baton.errors import shown
from baton_router.frontend.openai.schemas import BOOL_OR_NULL, STRING, array_schema, invalid_field, object_schema

_HOSTED = re.compile(r"web_search\w*|file_search|code_interpreter|image_generation|mcp|tool_search")
"""Types of the tools that OpenAI's servers run."""
_SEPARATOR = "__"
_INPUT = "input"
_TEXT_INPUT = {
    "type": "object",
    "properties": {_INPUT: {"type": "string"}},
    "required": [_INPUT],
    "additionalProperties": False,
}
FUNCTION_SCHEMA = object_schema(
    {"type": {"const": "function"}, "name": STRING},
    description={"type": ["string", "null"]},
    parameters={"description": "A JSON schema of an object.", "type": ["object", "null"]},
    strict=BOOL_OR_NULL,
)
CUSTOM_SCHEMA = object_schema({"type": {"const": "custom"}, "name": STRING}, description=STRING)
TOOLS_SCHEMA = array_schema(
    {
        "anyOf": [
            FUNCTION_SCHEMA,
            CUSTOM_SCHEMA,
            object_schema(
                {
                    "type": {"const": "namespace"},
                    "name": STRING,
                    "tools": array_schema({"anyOf": [FUNCTION_SCHEMA, CUSTOM_SCHEMA]}),
                }
            ),
            object_schema({"type": {"description": "Tools of OpenAI's servers are left out.", **STRING}}),
        ]
    }
)


class _Tool(NamedTuple):
    """A tool as items name it."""

    name: str
    namespace: str = ""
    custom: bool = False


class ResponseTools:
    """The tools of a request.

    Args:
        ignored: Takes the names of what has no effect.

    Attributes:
        functions: The tools in the form of chat requests.
        places: Where each is in the request.
    """

    def __init__(self, ignored: list[str]) -> None:
        self.functions: list[dict[str, Any]] = []
        self.places: list[str] = []
        self._ignored = ignored
        self._hosted: list[tuple[str, str]] = []
        self._tools: dict[str, _Tool] = {}

    def add(self, tools: Any, place: str, namespace: str = "") -> None:
        """Add tools of a list.

        Args:
            tools: The list.
            place: Where it is in the request.
            namespace: Name of the namespace that it is of; empty: none.

        Raises:
            InvalidRequestError: A tool is wrong or of a type that is not supported; names the place.
        """
        if not isinstance(tools, list):
            raise invalid_field(place, f"must be a list, got {shown(tools)}")
        for at, tool in enumerate(tools):
            where = f"{place}[{at}]"
            if not isinstance(tool, Mapping):
                raise invalid_field(where, f"must be an object, got {shown(tool)}")
            kind = tool.get("type")
            if kind == "namespace" and not namespace:
                self.add(tool.get("tools"), f"{where}.tools", _name_of(tool, where))
            elif kind in ("function", "custom"):
                self._add_function(tool, where, namespace)
            elif isinstance(kind, str) and _HOSTED.fullmatch(kind):
                self._ignored.append(f"{where}.{kind}")
                self._hosted.append((where, kind))
            else:
                known = "function or custom" if namespace else "function, custom or namespace"
                raise invalid_field(f"{where}.type", f"must be {known}, got {shown(kind)}")

    def _add_function(self, tool: Mapping[str, Any], place: str, namespace: str) -> None:
        name = _name_of(tool, place)
        custom = tool["type"] == "custom"
        function = {key: item for key, item in tool.items() if key not in ("type", "format")}
        if custom:
            function["parameters"] = _TEXT_INPUT
            if (tool.get("format") or {"type": "text"}) != {"type": "text"}:
                self._ignored.append(f"{place}.format")
        function["name"] = _joined(name, namespace)
        self._tools.setdefault(function["name"], _Tool(name, namespace, custom))
        self.functions.append({"type": "function", "function": function})
        self.places.append(place)

    def check_left(self) -> None:
        """Refuse a request that offers nothing but tools of OpenAI's servers: it asks for what cannot be done.

        Raises:
            InvalidRequestError: Names the first one.
        """
        if self._hosted and not self.functions:
            place, kind = self._hosted[0]
            raise invalid_field(f"{place}.type", f"is {kind}, which OpenAI's servers run: there are no other tools")

    def choice(self, value: Any) -> Any:
        """Return a tool choice in the form of chat requests."""
        match value:
            case {"type": "function" | "custom"}:
                return {"type": "function", "function": {"name": _named(value)}}
            case {"type": "allowed_tools", "mode": mode, "tools": list() as tools}:
                own = [item for item in tools if not _is_hosted(item)]
                named = [{"function": {"name": _named(item)}} for item in own]
                return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}
        return value

    def call_item(self, name: str) -> dict[str, Any]:
        """Return the beginning of the item of a call: its type and names, and the empty arguments or input.

        Args:
            name: Name of the tool in the prompt.
        """
        tool = self._tools.get(name, _Tool(name))
        item = {"type": "custom_tool_call", "input": ""} if tool.custom else {"type": "function_call", "arguments": ""}
        return {**item, "name": tool.name, **({"namespace": tool.namespace} if tool.namespace else {})}


def _name_of(tool: Mapping[str, Any], place: str) -> str:
    name = tool.get("name")
    if not isinstance(name, str) or not name:
        raise invalid_field(f"{place}.name", f"must be a string, not empty, got {shown(name)}")
    return name


def _joined(name: str, namespace: Any) -> str:
    return f"{namespace}{_SEPARATOR}{name}" if namespace else name


def _named(value: Any) -> Any:
    """Return the name in the prompt of the tool that a choice names."""
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        return None
    return _joined(value["name"], value.get("namespace"))


def _is_hosted(value: Any) -> bool:
    kind = value.get("type") if isinstance(value, Mapping) else None
    return isinstance(kind, str) and _HOSTED.fullmatch(kind) is not None


def call_of_item(item: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return the call of a ``function_call`` or ``custom_tool_call`` item in the form of chat messages.

    Raises:
        InvalidRequestError: A field is wrong; names it.
    """
    field = _INPUT if item["type"] == "custom_tool_call" else "arguments"
    for name in ("call_id", "name", field):
        if not isinstance(item.get(name), str):
            raise invalid_field(f"{place}.{name}", "must be a string")
    if not isinstance(item.get("namespace"), str | None):
        raise invalid_field(f"{place}.namespace", "must be a string")
    arguments = item[field]
    if field == _INPUT:
        arguments = orjson.dumps({_INPUT: arguments}).decode()
    else:
        try:
            orjson.loads(arguments or "{}")
        except orjson.JSONDecodeError as error:
            raise invalid_field(f"{place}.{field}", f"must be JSON: {error}") from error
    function = {"name": _joined(item["name"], item.get("namespace")), "arguments": arguments}
    return {"id": item["call_id"], "type": "function", "function": function}


def custom_input(arguments: str) -> str:
    """Return the input that a call of a custom tool has; the text of the arguments where they have none."""
    try:
        value = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return arguments
    found = value.get(_INPUT) if isinstance(value, dict) else None
    return found if isinstance(found, str) else arguments
