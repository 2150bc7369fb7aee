"""The connector to a KV store: one node, several, or a Redis; see ``backed`` for what it does with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from baton.kv_cache.arena import Arena
from baton.kv_cache.fingerprint import Fingerprint
from baton.kv_transfer.blocks import BlockFetcher, BlockSource
from baton.kv_transfer.connector.store.backed import BackedConnector, SavedPool
from baton.kv_transfer.connector.store.open import open_store
from baton.kv_transfer.connector.store.use import StoreOptions, StoreUse

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
