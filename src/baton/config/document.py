"""YAML and JSON files whose values know their line, so that an error can name path and line."""

from __future__ import annotations

import difflib
import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from baton.config.files import read_small_file
from baton.errors import ConfigError, shown

_MAX_VALUES = 100_000
"""Values of a file, those that its aliases repeat included."""
_KINDS = {"object": "a mapping", "array": "a list", "string": "text", "integer": "a whole number",
          "number": "a number", "boolean": "true or false"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Node:
    """A value of a file.

    Attributes:
        value: A number, text, bool or ``None``; a list of nodes; a mapping of names to nodes.
        line: Line number, from 1; in a mapping, the line of the value's name.
    """

    value: Any
    line: int

    def plain(self) -> Any:
        """Return the value without line numbers."""
        if isinstance(self.value, dict):
            return {name: node.plain() for name, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain() for node in self.value]
        return self.value


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """YAML, but yes, no, on and off are text, as in YAML 1.2, and so are dates."""


_Loader.yaml_implicit_resolvers = {
    first: [
        (tag, pattern)
        for tag, pattern in resolvers
        if tag not in ("tag:yaml.org,2002:bool", "tag:yaml.org,2002:timestamp")
    ]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)


def read_document(path: Path) -> Node:
    """Read a YAML or JSON file, whose top level must be a mapping.

    Raises:
        ConfigError: The file cannot be read or parsed, or has a name twice; says path and line.
    """
    try:
        text = read_small_file(path, "the configuration", "config", pipes=True).decode("utf-8")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}:{line}: no UTF-8 text", field="config") from error
    loader: _Loader | None = None
    try:
        loader = _Loader(text)
        top = loader.get_single_node()
        if top is None:
            return Node({}, 1)
        if not isinstance(top, yaml.MappingNode):
            raise ConfigError(f"{path}:{top.start_mark.line + 1}: must be a mapping of names to values", field="config")
        return _node(loader, top, str(path), top.start_mark.line + 1, (), itertools.count(1))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = 1 if mark is None else mark.line + 1
        raise ConfigError(f"{path}:{line}: no YAML: {error.problem or error.context}", field="config") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path}:1: no YAML: {' '.join(str(error).split())}", field="config") from error
    finally:
        if loader is not None:
            loader.dispose()


def _node(
    loader: _Loader, node: yaml.Node, path: str, line: int, above: tuple[int, ...], numbers: Iterator[int]
) -> Node:
    if next(numbers) > _MAX_VALUES:
        raise ConfigError(f"{path}:{line}: more than {_MAX_VALUES} values, with its aliases", field="config")
    if id(node) in above:
        raise ConfigError(f"{path}:{node.start_mark.line + 1}: refers to itself", field="config")
    above = (*above, id(node))
    if isinstance(node, yaml.MappingNode):
        children: dict[str, Node] = {}
        for key, child in node.value:
            at = key.start_mark.line + 1
            name = key.value if isinstance(key, yaml.ScalarNode) else None
            if name is None or name == "<<":
                raise ConfigError(f"{path}:{at}: names must be plain text", field="config")
            if name in children:
                raise ConfigError(
                    f"{path}:{at}: {name} is given twice, first in line {children[name].line}", field="config"
                )
            children[name] = _node(loader, child, path, at, above, numbers)
        return Node(children, line)
    if isinstance(node, yaml.SequenceNode):
        items = [_node(loader, child, path, child.start_mark.line + 1, above, numbers) for child in node.value]
        return Node(items, line)
    try:
        return Node(loader.construct_object(node), line)
    except ValueError as error:  # such as an integer with too many digits
        raise ConfigError(f"{path}:{line}: {shown(node.value)}: {error}", field="config") from error


# --- against a schema ---


def check(node: Node, schema: Mapping[str, Any], path: str) -> None:
    """Check a file against a JSON Schema.

    Supported keywords: type, properties, additionalProperties, enum, items, minimum, maximum and pattern.

    Raises:
        ConfigError: Says path, line, the place in the file and, for an unknown name, the nearest known one.
    """
    for place, line, problem in problems(node, schema, ""):
        raise ConfigError(f"{path}:{line}: {place or 'the file'} {problem}", field=place or "config")


def problems(node: Node, schema: Mapping[str, Any], place: str) -> Iterator[tuple[str, int, str]]:
    """Yield place, line and message of each problem, in the order of the file."""
    value = node.value
    if value is None:
        return  # a name without a value counts as not given
    if "enum" in schema:
        if value not in schema["enum"]:
            yield place, node.line, f"must be one of {', '.join(map(str, schema['enum']))}, got {shown(node.plain())}"
        return
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(_is(value, kind) for kind in kinds):
        wanted = " or ".join(_KINDS[kind] for kind in kinds)
        yield place, node.line, f"must be {wanted}, got {shown(node.plain())}"
        return
    if isinstance(value, dict):
        yield from _problems_of_mapping(node, schema, place)
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from problems(item, schema.get("items", {}), f"{place}[{number}]")
    elif isinstance(value, str):
        if not re.search(schema.get("pattern", ""), value):
            yield place, node.line, f"must look like {schema.get('example', schema['pattern'])}, got {shown(value)}"
    elif not isinstance(value, bool):
        least = schema.get("minimum", -math.inf)
        most = schema.get("maximum", math.inf)
        if not least <= value <= most:
            bound = f"at least {least}" if value < least else f"at most {most}"
            yield place, node.line, f"must be {bound}, got {value}"


def _problems_of_mapping(node: Node, schema: Mapping[str, Any], place: str) -> Iterator[tuple[str, int, str]]:
    known = schema.get("properties", {})
    for name, child in node.value.items():
        where = f"{place}.{name}" if place else name
        if name in known:
            yield from problems(child, known[name], where)
        elif schema.get("additionalProperties", True) is False:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]}?" if near else f"; there are {', '.join(sorted(known)[:12])}"
            hint += ", ..." if not near and len(known) > 12 else ""
            yield where, child.line, f"is not known{hint}"
        elif isinstance(schema.get("additionalProperties"), Mapping):
            yield from problems(child, schema["additionalProperties"], where)


def _is(value: object, kind: str) -> bool:
    if kind in ("integer", "number"):
        is_number = isinstance(value, int) or (kind == "number" and isinstance(value, float) and math.isfinite(value))
        return is_number and not isinstance(value, bool)
    return isinstance(value, {"object": dict, "array": list, "string": str, "boolean": bool}[kind])
