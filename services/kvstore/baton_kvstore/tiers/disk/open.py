"""Opens the disk tier that a configuration asks for."""

from __future__ import annotations

import logging
import time

from baton.errors import ConfigError
from baton_kvstore.tiers.config import TierConfig
from baton_kvstore.tiers.disk.log import DiskLog
from baton_kvstore.tiers.disk.tier import DiskTier

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
