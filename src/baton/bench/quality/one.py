"""One configuration, measured in a process of its own: logits over a text, speeds, memory."""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import torch

from baton.config import EngineConfig
from baton.engine.build import make_arena
from baton.engine.executor.base import Executor, load_executor
from baton.engine.quantization.kept import return_free_memory
from baton.engine.runner.input_batch import ForwardBatch
from baton.errors import BatonError, ConfigError
from baton.kv_cache.shards import shard_layout

_REPEATS = 3


@dataclass(frozen=True, slots=True)
class Task:
    """What to measure.

    Attributes:
        config: The configuration.
        windows: Token ids of each context.
        logits: File of the reference's logits float32 [tokens, vocab]; that of the reference is written.
        is_reference: Whether this is the reference.
        isl: Prompt tokens of the speeds.
        batch_sizes: Sequences of each decode.
        steps: Decode steps that count; 0: no speeds.
        clock: ``wall`` or ``cpu``.
    """

    config: EngineConfig
    windows: list[list[int]]
    logits: Path
    is_reference: bool
    isl: int
    batch_sizes: tuple[int, ...]
    steps: int
    clock: str


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured; see ``baton bench quality --help``."""

    operators: str
    vocab_size: int
    perplexity: float
    kl: float
    kl_p99: float
    top1: float
    prefill_tokens_per_s: float | None
    decode_tokens_per_s: tuple[float, ...]
    weight_bytes: int
    kv_bytes_per_token: int


def measure_one(task: Task) -> Measured | tuple[str, str]:
    """Measure a configuration; returns an error's message and field instead if it cannot be loaded."""
    try:
        return _measure(task)
    except BatonError as error:
        return error.message, error.field if isinstance(error, ConfigError) and error.field else ""


def _measure(task: Task) -> Measured:
    longest = max(len(task.windows[0]), task.isl + task.steps + 2)
    blocks = -(-longest // task.config.block_size) * max(1, *task.batch_sizes)
    config = dataclasses.replace(task.config, kv_blocks=task.config.kv_blocks or blocks, max_model_len=longest)
    before = _resident()
    executor = load_executor(config)
    try:
        weights = _resident() - before
        shards = make_arena(config, executor, private=True)
        try:
            nll, divergences, same = _text(task, config, executor)
            prefill, decodes = _speeds(task, config, executor) if task.steps else (None, ())
        finally:
            shards.close()
        groups = executor.layout.groups
        layouts = [shard_layout(executor.geometry, spec, config.block_size, groups) for spec in executor.shards]
        return Measured(
            executor.description,
            executor.vocab_size,
            float(np.exp(nll)),
            float(divergences.mean()),
            float(np.quantile(divergences, 0.99)),
            float(same.mean()),
            prefill,
            decodes,
            weights,
            sum(layout.block_bytes * layout.num_groups for layout in layouts) // config.block_size,
        )
    finally:
        executor.close()


def _resident() -> int:
    """Return this process's resident bytes, without what it has given back."""
    gc.collect()
    return_free_memory()
    return int(psutil.Process().memory_info().rss)


def _text(
    task: Task, config: EngineConfig, executor: Executor
) -> tuple[float, np.ndarray[tuple[int], np.dtype[np.float64]], np.ndarray[tuple[int], np.dtype[np.bool_]]]:
    """Return the mean loss, and each token's divergence and whether both have the same most likely one."""
    count = sum(map(len, task.windows))
    shape = (count, executor.vocab_size)
    if not task.is_reference and task.logits.stat().st_size != 4 * count * executor.vocab_size:
        raise ConfigError(
            f"{config.model} has a vocabulary of {executor.vocab_size}, the reference another one", field="config"
        )
    kept = np.memmap(task.logits, np.float32, "w+" if task.is_reference else "r", shape=shape)
    losses, divergences, same, at = [], [], [], 0
    for window in task.windows:
        for begin in range(0, len(window), config.prefill_chunk):
            chunk = window[begin : begin + config.prefill_chunk]
            logits = executor.forward(_chunk(chunk, begin, config.block_size, range(len(chunk)))).logits.float().cpu()
            rows = slice(at, at + len(chunk))
            at += len(chunk)
            if task.is_reference:
                kept[rows] = logits.numpy()
            found = logits.log_softmax(-1)
            expected = torch.from_numpy(np.array(kept[rows])).log_softmax(-1)
            divergences.append((expected.exp() * (expected - found)).sum(-1).clamp_min(0).double().numpy())
            same.append((found.argmax(-1) == expected.argmax(-1)).numpy())
            following = window[begin + 1 : begin + 1 + len(chunk)]
            losses.append(-found[range(len(following)), following].double().numpy())
    return float(np.concatenate(losses).mean()), np.concatenate(divergences), np.concatenate(same)


def _speeds(task: Task, config: EngineConfig, executor: Executor) -> tuple[float, tuple[float, ...]]:
    """Return tokens per second of a prefill, and of each decode."""

    def clock() -> float:
        return time.perf_counter() if task.clock == "wall" else time.process_time() / config.threads

    tokens = np.random.default_rng(0).integers(0, executor.vocab_size, task.isl).tolist()

    def prefill() -> None:
        executor.forward(_chunk(tokens, 0, config.block_size, [len(tokens) - 1]))

    prefill_s = _median(clock, [prefill] * (_REPEATS + 1))
    found = []
    for size in task.batch_sizes:
        steps = [_decode(size, task.isl + step, config.block_size) for step in range(task.steps + 1)]
        found.append(size / _median(clock, [partial(executor.forward, step) for step in steps]))
    return len(tokens) / prefill_s, tuple(found)


def _median(clock: Callable[[], float], calls: Sequence[Callable[[], object]]) -> float:
    """Return the median seconds of calls, without the first, which finds cold caches."""
    seconds = []
    for call in calls:
        started = clock()
        call()
        seconds.append(clock() - started)
    return max(1e-9, statistics.median(seconds[1:]))


def _chunk(tokens: Sequence[int], done: int, block_size: int, rows: Sequence[int]) -> ForwardBatch:
    """Return a step of one sequence of which so many tokens are computed."""
    end = done + len(tokens)
    return ForwardBatch(
        token_ids=np.array(tokens, dtype=np.int64),
        positions=np.arange(done, end),
        query_starts=np.array([0, len(tokens)], dtype=np.int32),
        context_lens=np.array([end], dtype=np.int32),
        block_tables=np.arange(-(-end // block_size), dtype=np.int32)[None],
        logit_rows=np.array(rows, dtype=np.int64),
    )


def _decode(size: int, done: int, block_size: int) -> ForwardBatch:
    """Return a step of one token each of sequences with so many tokens before, in blocks of their own."""
    width = -(-(done + 1) // block_size)
    return ForwardBatch(
        token_ids=np.arange(1, size + 1, dtype=np.int64),
        positions=np.full(size, done, dtype=np.int64),
        query_starts=np.arange(size + 1, dtype=np.int32),
        context_lens=np.full(size, done + 1, dtype=np.int32),
        block_tables=np.arange(size * width, dtype=np.int32).reshape(size, width),
        logit_rows=np.arange(size, dtype=np.int64),
    )
