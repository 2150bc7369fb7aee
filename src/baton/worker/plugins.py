"""The KV connectors that ``--kv-connectors`` names: Baton's own, and those of other packages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from baton.engine.executor.memory import available_bytes
from baton.errors import ConfigError
from baton.kv_cache.arena import arena_bytes
from baton.kv_cache.connector import KVConnector
from baton.kv_transfer.connector.offload.block_folder import BlockFolder
from baton.kv_transfer.connector.offload.host_memory import HostMemory, OffloadConnector
from baton.kv_transfer.connector.offload.shared_storage import SharedStorage
from baton.kv_transfer.connector.offload.staging import SideArena
from baton.kv_transfer.connector.registry import ConnectorContext, make_connector, parse_options
from baton.kv_transfer.connector.store.backed import BackedConnector, SavedPool
from baton.kv_transfer.connector.store.use import LocalOptions, StoreUse
from baton.types import InstanceId
from baton.worker.instance import Parts

Options = Mapping[str, str]
FIELD = "kv_connector_options"
_MAX_BYTES = 1 << 60


class PluginConnectors:
    """The connectors that the configuration names.

    Args:
        parts: The instance's parts.

    Attributes:
        connectors: In the order of the configuration.
        uses: What Baton's own ones were used for, by their names.

    Raises:
        ConfigError: One is not installed, does not start or does not want its options.
    """

    def __init__(self, parts: Parts) -> None:
        config = parts.config
        options = parse_options(config.kv_connectors, config.kv_connector_options)
        self.connectors: list[KVConnector] = []
        self.uses: dict[str, StoreUse] = {}
        try:
            for name in config.kv_connectors:
                if name in BUILT_IN:
                    connector = BUILT_IN[name](parts, options[name])
                    self.uses[name] = connector.use
                    self.connectors.append(connector)
                else:
                    self.connectors.append(make_connector(name, _context(parts, options[name])))
        except BaseException:
            for made in self.connectors:
                made.close()
            raise

    async def close(self) -> None:
        """Wait for what Baton's own ones do; all of them were closed before."""
        for connector in self.connectors:
            if isinstance(connector, BackedConnector):
                await connector.aclose()


def _context(parts: Parts, options: Options) -> ConnectorContext:
    return ConnectorContext(
        instance_id=InstanceId(parts.config.instance_id or str(parts.role)),
        role=parts.role,
        shards=parts.shards,
        fingerprint=parts.executor.fingerprint,
        loop=parts.loop,
        wake=parts.wake,
        options=options,
    )


def _shared_storage(parts: Parts, options: Options) -> BackedConnector:
    """Files in a directory: ``path``, ``max_bytes`` (64 GiB), ``sync`` (off), ``threads`` (4)."""
    known = _known("shared_storage", options, path="", max_bytes=str(64 << 30), sync="off", threads="4")
    if not known["path"]:
        raise ConfigError("the shared_storage connector needs shared_storage.path", field=FIELD)
    if known["sync"] not in ("on", "off"):
        raise ConfigError(f"shared_storage.sync must be on or off, got {known['sync']!r}", field=FIELD)
    threads = _number("shared_storage.threads", known["threads"], most=256)
    fingerprint = parts.executor.fingerprint
    folder = BlockFolder(
        Path(known["path"]),
        fingerprint.undivided(),
        max_bytes=_number("shared_storage.max_bytes", known["max_bytes"], most=_MAX_BYTES),
        sync=known["sync"] == "on",
    )
    limits = LocalOptions(known["path"])
    files = SharedStorage(folder, parts.shards, fingerprint, threads=threads, blocks_per_call=limits.blocks_per_call)
    return BackedConnector(
        files,
        limits,
        pool=_pool(parts),
        use=StoreUse(),
        loop=parts.loop,
        wake=parts.wake,
        follows_all=True,
    )


def _offload(parts: Parts, options: Options) -> BackedConnector:
    """Host memory: ``bytes`` (1 GiB)."""
    known = _known("offload", options, bytes=str(1 << 30))
    size = _number("offload.bytes", known["bytes"], most=_MAX_BYTES)
    fingerprint = parts.executor.fingerprint
    block_bytes = fingerprint.undivided().block_bytes
    num_blocks = size // block_bytes
    if not num_blocks:
        raise ConfigError(f"offload.bytes is {size}, less than a block of {block_bytes}", field=FIELD)
    available = available_bytes()
    if arena_bytes(num_blocks, block_bytes) > available:
        raise ConfigError(f"offload.bytes is {size}, but only {available} bytes are free", field=FIELD)
    side = SideArena(parts.shards, fingerprint, num_blocks)
    side.arena.touch()
    host = HostMemory(side, parts.tiers.tell)
    parts.tiers.add(host.snapshot)
    return OffloadConnector(
        host,
        LocalOptions("host memory"),
        pool=_pool(parts),
        use=StoreUse(),
        loop=parts.loop,
        wake=parts.wake,
    )


BUILT_IN: Mapping[str, Callable[[Parts, Options], BackedConnector]] = {
    "shared_storage": _shared_storage,
    "offload": _offload,
}


def _pool(parts: Parts) -> SavedPool:
    return SavedPool(parts.arena, parts.engine_config.block_size, parts.source)


def _known(name: str, options: Options, **defaults: str) -> dict[str, str]:
    if unknown := sorted(set(options) - set(defaults)):
        message = f"the {name} connector has no option {unknown[0]!r} (there are: {', '.join(defaults)})"
        raise ConfigError(message, field=FIELD)
    return {**defaults, **options}


def _number(name: str, text: str, *, most: int) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= most):
        raise ConfigError(f"{name} must be from 1 to {most}, got {text!r}", field=FIELD)
    return int(text)
