"""What all benchmarks share: records, statistics, tables, pictures, checks of flags, exit statuses."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from baton.errors import BatonError, ConfigError, shown
from baton.terminal import Step, progress

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_UNABLE = 2
EXIT_TOO_SLOW = 3
PLOT_SUFFIXES = (".png", ".svg")
BUSY_SHARE = 0.5
"""Load per CPU before a run from which its figures are shown with a warning."""
MET = {True: "yes", False: "[red]no[/red]", None: ""}
"""Whether an aim was met, as tables show it."""
_MEMORY_SHARE = 0.85
"""Share of the free memory that a benchmark may take."""


@dataclass(frozen=True)
class Record:
    """A line of ``--json``: its fields, and ``record``, its kind; docs/bench-*.md lists each benchmark's kinds."""

    record: ClassVar[str]

    def to_json(self) -> str:
        """Write as one line of JSON."""
        return json.dumps({"record": self.record, **dataclasses.asdict(self)}, allow_nan=False)


@dataclass(frozen=True)
class ResultRecord(Record):
    """Last line: the exit status and what led to it."""

    record: ClassVar[str] = "result"
    exit_code: int
    failures: tuple[str, ...]
    seconds: float


T = TypeVar("T")
R = TypeVar("R", bound=Record)


def build_from(kind: type[T], source: object, **others: Any) -> T:
    """Build a dataclass from the attributes of an object that are named as its fields, and from ``others``.

    So options are built from parsed flags, and records from options.
    """
    names = {item.name for item in dataclasses.fields(kind)} - others.keys()  # type: ignore[arg-type]
    return kind(**{name: getattr(source, name) for name in names if hasattr(source, name)}, **others)


Report = Callable[[Record], None]
"""Gets each record as soon as it is known."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles of samples, in the samples' unit."""

    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        """Compute them, interpolated between the samples next to them; there must be a sample."""
        return cls(*np.percentile(samples, (50, 95, 99)).tolist())


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Return the median of the quotients of samples taken next to each other: a machine's drift cancels out.

    Raises:
        ValueError: Different numbers of samples, or none.
    """
    if len(numerators) != len(denominators) or not numerators:
        raise ValueError(f"{len(numerators)} and {len(denominators)} samples cannot be paired")
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))


def machine_facts() -> dict[str, Any]:
    """Return the facts about this machine that records carry."""
    return {
        "host": platform.node(),
        "cpus": os.cpu_count() or 0,
        "arch": platform.machine(),
        "kernel": platform.release(),
        "memory": psutil.virtual_memory().total,
        "load": round(os.getloadavg()[0], 2),
    }


def require_memory(size: int) -> None:
    """Refuse what the machine has no room for.

    Raises:
        ConfigError: Says how much there is.
    """
    free = psutil.virtual_memory().available
    if size > free * _MEMORY_SHARE:
        raise ConfigError(
            f"this needs {size / 2**30:.1f} GiB of memory and {free / 2**30:.1f} GiB are free: take a smaller --isl, "
            "--bytes or geometry",
            field="isl",
        )


def one_line(error: BatonError) -> str:
    """Return an error in one line."""
    return " ".join(error.message.split())[:500]


def run_with_result(measure: Callable[[], tuple[int, Sequence[str]]], report: Report) -> int:
    """Measure, and report the result at the end; returns the exit status.

    Args:
        measure: Returns the exit status, and what led to it.
        report: Gets the result, also when ``measure`` fails.

    Raises:
        BatonError: What ``measure`` raised.
    """
    started = time.perf_counter()

    def finish(code: int, failures: Sequence[str]) -> None:
        report(ResultRecord(code, tuple(failures), round(time.perf_counter() - started, 3)))

    try:
        code, failures = measure()
    except BatonError as error:
        finish(EXIT_UNABLE if isinstance(error, ConfigError) else EXIT_FAILED, [one_line(error)])
        raise
    finish(code, failures)
    return code


def run_and_show(
    args: argparse.Namespace,
    run: Callable[[Report, Step], int],
    show: Callable[[Sequence[Record], Console], None],
    draw: Callable[[Sequence[Record], Path], None],
    width: int,
) -> int:
    """Run a benchmark and show its records as ``--json`` and ``--plot`` say; returns the exit status.

    Args:
        args: The command line.
        run: Measures, reports and tells each step; returns the exit status.
        show: Prints the records as tables.
        draw: Draws them into a file.
        width: Columns of tables that go to a file or a pipe.

    Raises:
        ConfigError: There cannot be such a picture.
    """
    if args.plot:
        check_plot(Path(args.plot))
    records: list[Record] = []

    def report(record: Record) -> None:
        records.append(record)
        if args.json:
            sys.stdout.write(record.to_json() + "\n")
            sys.stdout.flush()

    with progress() as step:
        code = run(report, step)
    if not args.json:
        show(records, result_console(width))
    if args.plot:
        draw(records, Path(args.plot))
    return code


def command_line() -> str:
    """Return the command that runs, as a shell takes it."""
    return shlex.join(["baton", *sys.argv[1:]])


def words(text: str) -> tuple[str, ...]:
    """Split a flag's list at its commas."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def numbers(text: str, flag: str) -> tuple[int, ...]:
    """Split a flag's list of numbers; each counts once.

    Raises:
        ConfigError: It has something else in it; names the flag.
    """
    try:
        return tuple(dict.fromkeys(int(part) for part in words(text)))
    except ValueError:
        raise ConfigError(f"--{flag} takes numbers, got {shown(text)}", field=flag) from None


