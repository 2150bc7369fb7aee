"""GB/s over clients as a picture; needs matplotlib, the extra ``plot``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from baton_kvstore.bench.ratios import NAMES
from baton_kvstore.bench.records import MeasureRecord, StoreRecord


def draw(records: Sequence[StoreRecord], path: Path) -> None:
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
