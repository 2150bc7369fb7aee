"""A replay as a picture: bars per policy, written as SVG by hand, so that nothing needs to be installed."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from baton.errors import ConfigError

_WIDTH, _ROW, _LEFT, _TOP, _GAP = 960, 26, 190, 74, 36
_STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#222}.title{font-weight:600}.faint{fill:#667}"
    ".bar{fill:#3b6fb6}.bar2{fill:#9fb9dc}.best{stroke:#c0392b;stroke-dasharray:4 3}"
)


def check_plot(path: Path) -> None:
    """Refuse a picture that could not be written, before anything is replayed.

    Raises:
        ConfigError: Another suffix, or no such folder; names ``plot``.
    """
    if path.suffix != ".svg":
        raise ConfigError("--plot takes a file that ends in .svg", field="plot")
    if not path.parent.is_dir():
        raise ConfigError(f"--plot: there is no folder {path.parent}", field="plot")


def draw(found: dict[str, Any]) -> str:
    """Return a replay's document as an SVG picture."""
    rows = found["policies"]
    names = [row["policy"] + ("" if row["beta"] is None else f" β={row['beta']:g}") for row in rows]
    panel = (_WIDTH - _LEFT - 3 * _GAP) / 3
    height = _TOP + _ROW * len(rows) + 30
    best = found["best_hit_rate"]
    title = f"{found['requests']:,} requests on {found['instances']} instances; best possible hit rate {best:.2%}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" role="img">',
        f"<style>{_STYLE}</style><title>{escape(title)}</title>",
        f'<rect width="{_WIDTH}" height="{height}" fill="#fff"/>',
        f'<text class="title" x="16" y="26">{escape(title)}</text>',
    ]
    for at, name in enumerate(names):
        parts.append(f'<text x="{_LEFT - 10}" y="{_y(at) + 15}" text-anchor="end">{escape(name)}</text>')
    hits = [row["hit_rate"] for row in rows]
    both = [row["hit_rate"] + row["reused_rate"] for row in rows]
    whole = max([best, *both]) or 1.0
    x = float(_LEFT)
    parts += _heading("block hits (pale: from decode)", x)
    parts += _bars(both, whole, (x, panel), "bar2", [""] * len(rows))
    parts += _bars(hits, whole, (x, panel), "bar", [f"{value:.1%}" for value in hits])
    line = x + panel * best / whole
    parts.append(f'<line class="best" x1="{line:.1f}" x2="{line:.1f}" y1="{_TOP - 6}" y2="{height - 26}"/>')
    spreads = [row["load_max_over_mean"] for row in rows]
    x += panel + _GAP
    parts += _heading("load: busiest over mean", x)
    parts += _bars(spreads, max(spreads), (x, panel), "bar", [f"{value:.2f}" for value in spreads])
    x += panel + _GAP
    slow, fast = [row["ttft_ms"]["p90"] for row in rows], [row["ttft_ms"]["p50"] for row in rows]
    parts += _heading("predicted TTFT: p50 (pale: p90)", x)
    parts += _bars(slow, max(slow), (x, panel), "bar2", [""] * len(rows))
    parts += _bars(fast, max(slow), (x, panel), "bar", [f"{value:,.0f} ms" for value in fast])
    return "\n".join([*parts, "</svg>"]) + "\n"


def _y(row: int) -> int:
    return _TOP + _ROW * row


def _heading(text: str, x: float) -> list[str]:
    return [f'<text class="faint" x="{x:.1f}" y="{_TOP - 14}">{escape(text)}</text>']


def _bars(
    values: Sequence[float], whole: float, place: tuple[float, float], kind: str, labels: Sequence[str]
) -> list[str]:
    x, width = place
    parts = []
    for at, (value, label) in enumerate(zip(values, labels, strict=True)):
        length = width * value / whole if whole else 0.0
        parts.append(f'<rect class="{kind}" x="{x:.1f}" y="{_y(at) + 2}" width="{length:.1f}" height="{_ROW - 7}"/>')
        if label:
            inside = length > 70
            style = ' style="fill:#fff"' if inside else ""
            at_x = x + (6 if inside else length + 6)
            parts.append(f'<text x="{at_x:.1f}" y="{_y(at) + 16}"{style}>{escape(label)}</text>')
    return parts
