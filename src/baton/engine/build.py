"""From a configuration to an engine that runs, in steps that services can call one by one."""

from __future__ import annotations

import logging
from collections.abc import Callable

from baton.config import EngineConfig
from baton.engine.core import EngineCore
from baton.engine.executor.base import Executor, load_executor
from baton.engine.executor.memory import available_bytes, plan_kv_blocks
from baton.errors import ConfigError
from baton.kv_cache.arena import HostArena, arena_bytes
from baton.kv_cache.connector import KVConnector
from baton.kv_cache.events import KVEvent
from baton.kv_cache.shards import KVShards, shard_layout

_log = logging.getLogger(__name__)


def make_arena(config: EngineConfig, executor: Executor, *, private: bool = False) -> KVShards:
    """Allocate the KV pool, one arena per rank, and bind the model to it.

    Args:
        config: Says how many blocks.
        executor: The model.
        private: No other process will read the pool, apart from other ranks.

    Raises:
        ConfigError: No pool that is worth it fits into memory, or not the one that was asked for.
    """
    blocks = plan_kv_blocks(config, executor)
    layouts = [shard_layout(executor.geometry, spec, config.block_size) for spec in executor.shards]
    wanted = sum(arena_bytes(blocks, layout.block_bytes) for layout in layouts)
    available = available_bytes()
    if wanted > available:
        # To touch it would have this process, or another one, killed for memory.
        raise ConfigError(
            f"{blocks} KV blocks take {wanted / 2**20:.0f} MiB, but only {available / 2**20:.0f} MiB are free",
            field="kv_blocks",
        )
    shards = KVShards(
        [HostArena(blocks, layout.block_bytes, private=private and len(layouts) == 1) for layout in layouts]
    )
    try:
        shards.touch()
        executor.bind(shards)
    except BaseException:
        shards.close()
        raise
    each = "+".join(str(layout.block_bytes) for layout in layouts)
    _log.info("KV pool: %d blocks of %d tokens, %s bytes each", blocks, config.block_size, each)
    return shards


def build_engine(
    config: EngineConfig,
    connector_factory: Callable[[Executor, KVShards], KVConnector] | None = None,
    on_events: Callable[[list[KVEvent]], None] | None = None,
) -> EngineCore:
    """Load a model, allocate its pool and put an engine over both.

    Args:
        config: Model, pool and scheduler.
        connector_factory: Makes the connector, which needs the model's fingerprint and the pool.
        on_events: Called with each step's KV events.

    Raises:
        ConfigError: The configuration can't work; names the field.
    """
    executor = load_executor(config)
    try:
        shards = make_arena(config, executor, private=connector_factory is None)
        connector = connector_factory(executor, shards) if connector_factory is not None else None
        return EngineCore(config, executor, shards, connector=connector, on_events=on_events)
    except BaseException:
        executor.close()
        raise
