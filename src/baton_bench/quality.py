"""``baton bench quality``: perplexity, divergence, speed and memory of configurations, each in its own process."""

from __future__ import annotations

import dataclasses
import gc
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import psutil
import torch
from rich.console import Console

from baton.allocator import return_free_memory
from baton.config import EngineConfig
from baton.engine.build import make_arena
from baton.engine.executor.base import Executor, load_executor
from baton.engine.executor.self_check import TEXT
from baton.engine.runner.input_batch import ForwardBatch
from baton.errors import BatonError, ConfigError, InternalError
from baton.kv_cache.shards import shard_layout
from baton.terminal import Step, format_bytes
from baton.tokenizer import Tokenizer
from baton.tokenizer.model_files import check_model_path
from baton_bench.report import (
    EXIT_OK,
    Record,
    Report,
    build_from,
    check_ranges,
    machine_facts,
    make_table,
    of_kind,
    print_failures,
    run_with_result,
    warn_if_busy,
)

_REPEATS = 3


@dataclass(frozen=True, slots=True)
class Task:
    """What to measure.

    Attributes:
        name: Name of the row.
        config: The configuration.
        windows: Token ids of each context.
        logits: File of the reference's logits float32 [tokens, vocab]; that of the reference is written.
        is_reference: Whether this is the reference.
        options: Options of the command line.
    """

    name: str
    config: EngineConfig
    windows: list[list[int]]
    logits: Path
    is_reference: bool
    options: Options


def measure_one(task: Task) -> QualityRecord | tuple[str, str]:
    """Measure a configuration; returns an error's message and field instead if it cannot be loaded."""
    try:
        return _measure(task)
    except BatonError as error:
        return error.message, error.field if isinstance(error, ConfigError) and error.field else ""


