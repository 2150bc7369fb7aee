"""From a configuration to an engine that runs, in steps that services can take apart."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from baton.config import EngineConfig
from baton.engine.core import EngineCore
from baton.engine.executor.model_runner import ModelRunner
from baton.engine.runner.memory import available_bytes, plan_kv_blocks
from baton.errors import ConfigError
from baton.kv_cache.arena import HostArena, arena_bytes
from baton.kv_cache.connector import KVConnector
from baton.kv_cache.events import KVEvent
from baton.kv_cache.shards import KVShards, shard_layout

_log = logging.getLogger(__name__)


def load_runner(config: EngineConfig) -> ModelRunner:
    """Load the model. Sets this process's number of intra-op threads, which torch has only one of.

    Raises:
        ConfigError: The model can't be loaded or served; names the field.
    """
    torch.set_num_threads(config.threads)
    return ModelRunner(config)


def make_arena(config: EngineConfig, runner: ModelRunner, *, private: bool = False) -> KVShards:
    """Allocate the KV pool, one arena per rank, and bind the model to it.

    Args:
        config: Says how many blocks.
        runner: The model.
        private: No other process will read the pool (the other ranks do, where there are some).

    Raises:
        ConfigError: No pool that is worth it fits into memory, or not the one that was asked for.
    """
    blocks = plan_kv_blocks(config, runner)
    layouts = [shard_layout(runner.geometry, spec, config.block_size) for spec in runner.shards]
    wanted = sum(arena_bytes(blocks, layout.block_bytes) for layout in layouts)
    available = available_bytes(runner.device)
    if wanted > available:
        # Touching it would end this process, or another one, without a word.
        raise ConfigError(
            f"{blocks} KV blocks take {wanted / 2**20:.0f} MiB, but only {available / 2**20:.0f} MiB are free",
            field="kv_blocks",
        )
    shards = KVShards(
        [HostArena(blocks, layout.block_bytes, private=private and len(layouts) == 1) for layout in layouts]
    )
    try:
        shards.touch()
        runner.bind(shards)
    except BaseException:
        shards.close()
        raise
    each = "+".join(str(layout.block_bytes) for layout in layouts)
    _log.info("KV pool: %d blocks of %d tokens, %s bytes each", blocks, config.block_size, each)
    return shards


def build_engine(
    config: EngineConfig,
    connector_factory: Callable[[ModelRunner, KVShards], KVConnector] | None = None,
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
    runner = load_runner(config)
    try:
        shards = make_arena(config, runner, private=connector_factory is None)
        connector = connector_factory(runner, shards) if connector_factory is not None else None
        return EngineCore(config, runner, shards, connector=connector, on_events=on_events)
    except BaseException:
        runner.close()
        raise
