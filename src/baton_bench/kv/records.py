"""What a run reports: a kind of record per line of ``--json`` (docs/bench/kv.md has the fields), tables, a plot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Console
from rich.table import Table

from baton.terminal import format_bytes
from baton_bench.kv.plan import HOST, MethodKey
from baton_bench.report import (
    MET,
    Record,
    ResultRecord,
    make_table,
    of_kind,
    print_failures,
    warn_if_busy,
)

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class RunRecord(Record):
    """First line: what was run, and where."""

    record: ClassVar[str] = "run"
    schema: int
    version: str
    machine: dict[str, Any]
    peer: dict[str, Any] | None
    pipes: tuple[str, ...]
    geometry: str
    kv_bytes_per_token: int
    block_size: int
    dst_block_size: int
    kv_dtype: str
    dst_kv_dtype: str
    src_tp: int
    src_pp: int
    dst_tp: int
    dst_pp: int
    pattern: str
    warmup: int
    repeat: int
    seed: int
    memory: str = "host"


@dataclass(frozen=True)
class UnavailableRecord(Record):
    """A pipe or baseline that cannot work here."""

    record: ClassVar[str] = "unavailable"
    method: str
    reason: str
    asked: bool
    memory: str = "host"


@dataclass(frozen=True)
class TransferRecord(Record):
    """A pipe at one size."""

    record: ClassVar[str] = "transfer"
    case: str
    pipe: str
    streams: int
    pattern: str
    tokens: int
    blocks: int
    block_bytes: int
    bytes: int
    runs: int
    p50_ms: float
    p95_ms: float
    p99_ms: float
    gb_per_s: float
    limit: str
    limit_gb_per_s: float
    percent_of_limit: float
    cpu_s_per_gb: float
    verified: bool
    wrong_blocks: int
    memory: str = "host"


@dataclass(frozen=True)
class BaselineRecord(Record):
    """A copy without Baton, at the same size in the same run."""

    record: ClassVar[str] = "baseline"
    case: str
    method: str
    streams: int
    tokens: int
    bytes: int
    runs: int
    p50_ms: float
    p95_ms: float
    p99_ms: float
    gb_per_s: float
    cpu_s_per_gb: float
    memory: str = "host"


@dataclass(frozen=True)
class MessagesRecord(Record):
    """Small exchanges in sequence: ``round trip`` of a message over TCP, one-sided ``read``, or ``fetch``."""

    record: ClassVar[str] = "messages"
    pipe: str
    what: str
    bytes: int
    count: int
    p50_us: float
    p95_us: float
    p99_us: float
    per_s: float
    memory: str = "host"


@dataclass(frozen=True)
class OverlapRecord(Record):
    """Transfer under simulated compute: ``serial``, ``chunked`` or ``layer-wise``."""

    record: ClassVar[str] = "overlap"
    pipe: str
    streams: int
    mode: str
    tokens: int
    chunk: int
    steps: int
    prefill_tokens_per_s: float
    compute_ms: float
    exposed_ms: float
    percent_of_serial: float
    verified: bool
    memory: str = "host"


@dataclass(frozen=True)
class VerdictRecord(Record):
    """Does this link carry this model: KV bytes per token times prefill tokens/s against bytes per second."""

    record: ClassVar[str] = "verdict"
    pipe: str
    streams: int
    tokens: int
    kv_bytes_per_token: int
    gb_per_s: float
    max_prefill_tokens_per_s: float
    prefill_tokens_per_s: float | None
    carries: bool | None
    memory: str = "host"


@dataclass(frozen=True)
class RatioRecord(Record):
    """The ratio of two methods of one run, and Baton's aim; ``sense`` is ``>=`` or ``<=``."""

    record: ClassVar[str] = "ratio"
    name: str
    value: float
    unit: str
    sense: str
    aim: float | None
    met: bool | None


RECORDS: tuple[type[Record], ...] = (
    RunRecord,
    UnavailableRecord,
    BaselineRecord,
    TransferRecord,
    MessagesRecord,
    OverlapRecord,
    VerdictRecord,
    RatioRecord,
    ResultRecord,
)
"""Every kind of record, in order of appearance."""


def print_tables(records: Sequence[Record], console: Console) -> None:
    """Print everything that was reported."""
    for run in of_kind(records, RunRecord):
        console.print(_headline(run))
        for machine in filter(None, (run.machine, run.peer)):
            warn_if_busy(machine, console)
    console.print(_transfers(records))
    if overlaps := of_kind(records, OverlapRecord):
        console.print(_overlaps(overlaps))
    if messages := of_kind(records, MessagesRecord):
        console.print(_messages(messages))
    if ratios := of_kind(records, RatioRecord):
        console.print(_ratios(ratios))
    verdicts = of_kind(records, VerdictRecord)
    for verdict in verdicts:
        if verdict.tokens == max(each.tokens for each in verdicts):
            console.print(_sentence(verdict))
    for missing in of_kind(records, UnavailableRecord):
        console.print(
            f"[yellow]{missing.method}{_where(missing)} was not measured:[/yellow] {missing.reason}", markup=True
        )
    print_failures(records, console)


