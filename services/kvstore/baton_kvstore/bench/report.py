"""The command's inside: options from flags, and what is shown."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from baton.bench.core.records import Record
from baton.bench.core.report import (
    MET,
    check_plot,
    format_bytes,
    make_table,
    numbers,
    of_kind,
    print_failures,
    result_console,
    warn_if_busy,
    words,
)
from baton_kvstore.bench.driver import Driver
from baton_kvstore.bench.plan import Options
from baton_kvstore.bench.records import MeasureRecord, RatioRecord, RunRecord, UnavailableRecord, VerifyRecord
from baton_kvstore.bench.results import NAMES

FILE_WIDTH = 160
"""Columns of tables that go to a file or a pipe."""
_LISTS = frozenset({"geometries", "tiers", "ops", "clients", "hits"})
"""Options that a flag writes as a list."""


def measure(args: argparse.Namespace) -> int:
    """Measure and show; returns the exit status.

    Raises:
        ConfigError: A flag that cannot work.
        BatonError: A client or a server ended.
    """
    options = options_from(args)
    if args.plot:
        check_plot(Path(args.plot))
    records: list[Record] = []

    def report(record: Record) -> None:
        records.append(record)
        if args.json:
            sys.stdout.write(record.to_json() + "\n")
            sys.stdout.flush()

    console = Console(stderr=True)
    with console.status("starting") as status:
        code = Driver(options, report, status.update).run()
    if not args.json:
        print_tables(records, result_console(FILE_WIDTH))
    if args.plot:
        draw(records, Path(args.plot))
    return code


def options_from(args: argparse.Namespace) -> Options:
    """Build the options from parsed flags.

    Raises:
        ConfigError: Names the flag.
    """
    same = {item.name for item in dataclasses.fields(Options)} - _LISTS
    return Options(
        geometries=words(args.geometry),
        tiers=words(args.tier),
        ops=words(args.op),
        clients=numbers(args.clients, "clients"),
        hits=numbers(args.hits, "hits"),
        **{name: getattr(args, name) for name in same},
    )


def print_tables(records: Sequence[Record], console: Console) -> None:
    """Print everything that was reported."""
    for run in of_kind(records, RunRecord):
        machine = run.machine
        console.print(f"{machine['cpus']} CPUs, {machine['arch']}; medians of {run.repeat} turns of {run.seconds:g} s")
        warn_if_busy(machine, console)
    console.print(_measures(of_kind(records, MeasureRecord)))
    ratios = of_kind(records, RatioRecord)
    if ratios:
        console.print(_ratios(ratios))
    checks = of_kind(records, VerifyRecord)
    compared, wrong = sum(record.blocks for record in checks), sum(record.wrong for record in checks)
    console.print(f"{compared:,} blocks compared byte by byte, {wrong} wrong")
    for missing in of_kind(records, UnavailableRecord):
        console.print(f"[yellow]{missing.method} was not measured:[/yellow] {missing.reason}")
    print_failures(records, console)


def _measures(records: Sequence[MeasureRecord]) -> Table:
    left = ("blocks", "operation", "by")
    columns = (*left, "clients", "hits", "blocks/s", "GB/s", "p50 ms", "p99 ms", "came", "from disk", "CPU s/GB")
    table = make_table("Chains put, got and asked for", columns, left)
    last = None
    for r in records:
        group = (r.geometry, r.clients, r.op, r.hit_percent)
        if last not in (None, group):
            table.add_section()
        last = group
        table.add_row(
            f"{r.blocks} x {format_bytes(r.block_bytes)}, {r.geometry}",
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
    columns = ("blocks", "ratio", "value", "aim", "met")
    table = make_table("Ratios, one client, and what Baton aims at", columns, ("blocks", "ratio", "met"))
    for r in records:
        table.add_row(r.geometry, r.name, f"{r.value:.2f}", "" if r.aim is None else f"≥ {r.aim:g}", MET[r.met])
    return table


def draw(records: Sequence[Record], path: Path) -> None:
    """Draw a panel per geometry, a line per method of ``get`` with all hits, and write the file."""
    from matplotlib.figure import Figure  # a figure of its own: no window system, no global state

    found = [r for r in records if isinstance(r, MeasureRecord) and (r.op, r.hit_percent) == ("get", 100)]
    geometries = list(dict.fromkeys(record.geometry for record in found))
    figure = Figure(figsize=(1 + 5 * max(1, len(geometries)), 4.5), layout="constrained")
    for place, geometry in enumerate(geometries):
        axes = figure.add_subplot(1, len(geometries), place + 1)
        own = [record for record in found if record.geometry == geometry]
        for method in dict.fromkeys(record.method for record in own):
            points = [(record.clients, record.gb_per_s) for record in own if record.method == method]
            style = "-" if method in ("shm", "tcp", "disk") else "--"
            axes.plot(*zip(*points, strict=True), style, marker="o", label=NAMES.get(method, method))
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("clients")
        axes.set_ylabel("GB/s (median)")
        axes.set_title(f"{geometry}, blocks of {own[0].block_bytes / 2**20:.3g} MiB")
        axes.grid(visible=True, alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)
