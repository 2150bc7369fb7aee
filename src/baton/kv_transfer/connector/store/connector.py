"""The connector to a KV store: one node, several, or a Redis; see ``backed`` for what it does with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from baton.config.stores import StoreAddress
from baton.kv_cache.arena import Arena
from baton.kv_cache.fingerprint import Fingerprint
from baton.kv_transfer.blocks import BlockFetcher, BlockSource
from baton.kv_transfer.connector.store.backed import BackedConnector, SavedPool
from baton.kv_transfer.connector.store.backend import StoreBackend, StoreOptions, StoreUse
from baton.kv_transfer.connector.store.client import StoreClient
from baton.kv_transfer.connector.store.cluster import StoreCluster
from baton.kv_transfer.connector.store.nodes import FixedMembership, Membership, RedisMembership
from baton.kv_transfer.connector.store.values import MooncakeValues, RedisValues, Values, ValueStore

__all__ = ["StoreConnector", "StoreOptions", "StoreUse"]


class StoreConnector(BackedConnector):
    """Loads from and saves to one KV store.

    Args:
        options: Which store, and how patiently.
        arena: The engine's pool.
        fingerprint: What its blocks are.
        fetcher: Copies blocks into it; belongs to the caller, who closes it after this.
        loop: Where I/O runs; another thread's than the engine's.
        wake: Makes the engine poll; called from any thread.
        source: Returns where this pool's blocks can be read, asked with every save; ``None``: nothing is saved.
        follows_all: Save the blocks of all requests, generated ones too, and not only of those prefilled for others.
    """

    def __init__(
        self,
        options: StoreOptions,
        *,
        arena: Arena,
        fingerprint: Fingerprint,
        fetcher: BlockFetcher,
        loop: asyncio.AbstractEventLoop,
        wake: Callable[[], None],
        source: Callable[[], BlockSource] | None = None,
        follows_all: bool = False,
    ) -> None:
        use = StoreUse()
        super().__init__(
            open_store(options, fingerprint=fingerprint, fetcher=fetcher, use=use),
            options,
            pool=SavedPool(arena, fingerprint.block_size, source),
            use=use,
            loop=loop,
            wake=wake,
            follows_all=follows_all,
        )


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
