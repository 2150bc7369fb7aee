"""From a configuration to an engine that runs, in steps that services can call one by one.

The pool takes what a trial run leaves of the memory, a fraction of it, and never more than can be used.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

import psutil
import torch

from baton.config import EngineConfig
from baton.engine.core import EngineCore
from baton.engine.device import ComputeDevice, rank_device
from baton.engine.device_memory import STAGING_BYTES, free_bytes, new_arena
from baton.engine.executor.base import Executor, load_executor
from baton.engine.grammar.constraint import GrammarCompiler, load_compiler
from baton.engine.scheduler import PROMPT_LOGPROB_ROWS
from baton.engine.speculation.methods import load_drafter
from baton.engine.speculation.speculator import MOST_ROWS
from baton.errors import ConfigError
from baton.kv_cache.arena import arena_bytes
from baton.kv_cache.layout import KVLayout
from baton.kv_cache.shards import KVShards, shard_layout
from baton.tokenizer.model_files import model_directory

log = logging.getLogger(__name__)

TRIAL_SECONDS = 0.3
"""About how long the measured run may take; its memory is extrapolated to a full batch."""
FIRST_TRIAL_TOKENS = 32


def make_arena(config: EngineConfig, executor: Executor, *, private: bool = False) -> KVShards:
    """Allocate the KV pool, one arena per rank, and bind the model to it.

    Args:
        config: Says how many blocks.
        executor: The model.
        private: No other process will read the pool, apart from other ranks.

    Raises:
        ConfigError: No pool that is worth it fits into memory, or not the one that was asked for.
    """
    devices = _rank_devices(config, executor)
    blocks = plan_kv_blocks(config, executor)
    layouts = _layouts(config, executor)
    groups = executor.layout.num_groups
    # The one more is never written: it stands in tables where a block was given back.
    arena_blocks = blocks if groups == 1 else blocks * groups + 1
    for memory, ranks in _ranks_by_memory(devices).items():
        wanted = sum(arena_bytes(arena_blocks, layouts[rank].block_bytes) for rank in ranks)
        available = free_bytes(memory)
        if wanted > available:
            # To touch it would have this process, or another one, killed for memory.
            fit = max(0, available // (wanted // blocks))
            on = f" on {memory}" if len(devices) > len(ranks) else ""
            raise ConfigError(
                f"{blocks} KV blocks take {wanted / 2**20:.0f} MiB{on}, but only {available / 2**20:.0f} MiB are free: "
                f"{fit} would fit",
                field="kv_blocks",
            )
    private = private and len(layouts) == 1
    arenas = [
        new_arena(device, arena_blocks, layout.block_bytes, private=private, leader=devices[0])
        for device, layout in zip(devices, layouts, strict=True)
    ]
    shards = KVShards(arenas)
    try:
        shards.touch()
        executor.bind(shards)
        if devices[0].is_cuda and (warm_up := getattr(executor, "warm_up", None)) is not None:
            warm_up()
    except BaseException:
        shards.close()
        raise
    each = "+".join(str(layout.block_bytes) for layout in layouts)
    log.info("KV pool: %d blocks of %d tokens, %s bytes each, %d layer groups", blocks, config.block_size, each, groups)
    return shards


def build_engine(config: EngineConfig) -> EngineCore:
    """Load a model, allocate its pool and put an engine over both, without a connector.

    Raises:
        ConfigError: The configuration can't work; names the field.
    """
    executor = load_executor(config)
    try:
        grammars = load_grammars(config, executor)
        drafter = load_drafter(config, executor)
        try:
            shards = make_arena(config, executor, private=True)
            return EngineCore(config, executor, shards, grammars=grammars, drafter=drafter)
        except BaseException:
            if drafter is not None:
                drafter.close()
            raise
    except BaseException:
        executor.close()
        raise


def load_grammars(config: EngineConfig, executor: Executor) -> GrammarCompiler | None:
    """Return what compiles grammars for a loaded model; ``None``: it has no support for them.

    Raises:
        ConfigError: ``grammar_backend`` was named, and cannot work.
    """
    return load_compiler(
        config.grammar_backend,
        model_directory(config.model),
        vocab_size=executor.vocab_size,
        eos_token_ids=executor.eos_token_ids,
    )


def _layouts(config: EngineConfig, executor: Executor) -> list[KVLayout]:
    """The layouts of all ranks' blocks."""
    groups = executor.layout.groups
    return [shard_layout(executor.geometry, spec, config.block_size, groups) for spec in executor.shards]


# The size of the pool


