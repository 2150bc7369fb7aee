"""Opens the store that an address names."""

from __future__ import annotations

from baton.config.stores import StoreAddress
from baton.kv.fingerprint import Fingerprint
from baton.transport.blocks import BlockFetcher
from baton.transport.connector.store_backend import StoreBackend
from baton.transport.connector.store_client import StoreClient
from baton.transport.connector.store_cluster import StoreCluster
from baton.transport.connector.store_discovery import RedisMembership
from baton.transport.connector.store_mooncake import MooncakeValues
from baton.transport.connector.store_nodes import FixedMembership, Membership
from baton.transport.connector.store_redis import RedisValues
from baton.transport.connector.store_use import StoreOptions, StoreUse
from baton.transport.connector.store_values import Values, ValueStore


def open_store(
    options: StoreOptions, *, fingerprint: Fingerprint, fetcher: BlockFetcher, use: StoreUse
) -> StoreBackend:
    """Return a client of the store; connections are made with the first call.

    Args:
        options: Which store, and how patiently.
        fingerprint: Of this instance's pool.
        fetcher: Copies blocks into that pool; belongs to the caller, who closes it after the store.
        use: Where counts go.

    Raises:
        ConfigError: A package is missing, or an option does not fit the store.
    """
    address = StoreAddress.parse(options.address)

    def connect(node: str) -> StoreClient:
        return StoreClient(
            node,
            fingerprint=fingerprint,
            fetcher=fetcher,
            token=options.token,
            tls=options.tls,
            call_timeout_s=options.call_timeout_s,
            blocks_per_call=options.blocks_per_call,
        )

    if len(address.nodes) == 1:
        return connect(address.nodes[0])
    values: Values | None = None
    if address.redis:
        values = RedisValues(address.redis, timeout_s=options.call_timeout_s, ttl_s=options.redis_ttl_s)
    elif address.mooncake:
        values = MooncakeValues(address.mooncake)
    if values is not None:
        per_call = options.blocks_per_call
        return ValueStore(values, pool=fetcher.pool, fingerprint=fingerprint, blocks_per_call=per_call)
    membership: Membership
    membership = RedisMembership(*options.discovery) if address.discover else FixedMembership(address.nodes)
    return StoreCluster(membership, connect, options, use)
