"""The connectors of one instance: those of ``--kv-connectors``, the KV store, and the role's hand-over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

from baton.config.flags import options_by_name
from baton.engine.device_memory import available_bytes
from baton.errors import BusyError, ConfigError
from baton.kv_cache.arena import arena_bytes
from baton.kv_cache.connector import GuardedConnector, KVConnector
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
    """All connectors of an instance, combined into one.

    For loads, the named connectors are asked first, then the KV store, then the role's hand-over; all of them save.

    Args:
        context: The instance's parts.

    Attributes:
        connector: The combined connector, for the engine.
        fetcher: Copies blocks of other instances and of the store into the pool.
        store_use: Counters of the KV store's use; all zero without a store.
        uses: Counters of the use of Baton's own named connectors, by name.

    Raises:
        ConfigError: A connector is not installed, fails to start or has invalid options.
    """

    def __init__(self, context: InstanceContext) -> None:
        self.fetcher = BlockFetcher(
            context.model.shards,
            context.model.fingerprint,
            kinds=context.config.pipes,
            max_threads=context.config.fetch_threads,
            links=context.links,
        )
        context.metrics.watch_pipes(self.fetcher.rests)
        self._store: StoreConnector | None = None
        if context.config.kvstore:
            self._store = open_connector(
                _store_options(context),
                pool=_pool(context),
                fingerprint=context.model.fingerprint,
                fetcher=self.fetcher,
                loop=context.loop,
                wake=context.wake_engine,
                follows_all=context.config.kvstore_decode_saves,
            )
        self._named, self.uses = _named_connectors(context)
        self._role = _RoleConnector()
        self.store_use = StoreUse() if self._store is None else self._store.use
        connectors = [*self._named, *([] if self._store is None else [self._store]), self._role]
        self.connector: KVConnector = connectors[0] if len(connectors) == 1 else MultiConnector(connectors)

    def set_role(self, role: InstanceRole) -> None:
        """Switch to a role's hand-over; call it in the engine's thread, or before that runs.

        Raises:
            BusyError: The previous role's hand-over has loads or saves outstanding.
        """
        self._role.switch(role.connector)
        if self._store is not None:
            self._store.follow_steps(role.next_step)

    async def close(self) -> None:
        """Cancel loads and saves and wait for their end; ``connector`` was closed before."""
        for connector in self._named:
            if isinstance(connector, StoreConnector):
                await connector.aclose()
        if self._store is not None:
            await self._store.aclose()
        await asyncio.to_thread(self.fetcher.close)


class _RoleConnector(GuardedConnector):
    """Hand-over of the instance's current role."""

    def __init__(self) -> None:
        super().__init__(KVConnector())

    def switch(self, connector: KVConnector) -> None:
        """Replace the connector.

        Raises:
            BusyError: The current one has loads or saves outstanding.
        """
        if self._connector.has_pending():
            raise BusyError("KV of this instance is being loaded, or kept for others", retry_after_s=1.0)
        self._connector = connector
        self.name = type(connector).__name__


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
    """Return the connectors of ``--kv-connectors``, and counters of the use of Baton's own ones by name."""
    config = context.config
    options = options_by_name(config.kv_connectors, config.kv_connector_options, field=FIELD)
    connectors: list[KVConnector] = []
    uses: dict[str, StoreUse] = {}
    try:
        for name in config.kv_connectors:
            if name in BUILT_IN:
                built_in = BUILT_IN[name](context, options[name])
                uses[name] = built_in.use
                connectors.append(built_in)
            else:
                connectors.append(make_connector(name, _connector_context(context, options[name]), BUILT_IN))
    except BaseException:
        for connector in connectors:
            connector.close()
        raise
    return connectors, uses


def _connector_context(context: InstanceContext, options: Options) -> ConnectorContext:
    return ConnectorContext(
        instance_id=InstanceId(context.config.instance_id or str(context.role)),
        role=context.role,
        shards=context.model.shards,
        fingerprint=context.model.fingerprint,
        loop=context.loop,
        wake=context.wake_engine,
        options=options,
    )


def _shared_storage(context: InstanceContext, options: Options) -> StoreConnector:
    """Files in a directory: ``path``, ``max_bytes`` (64 GiB), ``sync`` (off), ``threads`` (4)."""
    known = _with_defaults("shared_storage", options, path="", max_bytes=str(64 << 30), sync="off", threads="4")
    if not known["path"]:
        raise ConfigError("the shared_storage connector needs shared_storage.path", field=FIELD)
    if known["sync"] not in ("on", "off"):
        raise ConfigError(f"shared_storage.sync must be on or off, got {known['sync']!r}", field=FIELD)
    threads = _number("shared_storage.threads", known["threads"], most=256)
    fingerprint = context.model.fingerprint
    stored = fingerprint.kept_as(context.config.kv_tier_dtype)
    folder = BlockFolder(
        Path(known["path"]),
        stored,
        max_bytes=_number("shared_storage.max_bytes", known["max_bytes"], most=_MAX_BYTES),
        sync=known["sync"] == "on",
    )
    files = FileStore(
        folder,
        context.model.shards,
        fingerprint,
        threads=threads,
        blocks_per_call=StoreLimits().blocks_per_call,
        stored=stored,
    )
    return _local_connector(context, files)


def _offload(context: InstanceContext, options: Options) -> StoreConnector:
    """Host memory: ``bytes`` (1 GiB)."""
    known = _with_defaults("offload", options, bytes=str(1 << 30))
    size = _number("offload.bytes", known["bytes"], most=_MAX_BYTES)
    stored = context.model.fingerprint.kept_as(context.config.kv_tier_dtype)
    block_bytes = stored.block_bytes
    num_blocks = size // block_bytes
    if not num_blocks:
        raise ConfigError(f"offload.bytes is {size}, less than a block of {block_bytes}", field=FIELD)
    available = available_bytes()
    if arena_bytes(num_blocks, block_bytes) > available:
        raise ConfigError(f"offload.bytes is {size}, but only {available} bytes are free", field=FIELD)
    staging = StagingArena(context.model.shards, context.model.fingerprint, num_blocks, stored=stored)
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
        wake=context.wake_engine,
        follows_all=True,
    )


def _pool(context: InstanceContext) -> SavedPool:
    return SavedPool(context.model.arena, context.engine_config.block_size, context.get_source)


def _with_defaults(name: str, options: Options, **defaults: str) -> dict[str, str]:
    """Return a connector's options with defaults filled in.

    Raises:
        ConfigError: There is an unknown option.
    """
    if unknown := sorted(set(options) - set(defaults)):
        message = f"the {name} connector has no option {unknown[0]!r} (there are: {', '.join(defaults)})"
        raise ConfigError(message, field=FIELD)
    return {**defaults, **options}


def _number(name: str, text: str, *, most: int) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= most):
        raise ConfigError(f"{name} must be from 1 to {most}, got {text!r}", field=FIELD)
    return int(text)
