"""Implementations chosen by name: a table of built-in ones, beside the entry points of installed packages.

A name stands for ``module:attribute``, imported when it is chosen. Entry points work in every process of an engine.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

from baton.errors import ConfigError


def find_implementation(name: str, builtin: Mapping[str, str], group: str, *, field: str) -> Any:
    """Import the implementation that a name stands for.

    Args:
        name: What was asked for.
        builtin: ``module:attribute`` by name.
        group: Entry point group in which other packages register theirs.
        field: Configuration field, for errors.

    Raises:
        ConfigError: There is none of that name, or its package cannot be imported; names ``field``.
    """
    installed = {point.name: point.value for point in entry_points(group=group)}
    target = builtin.get(name) or installed.get(name)
    if target is None:
        known = ", ".join(sorted({*builtin, *installed}))
        raise ConfigError(f"{field} {name!r} is not known (there are: auto, {known})", field=field)
    module, _, attribute = target.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{field} {name!r} cannot be imported: {error}", field=field) from error
