"""Text from the network as a terminal may show it: without control characters, which can rewrite and redefine it."""

from __future__ import annotations

import re
from typing import Any

NOTHING = "-"
MAX_ERROR_CHARS = 300
_MAX_CHARS = 4096
_MAX_DEPTH = 32
_REPLACEMENT = "\ufffd"
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_UNESCAPED = re.compile("[\x7f-\x9f\ud800-\udfff]")


def one_line(text: str, limit: int = _MAX_CHARS) -> str:
    """Return a text as part of a line: only characters that print, and at most ``limit`` of them."""
    short = text if len(text) <= limit else text[: limit - 1] + "…"
    return short if short.isprintable() else "".join(x if x.isprintable() else _REPLACEMENT for x in short)


def plain(value: object) -> str:
    """Return a value from the network as part of a line; ``-`` for ``None`` and empty text."""
    return NOTHING if value in (None, "") else one_line(str(value))


def lines(text: str) -> str:
    """Return a text of several lines without control characters but tabs; carriage returns are dropped."""
    return _CONTROLS.sub(_REPLACEMENT, text.replace("\r", ""))


def clean(value: Any, depth: int = 0) -> Any:
    """Return parsed JSON whose texts, also the keys, are each :func:`one_line`.

    Raises:
        ValueError: It is nested more deeply than anything that a router answers.
    """
    if isinstance(value, str):
        return one_line(value)
    if isinstance(value, (list, dict)) and depth == _MAX_DEPTH:
        raise ValueError("it is nested too deeply")
    if isinstance(value, list):
        return [clean(item, depth + 1) for item in value]
    if isinstance(value, dict):
        return {one_line(name): clean(item, depth + 1) for name, item in value.items()}
    return value


def escaped(dumped: str) -> str:
    """Return JSON with escapes for the control characters that ``json.dumps`` leaves as they are."""
    return _UNESCAPED.sub(lambda found: f"\\u{ord(found[0]):04x}", dumped)
