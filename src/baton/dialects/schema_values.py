"""Arguments that are written as text become JSON, by the tool's schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

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


def parameter_schemas(parameters: Any) -> Mapping[str, Any]:
    """Return the schemas of a tool's parameters by their names, as far as they are said."""
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def schema_types(schema: Any, root: Any) -> frozenset[str]:
    """Return the types that a schema allows; none: it does not say, or it takes too much to find out.

    Args:
        schema: The schema of a value.
        root: What ``$ref`` in it points into.
    """
    found, seen, left = set[str](), set[int](), [schema]
    for _ in range(_MOST_SCHEMAS):
        if not left:
            return frozenset(found)
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
        if isinstance(declared, str):
            found.add(declared)
        elif isinstance(declared, list):
            found.update(item for item in declared[:_MOST_SCHEMAS] if isinstance(item, str))
        else:
            if isinstance(values, list):
                found.update(kind for value in values[:_MOST_SCHEMAS] for kind in _KINDS.get(type(value), ()))
            for name in ("anyOf", "oneOf", "allOf"):
                choices = part.get(name)
                left += choices[:_MOST_SCHEMAS] if isinstance(choices, list) else ()
        if part.get("nullable") is True:
            found.add("null")
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
