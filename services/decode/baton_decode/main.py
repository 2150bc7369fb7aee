"""``baton-decode``: a decode instance."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from baton.kv_cache.connector import KVConnector
from baton.kv_transfer.blocks import BlockFetcher
from baton.kv_transfer.connector.p2p.consumer import OwnPool, P2PConsumer
from baton.rpc.ticket import Bearer, TicketCheck, read_ticket_key
from baton.types import Role
from baton.worker.dialer import GrpcPrefillDialer
from baton.worker.instance import SERVICE, Parts
from baton.worker.main import main as run_worker
from baton.worker.plugins import PluginConnectors
from baton.worker.servicer import WorkerContext
from baton.worker.store import StoreSide
from baton_decode.servicer import DecodeServicer


class DecodeParts:
    """A decode instance fetches KV from the store, if it has one, and from prefill instances."""

    def __init__(self, parts: Parts) -> None:
        config, fingerprint = parts.config, parts.executor.fingerprint
        self._has_tickets = bool(config.ticket_key_file)
        self._fetcher = BlockFetcher(
            parts.shards, fingerprint, kinds=config.pipes, max_threads=config.fetch_threads, links=parts.links
        )
        self._dialer = GrpcPrefillDialer(fingerprint, parts.token, parts.tls)
        self._loader = P2PConsumer(
            pool=OwnPool(self._fetcher, parts.arena, parts.engine_config.block_size, parts.source),
            dialer=self._dialer,
            loop=parts.loop,
            wake=parts.wake,
            threshold=config.remote_prefill_threshold,
            stall_s=config.prefill_stall_s,
        )
        self._store = StoreSide(parts, self._fetcher)
        self._plugins = PluginConnectors(parts)
        self.connector: KVConnector = self._store.between(self._plugins.connectors, self._loader)

    @property
    def open_calls(self) -> frozenset[str]:
        """Generate, where it wants a ticket: clients have tickets and no token."""
        return frozenset({f"/{SERVICE}/Generate"}) if self._has_tickets else frozenset()

    def servicer(self, context: WorkerContext) -> DecodeServicer:
        """Build the decode calls."""
        context.metrics.watch_store(self._store.use)
        context.metrics.watch_connectors(self._plugins.uses)
        key = read_ticket_key(context.config.ticket_key_file)
        bearer = Bearer(context.instance_id, context.arena.epoch)
        return DecodeServicer(context, self._loader, TicketCheck(key, bearer) if key is not None else None)

    async def close(self) -> None:
        """End loads, then close connections."""
        self.connector.close()
        await self._plugins.close()
        await self._store.close()
        await self._dialer.close()
        await asyncio.to_thread(self._fetcher.close)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    return run_worker(Role.DECODE, DecodeParts, argv)


if __name__ == "__main__":
    sys.exit(main())
