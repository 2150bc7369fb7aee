"""JSON Schema of services' flags: what a configuration file and the chart's values take under ``flags``."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterable, Sequence
from typing import Any

from baton.config.flags import base_type

_TYPES: dict[Any, dict[str, Any]] = {
    int: {"type": "integer"},
    # Helm's --set makes text of 0.5.
    float: {"type": ["number", "string"], "pattern": r"^-?[0-9]+(\.[0-9]+)?$"},
    bool: {"type": "boolean"},
    str: {"type": "string"},
    tuple: {"type": "array", "items": {"type": "string"}},
}


def flag_schema(configs: Sequence[type], skip: Iterable[str] = ()) -> dict[str, Any]:
    """Return the schema of a service's flags, by their names without dashes in front.

    Args:
        configs: Dataclasses that its flags are made of.
        skip: Fields that are no flags here.
    """
    skipped = frozenset(skip)
    found: dict[str, Any] = {}
    for config in configs:
        hints = typing.get_type_hints(config)
        for item in dataclasses.fields(config):
            text = item.metadata.get("help")
            if text is None or item.name in skipped:
                continue
            choices = item.metadata.get("choices")
            kind = {"enum": list(choices)} if choices else _TYPES[base_type(hints[item.name])]
            found[item.name.replace("_", "-")] = {**kind, "description": text}
    return {"type": "object", "properties": found}
