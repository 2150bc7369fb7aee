"""What a run reports: records (docs/bench/store.md has the fields), how samples become them, tables, a plot."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Console
from rich.table import Table

from baton.terminal import format_bytes
from baton_bench.report import (
    MET,
    Record,
    ResultRecord,
    Spread,
    build_from,
    make_table,
    of_kind,
    paired_ratio,
    print_failures,
    warn_if_busy,
)
from baton_bench.store.plan import TIERS, Plan

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class RunRecord(Record):
    """First line: what was run, and where."""

    record: ClassVar[str] = "run"
    schema: int
    version: str
    machine: dict[str, Any]
    geometries: tuple[str, ...]
    block_size: int
    kv_dtype: str
    tiers: tuple[str, ...]
    ops: tuple[str, ...]
    clients: tuple[int, ...]
    hits: tuple[int, ...]
    total_bytes: int
    disk_readers: int
    warmup: int
    repeat: int
    seconds: float
    seed: int


@dataclass(frozen=True)
class UnavailableRecord(Record):
    """A baseline that cannot work here."""

    record: ClassVar[str] = "unavailable"
    method: str
    reason: str


@dataclass(frozen=True)
class MeasureRecord(Record):
    """One operation on one tier, or a baseline's."""

    record: ClassVar[str] = "measure"
    geometry: str
    block_bytes: int
    blocks: int
    method: str
    op: str
    clients: int
    hit_percent: int
    requests: int
    requests_per_s: float
    blocks_per_s: float
    gb_per_s: float
    p50_ms: float
    p99_ms: float
    came_percent: float
    disk_percent: float | None
    cpu_s_per_gb: float | None


@dataclass(frozen=True)
class VerifyRecord(Record):
    """Bytes that were compared after the turns."""

    record: ClassVar[str] = "verify"
    geometry: str
    method: str
    op: str
    blocks: int
    wrong: int


@dataclass(frozen=True)
class RatioRecord(Record):
    """A tier against a baseline, one client each, and what Baton aims at: ``sense`` is ``>=``."""

    record: ClassVar[str] = "ratio"
    geometry: str
    name: str
    value: float
    sense: str
    aim: float | None
    met: bool | None


RECORDS: tuple[type[Record], ...] = (
    RunRecord,
    UnavailableRecord,
    MeasureRecord,
    VerifyRecord,
    RatioRecord,
    ResultRecord,
)
"""Every kind of record, in order of appearance."""

NAMES = {"shm": "memory over shm", "tcp": "memory over tcp", "disk": "disk", "redis": "Redis", "plain": "plain reads"}
NAMES |= {"redis-mget": "Redis MGET", "redis-bare": "Redis, bare socket"}
_AIMS: tuple[tuple[str, str, float | None], ...] = (
    ("shm", "memcpy", 0.6),
    ("tcp", "memcpy", None),
    ("disk", "plain", 0.8),
    ("disk", "dd", 0.8),
    ("shm", "redis", 3.0),
    ("tcp", "redis", 3.0),
    ("disk", "redis", 3.0),
    ("shm", "redis-mget", 3.0),
    ("tcp", "redis-mget", 3.0),
    ("disk", "redis-mget", 3.0),
    ("shm", "redis-bare", None),
    ("tcp", "redis-bare", None),
    ("disk", "redis-bare", None),
)


@dataclass(frozen=True, slots=True)
class Sample:
    """One turn of all clients.

    Attributes:
        seconds: From the first request's start to the last one's end.
        blocks: Blocks loaded, put or found.
        wanted: That should have.
        latencies: Seconds of each request.
        cpu: Seconds of clients and servers together.
        disk_bytes: Bytes that the disk store read from its files.
    """

    seconds: float
    blocks: int
    wanted: int
    latencies: list[float]
    cpu: float
    disk_bytes: int = 0


@dataclass
class Cell:
    """A method with an operation, a number of clients and a share of hits."""

    method: str
    op: str
    clients: int
    hit_percent: int
    samples: list[Sample] = field(default_factory=list)

    @property
    def label(self) -> str:
        mix = f", {self.hit_percent} % hits" if self.hit_percent != 100 else ""
        return f"{self.op} {self.method} x{self.clients}{mix}"

    @property
    def rates(self) -> list[float]:
        """Blocks per second, turn by turn."""
        return [sample.blocks / sample.seconds for sample in self.samples]


