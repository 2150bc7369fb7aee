"""JSON schemas: which keywords are supported, and a schema as a part of a Lark grammar.

Keywords are those of draft 2020-12, and what earlier drafts write differently. A keyword that decides what is valid is
kept to, or refused by name and place. All others are annotations, as the specification says of unknown ones: they
change nothing. Nor does strictness: the answer follows the schema in any case.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

import orjson

from baton.errors import InvalidRequestError, shown
from baton.grammar.validation import check_repeats
from baton.types import MAX_GRAMMAR_BYTES

MAX_DEPTH = 64
"""Of schemas in schemas."""
MAX_INLINED = 20_000
"""Schemas beyond which alternatives of ``oneOf`` are no more written out where they are referred to."""
DEFAULT_WHITESPACE = " ?"
"""Between the parts of JSON: bounded, as models wander off in whitespace where it is not."""

_ONE = frozenset({"items", "additionalProperties"})
_MANY = frozenset({"prefixItems", "anyOf", "oneOf", "allOf"})
_NAMED = frozenset({"properties", "patternProperties"})
_COUNTS = frozenset({"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"})
_BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
_VALUES = frozenset({"type", "enum", "const", "required", "pattern", "format", "$ref"})
_DEPENDENT = frozenset({"dependentRequired", "dependentSchemas", "dependencies"})
_REWRITTEN = _DEPENDENT | {"propertyNames", "unevaluatedProperties", "unevaluatedItems", "additionalItems"}
SUPPORTED = _ONE | _MANY | _NAMED | _COUNTS | _BOUNDS | _VALUES | _REWRITTEN
"""Keywords that decide what is valid, and are kept to; those of ``_REWRITTEN`` where other keywords can say it."""
REFUSED = frozenset({"not", "if", "uniqueItems", "contains", "$dynamicRef", "$recursiveRef"})
"""Keywords that decide what is valid, and are refused where they forbid anything."""
_APPLICATORS = frozenset({"$ref", "allOf", "anyOf", "oneOf", *_DEPENDENT})
"""Keywords whose schemas evaluate the same value, so that what is left unevaluated depends on them."""
_TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")

_BUILT_IN_FORMATS = frozenset(
    {"date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"}
)
_DATE = (
    "(?:[1-9][0-9]{3}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    "|(?:[1-9][0-9](?:0[48]|[2468][048]|[13579][26])|(?:[2468][048]|[13579][26])00)-02-29)"
)
_LABEL = (  # of a host: without hyphens in both the third and the fourth place, as in punycode
    "[a-zA-Z0-9](?:[a-zA-Z0-9-]?[a-zA-Z0-9]|[a-zA-Z0-9-][a-zA-Z0-9][a-zA-Z0-9-]{0,59}[a-zA-Z0-9]"
    "|[a-zA-Z0-9-]-[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,58}[a-zA-Z0-9])?)?"
)
_URI_NAME = r"(?:[a-zA-Z0-9\-._~!$&'()*+,;=]|%[0-9a-fA-F]{2})"
_URI_CHAR = f"(?:{_URI_NAME}|[:@])"
_PATH = f"(?:/{_URI_CHAR}*)*"
_SCHEME = "[a-zA-Z][a-zA-Z0-9+.-]*"
_AUTHORITY = f"(?:(?:{_URI_NAME}|:)*@)?{_URI_NAME}*(?::[0-9]*)?"
_INT64 = 2**63 - 2**10
"""The largest int64 that is also a double, which the compiler's bounds are."""
_FORMATS: dict[str, tuple[dict[str, Any], ...]] = {
    # Beside the compiler's own patterns, which allow more than every validator does: February 29 in any year, the year
    # 0, leap seconds, names of hosts that are too long or look like punycode.
    "date": ({"pattern": f"^{_DATE}$"},),
    "date-time": ({"pattern": f"^{_DATE}T[0-9]{{2}}:[0-9]{{2}}:[0-5]"},),
    "time": ({"pattern": "^[0-9]{2}:[0-9]{2}:[0-5]"},),
    "hostname": ({"pattern": rf"^{_LABEL}(?:\.{_LABEL})*$"}, {"maxLength": 253}),
    # OpenAPI's
    "int32": ({"minimum": -(2**31), "maximum": 2**31 - 1},),
    "int64": ({"minimum": -_INT64, "maximum": _INT64},),
    "float": (),
    "double": (),
    "uri-reference": (
        {
            "pattern": f"^(?:(?:{_SCHEME}:)?//{_AUTHORITY}{_PATH}|{_SCHEME}:(?:/?{_URI_CHAR}+{_PATH})?"
            rf"|/(?:{_URI_CHAR}+{_PATH})?|(?:{_URI_NAME}|@)+{_PATH})?"
            rf"(?:\?(?:{_URI_CHAR}|[/?])*)?(?:#(?:{_URI_CHAR}|[/?])*)?$"
        },
    ),
    "json-pointer": ({"pattern": "^(?:/(?:[^/~]|~[01])*)*$"},),
    "relative-json-pointer": ({"pattern": "^(?:0|[1-9][0-9]*)(?:#|(?:/(?:[^/~]|~[01])*)*)$"},),
}
"""What else formats demand, as schemas. The rest of the world's formats are annotations."""
FORMATS = _BUILT_IN_FORMATS | frozenset(_FORMATS)
"""Values of ``format`` that are kept to."""