def _headline(run: RunRecord) -> str:
    kappa = f", {run.kv_bytes_per_token:,} KV bytes per token" if run.kv_bytes_per_token else ""
    where = f"{run.machine.get('cpus')} CPUs, {run.machine.get('arch')}"
    peer = f" ← {run.peer.get('host')}" if run.peer else ""
    memory = "" if run.memory == HOST else f"; blocks in {run.memory} memory"
    return f"{run.geometry}{kappa}{memory}; pattern {run.pattern}; {where}{peer}; medians of {run.repeat}"


def _method(record: BaselineRecord | TransferRecord | OverlapRecord | VerdictRecord) -> str:
    return MethodKey(record.method if isinstance(record, BaselineRecord) else record.pipe, record.streams).label


_Placed = BaselineRecord | TransferRecord | MessagesRecord | OverlapRecord | VerdictRecord | UnavailableRecord


def _where(record: _Placed) -> str:
    """Say where the blocks lie, unless all are in host memory."""
    return "" if record.memory == HOST else f", {record.memory}"


def _transfers(records: Sequence[Record]) -> Table:
    table = make_table(
        "Transfers",
        ("case", "pipe", "size", "p50 ms", "p95", "p99", "GB/s", "% of limit", "CPU s/GB", "verified"),
        ("case", "pipe", "% of limit", "verified"),
    )
    case = ""
    for record in records:
        if not isinstance(record, (TransferRecord, BaselineRecord)):
            continue
        named = f"{record.case} {record.tokens}" if record.tokens else record.case
        named += _where(record)
        if case and case != named:
            table.add_section()
        case = named
        times = [f"{ms:.2f}" for ms in (record.p50_ms, record.p95_ms, record.p99_ms)]
        rate = f"{record.gb_per_s:.2f}"
        cpu = f"{record.cpu_s_per_gb:.3f}"
        name = _method(record)
        size = format_bytes(record.bytes)
        if isinstance(record, BaselineRecord):
            table.add_row(named, name, size, *times, rate, "", cpu, "", style="dim")
        else:
            share = f"{record.percent_of_limit:.0f}% of {record.limit}"
            verified = "yes" if record.verified else f"{record.wrong_blocks} WRONG" if record.wrong_blocks else "no"
            table.add_row(named, name, size, *times, rate, share, cpu, verified)
    return table


def _messages(records: Sequence[MessagesRecord]) -> Table:
    table = make_table(
        "Small exchanges, one after the other",
        ("pipe", "what", "bytes", "p50 µs", "p95", "p99", "per second"),
        ("pipe", "what"),
    )
    for r in records:
        times = [f"{us:.1f}" for us in (r.p50_us, r.p95_us, r.p99_us)]
        table.add_row(r.pipe + _where(r), r.what, str(r.bytes), *times, f"{r.per_s:,.0f}")
    return table


def _overlaps(records: Sequence[OverlapRecord]) -> Table:
    table = make_table(
        "Exposed under simulated compute",
        ("pipe", "mode", "tokens", "prefill tokens/s", "compute ms", "exposed ms", "% of serial"),
        ("pipe", "mode"),
    )
    for r in records:
        times = (f"{r.compute_ms:.1f}", f"{r.exposed_ms:.2f}", f"{r.percent_of_serial:.0f}")
        table.add_row(_method(r) + _where(r), r.mode, str(r.tokens), f"{r.prefill_tokens_per_s:,.0f}", *times)
    return table


def _ratios(records: Sequence[RatioRecord]) -> Table:
    table = make_table("Ratios, and what Baton aims at", ("ratio", "value", "aim", "met"), ("ratio", "met"))
    for r in records:
        sign = {"<=": "≤", ">=": "≥"}[r.sense]
        unit = " µs" if r.unit == "us" else ""
        aim = "" if r.aim is None else f"{sign} {r.aim:g}{unit}"
        table.add_row(r.name, f"{r.value:.2f}{unit}", aim, MET[r.met])
    return table


def _sentence(verdict: VerdictRecord) -> str:
    most = f"{verdict.max_prefill_tokens_per_s:,.0f}"
    text = f"{_method(verdict)}{_where(verdict)}: this link carries this model up to {most} prefill tokens/s"
    if verdict.carries is None:
        return text
    asked = f"{verdict.prefill_tokens_per_s:,.0f}"
    return f"{text}; {asked}: {'[green]yes[/green]' if verdict.carries else '[red]no[/red]'}"


def draw(records: Sequence[Record], path: Path) -> None:
    """Draw a line per pipe and baseline over the sizes, and write the file."""
    from matplotlib.figure import Figure  # a figure of its own: no window system, no global state

    lines: dict[str, list[tuple[float, float]]] = {}
    for record in records:
        if isinstance(record, (TransferRecord, BaselineRecord)) and record.case in ("kv", "raw"):
            label = _method(record) + _where(record) + (" (limit)" if isinstance(record, BaselineRecord) else "")
            lines.setdefault(label, []).append((record.bytes / 2**20, record.gb_per_s))
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.add_subplot()
    for label, points in lines.items():
        style = "--" if label.endswith("(limit)") else "-"
        axes.plot([x for x, _ in points], [y for _, y in points], style, marker="o", label=label)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("MiB moved")
    axes.set_ylabel("GB/s (median)")
    axes.set_ylim(bottom=0)
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    runs = of_kind(records, RunRecord)
    axes.set_title(f"KV transfer, {runs[0].geometry}, pattern {runs[0].pattern}" if runs else "KV transfer")
    figure.savefig(path, dpi=150)
