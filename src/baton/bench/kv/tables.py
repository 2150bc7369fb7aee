"""Records as tables for people."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from baton.bench.core.records import Record
from baton.bench.core.report import MET, R, format_bytes, make_table, of_kind, print_failures, warn_if_busy
from baton.bench.kv.records import (
    BaselineRecord,
    MessagesRecord,
    OverlapRecord,
    RatioRecord,
    RunRecord,
    TransferRecord,
    UnavailableRecord,
    VerdictRecord,
)


def print_tables(records: Sequence[Record], console: Console) -> None:
    """Print everything that was reported."""
    for run in of_kind(records, RunRecord):
        console.print(_headline(run))
        for machine in filter(None, (run.machine, run.peer)):
            warn_if_busy(machine, console)
    console.print(_transfers(records))
    for overlap_table in _some(of_kind(records, OverlapRecord), _overlaps):
        console.print(overlap_table)
    for messages in _some(of_kind(records, MessagesRecord), _messages):
        console.print(messages)
    for ratios in _some(of_kind(records, RatioRecord), _ratios):
        console.print(ratios)
    for verdict in _largest(of_kind(records, VerdictRecord)):
        console.print(_sentence(verdict))
    for missing in of_kind(records, UnavailableRecord):
        console.print(f"[yellow]{missing.method} was not measured:[/yellow] {missing.reason}", markup=True)
    print_failures(records, console)


def _headline(run: RunRecord) -> str:
    kappa = f", {run.kv_bytes_per_token:,} KV bytes per token" if run.kv_bytes_per_token else ""
    where = f"{run.machine.get('cpus')} CPUs, {run.machine.get('arch')}"
    peer = f" ← {run.peer.get('host')}" if run.peer else ""
    return f"{run.geometry}{kappa}; pattern {run.pattern}; {where}{peer}; medians of {run.repeat}"


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
        if case and case != named:
            table.add_section()
        case = named
        times = [f"{ms:.2f}" for ms in (record.p50_ms, record.p95_ms, record.p99_ms)]
        rate, cpu = f"{record.gb_per_s:.2f}", f"{record.cpu_s_per_gb:.3f}"
        name, size = record.pipe if isinstance(record, TransferRecord) else record.method, format_bytes(record.bytes)
        name += f" x{record.streams}" if record.streams > 1 else ""
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
        table.add_row(r.pipe, r.what, str(r.bytes), *times, f"{r.per_s:,.0f}")
    return table


def _overlaps(records: Sequence[OverlapRecord]) -> Table:
    table = make_table(
        "Exposed under simulated compute",
        ("pipe", "mode", "tokens", "prefill tokens/s", "compute ms", "exposed ms", "% of serial"),
        ("pipe", "mode"),
    )
    for r in records:
        name = r.pipe + (f" x{r.streams}" if r.streams > 1 else "")
        row = (
            f"{r.prefill_tokens_per_s:,.0f}",
            f"{r.compute_ms:.1f}",
            f"{r.exposed_ms:.2f}",
            f"{r.percent_of_serial:.0f}",
        )
        table.add_row(name, r.mode, str(r.tokens), *row)
    return table


def _ratios(records: Sequence[RatioRecord]) -> Table:
    table = make_table("Ratios, and what Baton aims at", ("ratio", "value", "aim", "met"), ("ratio", "met"))
    for r in records:
        sign, unit = {"<=": "≤", ">=": "≥"}[r.sense], " µs" if r.unit == "us" else ""
        aim = "" if r.aim is None else f"{sign} {r.aim:g}{unit}"
        table.add_row(r.name, f"{r.value:.2f}{unit}", aim, MET[r.met])
    return table


def _sentence(verdict: VerdictRecord) -> str:
    name = verdict.pipe + (f" x{verdict.streams}" if verdict.streams > 1 else "")
    text = f"{name}: this link carries this model up to {verdict.max_prefill_tokens_per_s:,.0f} prefill tokens/s"
    if verdict.carries is None:
        return text
    asked = f"{verdict.prefill_tokens_per_s:,.0f}"
    return f"{text}; {asked}: {'[green]yes[/green]' if verdict.carries else '[red]no[/red]'}"


def _largest(verdicts: Sequence[VerdictRecord]) -> list[VerdictRecord]:
    most = max((verdict.tokens for verdict in verdicts), default=0)
    return [verdict for verdict in verdicts if verdict.tokens == most]


def _some(records: list[R], make: Callable[[Sequence[R]], Any]) -> list[Any]:
    return [make(records)] if records else []


def draw(records: Sequence[Record], path: Path) -> None:
    """Draw a line per pipe and baseline over the sizes of what was asked for, and write the file."""
    from matplotlib.figure import Figure  # a figure of its own: no window system, no global state

    lines: dict[str, list[tuple[float, float]]] = {}
    for record in records:
        if isinstance(record, (TransferRecord, BaselineRecord)) and record.case in ("kv", "raw"):
            is_pipe = isinstance(record, TransferRecord)
            name = record.pipe if isinstance(record, TransferRecord) else record.method
            label = name + (f" x{record.streams}" if record.streams > 1 else "") + ("" if is_pipe else " (limit)")
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
    runs = [record for record in records if isinstance(record, RunRecord)]
    axes.set_title(f"KV transfer, {runs[0].geometry}, pattern {runs[0].pattern}" if runs else "KV transfer")
    figure.savefig(path, dpi=150)