def check_ranges(options: object, ranges: Mapping[str, tuple[float, float]]) -> None:
    """Check numbers of a benchmark's options; ``None`` values are skipped.

    Raises:
        ConfigError: One is out of its range; names the flag.
    """
    for name, (least, most) in ranges.items():
        value = getattr(options, name)
        if value is not None and not least <= value <= most:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} must be between {least} and {most}, got {value}", field=name)


def check_positive(options: object, *names: str) -> None:
    """Check numbers of a benchmark's options; ``None`` values are skipped.

    Raises:
        ConfigError: One is not above 0, or not finite; names the flag.
    """
    for name in names:
        value = getattr(options, name)
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"--{name.replace('_', '-')} must be above 0", field=name)


def of_kind(records: Sequence[Record], kind: type[R]) -> list[R]:
    """Return the records of one kind, in their order."""
    return [record for record in records if isinstance(record, kind)]


def make_table(title: str, columns: Sequence[str], left: Sequence[str]) -> Table:
    """Make a table whose columns are right-aligned, except those in ``left``."""
    table = Table(title=title)
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right")
    return table


def warn_if_busy(machine: Mapping[str, Any], console: Console) -> None:
    """Warn if a machine (``host``, ``load``, ``cpus``) was busy when the run began."""
    if machine["load"] > machine["cpus"] * BUSY_SHARE:
        text = f"{machine['host']} was busy (load {machine['load']} on {machine['cpus']} CPUs): rates are too low"
        console.print(text, style="yellow")


def print_failures(records: Sequence[Record], console: Console) -> None:
    """Print why a run failed, if it did."""
    for result in of_kind(records, ResultRecord):
        for failure in result.failures:
            console.print("FAILED: " + failure, style="red", markup=False)


def result_console(width: int) -> Console:
    """Return a console on standard output; if that is not a terminal, ``width`` columns wide."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = width
    return console


def show_document(
    document: dict[str, Any], show: Callable[[dict[str, Any], Console], None], width: int, *, as_json: bool
) -> None:
    """Show what was found as one JSON object, or as ``show`` prints it, in ``width`` columns where that is a file."""
    if as_json:
        sys.stdout.write(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
        sys.stdout.flush()
    else:
        show(document, result_console(width))


def check_folder(path: str, flag: str) -> None:
    """Refuse a file to write whose folder there is not.

    Raises:
        ConfigError: Names the flag.
    """
    if not Path(path).parent.is_dir():
        raise ConfigError(f"--{flag}: there is no folder {Path(path).parent}", field=flag)


def write_file(path: Path, content: str, flag: str) -> None:
    """Write a result.

    Raises:
        ConfigError: It cannot be written; names the flag.
    """
    try:
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", field=flag) from error


def check_plot(path: Path) -> None:
    """Refuse a picture that could not be drawn, before anything is measured.

    Raises:
        ConfigError: matplotlib is missing, another suffix, or no such folder.
    """
    if path.suffix not in PLOT_SUFFIXES:
        raise ConfigError(f"--plot takes a file that ends in {' or '.join(PLOT_SUFFIXES)}", field="plot")
    check_folder(str(path), "plot")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'baton-serve[plot]'", field="plot")
