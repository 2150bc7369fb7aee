"""``baton bench offline``: latency and throughput of the engine without a server."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from rich.console import Console

from baton.config import EngineConfig
from baton.engine import LLM, SamplingParams
from baton.engine.llm import RequestOutput
from baton.errors import ConfigError
from baton.terminal import Step
from baton_bench.report import (
    EXIT_OK,
    Record,
    Report,
    Spread,
    build_from,
    check_ranges,
    machine_facts,
    make_table,
    of_kind,
    print_failures,
    run_with_result,
    warn_if_busy,
)


@dataclass(frozen=True)
class Options:
    """What to measure; see ``--help``.

    Raises:
        ConfigError: A number is out of range; names the flag.
    """

    mode: str
    isl: int
    osl: int
    batch_size: int
    repeats: int
    warmup: int
    requests: int
    prompt_seed: int

    def __post_init__(self) -> None:
        ranges = dict.fromkeys(("isl", "osl", "batch_size", "repeats", "requests"), (1, 10**6))
        check_ranges(self, ranges | {"warmup": (0, 10**6), "prompt_seed": (0, 2**32)})


@dataclass(frozen=True)
class OfflineRunRecord(Record):
    """First line: what is measured, and where."""

    record: ClassVar[str] = "run"
    model: str
    isl: int
    osl: int
    batch_size: int
    requests: int
    machine: dict[str, Any]


@dataclass(frozen=True)
class LatencyRecord(Record):
    """A batch's seconds, its prompts' time to first token, and what its decodes made of the rest; milliseconds."""

    record: ClassVar[str] = "latency"
    batch_size: int
    batch_ms: Spread
    ttft_ms: Spread
    tpot_ms: float | None
    batches_ms: list[float]


@dataclass(frozen=True)
class ThroughputRecord(Record):
    """Many prompts at once."""

    record: ClassVar[str] = "throughput"
    requests: int
    seconds: float
    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float


class _Prompts:
    """Random prompts, none of which begins as another does: the prefix cache must not answer for the engine."""

    def __init__(self, llm: LLM, options: Options) -> None:
        special = llm.tokenizer.special_ids if llm.tokenizer is not None else frozenset[int]()
        self._ids = [i for i in range(llm.core.executor.vocab_size) if i not in special]
        self._rng = np.random.default_rng(options.prompt_seed)
        self._isl = options.isl

    def draw(self, count: int) -> list[list[int]]:
        """Return prompts of ``isl`` tokens."""
        results: list[list[int]] = self._rng.choice(self._ids, (count, self._isl)).tolist()
        return results


def measure(engine: EngineConfig, options: Options, report: Report, step: Step) -> int:
    """Load the model and measure; returns the exit status.

    Raises:
        ConfigError: The model cannot be loaded, or prompt and output are longer than it takes.
        InternalError: The engine failed.
    """

    def run() -> tuple[int, Sequence[str]]:
        step("loading the model", options.warmup + options.repeats + 1)
        with LLM(engine) as llm:
            longest = llm.core.max_model_len
            if options.isl + options.osl > longest:
                raise ConfigError(f"--isl and --osl together are more than the model's {longest} tokens", field="isl")
            report(build_from(OfflineRunRecord, options, model=engine.model, machine=machine_facts()))
            prompts = _Prompts(llm, options)
            for _ in range(options.warmup):
                _generate(llm, prompts.draw(options.batch_size), options.osl)
                step("warm-up", options.repeats)
            if options.mode != "throughput":
                report(_latency(llm, prompts, options, step))
            if options.mode != "latency":
                report(_throughput(llm, prompts, options))
        return EXIT_OK, ()

    return run_with_result(run, report)


def _generate(llm: LLM, prompts: Sequence[Sequence[int]], osl: int) -> tuple[float, list[RequestOutput]]:
    sampling = SamplingParams(max_tokens=osl, temperature=0.0, ignore_eos=True)
    started = time.perf_counter()
    outputs = llm.generate(prompts, sampling)
    return time.perf_counter() - started, outputs


def _latency(llm: LLM, prompts: _Prompts, options: Options, step: Step) -> LatencyRecord:
    batches: list[float] = []
    firsts: list[float] = []
    rests: list[float] = []
    for number in range(options.repeats):
        seconds, outputs = _generate(llm, prompts.draw(options.batch_size), options.osl)
        batches.append(1e3 * seconds)
        ttfts = [output.metrics.ttft_us / 1e3 for output in outputs if output.metrics is not None]
        firsts += ttfts
        if options.osl > 1:
            rests.append((1e3 * seconds - float(np.mean(ttfts))) / (options.osl - 1))
        step("batches", options.repeats - number - 1)
    tpot = round(float(np.median(rests)), 4) if rests else None
    return LatencyRecord(options.batch_size, Spread.of(batches), Spread.of(firsts), tpot, batches)


def _throughput(llm: LLM, prompts: _Prompts, options: Options) -> ThroughputRecord:
    seconds, outputs = _generate(llm, prompts.draw(options.requests), options.osl)
    made = sum(len(output.token_ids) for output in outputs)
    read = options.requests * options.isl
    rates = (len(outputs) / seconds, read / seconds, made / seconds, (read + made) / seconds)
    return ThroughputRecord(options.requests, round(seconds, 4), *(round(rate, 3) for rate in rates))


def print_tables(records: Sequence[Record], console: Console) -> None:
    for run in of_kind(records, OfflineRunRecord):
        warn_if_busy(run.machine, console)
        console.print(f"{run.model}: prompts of {run.isl} tokens, outputs of {run.osl}")
    for one in of_kind(records, LatencyRecord):
        table = make_table(f"Latency, batches of {one.batch_size}, ms", ("", "p50", "p95", "p99"), ("",))
        for name, spread in (("batch", one.batch_ms), ("TTFT", one.ttft_ms)):
            table.add_row(name, *(f"{x:.1f}" for x in (spread.p50, spread.p95, spread.p99)))
        if one.tpot_ms is not None:
            table.add_row("per output token", f"{one.tpot_ms:.2f}", "", "")
        console.print(table)
    for many in of_kind(records, ThroughputRecord):
        console.print(
            f"Throughput, {many.requests} prompts at once: {many.requests_per_s:.2f} requests/s, "
            f"{many.total_tokens_per_s:.0f} tokens/s ({many.output_tokens_per_s:.0f} of them output)"
        )
    print_failures(records, console)


def draw(records: Sequence[Record], path: Path) -> None:
    """Draw the batches' times and write the file."""
    from matplotlib.figure import Figure  # a figure of its own: no window system, no global state

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for one in of_kind(records, LatencyRecord):
        axes.plot(range(1, len(one.batches_ms) + 1), one.batches_ms, "-o", label=f"batches of {one.batch_size}")
        axes.legend()
    axes.set_xlabel("batch")
    axes.set_ylabel("ms")
    axes.set_ylim(bottom=0)
    axes.grid(visible=True, alpha=0.3)
    figure.savefig(path, dpi=150)
