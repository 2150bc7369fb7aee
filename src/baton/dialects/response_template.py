"""Dialects that come with a tokenizer: ``response_template`` in ``tokenizer_config.json``.

The format is transformers' (5 and above): fields of the message, each with what it begins and ends with, how its
text is parsed (``text``, ``json``, ``xml-inline``, ``kv-lines``, ...) and how that becomes the value (``transform``).
Fields that are called ``tool_calls`` are calls, ``thinking``, ``reasoning`` and ``reasoning_content`` are reasoning,
and all else is text. Text outside of all fields stays text here, but for what begins a message.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from baton.dialects.syntax import Converted, ReasoningDialect, Region, ToolDialect
from baton.dialects.tool_use import json_of_text, parameter_schemas, schema_types
from baton.errors import ConfigError

NAME = "template"
"""What a tokenizer's own dialect is called."""
_FIELD = "response_template"
_KEYS = {"version", "defaults", "fields", "start_anchor", "start_anchor_pattern"}
_FIELD_KEYS = {
    "open",
    "open_pattern",
    "close",
    "close_pattern",
    "content",
    "content_args",
    "repeats",
    "join",
    "optional",
    "transform",
    "transform_each",
}
_REASONING = {"thinking", "reasoning", "reasoning_content"}
_PLACEHOLDER = re.compile(r"\{(\w+(?:\.\w+)*)\}")


def read_response_template(spec: Any) -> tuple[ToolDialect, ReasoningDialect]:
    """Return the dialects that a template describes.

    Args:
        spec: The value of ``response_template``.

    Raises:
        ConfigError: It is none that is understood; names the place.
    """
    if not isinstance(spec, Mapping) or spec.get("version", 1) != 1 or not {*spec} <= _KEYS:
        raise ConfigError("response_template is not one of version 1", field=_FIELD)
    fields = spec.get("fields")
    if not isinstance(fields, Mapping) or not fields:
        raise ConfigError("response_template has no fields", field=_FIELD)
    start = _anchor(spec, "start_anchor", _FIELD)
    regions = []
    for name, field in fields.items():
        place = f"{_FIELD}.fields.{name}"
        if not isinstance(field, Mapping) or not {*field} <= _FIELD_KEYS:
            raise ConfigError(f"{place} has fields that are not known", field=place)
        regions += _regions(name, field, place)
    if start is not None:  # the beginning of a message that follows another one
        pattern, literals = start
        regions.append(_literal_region(pattern, literals))
    both = tuple(regions)
    begins = None if start is None else start[0]
    return ToolDialect(name=NAME, regions=both, start=begins), ReasoningDialect(name=NAME, regions=both, start=begins)


def _regions(name: str, field: Mapping[str, Any], place: str) -> list[Region]:
    opened = _anchor(field, "open", place)
    closed = _anchor(field, "close", place)
    if opened is None:  # all text that is nothing else
        return [] if closed is None else [_literal_region(*closed)]
    args = field.get("content_args") or {}
    if not isinstance(args, Mapping):
        raise ConfigError(f"{place}.content_args must be an object", field=place)
    kind = str(field.get("content", "text"))
    if kind not in _PARSERS:
        raise ConfigError(f"{place}.content {kind!r} is not known", field=place)
    calls = name == "tool_calls"
    convert = functools.partial(_convert, field, _PARSERS[kind], dict(args)) if calls else None
    return [
        Region(
            kind="calls" if calls else "reasoning" if name in _REASONING else "text",
            open=opened[0],
            literals=opened[1] or _first_literal(opened[0].pattern),
            exact=bool(opened[1]),
            close=None if closed is None else closed[0],
            close_literals=() if closed is None else closed[1],
            convert=convert,
            strip=args.get("strip", True) is not False,
        )
    ]


def _literal_region(pattern: re.Pattern[str], literals: tuple[str, ...]) -> Region:
    """Return a region without text in it."""
    return Region(
        kind="text",
        open=pattern,
        literals=literals or _first_literal(pattern.pattern),
        exact=bool(literals),
        close=re.compile(""),
        close_literals=(),
        strip=False,
    )


def _anchor(spec: Mapping[str, Any], key: str, place: str) -> tuple[re.Pattern[str], tuple[str, ...]] | None:
    value = spec.get(key)
    pattern = spec.get(f"{key}_pattern")
    if value is not None:
        literals = (value,) if isinstance(value, str) else value
        if not isinstance(literals, list | tuple) or not literals:
            raise ConfigError(f"{place}.{key} must be a text or a list of texts", field=place)
        if not all(isinstance(item, str) and item for item in literals):
            raise ConfigError(f"{place}.{key} must have texts that are not empty", field=place)
        ordered = tuple(sorted(literals, key=len, reverse=True))
        return re.compile("|".join(map(re.escape, ordered))), ordered
    if pattern is None:
        return None
    try:
        return re.compile(str(pattern), re.DOTALL), ()
    except (re.error, RecursionError) as error:
        raise ConfigError(f"{place}.{key}_pattern is no regular expression: {error}", field=place) from error


