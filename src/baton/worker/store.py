"""The KV store beside the point-to-point hand-over, for instances started with ``--kvstore``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from baton.kv_cache.connector import KVConnector
from baton.kv_transfer.blocks import BlockFetcher
from baton.kv_transfer.connector.multi import MultiConnector
from baton.kv_transfer.connector.store.connector import StoreConnector, StoreOptions, StoreUse
from baton.worker.instance import Parts


class StoreSide:
    """A worker's connection to its KV store, or nothing if it has none.

    Args:
        parts: The instance's parts.
        fetcher: Copies blocks into its pool; closed by the caller after :meth:`close`.
        next_step: Returns the arena's progress before the step that begins next, for blocks to be saved layer by layer;
            ``None``: they are saved when they are complete.
    """

    def __init__(self, parts: Parts, fetcher: BlockFetcher, *, next_step: Callable[[], int] | None = None) -> None:
        self.connector: StoreConnector | None = None
        if parts.config.kvstore:
            self.connector = StoreConnector(
                _options(parts),
                arena=parts.arena,
                fingerprint=parts.executor.fingerprint,
                fetcher=fetcher,
                loop=parts.loop,
                wake=parts.wake,
                source=parts.source,
                follows_all=parts.config.kvstore_decode_saves,
            )
            if next_step is not None:
                self.connector.follow_steps(next_step)

    @property
    def use(self) -> StoreUse:
        """What the store was used for; all zero without one."""
        return StoreUse() if self.connector is None else self.connector.use

    def between(self, before: Sequence[KVConnector], *after: KVConnector) -> KVConnector:
        """Ask the store after some connectors and before others; all save."""
        connectors = [*before, *([] if self.connector is None else [self.connector]), *after]
        return connectors[0] if len(connectors) == 1 else MultiConnector(connectors)

    async def close(self) -> None:
        """End loads and saves, and wait for them."""
        if self.connector is not None:
            await self.connector.aclose()


def _options(parts: Parts) -> StoreOptions:
    config = parts.config
    return StoreOptions(
        config.kvstore,
        token=parts.token,
        tls=parts.tls,
        replication=config.kvstore_replication,
        hot_loads_per_s=config.kvstore_hot_loads,
        redis_ttl_s=config.kvstore_ttl_s,
        discovery=(config.redis, config.redis_prefix),
    )
