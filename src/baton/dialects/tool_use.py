"""The tools that a request offers, and what the model may do with them, as OpenAI's interface has them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from baton.errors import InvalidRequestError, shown

_MOST_SCHEMAS = 64
"""That are looked at for the types of one value, and values of an enumeration."""
_KINDS: Mapping[type, tuple[str, ...]] = {
    str: ("string",),
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    dict: ("object",),
    list: ("array",),
    type(None): ("null",),
}
_PYTHON_TYPES = {
    "str": "string",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "list": "array",
    "dict": "object",
}
"""What some clients write for types, which are none of JSON schema."""


def parameter_schemas(parameters: Any) -> Mapping[str, Any]:
    """Return the schemas of a tool's parameters by their names, as far as they are said."""
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def schema_types(schema: Any, root: Any) -> frozenset[str]:
    """Return the types that a schema allows; none: it does not say, or it takes too much to find out.

    Args:
        schema: The schema of a value.
        root: Schema that ``$ref`` points into.
    """
    types = set[str]()
    seen = set[int]()
    left = [schema]
    for _ in range(_MOST_SCHEMAS):
        if not left:
            return frozenset(types)
        part = left.pop()
        if not isinstance(part, Mapping) or id(part) in seen:
            continue
        seen.add(id(part))
        reference = part.get("$ref")
        if isinstance(reference, str) and reference.startswith("#/"):
            left.append(_target(reference, root))
            continue
        declared = part.get("type")
        values = [part["const"]] if "const" in part else part.get("enum")
        if isinstance(declared, str | list):
            names = [declared] if isinstance(declared, str) else declared[:_MOST_SCHEMAS]
            types.update(_PYTHON_TYPES.get(item, item) for item in names if isinstance(item, str))
        else:
            if isinstance(values, list):
                types.update(kind for value in values[:_MOST_SCHEMAS] for kind in _KINDS.get(type(value), ()))
            for name in ("anyOf", "oneOf", "allOf"):
                choices = part.get(name)
                left += choices[:_MOST_SCHEMAS] if isinstance(choices, list) else ()
        if part.get("nullable") is True:
            types.add("null")
    return frozenset()


def _target(reference: str, root: Any) -> Any:
    """Return what ``#/...`` stands for; ``None``: nothing."""
    for part in reference[2:].split("/"):
        root = root.get(part) if isinstance(root, Mapping) else None
    return root


def json_of_text(text: str, types: frozenset[str]) -> str:
    """Return the JSON of a value that was written as text.

    JSON of one of the types stays what it is; anything else is a string, also where that is wrong: then the tool, or
    the model's next try, has to find out.

    Args:
        text: The text.
        types: Types that the schema allows; none: JSON if the text is JSON, else a string.
    """
    stripped = text.strip()
    if types != {"string"}:
        plain = _PYTHON.get(stripped, stripped)
        try:
            value = json.loads(plain, parse_constant=_refuse)
        except (ValueError, RecursionError):
            value = _NOTHING
        if value is not _NOTHING:
            kinds = {*_KINDS[type(value)]}
            if isinstance(value, float) and value.is_integer():
                kinds.add("integer")
            if not types or kinds & types:
                return plain
    return json_text(text)


def json_text(value: Any) -> str:
    """Return the JSON of a value, as short as it can be; lone surrogates, which UTF-8 does not have, are escaped."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value)
    return text


def _refuse(name: str) -> Any:
    raise ValueError(name)


_NOTHING = object()
_PYTHON = {"True": "true", "False": "false", "None": "null"}


MAX_TOOLS = 512
_SHOWN = 8
_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request.

    Attributes:
        tools: As the request has them, for the chat template.
        mode: Whether a call may (``auto``), must (``required``) or must not (``none``) be made.
        names: The tools that may be called.
        parallel: Whether several calls may be made.
        places: Where the function of each tool is in the request; none: as in OpenAI's chat requests.
    """

    tools: tuple[Mapping[str, Any], ...] = ()
    mode: Literal["none", "auto", "required"] = "none"
    names: tuple[str, ...] = ()
    parallel: bool = True
    places: tuple[str, ...] = field(default=(), compare=False, repr=False)
    schemas: Mapping[str, Any] = field(init=False, compare=False, repr=False)
    """The schemas of parameters by the tools' names."""
    strict: frozenset[str] = field(init=False, compare=False, repr=False)
    """Names of tools whose arguments must follow their schemas."""

    def __str__(self) -> str:
        """What may be called, in a few words: what explanations show."""
        if self.mode == "none":
            return "none"
        some = self.names[:_SHOWN]
        more = len(self.names) - _SHOWN
        alone = "" if self.parallel else ", one call at most"
        return f"{self.mode}: {', '.join(some)}{f' and {more} more' if more > 0 else ''}{alone}"

    def __post_init__(self) -> None:
        functions = [tool["function"] for tool in self.tools]
        if not self.places:
            object.__setattr__(self, "places", tuple(f"tools[{at}].function" for at in range(len(functions))))
        object.__setattr__(self, "schemas", {item["name"]: item.get("parameters") or {} for item in functions})
        object.__setattr__(self, "strict", frozenset(item["name"] for item in functions if item.get("strict")))


