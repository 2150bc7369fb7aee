"""Arguments that are written as text become JSON, by the tool's schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_MAX_DEPTH = 8
_KINDS: Mapping[type, tuple[str, ...]] = {
    str: ("string",),
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    dict: ("object",),
    list: ("array",),
    type(None): ("null",),
}


def parameter_schemas(parameters: Any) -> Mapping[str, Any]:
    """Return the schemas of a tool's parameters by their names, as far as they are said."""
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def schema_types(schema: Any, root: Any, depth: int = 0) -> frozenset[str]:
    """Return the types that a schema allows; none: it does not say.

    Args:
        schema: The schema of a value.
        root: What ``$ref`` in it points into.
        depth: How far it is from the value's own schema.
    """
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return frozenset()
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target = root
        for part in reference[2:].split("/"):
            target = target.get(part) if isinstance(target, Mapping) else None
        return schema_types(target, root, depth + 1)
    declared = schema.get("type")
    if isinstance(declared, str):
        found = {declared}
    elif isinstance(declared, list):
        found = {item for item in declared if isinstance(item, str)}
    else:
        found = set()
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list):
            found = {kind for value in values for kind in _KINDS.get(type(value), ())}
        for name in ("anyOf", "oneOf", "allOf"):
            for choice in schema.get(name) or ():
                found |= schema_types(choice, root, depth + 1)
    if schema.get("nullable") is True:
        found.add("null")
    return frozenset(found)


def json_of_text(text: str, types: frozenset[str]) -> str:
    """Return the JSON of a value that was written as text.

    JSON of one of the types stays what it is; anything else is a string, also where that is wrong: then the tool, or
    the model's next try, has to find out.

    Args:
        text: The text.
        types: What the schema allows; none: JSON, if it is such.
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
    return json_string(text)


def json_string(text: str) -> str:
    """Return a string of JSON, as short as it can be; lone surrogates, which UTF-8 does not have, are escaped."""
    quoted = json.dumps(text, ensure_ascii=False)
    return quoted if quoted.isascii() or not _has_surrogate(quoted) else json.dumps(text)


def _has_surrogate(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _refuse(name: str) -> Any:
    raise ValueError(name)


_NOTHING = object()
_PYTHON = {"True": "true", "False": "false", "None": "null"}
