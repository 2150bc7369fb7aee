"""GB/s over size as a picture; needs matplotlib, the extra ``plot``."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from baton.bench.kv.records import BaselineRecord, Record, RunRecord, TransferRecord
from baton.errors import ConfigError

SUFFIXES = (".png", ".svg")


def check_plot(path: Path) -> None:
    """Refuse a picture that could not be drawn, before anything is measured.

    Raises:
        ConfigError: matplotlib is missing, another suffix, or no such folder.
    """
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"--plot takes a file that ends in {' or '.join(SUFFIXES)}", field="plot")
    if not path.parent.is_dir():
        raise ConfigError(f"--plot: there is no folder {path.parent}", field="plot")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'baton-serve[plot]'", field="plot")


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