def plan_kv_blocks(config: EngineConfig, executor: Executor) -> int:
    """Return the number of blocks of the KV pool: ``kv_blocks``, or what the memory fraction holds.

    If less than one longest sequence fits, ``executor.max_model_len`` is lowered to what does, with a warning.

    Raises:
        ConfigError: Not even one block fits, or less than a sequence of the ``max_model_len`` that was asked for.
    """
    blocks = _blocks_that_fit(config, executor) if config.kv_blocks is None else config.kv_blocks
    if blocks < 1:
        raise ConfigError(
            "no memory is left for a single KV block; raise kv_memory_fraction", field="kv_memory_fraction"
        )
    states = 2 * executor.state_blocks  # one is loaded while another one is written
    if states >= blocks:
        raise ConfigError(f"{blocks} KV blocks: two recurrent states take {states}", field="kv_blocks")
    fits = (blocks - states) * config.block_size
    if fits < executor.max_model_len:
        if config.max_model_len is not None:
            raise ConfigError(
                f"the KV pool holds {fits} tokens ({blocks} blocks), less than one sequence of max_model_len "
                f"{config.max_model_len}",
                field="kv_blocks" if config.kv_blocks is not None else "kv_memory_fraction",
            )
        log.warning("the KV pool holds %d tokens: max_model_len lowered from %d", fits, executor.max_model_len)
        executor.max_model_len = fits
    return blocks


def _blocks_that_fit(config: EngineConfig, executor: Executor) -> int:
    """Measure a trial run and return how many blocks fit into the configured share of what it leaves."""
    activations = _activation_bytes(config, executor)
    graphs = executor.graph_bytes()
    layouts = _layouts(config, executor)
    staging = STAGING_BYTES if executor.device.type == "cuda" else 0
    states = config.max_num_seqs * executor.state_blocks * executor.layout.block_bytes
    blocks = config.max_num_seqs * (executor.layout.num_blocks_for(executor.max_model_len) + executor.state_blocks)
    for memory, ranks in _ranks_by_memory(_rank_devices(config, executor)).items():
        peaks = sum(activations[rank] for rank in ranks)
        available = free_bytes(memory)
        block_bytes = sum(layouts[rank].block_bytes * layouts[rank].num_groups for rank in ranks)
        usable = config.pool_fraction * max(0, available - peaks - graphs - staging - states)
        blocks = min(int(usable) // block_bytes, blocks)
        log.info(
            "memory of %s: %.0f MiB free after loading, %.0f MiB for activations, %.0f MiB for graphs; %d blocks of %d "
            "bytes",
            *(memory, available / 2**20, peaks / 2**20, graphs / 2**20, blocks, block_bytes),
        )
    return blocks


def _rank_devices(config: EngineConfig, executor: Executor) -> list[ComputeDevice]:
    ranks = len(executor.shards)
    return [rank_device(config.device, rank, ranks) for rank in range(ranks)]


def _ranks_by_memory(devices: list[ComputeDevice]) -> dict[torch.device, list[int]]:
    """Which ranks' pools and activations are in the same memory."""
    ranks_of: dict[torch.device, list[int]] = {}
    for rank, device in enumerate(devices):
        ranks_of.setdefault(device.memory, []).append(rank)
    return ranks_of


def _activation_bytes(config: EngineConfig, executor: Executor) -> list[int]:
    """Peak bytes of a step of ``max_num_batched_tokens`` on each rank, extrapolated from a short one, and of logits."""
    tokens = min(FIRST_TRIAL_TOKENS, config.max_num_batched_tokens, executor.max_model_len)
    executor.trial_run(tokens)
    begin = time.perf_counter()
    peaks = _peak_bytes(executor, tokens)
    per_token = max(1e-9, (time.perf_counter() - begin) / tokens)
    more = min(config.max_num_batched_tokens, executor.max_model_len, int(TRIAL_SECONDS / per_token))
    if more > tokens:
        tokens = more
        peaks = _peak_bytes(executor, more)
    drafts = MOST_ROWS if config.speculative != "none" else 0
    logits = (config.max_num_seqs + PROMPT_LOGPROB_ROWS + drafts) * executor.vocab_size * 4 * 3
    return [int(peak * config.max_num_batched_tokens / tokens) + logits for peak in peaks]


def _peak_bytes(executor: Executor, tokens: int) -> list[int]:
    """Return the peak of each rank; on a CPU a follower's is taken to be as large as the leader's."""
    if executor.device.type == "cuda":
        return executor.peak_bytes(tokens)
    before = _resident_peak(reset=True)
    executor.trial_run(tokens)
    return [max(0, _resident_peak(reset=False) - before)] * len(executor.shards)


def _resident_peak(*, reset: bool) -> int:
    """Peak resident bytes of this process; with ``reset``, forget the past first where the kernel allows it."""
    if reset:
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError as error:
            log.debug("cannot reset the peak of resident memory: %s", error)
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return int(psutil.Process().memory_info().rss)