def _measure(task: Task) -> QualityRecord:
    options = task.options
    longest = max(len(task.windows[0]), options.isl + options.steps + 2)
    blocks = -(-longest // task.config.block_size) * options.batch_size
    config = dataclasses.replace(task.config, kv_blocks=task.config.kv_blocks or blocks, max_model_len=longest)
    before = _resident()
    executor = load_executor(config)
    try:
        weights = _resident() - before
        shards = make_arena(config, executor, private=True)
        try:
            nll, divergences, same = _text(task, config, executor)
            prefill, decodes = _speeds(task, config, executor) if options.steps else (None, ())
        finally:
            shards.close()
        groups = executor.layout.groups
        layouts = [shard_layout(executor.geometry, spec, config.block_size, groups) for spec in executor.shards]
        return QualityRecord(
            task.name,
            executor.description,
            round(float(np.exp(nll)), 4),
            float(divergences.mean()),
            float(np.quantile(divergences, 0.99)),
            round(float(same.mean()), 5),
            None if prefill is None else round(prefill, 2),
            tuple(round(each, 2) for each in decodes),
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
    losses = []
    divergences = []
    same = []
    at = 0
    for window in task.windows:
        for begin in range(0, len(window), config.prefill_chunk):
            chunk = window[begin : begin + config.prefill_chunk]
            logits = executor.forward(_chunk(chunk, begin, config.block_size, range(len(chunk)))).logits.float().cpu()
            rows = slice(at, at + len(chunk))
            at += len(chunk)
            if task.is_reference:
                kept[rows] = logits.numpy()
            result = logits.log_softmax(-1)
            expected = torch.from_numpy(np.array(kept[rows])).log_softmax(-1)
            divergences.append((expected.exp() * (expected - result)).sum(-1).clamp_min(0).double().numpy())
            same.append((result.argmax(-1) == expected.argmax(-1)).numpy())
            following = window[begin + 1 : begin + 1 + len(chunk)]
            losses.append(-result[range(len(following)), following].double().numpy())
    return float(np.concatenate(losses).mean()), np.concatenate(divergences), np.concatenate(same)


def _speeds(task: Task, config: EngineConfig, executor: Executor) -> tuple[float, tuple[float, ...]]:
    """Return tokens per second of a prefill, and of each decode."""
    options = task.options

    def clock() -> float:
        return time.perf_counter() if options.clock == "wall" else time.process_time() / config.threads

    tokens = np.random.default_rng(0).integers(0, executor.vocab_size, options.isl).tolist()

    def prefill() -> None:
        executor.forward(_chunk(tokens, 0, config.block_size, [len(tokens) - 1]))

    prefill_s = _median(clock, [prefill] * (_REPEATS + 1))
    results = []
    for size in options.decode_sizes:
        steps = [_decode(size, options.isl + step, config.block_size) for step in range(options.steps + 1)]
        results.append(size / _median(clock, [partial(executor.forward, step) for step in steps]))
    return len(tokens) / prefill_s, tuple(results)


def _median(clock: Callable[[], float], calls: Sequence[Callable[[], object]]) -> float:
    """Return the median seconds of calls, without the first, which finds cold caches."""
    seconds = []
    for call in calls:
        started = clock()
        call()
        seconds.append(clock() - started)
    return max(1e-9, statistics.median(seconds[1:]))


def _chunk(tokens: Sequence[int], done: int, block_size: int, rows: Sequence[int]) -> ForwardBatch:
    """Return a step of one sequence with ``start`` tokens computed before."""
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


_LEAST_TOKENS = 16


@dataclass(frozen=True)
class Options:
    """What to measure; see ``--help``.

    Raises:
        ConfigError: A number is out of range; names the flag.
    """

    text: str
    tokens: int
    window: int
    isl: int
    batch_size: int
    steps: int
    clock: str

    def __post_init__(self) -> None:
        ranges = {"tokens": (_LEAST_TOKENS, 10**7), "window": (_LEAST_TOKENS, 10**6), "isl": (1, 10**6)}
        check_ranges(self, ranges | {"batch_size": (1, 4096), "steps": (0, 10**5)})

    @property
    def decode_sizes(self) -> tuple[int, ...]:
        """Sequences of each decode that is timed."""
        return tuple(dict.fromkeys((1, self.batch_size)))


@dataclass(frozen=True)
class QualityRunRecord(Record):
    """First line: what is read, and where."""

    record: ClassVar[str] = "run"
    model: str
    text: str
    tokens: int
    window: int
    isl: int
    batch_size: int
    clock: str
    machine: dict[str, Any]


@dataclass(frozen=True)
class QualityRecord(Record):
    """One configuration; ``config`` is ``reference`` for the one that all are compared with."""

    record: ClassVar[str] = "quality"
    config: str
    operators: str
    perplexity: float
    kl: float
    kl_p99: float
    top1: float
    prefill_tokens_per_s: float | None
    decode_tokens_per_s: tuple[float, ...]
    weight_bytes: int
    kv_bytes_per_token: int


def measure(configs: Mapping[str, EngineConfig], options: Options, report: Report, step: Step) -> int:
    """Measure configurations, the first of which is the reference; returns the exit status.

    Raises:
        ConfigError: A configuration or the text cannot work; names which.
        InternalError: The engine failed.
    """

    def run() -> tuple[int, Sequence[str]]:
        reference = next(iter(configs.values()))
        for name, config in configs.items():
            try:
                check_model_path(config.model)
            except ConfigError as error:
                raise ConfigError(f"{name}: {error.message}", field="model") from error
        windows = _windows(reference.model, options)
        report(
            build_from(
                QualityRunRecord,
                options,
                model=reference.model,
                text=options.text or "Baton's own",
                tokens=sum(map(len, windows)),
                window=len(windows[0]),
                machine=machine_facts(),
            )
        )
        with tempfile.TemporaryDirectory(prefix="baton-quality-") as folder:
            for index, (name, config) in enumerate(configs.items()):
                step(name, len(configs) - index)
                report(_in_child(Task(name, config, windows, Path(folder, "logits"), index == 0, options)))
        return EXIT_OK, ()

    return run_with_result(run, report)


def _windows(model: str, options: Options) -> list[list[int]]:
    """Return the text's tokens in windows of one length.

    Raises:
        ConfigError: It cannot be read, or is too short.
    """
    if options.text:
        try:
            text = Path(options.text).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--text {options.text} cannot be read: {error}", field="text") from error
    else:
        text = TEXT
    tokens = Tokenizer.load(model).encode(text)[: options.tokens]
    length = min(options.window, len(tokens))
    if length < _LEAST_TOKENS:
        raise ConfigError(f"--text has {len(tokens)} tokens, at least {_LEAST_TOKENS} are needed", field="text")
    return [tokens[at : at + length] for at in range(0, len(tokens) - length + 1, length)]


def _in_child(task: Task) -> QualityRecord:
    """Measure in a new process, so that its memory is that of this configuration alone.

    Raises:
        ConfigError: It cannot be loaded.
        InternalError: The process died.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            result = pool.submit(measure_one, task).result()
        except BrokenProcessPool as error:
            raise InternalError(f"{task.name}: the process that measured it died") from error
    if isinstance(result, QualityRecord):
        return result
    message, field = result
    message = f"{task.name}: {message}"
    raise ConfigError(message, field=field) if field else InternalError(message)


def print_tables(records: Sequence[Record], console: Console) -> None:
    for run in of_kind(records, QualityRunRecord):
        warn_if_busy(run.machine, console)
        console.print(f"{run.model}: {run.tokens} tokens of {run.text} text in windows of {run.window}", markup=False)
        decodes = [f"decode {size}" for size in dict.fromkeys((1, run.batch_size))]
        clock = "tokens/s" if run.clock == "wall" else "tokens/s of CPU time"
        columns = ("", "perplexity", "KL", "KL p99", "top-1", "prefill", *decodes, "weights", "KV/token")
        table = make_table(f"Quality, speed ({clock}) and memory", columns, ("",))
        for one in of_kind(records, QualityRecord):
            speeds = (one.prefill_tokens_per_s, *one.decode_tokens_per_s)
            shown = ["" if each is None else f"{each:.4g}" for each in speeds]
            table.add_row(
                one.config,
                f"{one.perplexity:.3f}",
                "" if one.config == "reference" else f"{one.kl:.2g}",
                "" if one.config == "reference" else f"{one.kl_p99:.2g}",
                "" if one.config == "reference" else f"{one.top1:.4f}",
                *shown,
                *[""] * (1 + len(decodes) - len(shown)),
                format_bytes(one.weight_bytes),
                format_bytes(one.kv_bytes_per_token),
            )
        console.print(table)
    for one in of_kind(records, QualityRecord):
        console.print(f"{one.config}: {one.operators}", markup=False)
    print_failures(records, console)


def draw(records: Sequence[Record], path: Path) -> None:
    """Draw each configuration's KL over the memory of its weights, and write the file."""
    from matplotlib.figure import Figure  # a figure of its own: no window system, no global state

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for one in of_kind(records, QualityRecord):
        if one.config != "reference":
            axes.plot(one.weight_bytes / 2**20, max(one.kl, 1e-9), "o", label=one.config)
    axes.set_yscale("log")
    axes.set_xlabel("memory of the loaded model, MiB")
    axes.set_ylabel("KL, nats per token")
    axes.grid(visible=True, alpha=0.3)
    if axes.lines:
        axes.legend()
    figure.savefig(path, dpi=150)
