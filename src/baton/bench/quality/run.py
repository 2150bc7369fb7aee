"""Configurations one after the other, and how they are shown."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Console

from baton.bench.core.report import (
    EXIT_OK,
    Record,
    Report,
    check_ranges,
    format_bytes,
    machine_facts,
    make_table,
    of_kind,
    print_failures,
    run_with_result,
    warn_if_busy,
)
from baton.bench.quality.one import Measured, Task, measure_one
from baton.config import EngineConfig
from baton.engine.executor.quality import TEXT
from baton.errors import ConfigError, InternalError
from baton.tokenizer import Tokenizer
from baton.tokenizer.model_files import check_model_path

Step = Callable[[str, int], None]
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
        count = sum(map(len, windows))
        report(
            QualityRunRecord(
                reference.model,
                options.text or "Baton's own",
                count,
                len(windows[0]),
                options.isl,
                options.batch_size,
                options.clock,
                machine_facts(),
            )
        )
        sizes = tuple(dict.fromkeys((1, options.batch_size)))
        with tempfile.TemporaryDirectory(prefix="baton-quality-") as folder:
            for index, (name, config) in enumerate(configs.items()):
                step(name, len(configs) - index)
                logits, is_reference = Path(folder, "logits"), index == 0
                task = Task(config, windows, logits, is_reference, options.isl, sizes, options.steps, options.clock)
                found = _in_child(task, name)
                report(
                    QualityRecord(
                        name,
                        found.operators,
                        round(found.perplexity, 4),
                        found.kl,
                        found.kl_p99,
                        round(found.top1, 5),
                        None if found.prefill_tokens_per_s is None else round(found.prefill_tokens_per_s, 2),
                        tuple(round(each, 2) for each in found.decode_tokens_per_s),
                        found.weight_bytes,
                        found.kv_bytes_per_token,
                    )
                )
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


def _in_child(task: Task, name: str) -> Measured:
    """Measure in a new process, whose memory is that of this configuration alone.

    Raises:
        ConfigError: It cannot be loaded.
        InternalError: The process died.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            found = pool.submit(measure_one, task).result()
        except BrokenProcessPool as error:
            raise InternalError(f"{name}: the process that measured it died") from error
    if isinstance(found, Measured):
        return found
    message, field = found
    raise ConfigError(f"{name}: {message}", field=field) if field else InternalError(f"{name}: {message}")


def print_tables(records: Sequence[Record], console: Console) -> None:
    """Print what was measured."""
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