_WRITTEN_CONTROLS = r"nrbtf\""
"""Escapes of the compiler's but ``\\u``: names of properties have one spelling each with these alone."""
_CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
"""Characters that JSON can only write as ``\\u``."""


def check_schema(schema: Any, field: str) -> None:
    """Refuse what would not be kept to.

    Args:
        schema: A decoded schema.
        field: Name of the request field, for errors; places in it follow as in ``schema.properties.a``.

    Raises:
        InvalidRequestError: A keyword is not supported, or a schema is none; names keyword and place.
    """
    _SchemaWriter(schema, field).write(schema, field)


class _SchemaWriter:
    """Writes a schema as the compiler is to read it: without annotations, and with few kinds of keywords.

    Args:
        root: The schema in which references are places.
        place: Name of the request field that has the root, for errors.

    Attributes:
        has_free_keys: Whether an object with named properties may have others.
        control: Where a text has a control character without a short escape; empty: nowhere.
    """

    def __init__(self, root: Any, place: str) -> None:
        self._root = root
        self._root_place = place
        self._names: dict[int, str] = {}
        self._pending: list[tuple[str, Any, str, Any]] = []
        self._resources: dict[str, tuple[Any, str]] | None = None
        self._inlining: set[int] = set()
        self._count = 0
        self.has_free_keys = False
        self.control = ""

    def write(self, schema: Any, place: str) -> Any:
        """Return a schema of the root's, or the root, with the definitions that it refers to."""
        written = self._schema(schema, place, 0, self._root)
        definitions = dict[str, Any]()
        while self._pending:
            name, target, where, base = self._pending.pop()
            definitions[name] = self._schema(target, where, 0, base)
        if self.has_free_keys and self.control:
            message = f"{self.control} has a control character, beside objects whose properties are not all listed"
            raise InvalidRequestError(message, field=self.control)
        return {**written, "$defs": definitions} if definitions else written

    def _schema(self, schema: Any, place: str, depth: int, base: Any) -> Any:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            raise InvalidRequestError(f"{place} must be a JSON schema, got a {type(schema).__name__}", field=place)
        if depth > MAX_DEPTH:
            field = self._root_place
            raise InvalidRequestError(f"{field}: schemas are nested deeper than {MAX_DEPTH}", field=field)
        if depth and _is_true(schema.get("not")):
            return False
        self._count += 1
        base = schema if _is_resource(schema) else base
        written = dict[str, Any]()
        more = list[Any]()
        for keyword, item in schema.items():
            if not isinstance(keyword, str):
                raise InvalidRequestError(f"{place}: the keyword {shown(keyword)} is no string", field=place)
            where = f"{place}.{keyword}"
            if keyword == "$ref":
                written[keyword] = self._reference(item, where, base)
            elif keyword == "format":
                written |= {keyword: item} if item in _BUILT_IN_FORMATS else {}
                more += _FORMATS.get(item, ()) if isinstance(item, str) else ()
            elif keyword == "items" and isinstance(item, list):  # before draft 2020-12
                written["prefixItems"] = self._listed(item, where, depth, base)
                if "additionalItems" in schema:
                    rest = schema["additionalItems"]
                    written["items"] = self._schema(rest, f"{place}.additionalItems", depth + 1, base)
            elif keyword in _ONE:
                written[keyword] = self._schema(item, where, depth + 1, base)
            elif keyword == "oneOf":
                written[keyword] = self._listed(item, where, depth, base, inline=True)
            elif keyword in _MANY:
                written[keyword] = self._listed(item, where, depth, base)
            elif keyword in _NAMED:
                written[keyword] = self._named(keyword, item, where, depth, base)
            elif keyword in _DEPENDENT:
                more += self._dependent(item, where, depth, base)
            elif keyword in ("unevaluatedProperties", "unevaluatedItems"):
                written |= self._unevaluated(keyword, schema, where, depth, base)
            elif keyword in REFUSED:
                _check_idle(keyword, schema, where)
            elif keyword in _VALUES | _COUNTS | _BOUNDS:
                written |= self._value(keyword, item, schema, where)
        if "propertyNames" in schema:
            self._restrict_names(schema["propertyNames"], written, f"{place}.propertyNames", depth, base)
        if more:
            written["allOf"] = [*written.get("allOf", ()), *more]
        self._look_at_keys(written, place)
        return written

    # --- schemas in schemas ---

    def _listed(self, item: Any, place: str, depth: int, base: Any, *, inline: bool = False) -> list[Any]:
        if not isinstance(item, list):
            raise InvalidRequestError(f"{place} must be a list of schemas", field=place)
        places = ((part, f"{place}[{at}]") for at, part in enumerate(item))
        return [(self._inlined if inline else self._schema)(part, where, depth + 1, base) for part, where in places]

    def _inlined(self, part: Any, place: str, depth: int, base: Any) -> Any:
        """Return an alternative whose reference is written out: the compiler sees which exclude each other."""
        written = self._schema(part, place, depth, base)
        if written is False or not isinstance(part, Mapping) or written.keys() != {"$ref"} or self._count > MAX_INLINED:
            return written
        target, where, base = self._target(part["$ref"], place, base)
        if not isinstance(target, Mapping) or id(target) in self._inlining:
            return written
        self._inlining.add(id(target))
        inlined = self._inlined(target, where, depth + 1, base)
        self._inlining.remove(id(target))
        return inlined

    def _named(self, keyword: str, item: Any, place: str, depth: int, base: Any) -> dict[str, Any]:
        if not isinstance(item, Mapping):
            raise InvalidRequestError(f"{place} must be an object of schemas", field=place)
        if keyword == "patternProperties":
            for pattern in item:
                check_repeats(str(pattern), place)
        return {name: self._schema(part, f"{place}.{name}", depth + 1, base) for name, part in item.items()}

    def _dependent(self, item: Any, place: str, depth: int, base: Any) -> Iterator[Any]:
        """Yield what objects with certain properties must be, as a choice between these objects and others."""
        if not isinstance(item, Mapping):
            raise InvalidRequestError(f"{place} must be an object", field=place)
        for name, part in item.items():
            where = f"{place}.{name}"
            if isinstance(part, list):
                then: Any = {"required": [name, *_names(part, where)]}
            else:
                then = {"allOf": [{"required": [name]}, self._schema(part, where, depth + 1, base)]}
            self.has_free_keys = True
            yield {"anyOf": [{"properties": {name: False}}, then]}

    def _unevaluated(self, keyword: str, schema: Any, place: str, depth: int, base: Any) -> dict[str, Any]:
        """Return what says the same where no other keyword's schemas are applied to the same value."""
        item = schema[keyword]
        rest = "additionalProperties" if keyword == "unevaluatedProperties" else "items"
        if _is_true(item) or rest in schema:  # which evaluates all that is left
            return {}
        if not _APPLICATORS.isdisjoint(schema) or ("contains" in schema and rest == "items"):
            raise _unsupported(place)
        return {rest: self._schema(item, place, depth + 1, base)}

    def _restrict_names(self, item: Any, written: dict[str, Any], place: str, depth: int, base: Any) -> None:
        """Put into an object's other keywords what the names of its properties must be."""
        names = self._schema(item, place, depth + 1, base)
        if names is True or (isinstance(names, dict) and _has_string(names.pop("type", "string")) and not names):
            return
        rest = written.get("additionalProperties", True)
        if "patternProperties" in written or not isinstance(names, dict):
            raise _unsupported(place)
        if names.keys() <= {"enum"} or names.keys() <= {"const"}:
            known = [name for name in names.get("enum", [names.get("const")]) if isinstance(name, str)]
            properties = written.get("properties", {})
            written["properties"] = {name: part if name in known else False for name, part in properties.items()}
            written["properties"] |= {name: rest for name in known if name not in properties}
        elif len(names) == 1 and "pattern" in names and not written.get("properties"):
            written["patternProperties"] = {names["pattern"]: rest}
        elif names.keys() <= {"minLength", "maxLength"} and not written.get("properties"):
            bounds = f"{names.get('minLength', 0)},{names.get('maxLength', '')}"
            written["patternProperties"] = {f"^(?s:.{{{bounds}}})$": rest}
        else:
            raise _unsupported(place)
        written["additionalProperties"] = False

    # --- values ---

    def _value(self, keyword: str, item: Any, schema: Mapping[str, Any], place: str) -> dict[str, Any]:
        if keyword in ("enum", "const"):
            if keyword == "enum" and not isinstance(item, list):
                raise InvalidRequestError(f"{place} must be a list", field=place)
            self._look_at_texts(item, place)
        elif keyword == "type":
            for name in item if isinstance(item, list) else [item]:
                if name not in _TYPES:
                    message = f"{place}: {shown(name)} is no type; these are: {', '.join(_TYPES)}"
                    raise InvalidRequestError(message, field=place)
        elif keyword == "required":
            item = _names(item, place)
        elif keyword == "pattern":
            if not isinstance(item, str):
                raise InvalidRequestError(f"{place} must be a string, got {shown(item)}", field=place)
            check_repeats(item, place)
        elif keyword in _COUNTS:
            if isinstance(item, float) and item.is_integer():
                item = int(item)
            if isinstance(item, bool) or not isinstance(item, int) or item < 0:
                raise InvalidRequestError(f"{place} must be a number of 0 or more, got {shown(item)}", field=place)
        elif isinstance(item, bool) and keyword.startswith("exclusive"):  # draft 4
            bound = schema.get(keyword.removeprefix("exclusive").lower())
            return {keyword: bound} if item and bound is not None else {}
        elif isinstance(item, bool) or not isinstance(item, int | float):
            raise InvalidRequestError(f"{place} must be a number, got {shown(item)}", field=place)
        return {keyword: item}

    def _look_at_texts(self, value: Any, place: str) -> None:
        stack = [value]
        while stack:
            one = stack.pop()
            if isinstance(one, str):
                self.control = self.control or (place if _CONTROL.search(one) else "")
            elif isinstance(one, list | Mapping):
                stack += one if isinstance(one, list) else one.values()

    def _look_at_keys(self, written: Mapping[str, Any], place: str) -> None:
        patterns = bool(written.get("patternProperties"))
        open_ended = written.get("additionalProperties") is not False
        if open_ended and (patterns or written.get("properties") or written.get("required")):
            self.has_free_keys = True
        free = written.get("minProperties", 0) - len({*written.get("required", ())})
        if free > 1 and (patterns or open_ended) and _may_be(written, "object"):
            where = f"{place}.minProperties"
            message = f"{where} may be one more than the properties in required: others might have one name twice"
            raise InvalidRequestError(message, field=where)

    # --- references ---

    def _reference(self, reference: Any, place: str, base: Any) -> str:
        target, where, base = self._target(reference, place, base)
        name = self._names.get(id(target))
        if name is None:
            name = self._names[id(target)] = str(len(self._names))
            self._pending.append((name, target, where, base))
        return f"#/$defs/{name}"

    def _target(self, reference: Any, place: str, base: Any) -> tuple[Any, str, Any]:
        """Return the schema that a reference means, its place, and the resource that it is in.

        Args:
            reference: Value of ``$ref``.
            place: Name of the reference's place, for errors.
            base: Resource, the root or a schema with ``$id``, in which it stands.
        """
        missing = InvalidRequestError(f"{place}: {shown(reference)} is not a place in this schema", field=place)
        if not isinstance(reference, str):
            raise missing
        address, fragment = urldefrag(reference)
        where = self._root_place
        if address or (fragment and not fragment.startswith("/")):
            if self._resources is None:
                self._resources = dict(_resources(self._root, self._root_place))
            full = urljoin(_address(base), reference if not fragment.startswith("/") else address)
            if full.rstrip("#") not in self._resources:
                raise missing
            base, where = self._resources[full.rstrip("#")]
        target = base
        for part in fragment.split("/")[1:] if fragment.startswith("/") else ():
            part = unquote(part).replace("~1", "/").replace("~0", "~")
            try:
                target = target[int(part)] if isinstance(target, list) else target[part]
            except (KeyError, IndexError, ValueError, TypeError):
                raise missing from None
            base = target if isinstance(target, Mapping) and _is_resource(target) else base
            where = f"{where}.{part}"
        return target, where, base