def find_ratios(geometry: str, cells: Sequence[Cell]) -> list[RatioRecord]:
    """Return the ratios of what was measured: medians of the quotients within a round."""
    result = {cell.method: cell for cell in cells if (cell.op, cell.clients, cell.hit_percent) == ("get", 1, 100)}
    out = []
    for tier, other, aim in _AIMS:
        if tier in result and other in result:
            value = round(paired_ratio(result[tier].rates, result[other].rates), 3)
            name = f"get, {NAMES[tier]} / {NAMES.get(other, other)}"
            out.append(RatioRecord(geometry, name, value, ">=", aim, None if aim is None else value >= aim))
    return out


def measure_record(plan: Plan, cell: Cell) -> MeasureRecord:
    """Sum up a cell: medians over its turns, percentiles over all requests."""
    spread = Spread.of([1e3 * value for sample in cell.samples for value in sample.latencies])
    rate = statistics.median(cell.rates)
    moved = sum(sample.blocks for sample in cell.samples) * plan.block_bytes
    moves = cell.op != "contains"
    return build_from(
        MeasureRecord,
        cell,
        geometry=plan.name,
        block_bytes=plan.block_bytes,
        blocks=plan.blocks,
        requests=sum(len(sample.latencies) for sample in cell.samples),
        requests_per_s=round(statistics.median(len(s.latencies) / s.seconds for s in cell.samples), 2),
        blocks_per_s=round(rate, 1),
        gb_per_s=round(rate * plan.block_bytes / 1e9, 4) if moves else 0.0,
        p50_ms=round(spread.p50, 4),
        p99_ms=round(spread.p99, 4),
        came_percent=round(_hit_percent(cell), 2),
        disk_percent=_from_disk(cell, moved),
        cpu_s_per_gb=round(sum(s.cpu for s in cell.samples) / (moved / 1e9), 4) if moves and moved else None,
    )


def _from_disk(cell: Cell, moved: int) -> float | None:
    """Return the percentage of the loaded bytes that was read from disk during the turns."""
    if (cell.method, cell.op) != ("disk", "get") or not moved:
        return None
    return round(min(100.0, 100.0 * sum(sample.disk_bytes for sample in cell.samples) / moved), 2)


def _hit_percent(cell: Cell) -> float:
    """Return the percentage of the requested blocks that was received."""
    wanted = sum(sample.wanted for sample in cell.samples)
    return min(100.0, 100.0 * sum(sample.blocks for sample in cell.samples) / wanted) if wanted else 100.0


def print_tables(records: Sequence[Record], console: Console) -> None:
    """Print everything that was reported."""
    for run in of_kind(records, RunRecord):
        machine = run.machine
        console.print(f"{machine['cpus']} CPUs, {machine['arch']}; medians of {run.repeat} turns of {run.seconds:g} s")
        warn_if_busy(machine, console)
    console.print(_measures(of_kind(records, MeasureRecord)))
    if ratios := of_kind(records, RatioRecord):
        console.print(_ratios(ratios))
    checks = of_kind(records, VerifyRecord)
    compared = sum(record.blocks for record in checks)
    wrong = sum(record.wrong for record in checks)
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
            style=None if r.method in TIERS else "dim",
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

    results = [r for r in records if isinstance(r, MeasureRecord) and (r.op, r.hit_percent) == ("get", 100)]
    geometries = list(dict.fromkeys(record.geometry for record in results))
    figure = Figure(figsize=(1 + 5 * max(1, len(geometries)), 4.5), layout="constrained")
    for place, geometry in enumerate(geometries):
        axes = figure.add_subplot(1, len(geometries), place + 1)
        own = [record for record in results if record.geometry == geometry]
        for method in dict.fromkeys(record.method for record in own):
            points = [(record.clients, record.gb_per_s) for record in own if record.method == method]
            style = "-" if method in TIERS else "--"
            axes.plot(*zip(*points, strict=True), style, marker="o", label=NAMES.get(method, method))
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("clients")
        axes.set_ylabel("GB/s (median)")
        axes.set_title(f"{geometry}, blocks of {own[0].block_bytes / 2**20:.3g} MiB")
        axes.grid(visible=True, alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)
