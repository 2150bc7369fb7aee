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

from baton.errors import ConfigError
from baton.kv_cache.connector import KVConnector
from baton.kv_cache.fingerprint import Fingerprint
from baton.kv_cache.shards import KVShards
from baton.plugins import PluginGroup
from baton.types import InstanceId, Role

KV_CONNECTORS = PluginGroup("kv_connectors", "baton.kv_connectors")


@dataclass(frozen=True)
class ConnectorContext:
    """What a connector is given.

    Attributes:
        shards: The instance's pool: one arena per rank. Blocks that a load was started for may be written, others
            only read.
        fingerprint: Fingerprint of the blocks; KV with another ``digest`` must not be mixed with it.
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


def make_connector(name: str, context: ConnectorContext, built_in: Collection[str] = ()) -> KVConnector:
    """Build the connector that another package registered under a name.

    Args:
        name: Name of its entry point.
        context: Argument of its factory.
        built_in: Names of connectors that need no entry point, for the error message.

    Raises:
        ConfigError: It is not installed, cannot be imported or cannot start, or it refuses these options.
    """
    connector = KV_CONNECTORS.create(name, context, other_names=built_in)
    if not isinstance(connector, KVConnector):
        raise ConfigError(f"KV connector {name!r} made a {type(connector).__name__}", field="kv_connectors")
    return connector
