"""Opens the tiers behind memory that a configuration asks for."""

from __future__ import annotations

import logging
import time

from baton.errors import ConfigError
from baton_kvstore.config import TierConfig
from baton_kvstore.tiers.chain import Chain, Link
from baton_kvstore.tiers.disk.log import DiskLog
from baton_kvstore.tiers.disk.tier import DiskTier
from baton_kvstore.tiers.remote.backend import HEADER_BYTES
from baton_kvstore.tiers.remote.object_backend import ObjectBackend
from baton_kvstore.tiers.remote.redis_backend import MAX_VALUE_BYTES, RedisBackend, RedisOptions
from baton_kvstore.tiers.remote.tier import RemoteOptions, RemoteTier

_QUEUE_BYTES = 64 << 20
_FIND_S = 1.0
"""A look-up that takes so long is a failure: a hung object store must be found out while Gets still wait for it."""
_READERS = 2
REDIS_BATCH_BYTES = 1 << 20
"""More is slower: redis-py keeps the answers of a pipeline in one buffer, which it copies as it grows."""
_OBJECT_BATCH_BYTES = 32 << 20
"""Enough for many requests side by side."""


def open_chain(config: TierConfig) -> Chain | None:
    """Open disk, Redis and object store, in this order, as far as they are asked for; ``None``: none is.

    Neither Redis nor the object store need be there yet.

    Raises:
        ConfigError: A package is missing, a URL cannot be read, or the disk's directory cannot be used.
    """
    redis, objects = _redis(config), _objects(config)
    disk = open_disk(config)
    links: list[Link] = []
    if disk is not None:
        links.append(Link(disk, config.disk_write == "all", config.disk_readers))
    if redis is not None:
        options = RemoteOptions(
            "redis",
            durable=False,
            queue_bytes=queue_bytes(config),
            index_blocks=config.known_blocks,
            batch_bytes=REDIS_BATCH_BYTES,
            max_block_bytes=MAX_VALUE_BYTES - HEADER_BYTES,
            max_bytes=config.redis_bytes,
            absent_s=config.lookup_again_s,
        )
        links.append(Link(RemoteTier(redis, options), config.redis_write == "all", _READERS))
    if objects is not None:
        options = RemoteOptions(
            "object",
            durable=True,
            queue_bytes=queue_bytes(config),
            index_blocks=config.known_blocks,
            batch_bytes=_OBJECT_BATCH_BYTES,
            absent_s=config.lookup_again_s,
        )
        links.append(Link(RemoteTier(objects, options), config.object_write == "all", _READERS))
    if not links:
        return None
    return Chain(links, lookup_timeout_s=config.lookup_timeout_s, raise_after=config.raise_after)


def queue_bytes(config: TierConfig) -> int:
    """Return how many bytes of blocks may wait for a tier: they are pinned in memory."""
    return min(_QUEUE_BYTES, max(1, config.capacity_bytes // 4))


def disk_of(chain: Chain | None) -> DiskTier | None:
    """Return a chain's disk."""
    tiers = [] if chain is None else chain.tiers
    return next((tier for tier in tiers if isinstance(tier, DiskTier)), None)


def _redis(config: TierConfig) -> RedisBackend | None:
    if not config.redis_url:
        return None
    return RedisBackend(
        RedisOptions(
            config.redis_url,
            config.redis_prefix,
            cluster=config.redis_cluster,
            ttl_s=config.redis_ttl_s,
            timeout_s=config.redis_timeout_s,
        )
    )


def _objects(config: TierConfig) -> ObjectBackend | None:
    if not config.object_url:
        return None
    return ObjectBackend(
        config.object_url,
        timeout_s=config.object_timeout_s,
        requests=config.object_requests,
        find_timeout_s=min(config.object_timeout_s, max(_FIND_S, 2 * config.lookup_timeout_s)),
    )


log = logging.getLogger(__name__)

_QUEUE_BYTES = 64 << 20


def open_disk(config: TierConfig) -> DiskTier | None:
    """Open the disk tier; ``None`` if none is asked for.

    Raises:
        ConfigError: Its directory cannot be used.
    """
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
    return DiskTier(
        disk,
        capacity_bytes=config.disk_bytes,
        queue_bytes=min(_QUEUE_BYTES, max(1, config.capacity_bytes // 4)),
        sync_interval_s=config.disk_sync_s,
        checkpoint_interval_s=config.disk_checkpoint_s,
    )
