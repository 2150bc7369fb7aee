"""Traces and data sets: JSON lines; a trace's requests name the blocks of their prompts (``hash_ids``)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson

from baton.errors import ConfigError, shown

_MAX_ID = 2**32


def read_lines(path: Path, limit: int | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects of a file of JSON lines, ``limit`` at most, each with the place where it stands.

    Raises:
        ConfigError: The file cannot be read, or a line is no JSON object.
    """
    count = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if limit is not None and count >= limit:
                    return
                if not line.strip():
                    continue
                where = f"{path}:{number}"
                try:
                    value = orjson.loads(line)
                except orjson.JSONDecodeError as error:
                    raise ConfigError(f"{where} is no JSON: {error}", field="trace") from error
                if not isinstance(value, dict):
                    raise ConfigError(f"{where} is no JSON object", field="trace")
                count += 1
                yield where, value
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", field="trace") from error


def whole_numbers(value: object, what: str, field: str) -> tuple[int, ...]:
    """Check a list of 32-bit numbers.

    Raises:
        ConfigError: It is none; says ``what`` and names ``field``.
    """
    if not isinstance(value, list) or not all(type(item) is int and 0 <= item < _MAX_ID for item in value):
        raise ConfigError(f"{what} must be a list of numbers from 0 to 2**32 - 1, got {shown(value)}", field=field)
    return tuple(value)


def best_hit_rate(chains: Sequence[Sequence[int]]) -> float:
    """Return the share of the prompts' blocks that one cache with endless memory would find.

    Args:
        chains: Per request, names of its prompt's blocks.
    """
    seen: set[int] = set()
    hits = 0
    for chain in chains:
        hits += next((at for at, block in enumerate(chain) if block not in seen), len(chain))
        seen.update(chain)
    return hits / sum(map(len, chains))