def _first_literal(pattern: str) -> tuple[str, ...]:
    """Return the text that every match of a pattern begins with; none: there is no such text."""
    if "|" in re.sub(r"\\.|\([^()]*\)|\[[^\]]*\]", "", pattern):  # alternatives outside of groups
        return ()
    literals: list[str] = []
    for part in re.finditer(r"\\([^\w])|([^\\.^$*+?{}\[\]()|])|(.)", pattern, re.DOTALL):
        if part[3] is not None:
            if part[3] in "*?{" and literals:
                literals.pop()
            break
        literals.append(part[1] or part[2])
    return ("".join(literals),) if literals else ()


# --- from a region's text to calls ---


def _convert(
    field: Mapping[str, Any],
    parse: Callable[[str, dict[str, Any]], Any],
    args: dict[str, Any],
    text: str,
    captures: Mapping[str, str],
    schemas: Mapping[str, Any],
) -> Converted | None:
    try:
        value = parse(text, args)
        transform = field.get("transform")
        if transform is None:
            items = value if isinstance(value, list) else [value]
        elif field.get("transform_each"):
            items = [_transform(transform, {**captures, **item}) for item in value]
        else:
            items = [_transform(transform, {**captures, "content": value})]
        return [_call(item, schemas) for item in items] or None
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, re.error):
        return None  # whatever the template did not expect: no call


def _call(item: Any, schemas: Mapping[str, Any]) -> tuple[str, str]:
    function = item.get("function", item)
    name = function["name"]
    arguments = function.get("arguments", {})
    if not isinstance(name, str) or not name:
        raise ValueError("a call without a name")
    if isinstance(arguments, str):
        return name, arguments or "{}"
    if not isinstance(arguments, dict):
        raise ValueError("arguments that are no object")
    known = parameter_schemas(schemas.get(name))
    parts = []
    for key, value in arguments.items():
        types = schema_types(known.get(key), schemas.get(name))
        plain = json_of_text(value, types) if isinstance(value, str) and types else json.dumps(value)
        parts.append(f"{json.dumps(key)}: {plain}")
    return name, "{" + ", ".join(parts) + "}"


def _transform(value: Any, scope: Mapping[str, Any]) -> Any:
    if isinstance(value, Mapping):
        return {key: _transform(item, scope) for key, item in value.items()}
    if isinstance(value, list):
        return [_transform(item, scope) for item in value]
    match = _PLACEHOLDER.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return value
    result: Any = scope
    for part in match[1].split("."):
        result = result[part]
    return result


def _text(text: str, args: dict[str, Any]) -> str:
    return text.strip() if args.get("strip", True) else text


def _json(text: str, args: dict[str, Any]) -> Any:
    strings: list[str] = []

    def replace_string(match: re.Match[str]) -> str:
        strings.append(json.dumps(match[1]))
        return f'"\ue000{len(strings) - 1}\ue001"'

    plain = text
    for begin, end in args.get("string_delims", ()):
        plain = re.sub(re.escape(begin) + "(.*?)" + re.escape(end), replace_string, plain, flags=re.DOTALL)
    if args.get("unquoted_keys"):
        plain = re.sub(r"(?<=[{,])\s*(\w+)\s*:", r'"\1":', plain)
    plain = re.sub('"\ue000([0-9]+)\ue001"', lambda match: strings[int(match[1])], plain)
    try:
        return json.loads(plain)
    except ValueError:
        if args.get("allow_non_json"):
            return text.strip()
        raise


def _inner(text: str, args: dict[str, Any]) -> Any:
    parser = args.get("value_parser")
    if not parser:
        return text
    return _PARSERS[parser.get("name", "text")](text, parser.get("args") or {})


def _xml_inline(text: str, args: dict[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    merged = set[str]()
    for match in re.finditer(args["tag_pattern"], text, re.DOTALL):
        key = match["key"]
        value = _inner(match["value"] or "", args)
        if key in values and args.get("merge_duplicates"):
            values[key] = [*values[key], value] if key in merged else [values[key], value]
            merged.add(key)
        else:
            values[key] = value
    return values


def _kv_lines(text: str, args: dict[str, Any]) -> dict[str, Any]:
    values = {}
    separator = args.get("kv_sep", ":")
    for line in text.split(args.get("line_sep", "\n")):
        key, has_separator, value = line.partition(separator)
        if has_separator:
            values[_text(key, args)] = _inner(_text(value, args), args)
    return values


_PARSERS: Mapping[str, Callable[[str, dict[str, Any]], Any]] = {
    "text": _text,
    "int": lambda text, args: int(_text(text, args)),
    "float": lambda text, args: float(_text(text, args)),
    "bool": lambda text, args: _text(text, args).lower() in ("true", "1"),
    "json": _json,
    "xml-inline": _xml_inline,
    "kv-lines": _kv_lines,
}
