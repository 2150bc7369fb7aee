"""Opens the lower tiers of a configuration: the built-in ones, and those of other packages.

A package registers a factory in the entry point group ``baton.store_tiers``::

    [project.entry-points."baton.store_tiers"]
    tape = "my_package.tape:open_tier"

and a store started with ``--tiers disk,tape`` calls it once with a :class:`TierContext`. Most return
:func:`remote_link` of a :class:`~baton_kvstore.tiers.remote.Backend` of their own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from baton.config.flags import options_by_name
from baton.config.kvstore import BUILT_IN_TIERS, TierConfig
from baton.errors import ConfigError
from baton.plugins import PluginGroup
from baton_kvstore.tiers.chain import Chain, Link
from baton_kvstore.tiers.disk.log import DiskLog
from baton_kvstore.tiers.disk.tier import DiskTier
from baton_kvstore.tiers.remote import HEADER_BYTES, Backend, RemoteOptions, RemoteTier

log = logging.getLogger(__name__)

STORE_TIERS = PluginGroup("tiers", "baton.store_tiers", BUILT_IN_TIERS)
REDIS_BATCH_BYTES = 1 << 20
"""Larger batches are slower: redis-py reads a pipeline's answers into one buffer, which it copies as it grows."""
_QUEUE_BYTES = 64 << 20
_OBJECT_BATCH_BYTES = 32 << 20
"""Large enough for many concurrent requests."""
_FIND_S = 1.0
"""Timeout of a look-up, in seconds: a hung object store must be detected while Gets still wait for it."""
_READERS = 2


@dataclass(frozen=True)
class TierContext:
    """The argument of a tier's factory.

    Attributes:
        config: The store's configuration.
        options: This tier's part of ``--tier-options``, without its name: ``tape.drive=/dev/st0`` sets ``drive``.
    """

    config: TierConfig
    options: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def queue_bytes(self) -> int:
        """Maximum size of the blocks waiting to be written to the tier; they are pinned in memory."""
        return min(_QUEUE_BYTES, max(1, self.config.capacity_bytes // 4))


TierFactory = Callable[[TierContext], Link | None]
"""Opens a tier, or returns ``None`` if the configuration does not enable it."""


def open_chain(config: TierConfig) -> Chain:
    """Open the enabled tiers of ``config.tiers``, in its order.

    A tier's server, such as Redis or an object store, need not be reachable yet.

    Raises:
        ConfigError: A tier is unknown, a package is missing, a URL cannot be parsed, or the disk's directory cannot be
            used.
    """
    options = options_by_name(config.tiers, config.tier_options, field="tier_options")
    links: list[Link] = []
    try:
        for name in config.tiers:
            link = STORE_TIERS.create(name, TierContext(config, options.get(name, {})))
            if name not in BUILT_IN_TIERS and not isinstance(link, Link):
                raise ConfigError(f"the tier {name!r} made a {type(link).__name__}", field="tiers")
            if link is not None:
                links.append(link)
    except BaseException:
        for link in links:
            link.tier.close()
        raise
    return Chain(links, lookup_timeout_s=config.lookup_timeout_s, raise_after=config.raise_after)


def remote_link(name: str, context: TierContext, backend: Backend, *, write_all: bool = False, **options: Any) -> Link:
    """Create a tier over a backend that other nodes share.

    Args:
        name: Name of the tier in metrics and logs.
        context: The factory's argument.
        backend: Stores the blocks.
        write_all: Whether every block is written to the tier, not only those that leave memory.
        options: Other fields of :class:`~baton_kvstore.tiers.remote.RemoteOptions`; ``durable`` is required.
    """
    known = context.config.known_blocks
    chosen = RemoteOptions(name, queue_bytes=context.queue_bytes, index_blocks=known, **options)
    return Link(RemoteTier(backend, chosen), write_all, _READERS)


def open_disk(context: TierContext) -> Link | None:
    """Open the tier on disk.

    Raises:
        ConfigError: Its directory cannot be used.
    """
    config = context.config
    if not config.disk_path:
        return None
    started = time.monotonic()
    try:
        disk = DiskLog(
            config.disk_path,
            max_bytes=config.disk_bytes,
            segment_bytes=config.disk_segment_bytes,
            direct=config.disk_direct,
        )
    except OSError as error:
        raise ConfigError(f"disk_path {config.disk_path} cannot be read: {error}", field="disk_path") from error
    log.info(
        "disk tier in %s: %d blocks, %d bytes in %d segments, opened in %.3f s",
        config.disk_path,
        len(disk.index),
        disk.used_bytes,
        disk.num_segments,
        time.monotonic() - started,
    )
    tier = DiskTier(
        disk,
        queue_bytes=context.queue_bytes,
        sync_interval_s=config.disk_sync_s,
        checkpoint_interval_s=config.disk_checkpoint_s,
    )
    return Link(tier, config.disk_write == "all", config.disk_readers)


def open_redis(context: TierContext) -> Link | None:
    """Open the tier in Redis.

    Raises:
        ConfigError: The package is missing, or the URL cannot be read.
    """
    config = context.config
    if not config.redis_url:
        return None
    from baton_kvstore.tiers.redis_backend import MAX_VALUE_BYTES, RedisBackend, RedisOptions

    backend = RedisBackend(
        RedisOptions(
            config.redis_url,
            config.redis_prefix,
            cluster=config.redis_cluster,
            ttl_s=config.redis_ttl_s,
            timeout_s=config.redis_timeout_s,
        )
    )
    return remote_link(
        "redis",
        context,
        backend,
        durable=False,
        batch_bytes=REDIS_BATCH_BYTES,
        write_all=config.redis_write == "all",
        max_block_bytes=MAX_VALUE_BYTES - HEADER_BYTES,
        max_bytes=config.redis_bytes,
        absent_s=config.lookup_again_s,
    )


def open_objects(context: TierContext) -> Link | None:
    """Open the tier in an object store.

    Raises:
        ConfigError: The package is missing, or the URL cannot be read.
    """
    config = context.config
    if not config.object_url:
        return None
    from baton_kvstore.tiers.object_backend import ObjectBackend

    backend = ObjectBackend(
        config.object_url,
        timeout_s=config.object_timeout_s,
        requests=config.object_requests,
        find_timeout_s=min(config.object_timeout_s, max(_FIND_S, 2 * config.lookup_timeout_s)),
    )
    return remote_link(
        "object",
        context,
        backend,
        durable=True,
        batch_bytes=_OBJECT_BATCH_BYTES,
        write_all=config.object_write == "all",
        absent_s=config.lookup_again_s,
    )
