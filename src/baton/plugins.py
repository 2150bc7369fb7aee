"""Implementations chosen by name: Baton's own, and those that installed packages register as entry points.

Every extension point (attention backends, executors, drafters, grammar backends, pipes, KV connectors, store tiers,
placement policies) is one :class:`PluginGroup`. An implementation is imported when it is chosen, so that its
dependencies are needed only then. Entry points work in every process of an instance.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import reduce
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from baton.errors import BatonError, ConfigError


def import_object(target: str) -> Any:
    """Import what ``module:attribute`` names; the attribute may be dotted, as in ``module:Class.method``.

    Raises:
        ImportError: There is no such module, or one that it needs is missing.
        AttributeError: The module has no such attribute.
    """
    module, _, attributes = target.partition(":")
    return reduce(getattr, attributes.split("."), importlib.import_module(module))


def installed_plugins(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of a group by their name."""
    return {point.name: point for point in entry_points(group=group)}


@dataclass(frozen=True)
class PluginGroup:
    """One extension point: its implementations by name. Built-in names cannot be overridden by entry points.

    Attributes:
        setting: Configuration field that chooses an implementation; errors begin with it and carry it.
        entry_point_group: Entry point group in which other packages register theirs.
        built_in: ``module:attribute`` of Baton's own implementations by name.
    """

    setting: str
    entry_point_group: str
    built_in: Mapping[str, str] = field(default_factory=dict)

    def find(self, name: str) -> str | None:
        """Return the ``module:attribute`` of a name without importing it; ``None``: the name is unknown."""
        if name in self.built_in:
            return self.built_in[name]
        installed = installed_plugins(self.entry_point_group)
        return installed[name].value if name in installed else None

    def load(self, name: str, *, other_names: Collection[str] = ()) -> Any:
        """Import the implementation of a name.

        Args:
            name: A built-in name or that of an entry point.
            other_names: Further valid values of the setting (``auto``), for the error message.

        Raises:
            ConfigError: The name is unknown, or its module cannot be imported.
        """
        target = self.find(name)
        if target is None:
            known = sorted({*other_names, *self.built_in, *installed_plugins(self.entry_point_group)})
            message = f"{self.setting} {name!r} is not known (there are: {', '.join(known) or 'none'})"
            raise ConfigError(message, field=self.setting)
        try:
            return import_object(target)
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"{self.setting} {name!r} cannot be imported: {error}", field=self.setting) from error

    def create(self, name: str, *args: Any, other_names: Collection[str] = ()) -> Any:
        """Import the factory of a name and call it.

        Args:
            name: See :meth:`load`.
            args: Arguments of the factory.
            other_names: See :meth:`load`.

        Raises:
            ConfigError: See :meth:`load`; or the factory raised an error that is not one of Baton's.
        """
        factory = self.load(name, other_names=other_names)
        try:
            return factory(*args)
        except BatonError:
            raise
        except Exception as error:
            raise ConfigError(f"{self.setting} {name!r} cannot start: {error}", field=self.setting) from error
