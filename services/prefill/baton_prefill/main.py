"""``baton-prefill``: a prefill instance."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from baton.kv_cache.connector import KVConnector
from baton.kv_transfer.blocks import BlockFetcher
from baton.kv_transfer.connector.p2p.prefill_stream import Offer
from baton.kv_transfer.connector.p2p.producer import P2PProducer
from baton.kv_transfer.connector.p2p.reuse import P2PReuser
from baton.kv_transfer.connector.p2p.unclaimed import UnclaimedPrompts
from baton.kv_transfer.lookup_buffer.buffer import LookupBuffer
from baton.types import Role
from baton.worker.instance import Parts
from baton.worker.main import main as run_worker
from baton.worker.plugins import PluginConnectors
from baton.worker.servicer import WorkerContext
from baton.worker.store import StoreSide
from baton_prefill.servicer import PrefillServicer, Prompts

OFFER_BUFFER_BYTES = 64 * 1024 * 1024


class PrefillParts:
    """A prefill instance offers what it computes, and shares it through the store, if it has one."""

    def __init__(self, parts: Parts) -> None:
        config = parts.config
        self._buffer: LookupBuffer[Offer] = LookupBuffer(max_bytes=OFFER_BUFFER_BYTES)
        self._producer = P2PProducer(
            arena=parts.arena,
            buffer=self._buffer,
            wake=parts.wake,
            block_size=parts.engine_config.block_size,
            lease_s=config.lease_s,
            max_leases=config.max_leases,
            layers=len(parts.executor.fingerprint.layer_shapes) if config.layerwise else 0,
        )
        self._unclaimed: Prompts = UnclaimedPrompts(
            max_blocks=int(config.unclaimed_share * parts.arena.num_blocks),
            block_bytes=parts.executor.fingerprint.block_bytes,
            block_size=parts.engine_config.block_size,
            lease_s=config.lease_s,
            close_lease=self._producer.close_lease,
        )
        self._producer.on_poll = self._unclaimed.drop_expired
        self._fetcher = BlockFetcher(parts.shards, parts.executor.fingerprint, kinds=config.pipes, links=parts.links)
        producer = self._producer
        self._store = StoreSide(
            parts, self._fetcher, next_step=(lambda: producer.next_step) if config.layerwise else None
        )
        self._reuser = P2PReuser(
            fetcher=self._fetcher,
            loop=parts.loop,
            wake=parts.wake,
            block_size=parts.engine_config.block_size,
            threshold=config.remote_prefill_threshold,
            timeout_s=config.prefill_stall_s,
        )
        self._plugins = PluginConnectors(parts)
        self.connector: KVConnector = self._store.between(self._plugins.connectors, self._reuser, self._producer)

    @property
    def open_calls(self) -> frozenset[str]:
        """None."""
        return frozenset()

    def servicer(self, context: WorkerContext) -> PrefillServicer:
        """Build the prefill calls."""
        context.metrics.watch_store(self._store.use)
        context.metrics.watch_connectors(self._plugins.uses)
        return PrefillServicer(context, self._producer, self._reuser, self._unclaimed)

    async def close(self) -> None:
        """End all leases, then close connections."""
        self.connector.close()
        self._unclaimed.close()
        self._buffer.close()
        await self._plugins.close()
        await self._store.close()
        await asyncio.to_thread(self._fetcher.close)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    return run_worker(Role.PREFILL, PrefillParts, argv)


if __name__ == "__main__":
    sys.exit(main())