def _is_resource(schema: Mapping[str, Any]) -> bool:
    address = schema.get("$id")
    return isinstance(address, str) and not address.startswith("#")


def _address(schema: Any) -> str:
    return str(schema.get("$id", "")) if isinstance(schema, Mapping) else ""


def _resources(root: Any, place: str) -> Iterator[tuple[str, tuple[Any, str]]]:
    """Yield the addresses of schemas that have one, with these and their places."""
    stack = [(root, place, "")]
    while stack:
        value, where, address = stack.pop()
        if isinstance(value, list):
            stack += ((part, f"{where}[{at}]", address) for at, part in enumerate(value))
        elif isinstance(value, Mapping):
            if _is_resource(value):
                address = urljoin(address, value["$id"])
                yield address.rstrip("#"), (value, where)
            elif value is root:
                yield "", (value, where)
            for keyword in ("$anchor", "$dynamicAnchor"):
                if isinstance(value.get(keyword), str):
                    yield f"{address}#{value[keyword]}", (value, where)
            if isinstance(value.get("$id"), str) and value["$id"].startswith("#"):  # before draft 2019-09
                yield f"{address}{value['$id']}", (value, where)
            stack += (
                (part, f"{where}.{name}", address) for name, part in value.items() if name not in ("enum", "const")
            )


