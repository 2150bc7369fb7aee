"""JSON schemas: which keywords are supported, and a schema as a part of a Lark grammar.

Keywords are those of draft 2020-12. Each is supported, an annotation without effect on what is valid, or refused by
name and place: none is ignored. Strictness changes nothing: the answer follows the schema in any case.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from baton.errors import InvalidRequestError, shown
from baton.grammar.validation import check_repeats
from baton.types import MAX_GRAMMAR_BYTES

MAX_DEPTH = 64
"""Of schemas in schemas."""
DEFAULT_WHITESPACE = " ?"
"""Between the parts of JSON: bounded, as models wander off in whitespace where it is not."""

_ONE = frozenset({"items", "additionalProperties"})
_MANY = frozenset({"prefixItems", "anyOf", "oneOf", "allOf"})
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_VALUES = frozenset(
    {
        "type",
        "enum",
        "const",
        "required",
        "pattern",
        "format",
        "minLength",
        "maxLength",
        "minItems",
        "maxItems",
        "minProperties",
        "maxProperties",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "multipleOf",
        "$ref",
        "$schema",
        "$id",
        "$anchor",
    }
)
SUPPORTED = _ONE | _MANY | _NAMED | _VALUES
"""Keywords that decide what is valid, and are kept to."""
ANNOTATIONS = frozenset(
    {
        "title",
        "description",
        "default",
        "examples",
        "deprecated",
        "readOnly",
        "writeOnly",
        "$comment",
        "contentEncoding",
        "contentMediaType",
        "contentSchema",  # annotations since draft 2019-09
        "discriminator",  # OpenAPI's hint beside oneOf
    }
)
"""Keywords that by their definition do not decide what is valid."""
FORMATS = frozenset(
    {"date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid", "unknown"}
)
"""Values of ``format`` that are kept to."""

_DATE = (
    "(?:[1-9][0-9]{3}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    "|(?:[1-9][0-9](?:0[48]|[2468][048]|[13579][26])|(?:[2468][048]|[13579][26])00)-02-29)"
)
_NARROWER = {
    "date": f"^{_DATE}$",
    "date-time": f"^{_DATE}T[0-9]{{2}}:[0-9]{{2}}:[0-5]",
    "time": "^[0-9]{2}:[0-9]{2}:[0-5]",
}
"""Beside the compiler's own patterns of these formats, which allow more than every validator does: February 29 in any
year, the year 0, leap seconds."""

_LOCAL_REF = re.compile(r"#.*")


def check_schema(schema: Any, field: str) -> None:
    """Refuse what would not be kept to.

    Args:
        schema: A decoded schema.
        field: Name of the request field, for errors; places in it follow as in ``schema.properties.a``.

    Raises:
        InvalidRequestError: A keyword is not supported, or a schema is none; names keyword and place.
    """
    stack = [(schema, field, 0)]
    while stack:
        value, place, depth = stack.pop()
        if isinstance(value, bool):
            continue
        if not isinstance(value, Mapping):
            raise InvalidRequestError(f"{place} must be a JSON schema, got a {type(value).__name__}", field=place)
        if depth > MAX_DEPTH:
            raise InvalidRequestError(f"{field}: schemas are nested deeper than {MAX_DEPTH}", field=field)
        for keyword, item in value.items():
            _check_keyword(keyword, item, place)
            stack += ((part, where, depth + 1) for part, where in _parts(keyword, item, f"{place}.{keyword}"))


def _check_keyword(keyword: Any, item: Any, place: str) -> None:
    where = f"{place}.{keyword}"
    if not isinstance(keyword, str) or (keyword not in SUPPORTED and keyword not in ANNOTATIONS):
        message = f"{place}: the keyword {shown(keyword)} is not supported"
        raise InvalidRequestError(message, field=where[:200])
    if keyword == "format" and not (isinstance(item, str) and item in FORMATS):
        known = ", ".join(sorted(FORMATS))
        raise InvalidRequestError(f"{where}: {shown(item)} is not supported; these are: {known}", field=where)
    if keyword == "pattern" and isinstance(item, str):
        check_repeats(item, where)
    if keyword == "patternProperties" and isinstance(item, Mapping):
        for pattern in item:
            check_repeats(str(pattern), where)
    if keyword == "$ref" and not (isinstance(item, str) and _LOCAL_REF.fullmatch(item)):
        raise InvalidRequestError(f"{where}: {shown(item)} is not a place in this schema ('#/...')", field=where)
    if keyword == "items" and isinstance(item, list):
        raise InvalidRequestError(f"{where} must be one schema; prefixItems has a list of them", field=where)


def _parts(keyword: str, item: Any, place: str) -> Iterator[tuple[Any, str]]:
    if keyword in _ONE:
        yield item, place
    elif keyword in _MANY:
        if not isinstance(item, list):
            raise InvalidRequestError(f"{place} must be a list of schemas", field=place)
        yield from ((part, f"{place}[{at}]") for at, part in enumerate(item))
    elif keyword in _NAMED:
        if not isinstance(item, Mapping):
            raise InvalidRequestError(f"{place} must be an object of schemas", field=place)
        yield from ((part, f"{place}.{name}") for name, part in item.items())


def _narrowed(schema: Any) -> Any:
    """Return a checked schema with the patterns of its formats beside them."""
    if not isinstance(schema, Mapping):
        return schema
    narrowed = dict(schema)
    for keyword, item in schema.items():
        if keyword in _ONE:
            narrowed[keyword] = _narrowed(item)
        elif keyword in _MANY:
            narrowed[keyword] = [_narrowed(part) for part in item]
        elif keyword in _NAMED:
            narrowed[keyword] = {name: _narrowed(part) for name, part in item.items()}
    pattern = _NARROWER.get(schema.get("format", ""))
    if pattern is not None:
        narrowed["allOf"] = [*narrowed.get("allOf", ()), {"pattern": pattern}]
    return narrowed


def decode_schema(schema: Any, field: str) -> Mapping[str, Any]:
    """Return a schema that came as an object or as its JSON.

    Raises:
        InvalidRequestError: It is neither, or too long; names ``field``.
    """
    if isinstance(schema, str | bytes):
        if len(schema) > MAX_GRAMMAR_BYTES:
            raise too_long(field)
        try:
            schema = orjson.loads(schema)
        except orjson.JSONDecodeError as error:
            raise InvalidRequestError(f"{field} is no JSON: {error}", field=field) from error
    if not isinstance(schema, Mapping):
        raise InvalidRequestError(f"{field} must be a JSON schema, an object, got {shown(schema)}", field=field)
    return schema


def json_rule(
    schema: Any, field: str, *, whitespace_pattern: str | None = None, disable_any_whitespace: bool = False
) -> str:
    """Return ``%json {...}``, which stands for a schema in a Lark grammar.

    Args:
        schema: The schema, decoded or as JSON.
        field: Name of the request field, for errors.
        whitespace_pattern: A regular expression of what may stand between the parts of JSON; default: at most a space.
        disable_any_whitespace: Nothing may.

    Raises:
        InvalidRequestError: It is wrong, too long, or has keywords that are not supported; names the place.
    """
    schema = decode_schema(schema, field)
    check_schema(schema, field)
    options: dict[str, Any] = {"whitespace_pattern": whitespace_pattern or DEFAULT_WHITESPACE}
    if disable_any_whitespace:
        options = {"whitespace_flexible": False}
    elif whitespace_pattern is not None:
        check_repeats(whitespace_pattern, "whitespace_pattern")
    try:
        text = json.dumps({**_narrowed(schema), "x-guidance": options}, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{field} is no JSON: {error}", field=field) from error
    if len(text) > MAX_GRAMMAR_BYTES:
        raise too_long(field)
    return f"%json {text}"


def too_long(field: str) -> InvalidRequestError:
    """Return the refusal of a schema whose JSON is longer than grammars may be."""
    return InvalidRequestError(f"{field} must have at most {MAX_GRAMMAR_BYTES} bytes", field=field)
