"""The KV store beside the point-to-point hand-over, for instances started with ``--kvstore``."""

from __future__ import annotations

from baton.kv.connector import KVConnector
from baton.transport.blocks import BlockFetcher
from baton.transport.connector.multi import MultiConnector
from baton.transport.connector.store import StoreConnector, StoreOptions, StoreUse
from baton.worker.instance import Parts


class StoreSide:
    """A worker's connection to its KV store, or nothing if it has none.

    Args:
        parts: The instance's parts.
        fetcher: Copies blocks into its pool; closed by the caller after :meth:`close`.
    """

    def __init__(self, parts: Parts, fetcher: BlockFetcher) -> None:
        self.connector: StoreConnector | None = None
        if parts.config.kvstore:
            self.connector = StoreConnector(
                StoreOptions(parts.config.kvstore, token=parts.token),
                arena=parts.arena,
                fingerprint=parts.runner.fingerprint,
                fetcher=fetcher,
                loop=parts.loop,
                wake=parts.wake,
                source=parts.source,
            )

    @property
    def use(self) -> StoreUse:
        """What the store was used for; all zero without one."""
        return StoreUse() if self.connector is None else self.connector.use

    def first(self, *others: KVConnector) -> KVConnector:
        """Ask the store before ``others``; all save."""
        connectors = [*([] if self.connector is None else [self.connector]), *others]
        return connectors[0] if len(connectors) == 1 else MultiConnector(connectors)

    async def close(self) -> None:
        """End loads and saves, and wait for them."""
        if self.connector is not None:
            await self.connector.aclose()
