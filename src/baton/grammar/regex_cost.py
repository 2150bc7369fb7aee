"""A bound on what regular expressions cost whose repeats are nested or long.

A repeat of a single character or class alone is counted by the engine of grammars; one of a group is written out with
all that is in it: ``[ab]{1000}`` has one part, ``(ab){1000}`` has 2000, ``(a{1000}){1000}`` a million, and its first
mask takes seconds.
"""

from __future__ import annotations

import re

from baton.errors import InvalidRequestError

MAX_PARTS = 20_000
"""Of an expression whose repeats of groups are written out."""

_PIECE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*+\]?|\{(?P<low>\d*+)(?P<to>,?+)(?P<high>\d*+)\}|.", re.DOTALL)
"""Each takes its length in time, whatever comes: a class that is not closed goes on to the end."""


def check_repeats(pattern: str, field: str) -> None:
    """Refuse an expression that has too many parts.

    Raises:
        InvalidRequestError: Names ``field``.
    """
    if count_parts(pattern) > MAX_PARTS:
        raise InvalidRequestError(
            f"{field}: the repeats of this regular expression make more than {MAX_PARTS} parts of it", field=field
        )


def count_parts(pattern: str) -> int:
    """Return the number of parts, repeats of groups written out; broken expressions are counted somehow."""
    groups = [(0, 0)]  # per open group its parts, and those that it has where it is repeated
    parts, written = 0, 0  # of the piece before: what a repeat would repeat
    for found in _PIECE.finditer(pattern):
        piece = found[0]
        if piece == "(":
            groups.append((0, 0))
            continue
        if piece == ")":
            parts, written = groups.pop() if len(groups) > 1 else (0, 0)
        elif found["low"] is not None and (found["low"] or found["high"]):
            times = max(int(found["low"][:9] or 0), int(found["high"][:9] or 0), 1)
            _add(groups, -parts, -written)
            parts, written = (1, times) if written == 1 else (written * times, written * times)
        elif piece in "?*+|^$":
            continue
        else:
            parts = written = 1
        _add(groups, parts, written)
    return sum(parts for parts, _ in groups)


def _add(groups: list[tuple[int, int]], parts: int, written: int) -> None:
    before = groups[-1]
    groups[-1] = before[0] + parts, before[1] + written
