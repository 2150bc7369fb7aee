"""The model card and the loss curve, made of nothing but the run's log."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from . import tokenizer

TEMPLATE = Path(__file__).with_name("card.md.jinja")
TOOL_TEMPLATE = Path(__file__).with_name("tool_card.md.jinja")
TABLE_ROWS = 12


def render_card(log: dict[str, Any]) -> str:
    """Fill the model card's template from the content of ``training_log.json``."""
    environment = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["f"] = format
    environment.filters["millions"] = lambda number: f"{number / 1e6:.2f}"
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    curve = log["curve"]
    points = [*curve[: -1 : max(1, len(curve) // TABLE_ROWS)], curve[-1]]
    tokens = {name: getattr(tokenizer, name) for name in ("PAD", "BOS", "END_OF_TEXT", "TURN_START", "TURN_END")}
    return template.render(log, points=points, **tokens)


def render_tool_card(log: dict[str, Any]) -> str:
    """Fill the model card of the model that calls tools from the content of its ``training_log.json``."""
    environment = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined
    )
    return environment.from_string(TOOL_TEMPLATE.read_text(encoding="utf-8")).render(log)


def draw_curve(curve: Sequence[dict[str, float]], bigram: float) -> str:
    """Draw the loss curve as an SVG document, with the held-out loss of the bigram model as a line."""
    width, height, left, bottom, top, right = 720, 360, 56, 44, 24, 16
    last = max(point["tokens"] for point in curve) or 1
    losses = [point[key] for point in curve for key in ("train_loss", "held_out_loss")]
    low, high = math.floor(min(losses)), math.ceil(max(losses))

    def x(tokens: float) -> float:
        return left + (width - left - right) * tokens / last

    def y(loss: float) -> float:
        return top + (height - top - bottom) * (high - loss) / (high - low)

    def level(loss: float, style: str) -> str:
        return f'<line x1="{left}" x2="{width - right}" y1="{y(loss):.1f}" y2="{y(loss):.1f}" {style}/>'

    def text(at_x: object, at_y: object, content: str, anchor: str = "middle", style: str = "") -> str:
        return f'<text x="{at_x}" y="{at_y}" text-anchor="{anchor}"{style}>{html.escape(content)}</text>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        'aria-label="Loss curve of baton-tiny" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for loss in range(low, high + 1):
        parts.append(level(loss, 'stroke="#dddddd"') + text(left - 8, f"{y(loss) + 4:.1f}", str(loss), "end"))
    for tokens in (last * index / 5 for index in range(6)):
        parts.append(text(f"{x(tokens):.1f}", height - bottom + 18, f"{tokens / 1e6:.1f} M"))
    label = f"bigram model, held-out: {bigram:.2f}"
    parts.append(
        level(bigram, 'stroke="#888888" stroke-dasharray="5 4"')
        + text(width - right, f"{y(bigram) - 5:.1f}", label, "end", ' fill="#666666"')
    )
    for row, (key, colour, label) in enumerate(
        (("train_loss", "#1f77b4", "training (plain and chat)"), ("held_out_loss", "#d62728", "held-out modules"))
    ):
        points = " ".join(f"{x(point['tokens']):.1f},{y(point[key]):.1f}" for point in curve)
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
            + text(width - right - 8, top + 16 + 18 * row, label, "end", f' fill="{colour}"')
        )
    middle = (top + height - bottom) / 2
    parts.append(
        text((left + width - right) / 2, height - 6, "training tokens")
        + text(14, middle, "loss (nats per token)", style=f' transform="rotate(-90 14 {middle})"')
        + "</svg>"
    )
    return "\n".join(parts) + "\n"
