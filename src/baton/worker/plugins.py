"""KV connectors of other packages, as ``--kv-connectors`` names them."""

from __future__ import annotations

from baton.kv.connector import KVConnector
from baton.kv.plugin import ConnectorContext, make_connector, parse_options
from baton.types import InstanceId
from baton.worker.instance import Parts


def plugin_connectors(parts: Parts) -> list[KVConnector]:
    """Build the connectors that the configuration names, in that order.

    Raises:
        ConfigError: One is not installed, does not start or does not want its options.
    """
    config = parts.config
    options = parse_options(config.kv_connectors, config.kv_connector_options)
    connectors: list[KVConnector] = []
    try:
        for name in config.kv_connectors:
            context = ConnectorContext(
                instance_id=InstanceId(config.instance_id or str(parts.role)),
                role=parts.role,
                shards=parts.shards,
                fingerprint=parts.runner.fingerprint,
                loop=parts.loop,
                wake=parts.wake,
                options=options[name],
            )
            connectors.append(make_connector(name, context))
    except BaseException:
        for connector in connectors:
            connector.close()
        raise
    return connectors
