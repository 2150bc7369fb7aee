"""Opens the store that an address names."""

from __future__ import annotations

from baton.config.stores import StoreAddress
from baton.kv_cache.fingerprint import Fingerprint
from baton.kv_transfer.blocks import BlockFetcher
from baton.kv_transfer.connector.store.backend import StoreBackend
from baton.kv_transfer.connector.store.client import StoreClient
from baton.kv_transfer.connector.store.cluster import StoreCluster
from baton.kv_transfer.connector.store.discovery import RedisMembership
from baton.kv_transfer.connector.store.mooncake import MooncakeValues
from baton.kv_transfer.connector.store.nodes import FixedMembership, Membership
from baton.kv_transfer.connector.store.redis import RedisValues
from baton.kv_transfer.connector.store.use import StoreOptions, StoreUse
from baton.kv_transfer.connector.store.values import Values, ValueStore


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
