"""The connectors of one instance: those that ``--kv-connectors`` names, its KV store, and its role's hand-over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

from baton.config.flags import options_by_name
from baton.engine.device_memory import available_bytes
from baton.errors import BusyError, ConfigError
from baton.kv_cache.arena import arena_bytes
from baton.kv_cache.connector import GuardedConnector, KVConnector
from baton.kv_cache.fingerprint import Fingerprint
from baton.kv_transfer.blocks import BlockFetcher
from baton.kv_transfer.connector.multi import MultiConnector
from baton.kv_transfer.connector.registry import ConnectorContext, make_connector
from baton.kv_transfer.connector.store.backend import StoreBackend, StoreLimits, StoreOptions, StoreUse
from baton.kv_transfer.connector.store.connector import SavedPool, StoreConnector, open_connector
from baton.kv_transfer.connector.store.files import BlockFolder, FileStore
from baton.kv_transfer.connector.store.host_memory import HostMemoryStore, StagingArena
from baton.types import InstanceId
from baton.worker.context import InstanceContext, InstanceRole

Options = Mapping[str, str]
FIELD = "kv_connector_options"
_MAX_BYTES = 1 << 60


class InstanceConnectors:
    """All of an instance's connectors, as one.

    The named ones are asked first, then the KV store, then the role's own; all save.

    Args:
        context: The instance's parts.

    Attributes:
        connector: The engine's.
        fetcher: Copies other instances' and the store's blocks into the pool.
        store_use: What the store was used for; all zero without one.
        uses: What Baton's own named ones were used for, by their names.

    Raises:
        ConfigError: One is not installed, does not start or does not want its options.
    """

    def __init__(self, context: InstanceContext) -> None:
        self.fetcher = BlockFetcher(
            context.shards,
            context.executor.fingerprint,
            kinds=context.config.pipes,
            max_threads=context.config.fetch_threads,
            links=context.links,
        )
        self._store: StoreConnector | None = None
        if context.config.kvstore:
            self._store = open_connector(
                _store_options(context),
                pool=_pool(context),
                fingerprint=context.executor.fingerprint,
                fetcher=self.fetcher,
                loop=context.loop,
                wake=context.wake,
                follows_all=context.config.kvstore_decode_saves,
            )
        self._named, self.uses = _named_connectors(context)
        self._role = _RoleConnector()
        self.store_use = StoreUse() if self._store is None else self._store.use
        connectors = [*self._named, *([] if self._store is None else [self._store]), self._role]
        self.connector: KVConnector = connectors[0] if len(connectors) == 1 else MultiConnector(connectors)

    def enter(self, role: InstanceRole) -> None:
        """Use a role's hand-over from now on; in the engine's thread, or before it runs.

        Raises:
            BusyError: The one before has something outstanding.
        """
        self._role.switch(role.connector)
        if self._store is not None:
            self._store.follow_steps(role.next_step)

    async def close(self) -> None:
        """End loads and saves and wait for them; ``connector`` was closed before."""
        for connector in self._named:
            if isinstance(connector, StoreConnector):
                await connector.aclose()
        if self._store is not None:
            await self._store.aclose()
        await asyncio.to_thread(self.fetcher.close)


class _RoleConnector(GuardedConnector):
    """The hand-over of the role that the instance has now."""

    def __init__(self) -> None:
        super().__init__(KVConnector())

    def switch(self, to: KVConnector) -> None:
        """Exchange it.

        Raises:
            BusyError: It has something outstanding.
        """
        if self._connector.has_pending():
            raise BusyError("KV of this instance is being loaded, or kept for others", retry_after_s=1.0)
        self._connector, self.name = to, type(to).__name__


def _store_options(context: InstanceContext) -> StoreOptions:
    config = context.config
    return StoreOptions(
        config.kvstore,
        token=context.token,
        tls=context.tls,
        replication=config.kvstore_replication,
        hot_loads_per_s=config.kvstore_hot_loads,
        redis_ttl_s=config.kvstore_ttl_s,
        kv_dtype=config.kv_tier_dtype,
        discovery=(config.redis, config.redis_prefix),
    )


def _named_connectors(context: InstanceContext) -> tuple[list[KVConnector], dict[str, StoreUse]]:
    """Return the connectors that the configuration names, and what Baton's own ones were used for."""
    config = context.config
    options = options_by_name(config.kv_connectors, config.kv_connector_options, field=FIELD)
    connectors: list[KVConnector] = []
    uses: dict[str, StoreUse] = {}
    try:
        for name in config.kv_connectors:
            if name in BUILT_IN:
                connector = BUILT_IN[name](context, options[name])
                uses[name] = connector.use
                connectors.append(connector)
            else:
                connectors.append(make_connector(name, _connector_context(context, options[name]), BUILT_IN))
    except BaseException:
        for made in connectors:
            made.close()
        raise
    return connectors, uses