def _check_idle(keyword: str, schema: Mapping[str, Any], place: str) -> None:
    """Refuse a keyword that would forbid something."""
    item = schema[keyword]
    idle = {
        "not": item is False,
        "if": "then" not in schema and "else" not in schema,
        "uniqueItems": item is False,
        "contains": schema.get("minContains") == 0 and "maxContains" not in schema,
    }
    if not idle.get(keyword):
        raise _unsupported(place)


def _unsupported(place: str) -> InvalidRequestError:
    outer, _, keyword = place.rpartition(".")
    return InvalidRequestError(f"{outer}: the keyword {shown(keyword)} is not supported", field=place[:200])


def _names(item: Any, place: str) -> list[str]:
    if not isinstance(item, list) or not all(isinstance(name, str) for name in item):
        raise InvalidRequestError(f"{place} must be a list of strings", field=place)
    return item


def _is_true(schema: Any) -> bool:
    return schema is True or schema == {}


def _has_string(types: Any) -> bool:
    return "string" in ([types] if isinstance(types, str) else types)


def _may_be(schema: Mapping[str, Any], kind: str) -> bool:
    types = schema.get("type", kind)
    return kind in ([types] if isinstance(types, str) else types)


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
    schema: Any,
    field: str,
    *,
    root: tuple[Any, str] | None = None,
    whitespace_pattern: str | None = None,
    disable_any_whitespace: bool = False,
) -> str:
    """Return ``%json {...}``, which stands for a schema in a Lark grammar.

    Args:
        schema: The schema, decoded or as JSON.
        field: Name of the request field, for errors.
        root: Schema in which references are places, and its field; default: the schema.
        whitespace_pattern: A regular expression of what may stand between the parts of JSON; default: at most a space.
        disable_any_whitespace: Nothing may.

    Raises:
        InvalidRequestError: It is wrong, too long, or has keywords that are not supported; names the place.
    """
    schema = decode_schema(schema, field)
    options: dict[str, Any] = {"whitespace_pattern": whitespace_pattern or DEFAULT_WHITESPACE}
    if disable_any_whitespace:
        options = {"whitespace_flexible": False}
    elif whitespace_pattern is not None:
        check_repeats(whitespace_pattern, "whitespace_pattern")
    writer = _SchemaWriter(*(root or (schema, field)))
    try:
        written = writer.write(schema, field)
        if writer.has_free_keys:  # else a free key might spell a listed one with \u, and have another's schema
            options["json_allowed_escapes"] = _WRITTEN_CONTROLS
        text = json.dumps({**written, "x-guidance": options}, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{field} is no JSON: {error}", field=field) from error
    if len(text) > MAX_GRAMMAR_BYTES:
        raise too_long(field)
    return f"%json {text}"


def too_long(field: str) -> InvalidRequestError:
    """Return the refusal of a schema whose JSON is longer than grammars may be."""
    return InvalidRequestError(f"{field} must have at most {MAX_GRAMMAR_BYTES} bytes", field=field)
