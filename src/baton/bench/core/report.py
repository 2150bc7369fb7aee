"""What the benchmarks' commands have in common: errors, lists in flags, warnings, tables, pictures."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from baton.bench.core.records import Record, ResultRecord
from baton.errors import BatonError, ConfigError, shown

R = TypeVar("R", bound=Record)
PLOT_SUFFIXES = (".png", ".svg")
BUSY_SHARE = 0.5
"""Load per CPU before a run from which on its figures come with a warning."""
MET = {True: "yes", False: "[red]no[/red]", None: ""}
"""Whether an aim was met, as tables show it."""


def guarded(name: str, action: Callable[[], int]) -> int:
    """Run ``baton bench NAME``; errors become messages on standard error and an exit status (1, 2 or 130)."""
    try:
        return action()
    except ConfigError as error:
        sys.stderr.write(f"baton bench {name}: error: {error.message}\n")
        return 2
    except BatonError as error:
        sys.stderr.write(f"baton bench {name}: {error.message}\n")
        return 1
    except BrokenPipeError:  # the reader of the output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130


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


def of_kind(records: Sequence[Record], kind: type[R]) -> list[R]:
    """Return the records of one kind, in their order."""
    return [record for record in records if isinstance(record, kind)]


def make_table(title: str, columns: Sequence[str], left: Sequence[str]) -> Table:
    """Make a table whose columns are aligned right but for those in ``left``."""
    table = Table(title=title)
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right")
    return table


def warn_if_busy(machine: Mapping[str, Any], console: Console) -> None:
    """Say that a machine (``host``, ``load``, ``cpus``) had other work when the run began."""
    if machine["load"] > machine["cpus"] * BUSY_SHARE:
        text = f"{machine['host']} was busy (load {machine['load']} on {machine['cpus']} CPUs): rates are too low"
        console.print(text, style="yellow")


def print_failures(records: Sequence[Record], console: Console) -> None:
    """Print why a run failed, if it did."""
    for result in of_kind(records, ResultRecord):
        for failure in result.failures:
            console.print("FAILED: " + failure, style="red", markup=False)


def format_bytes(size: int) -> str:
    """Write a number of bytes with its unit."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:.4g} {name}"
    return f"{size} B"


def result_console(width: int) -> Console:
    """Return a console on standard output, ``width`` columns wide where that is no terminal."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = width
    return console


def check_plot(path: Path) -> None:
    """Refuse a picture that could not be drawn, before anything is measured.

    Raises:
        ConfigError: matplotlib is missing, another suffix, or no such folder.
    """
    if path.suffix not in PLOT_SUFFIXES:
        raise ConfigError(f"--plot takes a file that ends in {' or '.join(PLOT_SUFFIXES)}", field="plot")
    if not path.parent.is_dir():
        raise ConfigError(f"--plot: there is no folder {path.parent}", field="plot")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'baton-serve[plot]'", field="plot")
