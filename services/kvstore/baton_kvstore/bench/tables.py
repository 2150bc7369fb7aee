"""Records as tables for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from baton_kvstore.bench.ratios import NAMES
from baton_kvstore.bench.records import (
    MeasureRecord,
    RatioRecord,
    ResultRecord,
    RunRecord,
    StoreRecord,
    UnavailableRecord,
    VerifyRecord,
)

BUSY_SHARE = 0.5
"""Load per CPU before a run from which on its figures come with a warning."""


def print_tables(records: Sequence[StoreRecord], console: Console) -> None:
    """Print everything that was reported."""
    for run in (record for record in records if isinstance(record, RunRecord)):
        machine = run.machine
        console.print(f"{machine['cpus']} CPUs, {machine['arch']}; medians of {run.repeat} turns of {run.seconds:g} s")
        if machine["load"] > machine["cpus"] * BUSY_SHARE:
            text = f"{machine['host']} was busy (load {machine['load']} on {machine['cpus']} CPUs): rates are too low"
            console.print(text, style="yellow")
    console.print(_measures([record for record in records if isinstance(record, MeasureRecord)]))
    ratios = [record for record in records if isinstance(record, RatioRecord)]
    if ratios:
        console.print(_ratios(ratios))
    checks = [record for record in records if isinstance(record, VerifyRecord)]
    compared, wrong = sum(record.blocks for record in checks), sum(record.wrong for record in checks)
    console.print(f"{compared:,} blocks compared byte by byte, {wrong} wrong")
    for missing in (record for record in records if isinstance(record, UnavailableRecord)):
        console.print(f"[yellow]{missing.method} was not measured:[/yellow] {missing.reason}")
    for result in (record for record in records if isinstance(record, ResultRecord)):
        for failure in result.failures:
            console.print("FAILED: " + failure, style="red", markup=False)


def _measures(records: Sequence[MeasureRecord]) -> Table:
    table = Table(title="Chains put, got and asked for")
    left = ("blocks", "operation", "by")
    for name in (*left, "clients", "hits", "blocks/s", "GB/s", "p50 ms", "p99 ms", "came", "from disk", "CPU s/GB"):
        table.add_column(name, justify="left" if name in left else "right")
    last = None
    for r in records:
        group = (r.geometry, r.clients, r.op, r.hit_percent)
        if last not in (None, group):
            table.add_section()
        last = group
        table.add_row(
            f"{r.blocks} x {_bytes(r.block_bytes)}, {r.geometry}",
            r.op,
            NAMES.get(r.method, r.method),
            str(r.clients),
            f"{r.hit_percent} %",
            f"{r.blocks_per_s:,.0f}",
            f"{r.gb_per_s:.2f}" if r.gb_per_s else "",
            f"{r.p50_ms:.2f}",
            f"{r.p99_ms:.2f}",
            f"{r.came_percent:.0f} %",
            "" if r.disk_percent is None else f"{r.disk_percent:.0f} %",
            "" if r.cpu_s_per_gb is None else f"{r.cpu_s_per_gb:.3f}",
            style=None if r.method in ("shm", "tcp", "disk") else "dim",
        )
    return table


def _ratios(records: Sequence[RatioRecord]) -> Table:
    table = Table(title="Ratios, one client, and what Baton aims at")
    for name in ("blocks", "ratio", "value", "aim", "met"):
        table.add_column(name, justify="right" if name in ("value", "aim") else "left")
    for r in records:
        met = {True: "yes", False: "[red]no[/red]", None: ""}[r.met]
        table.add_row(r.geometry, r.name, f"{r.value:.2f}", "" if r.aim is None else f"≥ {r.aim:g}", met)
    return table


def _bytes(size: int) -> str:
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:.4g} {name}"
    return f"{size} B"
