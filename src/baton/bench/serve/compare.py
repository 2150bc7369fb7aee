"""Two results of ``baton bench serve --json`` side by side."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from baton.bench.core.report import make_table
from baton.bench.core.traces import read_lines
from baton.bench.serve.records import METRICS, ServeRecord, Times
from baton.errors import ConfigError

_RATES = {
    "requests_per_s": "requests/s",
    "goodput": "goodput, requests/s",
    "output_tokens_per_s": "output tokens/s",
    "total_tokens_per_s": "tokens/s",
}
_STATISTICS = ("mean", "median", "p90", "p95", "p99")


@dataclass(frozen=True, slots=True)
class Compared:
    """A figure of both; ``better`` says whether the second one's is, by more than nothing."""

    name: str
    first: float
    second: float
    ratio: float | None
    better: bool | None


def compare(first: Path, second: Path) -> dict[str, Any]:
    """Return what differs between the last loads of two files.

    Raises:
        ConfigError: A file cannot be read, or has no load.
    """
    a, b = _last_load(first), _last_load(second)
    rows = [_row(label, a.get(name), b.get(name), more_is_better=True) for name, label in _RATES.items()]
    for name in METRICS:
        for statistic in _STATISTICS:
            both = [(load.get(name) or {}).get(statistic) for load in (a, b)]
            label = f"{name.removesuffix('_ms').upper()} {statistic}, ms"
            rows.append(_row(label, *both, more_is_better=False))
    rows.append(_row("failed requests", a["failed"], b["failed"], more_is_better=False))
    return {"files": [str(first), str(second)], "rows": [asdict(row) for row in rows if row is not None]}


def _last_load(path: Path) -> dict[str, Any]:
    found: dict[str, Any] | None = None
    for _, value in read_lines(path):
        if value.get("record") == ServeRecord.record:
            found = value
    if found is None:
        raise ConfigError(f"{path} has no result of baton bench serve --json", field="compare")
    missing = [name for name in ("failed", *_RATES, *METRICS) if name not in found]
    if missing or not all(_is_times(found[name]) for name in METRICS):
        lacks = ", ".join(missing) or "statistics"
        raise ConfigError(f"{path} is of another version: it lacks {lacks}", field="compare")
    return found


def _is_times(value: object) -> bool:
    return value is None or (isinstance(value, dict) and set(value) == set(Times.__dataclass_fields__))


def _row(name: str, a: float | None, b: float | None, *, more_is_better: bool) -> Compared | None:
    if a is None or b is None:
        return None
    better = None if a == b else (b > a) == more_is_better
    return Compared(name, a, b, round(b / a, 4) if a else None, better)


def print_comparison(found: dict[str, Any], console: Console) -> None:
    """Print it as a table; green is better in the second file."""
    names = [Path(name).stem for name in found["files"]]
    table = make_table("", ("", *names, "ratio"), ("",))
    for row in found["rows"]:
        colour = {True: "green", False: "red", None: "default"}[row["better"]]
        ratio = "" if row["ratio"] is None else f"[{colour}]{row['ratio']:.3f}[/{colour}]"
        table.add_row(row["name"], f"{row['first']:.2f}", f"{row['second']:.2f}", ratio)
    console.print(table)