def read_tools(tools: Any, choice: Any, parallel: bool | None, places: Sequence[str] = ()) -> ToolUse:
    """Read ``tools``, ``tool_choice`` and ``parallel_tool_calls`` of a request.

    Args:
        tools: The tools.
        choice: The tool choice, in OpenAI's form.
        parallel: Whether several calls may be made; ``None`` allows them.
        places: Where the function of each tool is in the request; empty: as in OpenAI's chat requests.

    Raises:
        InvalidRequestError: One is wrong, or they contradict each other; names the place.
    """
    functions = _tools(tools, places)
    if not functions:
        if choice not in (None, "none", "auto"):
            raise InvalidRequestError("tool_choice needs tools", field="tool_choice")
        return ToolUse()
    names = tuple(tool["function"]["name"] for tool in functions)
    mode, chosen = _choice(choice, names)
    return ToolUse(functions, mode, chosen, parallel is not False, tuple(places))


def _tools(value: Any, places: Sequence[str]) -> tuple[Mapping[str, Any], ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        raise InvalidRequestError(f"tools must be a list of at most {MAX_TOOLS} tools", field="tools")
    seen = set[str]()
    for at, tool in enumerate(value):
        place = f"tools[{at}]"
        if not isinstance(tool, Mapping):
            raise InvalidRequestError(f"{place} must be an object", field=place)
        if tool.get("type", "function") != "function":
            message = f"{place}.type must be function, got {shown(tool.get('type'))}"
            raise InvalidRequestError(message, field=f"{place}.type")
        function = tool.get("function")
        where = places[at] if places else f"{place}.function"
        if not isinstance(function, Mapping):
            raise InvalidRequestError(f"{where} must be an object with a name", field=where)
        _check_function(function, where)
        if function["name"] in seen:
            message = f"{where}.name: {function['name']} is the name of another tool, too"
            raise InvalidRequestError(message, field=f"{where}.name")
        seen.add(function["name"])
    return tuple(value)


def _check_function(function: Mapping[str, Any], place: str) -> None:
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        message = f"{place}.name must be 1 to 64 letters, digits, '_', '-' or '.', got {shown(name)}"
        raise InvalidRequestError(message, field=f"{place}.name")
    for key, kind, what in (("description", str, "a string"), ("strict", bool, "true or false")):
        if not isinstance(function.get(key), kind | None):
            raise InvalidRequestError(f"{place}.{key} must be {what}", field=f"{place}.{key}")
    parameters = function.get("parameters")
    if parameters is None:
        return
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        message = f"{place}.parameters must be the JSON schema of an object, got {shown(parameters)}"
        raise InvalidRequestError(message, field=f"{place}.parameters")
    properties = parameters.get("properties")
    required = parameters.get("required")
    if not isinstance(properties, Mapping | None):
        message = f"{place}.parameters.properties must be an object of schemas, got {shown(properties)}"
        raise InvalidRequestError(message, field=f"{place}.parameters.properties")
    if not (required is None or (isinstance(required, list) and all(isinstance(item, str) for item in required))):
        message = f"{place}.parameters.required must be a list of names, got {shown(required)}"
        raise InvalidRequestError(message, field=f"{place}.parameters.required")


def _choice(value: Any, names: tuple[str, ...]) -> tuple[Literal["none", "auto", "required"], tuple[str, ...]]:
    field_name = "tool_choice"
    match value:
        case None | "auto":
            return "auto", names
        case "none":
            return "none", ()
        case "required" | "any":
            return "required", names
        case {"type": "function", "function": {"name": name}}:
            return "required", (_known(name, names, f"{field_name}.function.name"),)
        case {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto" | "required" as mode, "tools": [_, *_] as some},
        }:
            place = f"{field_name}.allowed_tools.tools"
            chosen = [_known(_name_of(item), names, f"{place}[{at}]") for at, item in enumerate(some)]
            return mode, tuple(dict.fromkeys(chosen))
    kinds = 'none, auto, required, or {"type": "function", "function": {"name": ...}}'
    raise InvalidRequestError(f"{field_name} must be {kinds}, got {shown(value)}", field=field_name)


def _name_of(item: Any) -> Any:
    function = item.get("function") if isinstance(item, Mapping) else None
    return function.get("name") if isinstance(function, Mapping) else None


def _known(name: Any, names: tuple[str, ...], place: str) -> str:
    if not isinstance(name, str) or name not in names:
        raise InvalidRequestError(f"{place}: {shown(name)} is none of the tools", field="tool_choice")
    return name
