"""KV connectors from other packages: found by entry point, put before the built-in ones.

A package registers a factory in the entry point group ``baton.kv_connectors``::

    [project.entry-points."baton.kv_connectors"]
    files = "baton_file_connector:make_connector"

and a service started with ``--kv-connectors files`` calls it once. ``examples/baton-file-connector`` is a whole one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points

from baton.errors import BatonError, ConfigError
from baton.kv_cache.connector import KVConnector
from baton.kv_cache.fingerprint import Fingerprint
from baton.kv_cache.shards import KVShards
from baton.types import InstanceId, Role

GROUP = "baton.kv_connectors"


@dataclass(frozen=True)
class ConnectorContext:
    """What a connector is given.

    Attributes:
        shards: The instance's pool: one arena per rank. Blocks that a load was started for may be written, others
            only read.
        fingerprint: What the blocks are; its ``digest`` tells KV apart that must not be mixed.
        loop: The service's event loop, in another thread than the engine's.
        wake: Makes the engine poll; any thread may call it.
        options: ``--kv-connector-options``, as far as they are this connector's: ``files.path=/kv`` is ``path``.
    """

    instance_id: InstanceId
    role: Role
    shards: KVShards
    fingerprint: Fingerprint
    loop: asyncio.AbstractEventLoop
    wake: Callable[[], None]
    options: Mapping[str, str] = field(default_factory=dict)


ConnectorFactory = Callable[[ConnectorContext], KVConnector]


def find_factory(name: str, built_in: Collection[str] = ()) -> ConnectorFactory:
    """Return the factory registered under a name.

    Args:
        name: Its entry point's.
        built_in: Names of connectors that need no entry point, for the error.

    Raises:
        ConfigError: There is none, or its package cannot be imported; names ``kv_connectors``.
    """
    known = {point.name: point for point in entry_points(group=GROUP)}
    if name not in known:
        there = ", ".join(sorted({*built_in, *known})) or "none"
        raise ConfigError(f"no KV connector {name!r} is installed (there are: {there})", field="kv_connectors")
    try:
        factory: ConnectorFactory = known[name].load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"KV connector {name!r} cannot be imported: {error}", field="kv_connectors") from error
    return factory


def make_connector(name: str, context: ConnectorContext, built_in: Collection[str] = ()) -> KVConnector:
    """Build a registered connector; see :func:`find_factory`.

    Raises:
        ConfigError: It is not there, or does not want these options.
    """
    factory = find_factory(name, built_in)
    try:
        connector = factory(context)
    except BatonError:
        raise
    except Exception as error:
        raise ConfigError(f"KV connector {name!r} cannot start: {error}", field="kv_connectors") from error
    if not isinstance(connector, KVConnector):
        raise ConfigError(f"KV connector {name!r} made a {type(connector).__name__}", field="kv_connectors")
    return connector
