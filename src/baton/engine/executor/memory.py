"""How many KV blocks fit: what a trial run leaves of the memory, a fraction of it, and never more than can be used."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from baton.config import EngineConfig
from baton.engine.executor.base import Executor
from baton.errors import ConfigError
from baton.kv_cache.shards import shard_layout

log = logging.getLogger(__name__)

TRIAL_SECONDS = 0.3
"""About how long the measured run may take; its memory is extrapolated to a full batch."""
FIRST_TRIAL_TOKENS = 32


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """What the sizing found, in bytes over all ranks; for the log and the metrics."""

    available: int
    activations: int
    blocks: int
    block_bytes: int


def plan_kv_blocks(config: EngineConfig, executor: Executor) -> int:
    """Return the number of blocks of the KV pool: ``kv_blocks``, or what the memory fraction holds.

    If less than one longest sequence fits, ``executor.max_model_len`` is lowered to what does, with a warning.

    Raises:
        ConfigError: Not even one block fits, or less than a sequence of the ``max_model_len`` that was asked for.
    """
    if config.kv_blocks is not None:
        blocks = config.kv_blocks
    else:
        report = measure(config, executor)
        blocks = report.blocks
        log.info(
            "KV pool: %d blocks of %d bytes (%.0f MiB free after loading, %.0f MiB for activations)",
            *(blocks, report.block_bytes, report.available / 2**20, report.activations / 2**20),
        )
    if blocks < 1:
        raise ConfigError(
            "no memory is left for a single KV block; raise kv_memory_fraction", field="kv_memory_fraction"
        )
    fits = blocks * config.block_size
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


def measure(config: EngineConfig, executor: Executor) -> MemoryReport:
    """Measure a trial run and return how many blocks fit into the configured share of what it leaves."""
    # All ranks share this host's memory; a follower's activations are taken to be as large as the leader's.
    activations = _activation_bytes(config, executor) * len(executor.shards)
    available = available_bytes()
    layouts = [shard_layout(executor.geometry, spec, config.block_size) for spec in executor.shards]
    block_bytes = sum(layout.block_bytes for layout in layouts)
    usable = config.kv_memory_fraction * max(0, available - activations)
    useful = config.max_num_seqs * executor.layout.num_blocks_for(executor.max_model_len)
    return MemoryReport(available, activations, min(int(usable) // block_bytes, useful), block_bytes)


def available_bytes() -> int:
    """Bytes of host memory that this process can still take, within the limit of its control group."""
    available = int(psutil.virtual_memory().available)
    for limit, used in (_cgroup_v2(), _cgroup_v1()):
        if limit is not None:
            available = min(available, max(0, limit - used))
    return available


def _cgroup_v2(root: Path = Path("/sys/fs/cgroup")) -> tuple[int | None, int]:
    return _cgroup(root / "memory.max", root / "memory.current", root / "memory.stat", "inactive_file")


def _cgroup_v1(root: Path = Path("/sys/fs/cgroup/memory")) -> tuple[int | None, int]:
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat")
    limit, usage, stat = (root / name for name in names)
    return _cgroup(limit, usage, stat, "total_inactive_file")


def _cgroup(limit: Path, usage: Path, stat: Path, cache: str) -> tuple[int | None, int]:
    """Return limit and use in bytes, page cache that can be dropped not counted; ``None``: no limit."""
    try:
        text = limit.read_text().strip()
        if text == "max":
            return None, 0
        used = int(usage.read_text())
        for line in stat.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == cache:
                used -= int(value)
        return int(text), max(0, used)
    except (OSError, ValueError):
        return None, 0


def _activation_bytes(config: EngineConfig, executor: Executor) -> int:
    """Peak bytes of a step of ``max_num_batched_tokens``, extrapolated from a short one, and of its logits."""
    tokens = min(FIRST_TRIAL_TOKENS, config.max_num_batched_tokens, executor.max_model_len)
    executor.trial_run(tokens)
    begin = time.perf_counter()
    peak = _peak_of(executor, tokens)
    per_token = max(1e-9, (time.perf_counter() - begin) / tokens)
    more = min(config.max_num_batched_tokens, executor.max_model_len, int(TRIAL_SECONDS / per_token))
    if more > tokens:
        tokens, peak = more, _peak_of(executor, more)
    logits = config.max_num_seqs * executor.vocab_size * 4 * 3
    return int(peak * config.max_num_batched_tokens / tokens) + logits


def _peak_of(executor: Executor, tokens: int) -> int:
    if executor.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(executor.device)
        before = torch.cuda.memory_allocated(executor.device)
        executor.trial_run(tokens)
        return int(torch.cuda.max_memory_allocated(executor.device)) - before
    before = _resident_peak(reset=True)
    executor.trial_run(tokens)
    return max(0, _resident_peak(reset=False) - before)


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