def _connector_context(context: InstanceContext, options: Options) -> ConnectorContext:
    return ConnectorContext(
        instance_id=InstanceId(context.config.instance_id or str(context.role)),
        role=context.role,
        shards=context.shards,
        fingerprint=context.executor.fingerprint,
        loop=context.loop,
        wake=context.wake,
        options=options,
    )


def _stored_fingerprint(context: InstanceContext) -> Fingerprint:
    """Return the fingerprint of the blocks that files and host memory store.

    Raises:
        ConfigError: This instance's KV cannot be converted to it; names ``kv_tier_dtype``.
    """
    return context.executor.fingerprint.kept_as(context.config.kv_tier_dtype)


def _shared_storage(context: InstanceContext, options: Options) -> StoreConnector:
    """Files in a directory: ``path``, ``max_bytes`` (64 GiB), ``sync`` (off), ``threads`` (4)."""
    known = _known("shared_storage", options, path="", max_bytes=str(64 << 30), sync="off", threads="4")
    if not known["path"]:
        raise ConfigError("the shared_storage connector needs shared_storage.path", field=FIELD)
    if known["sync"] not in ("on", "off"):
        raise ConfigError(f"shared_storage.sync must be on or off, got {known['sync']!r}", field=FIELD)
    threads = _number("shared_storage.threads", known["threads"], most=256)
    fingerprint = context.executor.fingerprint
    stored = _stored_fingerprint(context)
    folder = BlockFolder(
        Path(known["path"]),
        stored,
        max_bytes=_number("shared_storage.max_bytes", known["max_bytes"], most=_MAX_BYTES),
        sync=known["sync"] == "on",
    )
    files = FileStore(
        folder,
        context.shards,
        fingerprint,
        threads=threads,
        blocks_per_call=StoreLimits().blocks_per_call,
        stored=stored,
    )
    return _local_connector(context, files)


def _offload(context: InstanceContext, options: Options) -> StoreConnector:
    """Host memory: ``bytes`` (1 GiB)."""
    known = _known("offload", options, bytes=str(1 << 30))
    size = _number("offload.bytes", known["bytes"], most=_MAX_BYTES)
    stored = _stored_fingerprint(context)
    block_bytes = stored.block_bytes
    num_blocks = size // block_bytes
    if not num_blocks:
        raise ConfigError(f"offload.bytes is {size}, less than a block of {block_bytes}", field=FIELD)
    available = available_bytes()
    if arena_bytes(num_blocks, block_bytes) > available:
        raise ConfigError(f"offload.bytes is {size}, but only {available} bytes are free", field=FIELD)
    staging = StagingArena(context.shards, context.executor.fingerprint, num_blocks, stored=stored)
    staging.arena.touch()
    host = HostMemoryStore(staging, context.events.append)
    context.tiers.append(host.snapshot)
    return _local_connector(context, host)


BUILT_IN: Mapping[str, Callable[[InstanceContext, Options], StoreConnector]] = {
    "shared_storage": _shared_storage,
    "offload": _offload,
}


def _local_connector(context: InstanceContext, backend: StoreBackend) -> StoreConnector:
    return StoreConnector(
        backend,
        StoreLimits(),
        pool=_pool(context),
        use=StoreUse(),
        loop=context.loop,
        wake=context.wake,
        follows_all=True,
    )


def _pool(context: InstanceContext) -> SavedPool:
    return SavedPool(context.arena, context.engine_config.block_size, context.source)


def _known(name: str, options: Options, **defaults: str) -> dict[str, str]:
    if unknown := sorted(set(options) - set(defaults)):
        message = f"the {name} connector has no option {unknown[0]!r} (there are: {', '.join(defaults)})"
        raise ConfigError(message, field=FIELD)
    return {**defaults, **options}


def _number(name: str, text: str, *, most: int) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= most):
        raise ConfigError(f"{name} must be from 1 to {most}, got {text!r}", field=FIELD)
    return int(text)
