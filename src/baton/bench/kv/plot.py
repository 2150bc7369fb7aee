"""GB/s over size as a picture; needs matplotlib, the extra ``plot``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from baton.bench.core.records import Record
from baton.bench.kv.records import BaselineRecord, RunRecord, TransferRecord


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
