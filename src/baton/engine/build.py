"""From a configuration to an engine that runs, in steps that services can take apart."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from baton.config import EngineConfig
from baton.engine.core import EngineCore
from baton.engine.memory import available_bytes, plan_kv_blocks
from baton.engine.model_runner import ModelRunner
from baton.errors import ConfigError
from baton.kv.arena import KVArena, arena_bytes
from baton.kv.connector import KVConnector
from baton.kv.events import KVEvent

_log = logging.getLogger(__name__)


def load_runner(config: EngineConfig) -> ModelRunner:
    """Load the model. Sets this process's number of intra-op threads, which torch has only one of.

    Raises:
        ConfigError: The model can't be loaded or served; names the field.
    """
    torch.set_num_threads(config.threads)
    return ModelRunner(config)


def make_arena(config: EngineConfig, runner: ModelRunner) -> KVArena:
    """Allocate the KV pool and bind the model to it.

    Raises:
        ConfigError: No pool that is worth it fits into memory, or not the one that was asked for.
    """
    blocks = plan_kv_blocks(config, runner)
    wanted, available = arena_bytes(blocks, runner.layout.block_bytes), available_bytes(runner.device)
    if wanted > available:
        # Touching it would end this process, or another one, without a word.
        raise ConfigError(
            f"{blocks} KV blocks take {wanted / 2**20:.0f} MiB, but only {available / 2**20:.0f} MiB are free",
            field="kv_blocks",
        )
    arena = KVArena(blocks, runner.layout.block_bytes)
    arena.touch()
    runner.bind(arena)
    _log.info("KV pool: %d blocks of %d tokens, %d bytes each", blocks, config.block_size, runner.layout.block_bytes)
    return arena


def build_engine(
    config: EngineConfig,
    connector_factory: Callable[[ModelRunner, KVArena], KVConnector] | None = None,
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
    arena = make_arena(config, runner)
    connector = connector_factory(runner, arena) if connector_factory is not None else None
    return EngineCore(config, runner, arena, connector=connector, on_events=on_events)
